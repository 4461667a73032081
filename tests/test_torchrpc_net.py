"""Which of a host's addresses TensorPipe listens on."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_python import ROOT
from namespaces import inside, link_up, run, two_namespaces

from transports import _torchrpc_net as net

MEMBER = """
import sys
import mq
from tests.namespaces import link_up

def join():
    return mq.connect(
        "torchrpc:cpu", group="g", rendezvous=sys.argv[1],
        listen="torchrpc://10.77.0.1:0", insecure=True,
    )

try:
    join()
except OSError as error:
    print(error)
link_up(sys.argv[2:])
with join() as queue:
    print(queue.describe()["engine"]["agent"])
"""


@pytest.mark.slow
def test_an_interface_that_has_no_link_yet_can_be_tried_again(tmp_path: Path) -> None:
    """TensorPipe, who chooses once per process, would take loopback for good."""
    with two_namespaces() as names:
        where = [f"file://{tmp_path}", *names]
        member = subprocess.run(
            [*inside(names[0]), sys.executable, "-c", MEMBER, *where],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
        )
    assert member.returncode == 0, member.stderr
    said, address = member.stdout.splitlines()
    assert "veth0" in said
    assert "no link" in said
    assert address.startswith("uv://10.77.0.1:")


JOINER = """
import sys
import mq

try:
    queue = mq.connect(
        "torchrpc:cpu", group="g", rendezvous=sys.argv[1],
        listen=sys.argv[2:], insecure=True,
    )
except mq.ConnectRefused as error:
    sys.exit(str(error))
with queue:
    print("open", flush=True)
    sys.stdin.read()
    print(len(queue.members()), "left")
"""
TWO = ["10.78.0.1", "10.77.0.2"]
"""The first is not reached from the other namespace."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second_listens", "words"),
    [
        (0, TWO, r"no connection can be made to uv://10.78.0.1:\d+,.* put one first"),
        (1, TWO, r"no connection can be made to uv://10.78.0.1:\d+,.* put one first"),
        (0, ["127.0.0.1"], r"on uv://127.0.0.1:\d+, which no other host reaches"),
    ],
)
def test_a_member_whose_agent_cannot_be_reached_is_refused(
    tmp_path: Path, first: int, second_listens: list[str], words: str
) -> None:
    """It may be reached by another address: whom TensorPipe leads nowhere it aborts."""
    with two_namespaces() as names, contextlib.ExitStack() as stack:
        link_up(names)
        alone = ("ip", "-n", names[1])
        run(*alone, "link", "add", "far0", "type", "veth", "peer", "name", "far1")
        run(*alone, "addr", "add", "10.78.0.1/24", "dev", "far0")
        for end in ("far0", "far1"):
            run(*alone, "link", "set", end, "up")
        listens = [["10.77.0.1"], second_listens]
        members = []
        for number in (first, 1 - first):
            where = [f"file://{tmp_path}"]
            where += [f"torchrpc://{host}:0" for host in listens[number]]
            member = subprocess.Popen(
                [*inside(names[number]), sys.executable, "-c", JOINER, *where],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            stack.callback(member.communicate)
            stack.callback(member.kill)
            members.append(member)
            if number == first:
                assert member.stdout is not None
                assert member.stdout.readline() == "open\n"
        there, joiner = members
        _, said = joiner.communicate(timeout=60)
        assert joiner.returncode == 1, said
        assert re.search(words, said)
        left, said = there.communicate(timeout=60)
        assert there.returncode == 0, said
        assert left == "1 left\n"


@pytest.mark.parametrize(
    "url", ["uv://127.0.0.1:1", "uv://[::ffff:127.0.0.1]:1", "shm://name"]
)
def test_what_stays_within_a_host_is_of_use_there_only(url: str) -> None:
    """Elsewhere TensorPipe would connect to whatever listens there."""
    net.check_url(url, ("uv", "shm"), within_host=True)
    with pytest.raises(ValueError, match="no other host reaches"):
        net.check_url(url, ("uv", "shm"), within_host=False)
