"""Members where files can hardly be made, or called by names that nobody can print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meeting import runtime
from namespaces import with_mounts
from nng_links import nng_runs

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
