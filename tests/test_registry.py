"""Backend strings: three failures with three messages, and options checked by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh_python import output_of

import mq
from mq import registry
from mq.errors import MQError, TransportUnavailable, UnknownTransport
from mq.log import WarnOnce
from mq.transport import Link
from transports.inproc import InprocLink


@pytest.fixture
def clean_table() -> Iterator[None]:
    """Undo what a test registers."""
    before = dict(registry._TABLE)
    yield
    registry._TABLE.clear()
    registry._TABLE.update(before)


def test_an_unknown_name_gets_the_nearest_and_all_known_ones() -> None:
    """The error is also a LookupError and an MQError."""
    with pytest.raises(UnknownTransport, match="did you mean 'zmq:tcp'") as caught:
        registry.load("zmq:tpc")

    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, MQError)
    assert "inproc" in str(caught.value)


def test_a_name_like_no_other_gets_the_known_ones() -> None:
    """In a sentence of their own, as after a question."""
    with pytest.raises(UnknownTransport, match=r"no transport 'x'\. Known: auto, "):
        registry.load("x")
    with pytest.raises(UnknownTransport, match=r"'zmq:tpc'; did .*\? Known: auto, "):
        registry.load("zmq:tpc")


@pytest.mark.usefixtures("clean_table")
def test_a_missing_library_gets_the_command_that_installs_it() -> None:
    """Not installed is another failure than unknown."""
    registry.register("absent", "no_such_module:Link", library="nosuchlib")

    with pytest.raises(TransportUnavailable, match="pip install nosuchlib"):
        registry.load("absent")
    assert "pip install nosuchlib" in (registry.check("absent") or "")


@pytest.mark.usefixtures("clean_table")
def test_a_transport_that_cannot_work_here_says_why() -> None:
    """Not usable on this host is the third failure."""

    class Unusable(InprocLink):
        @classmethod
        def unusable(cls) -> str | None:
            return "no such device"

    registry.register("unusable", Unusable)

    with pytest.raises(TransportUnavailable, match="cannot run here: no such device"):
        registry.load("unusable")


@pytest.mark.usefixtures("clean_table")
def test_a_taken_name_is_replaced_only_on_request() -> None:
    """Two libraries that register one name do not displace each other in silence."""
    registry.register("mine", InprocLink)

    with pytest.raises(ValueError, match="replace=True"):
        registry.register("mine", InprocLink)
    registry.register("mine", "transports.inproc:InprocLink", replace=True)
    assert registry.load("mine") is InprocLink


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("transports.inproc:Nothing", "has no Nothing"),
        ("transports.inproc:secrets", "no subclass"),
        ("mq.errors:Closed", "no subclass"),
        (object, "no subclass"),
    ],
)
def test_a_target_that_is_no_link_is_refused(target: Any, reason: str) -> None:
    """An entry point, or a program, may name anything; only links are loaded."""
    registry.register("odd", target)

    with pytest.raises(TransportUnavailable, match=reason):
        registry.load("odd")


@pytest.mark.usefixtures("clean_table")
def test_a_module_that_misses_something_of_the_system_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is another failure than a class which is not there."""
    source = "import select\nselect.no_such_call\nclass Link: ...\n"
    (tmp_path / "mq_elsewhere.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    registry.register("elsewhere", "mq_elsewhere:Link")

    with pytest.raises(TransportUnavailable, match=r"cannot run here.*'no_such_call'"):
        registry.load("elsewhere")


def install(
    folder: Path, patch: pytest.MonkeyPatch, points: str, source: str = ""
) -> None:
    """Have a distribution of one module found, with these entry points."""
    metadata = folder / "broken-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\n")
    (metadata / "entry_points.txt").write_text(f"[mq.transports]\n{points}\n")
    if source:
        (folder / "mq_broken.py").write_text(source)
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "mq_broken", raising=False)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('boom')", "importing mq_broken failed: OSError: boom"),
        ("def (", "importing mq_broken failed: SyntaxError: "),
        ("raise SystemExit", "importing mq_broken failed: SystemExit: "),
        ("from mq.transport import Link", "mq_broken:Link does not say its capab"),
        (
            "from transports.inproc import InprocLink\n"
            "class Link(InprocLink):\n"
            "    unusable = classmethod(lambda cls: 1 / 0)",
            "it could not tell whether it can: ZeroDivisionError: ",
        ),
        (
            "import mq.transport\n"
            "class Link(mq.transport.Link):\n"
            "    capabilities = mq.Capabilities('host')\n",
            "mq_broken:Link lacks abandon, close, ",
        ),
    ],
)
def test_a_broken_plugin_is_one_that_cannot_be_used(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does; the error names it, and the list goes on to the others."""
    install(tmp_path, monkeypatch, "broken = mq_broken:Link", source)

    with pytest.raises(TransportUnavailable) as caught:
        mq.connect("broken", group="g")
    assert "transport 'broken'" in str(caught.value)
    assert reason in str(caught.value)
    assert registry.check("broken") == str(caught.value)


def test_a_plugin_without_its_module_is_to_be_installed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is installed already, so that `pip install` alone would do nothing."""
    install(tmp_path, monkeypatch, "broken = mq_broken:Link")

    with pytest.raises(TransportUnavailable, match="pip install --force-reinstall bro"):
        registry.load("broken")


@pytest.mark.parametrize("point", ["mq_broken", "mq_broken:", "mq_broken:a.Link"])
def test_a_plugin_that_names_no_class_is_told_how(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that its module lacks one without a name."""
    install(tmp_path, monkeypatch, f"broken = {point}", "from mq.auto import AutoLink")

    with pytest.raises(TransportUnavailable, match=f"'{point}' is not of the form 'pa"):
        registry.load("broken")


@pytest.mark.parametrize("name", ["zmq", "cuda"])
def test_a_plugin_named_like_a_transport_of_this_package_is_told_of(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once; it is ignored, or else what is installed could take any program over."""
    install(tmp_path, monkeypatch, f"{name} = mq_broken:Link")
    monkeypatch.setattr(registry, "_warn", WarnOnce(registry.logger))

    registry.names()
    registry.names()

    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"the transport {name!r} of broken is ignored: tensormq has one of that name"
    ]


ELSEWHERE = """
import fcntl, os, select, socket
for module, start in (
    (socket, "MSG_CMSG_CLOEXEC"), (socket, "SO_PEERCRED"), (os, "memfd_create"),
    (os, "MFD_"), (os, "eventfd"), (os, "pidfd_"), (fcntl, "F_ADD_SEALS"),
    (fcntl, "F_GET_SEALS"), (fcntl, "F_SEAL_"), (select, "epoll"), (select, "EPOLL"),
):
    for name in [name for name in vars(module) if name.startswith(start)]:
        delattr(module, name)
import mq
from mq import registry
print(registry.check("shm"))
try:
    mq.connect("shm", group="g")
except mq.TransportUnavailable as error:
    print(error)
print(*map(registry.check, registry.names()), sep="\\n")
"""


def test_where_memory_cannot_be_sealed_shm_says_so() -> None:
    """As on macOS, which lacks what Linux has beside that, too."""
    checked, connecting, *others = output_of(ELSEWHERE).splitlines()

    assert "'shm' cannot run here: it needs sealed memory (memfd_create)" in checked
    assert connecting == checked
    assert len(others) == len(registry.names())
    assert not [reason for reason in others if re.search(r"has no \w+Link", reason)]


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize(
    "target",
    ["transports.inproc.InprocLink", ":", "a:", ":B", "", "a:b:c", "a b:C", "a..b:C"],
)
def test_a_malformed_target_is_refused_at_once(target: str) -> None:
    """The form is package.module:Class."""
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        registry.register("odd", target)


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("target", ["my-plug.link:L", "a.b_1.c:De\u0301"])
def test_whatever_can_be_imported_is_a_target(target: str) -> None:
    """Also what no statement could import."""
    registry.register("odd", target)


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("alias", registry.aliases)
def test_an_alias_is_taken_over_only_on_request(alias: str) -> None:
    """Its members are in the group of those that use the other name."""
    stands_for = registry.canonical(alias)
    with pytest.raises(ValueError, match=f"'{alias}' exists.*replace=True"):
        registry.register(alias, InprocLink)
    assert registry.canonical(alias) == stands_for
    registry.register(alias, InprocLink, replace=True)
    assert registry.load(alias) is InprocLink


@pytest.mark.parametrize("name", [1, b"mine", None, "", "a\nb"])
def test_what_is_no_name_of_a_transport_is_refused(name: Any) -> None:
    """With what was given."""
    kind = ValueError if isinstance(name, str) else TypeError
    with pytest.raises(kind, match=re.escape(f"{name!r} is no name for a transport")):
        registry.register(name, InprocLink)


@pytest.mark.usefixtures("clean_table")
def test_a_target_that_names_no_class_is_refused_at_once() -> None:
    """By its type."""
    with pytest.raises(TypeError, match=r"target 5 is no class and no 'package"):
        registry.register("odd", 5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("clean_table")
def test_an_option_that_the_class_does_not_take_is_refused_by_name() -> None:
    """At once where the class is known, else when it is imported."""
    wrong = "InprocLink takes no option 'foo', given to mq.register"
    with pytest.raises(TypeError, match=wrong):
        registry.register("odd", InprocLink, foo=1)
    registry.register("odd", "transports.inproc:InprocLink", foo=1)

    with pytest.raises(TransportUnavailable, match=f"transport 'odd': {wrong}"):
        mq.connect("odd", group="g")


def test_an_unknown_option_gets_the_nearest_one() -> None:
    """Options of connect and of the transport are looked through."""
    with pytest.raises(TypeError, match="did you mean 'peer_timeout'"):
        registry.create("inproc", {"peer_timeuot": 3})
    with pytest.raises(TypeError, match=r"option 'q'\. Options of .*: shm_bytes"):
        registry.create("shm", {"q": 3})


def test_every_registered_transport_is_a_link_with_capabilities() -> None:
    """The table holds what it promises."""
    for name in ("inproc", "zmq", "zmq:ipc", "zmq:tcp"):
        assert issubclass(registry.load(name), Link)
        assert registry.capabilities(name).reach in ("process", "host", "network")
    assert list(registry.table) == sorted(registry.table)


_PRELOADS = """
import sys
import torch

def started(*args):
    raise SystemExit("CUDA was asked")

for name in ("is_available", "device_count", "init", "current_device"):
    setattr(torch.cuda, name, started)
torch._C._cuda_getDeviceCount = started
import bench.preload
import mq.testing.preload

print("transports.torchrpc_cuda" in sys.modules)
"""


def test_what_processes_are_forked_from_has_started_no_driver() -> None:
    """Where CUDA was only asked for its devices it works in no process forked later."""
    assert output_of(_PRELOADS) == "True\n"
