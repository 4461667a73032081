"""Members where files can hardly be made, or called by names that nobody can print."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from meeting import meet, runtime
from namespaces import with_mounts
from nng_links import nng_runs

import mq
from mq import log, paths
from mq.errors import TransportUnavailable
from mq.stream.files import SocketFiles

__all__ = ["nng_runs", "runtime"]  # fixtures

STEP = 30.0

_MEMBERS = """
import json, logging, os, sys
import mq
from mq import log

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
mask, cases = json.loads(sys.argv[1])
os.umask(mask)
for backend, options in cases:
    said.clear()
    options = {**options, "group": "g", "connect_timeout": 20}
    try:
        with (
            mq.connect(backend, name="a", **options) as a,
            mq.connect(backend, name="b", **options) as b,
        ):
            b.subscribe("t", timeout=20)
            a.publish("t", bytes(1 << 20), timeout=20)
            assert len(b.recv(timeout=20).payload) == 1 << 20
            found = {"addresses": a.describe()["addresses"], "error": ""}
    except Exception as error:
        found = {"addresses": [], "error": f"{type(error).__name__}: {error}"}
    log.flush()
    print(json.dumps({**found, "said": said}))
"""
"""Two members of each backend, which hear each other."""


def _members(
    before: Sequence[str],
    cases: Sequence[tuple[str, Mapping[str, object]]],
    *,
    mask: int = 0o022,
    variables: Mapping[str, str],
) -> list[dict[str, Any]]:
    """What comes of `_MEMBERS` in a process that this command begins."""
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("TMPDIR", "TEMP", "TMP")},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **variables,
    }
    ended = subprocess.run(
        [*before, sys.executable, "-c", _MEMBERS, json.dumps([mask, cases])],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def _schemes(found: Mapping[str, Any]) -> list[str]:
    return [address.partition("://")[0] for address in found["addresses"]]


def _read_only(writable: Path) -> list[str]:
    """What a command begins with for which this directory alone is writable."""
    places = [place for place in ("/", "/tmp", "/var/tmp") if os.path.isdir(place)]
    mounts = [f"mount --rbind {p} {p} && mount -o remount,ro,bind {p}" for p in places]
    return with_mounts(" && ".join([*mounts, f"mount -t tmpfs tmpfs {writable}"]))


# -- nowhere to write ----------


def test_a_runtime_directory_is_all_that_members_need(runtime: Path) -> None:
    """As in a container with a root that is read-only: nothing is temporary there."""
    meets: dict[str, object] = {"rendezvous": f"file://{runtime}"}
    wires = {"shm": "shm", "auto": "shm", "zmq": "ipc", "nng": "ipc", "tcp": "tcp"}
    cases = [(backend, options) for backend in wires for options in ({}, meets)]

    found = _members(
        _read_only(runtime), cases, variables={"XDG_RUNTIME_DIR": str(runtime)}
    )

    assert [one["error"] for one in found] == [""] * len(cases)
    assert [_schemes(one)[0] for one in found] == [wires[name] for name, _ in cases]
    assert [one["said"] for one in found] == [[]] * len(cases)


def test_without_a_place_for_socket_files_tcp_is_what_is_left(runtime: Path) -> None:
    """Where a backend has it; each of its members says so. No backend is another."""
    meets = {"rendezvous": f"file://{runtime}"}
    wired, fixed = ("auto", "auto:zmq", "zmq", "nng", "tcp"), ("shm", "zmq:ipc")

    found = _members(
        _read_only(runtime),
        [(backend, meets) for backend in (*wired, *fixed)],
        variables={"XDG_RUNTIME_DIR": ""},
    )

    remedy = r"none of \['/tmp'\] is writable .*; set XDG_RUNTIME_DIR or TMPDIR"
    for backend, one in zip(wired, found, strict=False):
        assert one["error"] == "", backend
        assert _schemes(one) == ["tcp"], backend
        assert len(one["said"]) == (0 if backend == "tcp" else 2), one["said"]
        assert all(re.search(f"tcp.*{remedy}", text) for text in one["said"])
    for one in found[len(wired) :]:
        assert re.match(f"TransportUnavailable: .*{remedy}", one["error"])
        assert one["said"] == []


def test_without_a_place_to_meet_the_error_says_what_would_do(runtime: Path) -> None:
    """The same for the key of a service on loopback, for which a secret would do."""
    service: dict[str, object] = {"rendezvous": "tcp://127.0.0.1:9"}

    found = _members(
        _read_only(runtime),
        [("tcp", {}), ("auto", {}), ("tcp", service)],
        variables={"XDG_RUNTIME_DIR": ""},
    )

    told = "TransportUnavailable: .*set XDG_RUNTIME_DIR or TMPDIR"
    assert all(re.match(told, one["error"]) for one in found)
    assert "secret" in found[2]["error"]


# -- a umask that takes from the owner, too ----------


@pytest.fixture
def plain_user() -> list[str]:
    """What a command begins with for which modes of files count, as not for root."""
    if os.geteuid():
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv to take root's privileges away with")
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all"]


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o777, 0o277])
def test_a_umask_locks_no_member_out(
    mask: int, runtime: Path, plain_user: list[str]
) -> None:
    """Neither members of the same mask nor, by what is left, those after them."""
    cases: list[tuple[str, dict[str, object]]] = [
        (backend, {}) for backend in ("shm", "zmq:ipc", "nng:ipc", "tcp")
    ]
    variables = {"XDG_RUNTIME_DIR": str(runtime)}

    found = _members(plain_user, cases, mask=mask, variables=variables)

    assert [one["error"] for one in found] == [""] * len(cases)
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("mask", [0o777, 0o277])
def test_a_umask_takes_nothing_from_the_owner(mask: int, runtime: Path) -> None:
    """Of what lies about for others to use, or to sweep."""
    files = SocketFiles("test")
    with _umask(mask), contextlib.closing(meet(None)):
        files.new(None)
        modes = {
            (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
            for path in runtime.rglob("*")
        }
        files.remove()
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_directory_that_locks_its_owner_out_is_mended(runtime: Path) -> None:
    """One that was left so, or is being made at this moment by another process."""
    base = Path(paths.local_base())
    base.mkdir()
    base.chmod(0)
    with contextlib.closing(meet(None)):
        assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_a_directory_of_another_user_stays_as_it_is(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may change it: root may."""
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    base = Path(paths.local_base())
    base.mkdir()
    base.chmod(0)
    with pytest.raises(TransportUnavailable, match=f"belongs to user {owner}, not"):
        meet(None)
    assert stat.S_IMODE(base.stat().st_mode) == 0
    base.chmod(0o700)


