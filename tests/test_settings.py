"""Arguments and environment of `connect`."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from meeting import free_port
from world import World

import mq
from mq import process, settings


def resolve(env: dict[str, str] | None = None, **given: Any) -> settings.Settings:
    """`settings.resolve` with everything left out that is not given."""
    defaults: dict[str, Any] = {
        "backend": None,
        "group": None,
        "name": None,
        "rendezvous": None,
        "listen": None,
        "attach_to": (),
        "labels": (),
        "secret": None,
        "connect_timeout": 30.0,
        "peer_timeout": 10.0,
        "max_message_bytes": None,
        "insecure": False,
    }
    return settings.resolve(**{**defaults, **given}, env=env or {})


def test_the_environment_fills_in_what_was_not_given() -> None:
    """A launcher configures an unchanged program."""
    env = {
        "MQ_BACKEND": "zmq",
        "MQ_GROUP": "g",
        "MQ_NAME": "n",
        "MQ_RENDEZVOUS": "tcp://127.0.0.1:1",
        "MQ_LISTEN": "tcp://127.0.0.1:0, shm://x",
        "MQ_LABELS": " a, b,",
        "MQ_SECRET": "twelve bytes",
    }

    found = resolve(env)

    assert (found.backend, found.group, found.name) == ("zmq", "g", "n")
    assert found.rendezvous == "tcp://127.0.0.1:1"
    assert found.listen == ("tcp://127.0.0.1:0", "shm://x")
    assert found.labels == ("a", "b")
    assert found.secret == b"twelve bytes"
    assert found.sources["backend"] == "environment MQ_BACKEND"
    assert found.sources["listen"] == "environment MQ_LISTEN"


def test_where_to_listen_says_where_to_meet_only_as_an_argument() -> None:
    """A launcher that says it for all of a run does not part its members."""
    env = {"MQ_LISTEN": "tcp://0.0.0.0:0"}
    found = resolve(env, backend="zmq", group="g")
    assert not found.explicit
    assert found.sources["rendezvous"] == "default"
    assert resolve(env, backend="zmq", group="g", listen="tcp://h:1").explicit


def test_an_argument_beats_the_environment() -> None:
    """And describe() can say so."""
    found = resolve({"MQ_GROUP": "other"}, backend="zmq", group="mine")

    assert found.group == "mine"
    assert found.sources["group"] == "argument"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group": "g"}, "which backend"),
        ({"backend": "zmq"}, "which group"),
        ({"backend": "zmq", "group": ""}, "group"),
        ({"backend": "zmq", "group": "a\nb"}, "printable"),
        ({"backend": "zmq", "group": "g", "name": "x" * 101}, "name"),
        ({"backend": "zmq", "group": "g", "name": ""}, "name"),
        ({"backend": "zmq", "group": "g", "peer_timeout": 0}, "peer_timeout"),
        ({"backend": "zmq", "group": "g", "connect_timeout": -1}, "connect_timeout"),
        ({"backend": "zmq", "group": "g", "max_message_bytes": 0}, "max_message_bytes"),
        ({"backend": "zmq", "group": "g", "secret": "short"}, "8 bytes"),
        ({"backend": "zmq", "group": "g", "secret": "\udcff" * 8}, "not valid Unicode"),
        (
            {"backend": "zmq", "group": "g", "labels": ["é" * 255] * 60},
            "60 labels take 30780 bytes, .* 24576 of them at most",
        ),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    """Bad input gets an error that names the thing."""
    with pytest.raises(ValueError, match=message):
        resolve(None, **given)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("secret", 12345678),
        ("secret", ["long enough"]),
        ("insecure", "no"),
        ("insecure", 1),
        ("allow_pickle", "no"),
        ("allow_pickle", None),
    ],
)
def test_what_keeps_others_out_is_not_guessed_at(option: str, given: Any) -> None:
    """A number is no secret of so many zeros, and "no" does not switch on."""
    with pytest.raises(TypeError, match=f"^{option} is "):
        mq.connect("inproc", group="g", **{option: given})


@pytest.mark.parametrize(
    "option",
    ["backend", "group", "name", "rendezvous", "listen", "attach_to", "labels"],
)
def test_what_is_no_text_is_named(option: str) -> None:
    """By the argument, with what was given for it."""
    with pytest.raises(TypeError, match=f"^{option} is a string.* 5$"):
        resolve(**{"backend": "zmq", "group": "g", option: 5})


@pytest.mark.parametrize("option", ["listen", "attach_to", "labels"])
@pytest.mark.parametrize("given", [b"x", 0, False, [b"x"]], ids=repr)
def test_what_is_no_text_and_looks_like_none_or_several_is_named(
    option: str, given: Any
) -> None:
    """Neither bytes are several numbers, nor zero the default."""
    shown = given[0] if isinstance(given, list) else given
    with pytest.raises(TypeError, match=f"^{option} is a string.* got {shown!r}$"):
        resolve(**{"backend": "zmq", "group": "g", option: given})


def test_more_labels_than_a_rendezvous_takes_are_counted() -> None:
    """In words that fit any sequence."""
    labels = [str(number) for number in range(65)]
    problem = "65 labels, but a rendezvous takes 64 of them at most"
    with pytest.raises(ValueError, match=problem):
        mq.connect("inproc", group="labels", labels=labels)


def test_torchrun_is_recognised_and_explicit_addresses_go_before_it() -> None:
    """Under torchrun, members meet at its store without configuration."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}

    found = resolve(env, backend="zmq", group="g")
    explicit = resolve(env, backend="zmq", group="g", attach_to="tcp://h:1")

    assert found.rendezvous == "env://"
    assert not found.explicit
    assert explicit.explicit


