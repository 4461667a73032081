"""Which of a host's addresses TensorPipe listens on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fresh_python import ROOT
from namespaces import inside, two_namespaces

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