def test_a_directory_that_is_another_by_now_is_not_mended(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody put a link in its place after it was looked at."""
    base, target = Path(paths.local_base()), runtime / "elsewhere"
    for directory in (base, target):
        directory.mkdir()
        directory.chmod(0o500)
    look = os.lstat

    def look_and_swap(path: str) -> os.stat_result:
        found = look(path)
        if path == str(base) and not base.is_symlink():
            base.rmdir()
            base.symlink_to(target)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", look_and_swap)
        with pytest.raises(TransportUnavailable, match=r"closed to its owner .*0500"):
            meet(None)
    assert base.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o500


# -- names that cannot be printed ----------


@pytest.fixture(params=["n\udcff", "a\nb"], ids=["no-utf-8", "newline"])
def unprintable(
    request: pytest.FixtureRequest, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory for everything, of such a name."""
    directory = runtime / request.param
    directory.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.parametrize("backend", ["shm", "zmq:ipc", "nng:ipc"])
def test_a_socket_file_that_cannot_be_named_is_an_error(
    backend: str, unprintable: Path
) -> None:
    """With its remedy; whoever records or greets a member has to name it."""
    told = re.escape(ascii(str(unprintable))[1:-1])
    told = f"{told}.*cannot be printed; set XDG_RUNTIME_DIR or TMPDIR"
    for meets in (None, f"file://{unprintable.parent}"):
        with pytest.raises(TransportUnavailable, match=told):
            mq.connect(backend, group="g", rendezvous=meets)
    assert list(unprintable.iterdir()) == []


@pytest.mark.parametrize("backend", ["auto", "zmq", "nng"])
def test_members_do_without_a_socket_file_that_cannot_be_named(
    backend: str, unprintable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They meet there, and talk over TCP."""
    with (
        mq.connect(backend, group="g", name="a") as a,
        mq.connect(backend, group="g", name="b") as b,
    ):
        b.subscribe("t", timeout=STEP)
        a.publish("t", 1, timeout=STEP)
        assert b.recv(STEP).payload == 1
        assert [_schemes(queue.describe()) for queue in (a, b)] == [["tcp"]] * 2
    assert caplog.text.count("cannot be printed") == 2


@pytest.mark.parametrize(
    ("host", "shown"), [("h\udcff", r"h\udcff"), ("a\nb", r"a\nb"), ("", "localhost")]
)
def test_a_host_is_shown_whatever_it_is_called(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`connect` needs no name of the user's own there."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    with (
        mq.connect("tcp", group="g") as a,
        mq.connect("tcp", group="g", name="b") as b,
    ):
        assert re.fullmatch(rf"{re.escape(shown)}-{os.getpid()}-\d+.*", a.name)
        assert {member.host for member in b.members()} == {shown}


def test_the_name_of_a_host_leaves_room_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name has at most 64 bytes, and each is six characters where it is escaped."""
    monkeypatch.setattr("socket.gethostname", lambda: "\udcff" * 64)
    with mq.connect("tcp", group="g") as queue:
        assert queue.name.startswith(r"\udcff" * 10)


def test_a_directory_that_was_passed_over_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who could use it before is not met elsewhere; that is said once."""
    gone = str(tmp_path / "gone")
    monkeypatch.setenv("XDG_RUNTIME_DIR", gone)
    for _ in range(2):
        base = paths.local_base()
    log.flush()
    (told,) = caplog.messages
    assert gone in told
    assert base in told
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert paths.local_base() == base