def test_the_secret_may_be_in_a_file(tmp_path: Path) -> None:
    """MQ_SECRET_FILE keeps it out of the process's environment."""
    path = tmp_path / "secret"
    path.write_bytes(b"from a file\n")

    found = resolve({"MQ_SECRET_FILE": str(path)}, backend="zmq", group="g")

    assert found.secret == b"from a file"
    with pytest.raises(ValueError, match="MQ_SECRET_FILE"):
        resolve({"MQ_SECRET_FILE": str(path) + "x"}, backend="zmq", group="g")


@pytest.mark.parametrize("namespace", [0, 4026532000, 4026531836])
def test_default_names_of_like_containers_differ(
    namespace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be the first process of a host of that name, and has its first queue."""
    monkeypatch.setattr("mq.process._namespace", lambda kind: namespace)
    found = []
    for _ in range(2):
        monkeypatch.setattr(settings, "_counter", itertools.count(1))
        found.append(resolve(backend="tcp", group="g").name)
    plain = f"{process.host_name()}-{os.getpid()}-1"
    if namespace == 4026531836:
        assert found == [plain, plain]
    else:
        assert len(set(found)) == 2
        assert all(
            re.fullmatch(re.escape(plain) + "-[0-9a-f]{6}", name) for name in found
        )


def test_default_names_differ() -> None:
    """Two queues of one process are two members."""
    first = resolve(backend="zmq", group="g")
    second = resolve(backend="zmq", group="g")

    assert first.name != second.name


def test_the_largest_message_is_bounded_by_the_memory() -> None:
    """The default never exceeds 4 GiB or half of what the process may use."""
    found = resolve(backend="zmq", group="g")

    assert found.max_message_bytes <= settings.FOUR_GIB
    assert found.max_message_bytes <= settings.memory_bytes() // 2


def test_a_secret_is_not_shown() -> None:
    """Logs and tracebacks with local variables show settings."""
    known = "not to be read in a log"
    resolved = resolve(backend="inproc", group="g", secret=known)
    config = World().config("a", secret=known.encode())

    assert resolved.secret == known.encode()
    assert known not in repr(resolved)
    assert known not in repr(config)


VARIABLES = [
    ("MQ_BACKEND", "zmqq", "no transport 'zmqq'; did you mean 'zmq'"),
    ("MQ_GROUP", "x" * 101, "group 'x+' is not 1 to 100"),
    ("MQ_NAME", "a\tb", "name 'a.*b' is not 1 to 100"),
    ("MQ_LABELS", "b\tc", "label 'b.*c' is not 1 to 255"),
    ("MQ_LISTEN", "tcp://127.0.0.1:99999", "'tcp://127.* not of the form"),
    ("MQ_LISTEN", "tcp://192.0.2.1:0", r"cannot listen on tcp://192\.0\.2\.1:0"),
    ("MQ_RENDEZVOUS", "foo", "unknown rendezvous 'foo'"),
    ("MQ_RENDEZVOUS", "file:///no/where", "directory /no/where does not exist"),
    ("MQ_RENDEZVOUS", "env://", "rendezvous env:// needs RANK"),
    ("MQ_SECRET", "short", "shorter than 8 bytes"),
]


@pytest.mark.parametrize(("variable", "value", "words"), VARIABLES)
def test_a_bad_value_is_told_with_the_variable_that_it_comes_from(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program says nothing of the kind; what it does say, it need not be told."""
    given = {"MQ_BACKEND": "tcp", "MQ_GROUP": "variables", variable: value}
    for each, text in given.items():
        monkeypatch.setenv(each, text)
    with pytest.raises((ValueError, OSError, mq.MQError), match=words) as caught:
        mq.connect(insecure=True)
    assert variable in str(caught.value)
    monkeypatch.delenv(variable)

    argument: dict[str, Any] = {variable.removeprefix("MQ_").lower(): value}
    with pytest.raises(type(caught.value), match=words) as caught:
        mq.connect(insecure=True, **argument)
    assert f"{variable}: " not in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "shm", "zmq:ipc"])
