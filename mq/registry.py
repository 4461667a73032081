"""Backend strings and the links behind them; nothing is imported until asked for.

Third parties register with `register` or by an entry point of group ``mq.transports``
whose name is the backend string and whose value is the `mq.transport.Link` class.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mq.errors import TransportUnavailable, UnknownTransport
from mq.log import Log, WarnOnce
from mq.transport import Capabilities, Link

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = Log(__name__)

ENTRY_POINTS: Final = "mq.transports"


@dataclass(frozen=True)
class Entry:
    """Where a backend's link is found.

    Attributes:
        target: ``package.module:Class``, or the class.
        library: What must be installed, for the error that says it is not.
        options: Given to the class before those of the user.
        distribution: Whose entry point it is, which is installed.
    """

    target: str | type[Link]
    library: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = ""


_TABLE: Final[dict[str, Entry]] = {
    "auto": Entry("mq.auto:AutoLink", "", {"wire": "tcp"}),
    "auto:nng": Entry("mq.auto:AutoNngLink", "pynng", {"wire": "nng:tcp"}),
    "auto:zmq": Entry("mq.auto:AutoLink", "pyzmq", {"wire": "zmq:tcp"}),
    "inproc": Entry("transports.inproc:InprocLink"),
    "nng": Entry("transports.nng:NngLink", "pynng", {"wires": ("ipc", "tcp")}),
    "nng:ipc": Entry("transports.nng:NngIpcLink", "pynng", {"wires": ("ipc",)}),
    "nng:tcp": Entry("transports.nng:NngLink", "pynng", {"wires": ("tcp",)}),
    "nng:tls": Entry("transports.nng_tls:NngTlsLink", "pynng"),
    "shm": Entry("transports.shm:ShmLink"),
    "tcp": Entry("transports.tcp:TcpLink"),
    "tls": Entry("transports.tls:TlsLink"),
    "torchrpc:cpu": Entry("transports.torchrpc:TorchRpcLink", "torch"),
    "torchrpc:cuda": Entry("transports.torchrpc_cuda:TorchRpcCudaLink", "torch"),
    "zmq": Entry("transports.zmq:ZmqLink", "pyzmq", {"wires": ("ipc", "tcp")}),
    "zmq:ipc": Entry("transports.zmq:ZmqIpcLink", "pyzmq", {"wires": ("ipc",)}),
    "zmq:tcp": Entry("transports.zmq:ZmqLink", "pyzmq", {"wires": ("tcp",)}),
}

aliases: Final[Mapping[str, str]] = MappingProxyType(
    {"cuda": "torchrpc:cuda", "torchrpc": "torchrpc:cpu"}
)
"""Other names of backends: members that use either are in the same group."""

_TARGET: Final = re.compile(r"[^\s:.]+(\.[^\s:.]+)*:[^\s:.]+")
_OWN: Final = frozenset({*_TABLE, *aliases})
_warn: Final = WarnOnce(logger)  # of these, where a distribution names one, too

table: Final[Mapping[str, Entry]] = MappingProxyType(_TABLE)
"""The registered backends; those of entry points come with `names`."""


def register(
    name: str,
    target: str | type[Link],
    *,
    library: str = "",
    replace: bool = False,
    **options: Any,
) -> None:
    """Make a link known under a backend string.

    Args:
        name: The backend string.
        target: The class, or ``package.module:Class`` to import when first used.
        library: What to ``pip install`` when the module cannot be imported.
        replace: Whether to take the place of a backend, or alias, of the same name.
        options: Keyword arguments for the class; those of `mq.connect` come on top.

    Raises:
        ValueError: The name is taken and `replace` is False, or the target malformed.
        TypeError: The name is no text, or the target neither text nor a class, or a
            class that does not take one of the options.
    """
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name for a transport, which is a str")
    if not name or not name.isprintable():
        raise ValueError(f"{name!r} is no name for a transport")
    if not replace and (name in aliases or name in names()):
        raise ValueError(f"transport {name!r} exists; pass replace=True to replace it")
    if isinstance(target, str) and not _TARGET.fullmatch(target):
        raise ValueError(f"target {target!r} is not of the form 'package.module:Class'")
    if isinstance(target, type):
        if wrong := _not_taken(target, options):
            raise TypeError(wrong)
    elif not isinstance(target, str):
        raise TypeError(f"target {target!r} is no class and no 'package.module:Class'")
    _TABLE[name] = Entry(target, library, options)


def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a fifth of the time of `import mq`

    points = {p.name: p for p in entry_points(group=ENTRY_POINTS)}
    for name in sorted(_OWN.intersection(points)):
        _warn(
            name,
            "the transport %r of %s is ignored: tensormq has one of that name",
            name,
            _distribution(points[name]) or points[name].value,
        )
    return points


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _hint(wrong: str, known: list[str]) -> str:
    """How the error that names a misspelt word goes on."""
    import difflib  # for errors alone

    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def names() -> list[str]:
    """All backend strings, sorted, without the aliases."""
    return sorted({*_TABLE, *_entry_points()})


def canonical(name: str) -> str:
    """The backend string that an alias stands for; others are returned as they are."""
    return name if name in _TABLE else aliases.get(name, name)


def _entry(name: str) -> Entry:
    entry = _TABLE.get(canonical(name))
    if entry is None:
        point = _entry_points().get(name)
        if point is not None:
            return Entry(point.value, distribution=_distribution(point))
        known = sorted({*names(), *aliases})
        hint = _hint(name, known)
        raise UnknownTransport(f"no transport {name!r}{hint} Known: {', '.join(known)}")
    return entry


def _load(name: str) -> tuple[type[Link], Entry]:
    entry = _entry(name)
    loaded = entry.target
    if isinstance(loaded, str):
        loaded = _import(name, loaded, entry)
    if wrong := _not_a_link(loaded, entry) or _not_taken(loaded, entry.options):
        raise TransportUnavailable(f"transport {name!r}: {wrong}")
    return loaded, entry


def _import(name: str, target: str, entry: Entry) -> Any:
    if not _TARGET.fullmatch(target):
        raise TransportUnavailable(
            f"transport {name!r}: its entry point {target!r} is not of the form "
            "'package.module:Class'"
        )
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever somebody else's module does
        raise TransportUnavailable(
            f"transport {name!r} {_not_imported(module_name, entry, error)}"
        ) from error
    try:
        return getattr(module, class_name)
    except AttributeError as error:
        raise TransportUnavailable(
            f"transport {name!r}: {module_name} has no {class_name}"
        ) from error


def _not_imported(module: str, entry: Entry, error: BaseException) -> str:
    """What is wrong with a transport whose module could not be imported."""
    if isinstance(error, ImportError) and entry.library:
        return (
            f"needs {entry.library}, which cannot be imported ({error}): "
            f"pip install {entry.library}"
        )
    wrong = f"importing {module} failed: {type(error).__name__}: {error}"
    if isinstance(error, ImportError) and entry.distribution:
        wrong += (
            f"; {entry.distribution}, which names it, is not whole: "
            f"pip install --force-reinstall {entry.distribution}"
        )
    return f"cannot run here: {wrong}"


def _not_a_link(loaded: Any, entry: Entry) -> str:
    """Why this is no class that links can be made of, or ""."""
    if not (isinstance(loaded, type) and issubclass(loaded, Link)):
        return f"{entry.target} is no subclass of mq.transport.Link"
    if not isinstance(getattr(loaded, "capabilities", None), Capabilities):
        return f"{entry.target} does not say its capabilities, an mq.Capabilities"
    if lacking := ", ".join(sorted(loaded.__abstractmethods__)):
        return f"{entry.target} lacks {lacking}, which mq.transport.Link requires"
    return ""


def _not_taken(link: type[Link], options: Mapping[str, Any]) -> str:
    """Which of the options that it was registered with a class does not take, or ""."""
    taken = {p.name for p in _parameters(link)}
    wrong = ", ".join(map(repr, sorted(options.keys() - taken)))
    return wrong and f"{link.__name__} takes no option {wrong}, given to mq.register"


def _parameters(link: type[Link]) -> list[inspect.Parameter]:
    """What a class can be called with by name.

    Where it takes anything (``**options``), that of the class that it extends counts.
    """
    found: list[inspect.Parameter] = []
    for owner in link.__mro__:
        if "__init__" in vars(owner):
            _, *given = inspect.signature(vars(owner)["__init__"]).parameters.values()
            named = (
                inspect.Parameter.KEYWORD_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            found += [p for p in given if p.kind in named]
            if not any(p.kind is p.VAR_KEYWORD for p in given):
                break
    return found


def load(name: str) -> type[Link]:
    """The class of a backend that can be used here.

    Raises:
        UnknownTransport: No such backend.
        TransportUnavailable: Its library is missing, or it cannot work on this host.
    """
    link, _ = _load(name)
    try:
        reason = link.unusable()
    except Exception as error:  # somebody else's, too
        reason = f"it could not tell whether it can: {type(error).__name__}: {error}"
    if reason is not None:
        raise TransportUnavailable(f"transport {name!r} cannot run here: {reason}")
    return link


def preload(name: str) -> None:
    """Import a backend, if what it needs is installed, and do no more.

    For processes that others are forked from: to ask whether it can be used may start
    a driver, such as CUDA's, which then works in none of them.
    """
    with contextlib.suppress(TransportUnavailable):
        _load(name)


def create(name: str, options: Mapping[str, Any]) -> Link:
    """A link of a backend, not yet opened.

    Raises:
        UnknownTransport, TransportUnavailable: As `load`.
        TypeError: An option is unknown; names the nearest one.
    """
    link = load(name)
    entry = _entry(name)
    check_options(name, options)
    return link(**{**entry.options, **options})


def option_names(name: str) -> list[str]:
    """The options that a backend takes on top of those of `mq.connect`.

    They are what its class takes by name only.
    """
    link, entry = _load(name)
    own = [p.name for p in _parameters(link) if p.kind is p.KEYWORD_ONLY]
    return [option for option in own if option not in entry.options]


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises: TypeError, if the backend has no such option."""
    known = option_names(name)
    for option in options:
        if option in known:
            continue
        connect_options = [
            *("group", "name", "rendezvous", "listen", "attach_to", "labels"),
            *("connect_timeout", "peer_timeout", "max_message_bytes"),
            *("allow_pickle", "secret", "insecure"),
        ]
        hint = _hint(option, connect_options + known)
        own = ", ".join(known) or "none"
        raise TypeError(
            f"mq.connect({name!r}) has no option {option!r}{hint} "
            f"Options of this transport: {own}"
        )


def check(name: str) -> str | None:
    """Why a backend cannot be used here, in words, or None."""
    try:
        load(name)
    except (TransportUnavailable, UnknownTransport) as error:
        return str(error)
    return None


def capabilities(name: str) -> Capabilities:
    """What a backend can do.

    Raises:
        UnknownTransport, TransportUnavailable: It is not known or cannot be imported.
    """
    return _load(name)[0].capabilities
