"""What `connect` was told, by arguments or the environment, and by which."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mq import process, registry
from mq.errors import AuthenticationFailed, MQError
from mq.options import listed, switch, whole
from mq.seconds import positive_seconds

if TYPE_CHECKING:
    from mq.transport import Link

FOUR_GIB: Final = 4 << 30
MAX_LABELS_BYTES: Final = 24 * 1024
"""With 3 more for each: what else is in a greeting must find room there, too."""
MOST_BYTES: Final = 2**62
"""What more stands for, as members are told of the limit in 64 bits."""
_FROM: Final = "environment "
_counter = count(1)


@contextlib.contextmanager
def told(source: str, *texts: str) -> Iterator[None]:
    """Have errors about a value say which variable it comes from, if from any.

    Args:
        source: As in `Settings.sources`.
        texts: An error that has one of these is about the value.
    """
    try:
        yield
    except AuthenticationFailed:  # it is the secret that is wrong
        raise
    except (ValueError, OSError, MQError) as error:
        if source.startswith(_FROM) and any(text in str(error) for text in texts):
            variable = source.removeprefix(_FROM)
            if isinstance(error, OSError) and error.strerror:
                error.strerror = f"{variable}: {error.strerror}"
                error.args = (error.errno, error.strerror)
            else:
                error.args = (f"{variable}: {error}", *error.args[1:])
        raise


@dataclass(frozen=True)
class Settings:
    """The resolved arguments of `mq.connect`; `sources` says where each came from."""

    backend: str
    group: str
    name: str
    rendezvous: str | None
    listen: tuple[str, ...]
    attach_to: tuple[str, ...]
    labels: tuple[str, ...]
    secret: bytes | None = field(repr=False)
    connect_timeout: float
    peer_timeout: float | None
    max_message_bytes: int
    insecure: bool
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def explicit(self) -> bool:
        """Whether members meet by explicit addresses and nothing else."""
        # What a launcher says of listening says nothing of where members meet.
        listen = self.listen and self.sources["listen"] == "argument"
        return self.rendezvous is None and bool(listen or self.attach_to)

    def as_given_to(self, link: Link) -> Settings:
        """The same, with addresses as the link has them."""
        return replace(
            self,
            listen=tuple(map(link.given, self.listen)),
            attach_to=tuple(map(link.given, self.attach_to)),
        )


def resolve(
    *,
    backend: str | None,
    group: str | None,
    name: str | None,
    rendezvous: str | None,
    listen: str | Sequence[str] | None,
    attach_to: str | Sequence[str],
    labels: str | Sequence[str],
    secret: str | bytes | None,
    connect_timeout: float,
    peer_timeout: float | None,
    max_message_bytes: int | None,
    insecure: bool,
    env: Mapping[str, str] = os.environ,
) -> Settings:
    """Fill in from the environment what was not given, and check everything.

    Raises:
        ValueError, TypeError: Something is missing or malformed; names it.
    """
    sources: dict[str, str] = {}

    def pick(key: str, given: str | None, variable: str) -> str | None:
        if given is not None:
            if not isinstance(given, str):
                raise TypeError(f"{key} is a string, not {given!r}")
            sources[key] = "argument"
            return str.__str__(given)  # whatever subclass of str: it goes on the wire
        value = env.get(variable)
        sources[key] = "default" if not value else _FROM + variable
        return value or None

    def pick_list(key: str, given: object, variable: str) -> tuple[str, ...]:
        values, sources[key] = _strings(key, given), "argument"
        if not values:
            values, sources[key] = listed(env.get(variable, "")), "default"
            if values:
                sources[key] = _FROM + variable
        return values

    chosen_backend = pick("backend", backend, "MQ_BACKEND")
    if chosen_backend is None:
        raise ValueError(
            "which backend? Pass one, as in mq.connect('zmq'), or set MQ_BACKEND; "
            "`mq transports` lists them"
        )
    chosen_group = pick("group", group, "MQ_GROUP")
    if chosen_group is None:
        raise ValueError(
            "which group? Pass group='...' or set MQ_GROUP: members of one group hear "
            "each other, so a default would join unrelated runs"
        )
    chosen_name = pick("name", name, "MQ_NAME")
    if chosen_name is None:
        chosen_name = _default_name()
    with told(sources["group"], "group"):
        _check_text("group", chosen_group, 100)
    with told(sources["name"], "name"):
        _check_text("name", chosen_name, 100)
    listen_given = () if listen is None or listen == "" else listen
    listen_list = pick_list("listen", listen_given, "MQ_LISTEN")
    attach_list = _strings("attach_to", attach_to)
    meeting = pick("rendezvous", rendezvous, "MQ_RENDEZVOUS")
    if meeting is None and not attach_list and _under_torchrun(env):
        meeting = "env://"
        sources["rendezvous"] = "torchrun's environment"
    elif meeting is None and (sources["listen"] == "argument" or attach_list):
        sources["rendezvous"] = "none: listen or attach_to was given"
    label_list = pick_list("labels", labels, "MQ_LABELS")
    with told(sources["labels"], "label"):
        _check_labels(label_list)
    connect_timeout = positive_seconds("connect_timeout", connect_timeout)
    if peer_timeout is not None:
        peer_timeout = positive_seconds("peer_timeout", peer_timeout)
        if peer_timeout < 0.1:
            raise ValueError(f"peer_timeout is {peer_timeout} s, at least 0.1 s needed")
    sources["max_message_bytes"] = "argument"
    if max_message_bytes is None:
        max_message_bytes = min(FOUR_GIB, memory_bytes() // 2)
        sources["max_message_bytes"] = "smaller of 4 GiB and half of the memory"
    max_message_bytes = whole("max_message_bytes", max_message_bytes, 1)
    found_secret, sources["secret"] = secret_from(secret, env)
    return Settings(
        backend=registry.canonical(chosen_backend),
        group=chosen_group,
        name=chosen_name,
        rendezvous=meeting,
        listen=listen_list,
        attach_to=attach_list,
        labels=label_list,
        secret=found_secret,
        connect_timeout=connect_timeout,
        peer_timeout=peer_timeout,
        max_message_bytes=min(max_message_bytes, MOST_BYTES),
        insecure=switch("insecure", insecure),
        sources=sources,
    )


def _default_name() -> str:
    name = f"{process.host_name()}-{os.getpid()}-{next(_counter)}"
    return name if process.has_unique_id() else f"{name}-{os.urandom(3).hex()}"


def _under_torchrun(env: Mapping[str, str]) -> bool:
    from mq.rendezvous.torchrun import is_under_torchrun  # `import mq` does without it

    return is_under_torchrun(env)


def _check_text(what: str, value: str, limit: int) -> None:
    if not 1 <= len(value) <= limit or not value.isprintable():
        raise ValueError(
            f"{what} {value[:50]!r} is not 1 to {limit} printable characters"
        )


def _check_labels(labels: Sequence[str]) -> None:
    for label in labels:
        _check_text("label", label, 255)
    in_all = sum(len(label.encode()) + 3 for label in labels)
    if in_all > MAX_LABELS_BYTES:
        raise ValueError(
            f"{len(labels)} labels take {in_all} bytes, and members tell each "
            f"other {MAX_LABELS_BYTES} of them at most; give fewer or shorter ones"
        )


def _strings(what: str, value: object) -> tuple[str, ...]:
    values: tuple[Any, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        values = tuple(value)
    for item in values:
        if not isinstance(item, str) or not item:
            raise TypeError(f"{what} is a string or several, got {item!r}")
    return tuple(map(str.__str__, values))


def secret_from(
    given: str | bytes | None, env: Mapping[str, str] = os.environ
) -> tuple[bytes | None, str]:
    """The secret of a group, and where it comes from.

    Args:
        given: By an argument; goes before what the environment says.

    Raises:
        TypeError, ValueError: It is malformed, too short to be one, or cannot be read.
    """
    secret, source = given, "argument"
    if secret is None and env.get("MQ_SECRET"):
        secret, source = env["MQ_SECRET"], _FROM + "MQ_SECRET"
    elif secret is None and env.get("MQ_SECRET_FILE"):
        path = env["MQ_SECRET_FILE"]
        source = f"file {path} of MQ_SECRET_FILE"
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(
                f"MQ_SECRET_FILE {path!r} cannot be read: {error}"
            ) from error
    if secret is None:
        return None, "the rendezvous"
    if not isinstance(secret, (str, bytes)):  # bytes(8) would be a secret of zeros
        raise TypeError(f"secret is a str or bytes, not {type(secret).__name__}")
    try:
        raw = secret.encode() if isinstance(secret, str) else secret
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the secret of the {source} is not valid Unicode; pass it as bytes, or "
            "put it into a file that MQ_SECRET_FILE names"
        ) from error
    if len(raw) < 8:
        raise ValueError(
            f"the secret of the {source} is shorter than 8 bytes; use a random one"
        )
    return raw, source


def memory_bytes() -> int:
    """Memory that this process may use: of the machine, its cgroups or its limits."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        total = min(total, address_space)
    for file in _limit_files():
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _limit_files() -> list[Path]:
    """Where the memory of this process's cgroup, and of those around it, is limited."""
    groups = {"": "/", "memory": "/"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for controller in {*controllers.split(",")} & groups.keys():
                groups[controller] = group
    found = []
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        root = Path("/sys/fs/cgroup", controller)
        inner = Path(root, groups[controller].lstrip("/"))
        while inner.is_relative_to(root):
            found.append(inner / name)
            inner = inner.parent
    return found