def test_a_socket_file_in_no_directory_is_told_with_its_path_and_variable(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with what to do."""
    scheme = "ipc" if backend.endswith("ipc") else "shm"
    monkeypatch.setenv("MQ_LISTEN", f"{scheme}:///no/where/x")
    words = f"MQ_LISTEN: cannot listen on {scheme}:///no/where/x: .*directory /no/where"
    with pytest.raises(FileNotFoundError, match=words + "; make it, or"):
        mq.connect(backend, group="variables")


def test_another_error_is_not_laid_at_a_variables_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An option is the program's, whoever chose the transport and where it listens."""
    monkeypatch.setenv("MQ_BACKEND", "zmq")
    monkeypatch.setenv("MQ_LISTEN", "tcp://127.0.0.1:0")
    with pytest.raises(ValueError, match=r"^hwm is 0"):
        mq.connect(group="variables", hwm=0)
    monkeypatch.setenv("MQ_BACKEND", "tls")
    files = dict.fromkeys(("certificate", "private_key", "authorities"), "/nowhere")
    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] tls: certificate"):
        mq.connect(group="variables", **files)


def test_a_secret_in_a_file_that_is_too_short_is_told_with_it(tmp_path: Path) -> None:
    """The variable and the path."""
    (tmp_path / "secret").write_bytes(b"short\n")
    env = {"MQ_SECRET_FILE": str(tmp_path / "secret")}
    with pytest.raises(
        ValueError, match=r"secret.* of MQ_SECRET_FILE is shorter than 8"
    ):
        resolve(env, backend="zmq", group="g")


def test_a_wrong_secret_is_not_laid_at_a_variables_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What says where members meet is right."""
    service = f"tcp://127.0.0.1:{free_port()}"
    with mq.connect("tcp", group="g", rendezvous=service, secret="that of the group"):
        monkeypatch.setenv("MQ_RENDEZVOUS", service)
        with pytest.raises(mq.AuthenticationFailed, match=r"^the rendezvous"):
            mq.connect("tcp", group="g", secret="that of another")


def test_an_error_of_the_system_says_it_in_another_process_too() -> None:
    """What pickle makes again has all its words."""
    with pytest.raises(OSError, match="MQ_LISTEN: cannot listen") as caught:
        with settings.told("environment MQ_LISTEN", "there"):
            raise OSError(errno.EADDRINUSE, "cannot listen there")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
