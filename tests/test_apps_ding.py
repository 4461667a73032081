"""DI-engine's own `Parallel`, over mq."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = (
    "DI-engine is not installed: it asks for numpy<2, gym==0.25.1 and "
    "setuptools<=66.1.1, which the pinned versions rule out; `make ding` installs it "
    "without its own pins, beside the environment, and runs this test"
)


needs_ding = pytest.mark.skipif(
    importlib.util.find_spec("ding") is None, reason=MISSING
)


def start(*arguments: str | Path, heard: Path | str = "") -> tuple[int, str]:
    """Run Python; its exit status, and what it said on stderr."""
    # DI-engine's log would break lines that are wider than a terminal.
    own = {"WANDB_MODE": "disabled", "DING_HEARD": str(heard), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parent,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, done.stderr


def run(heard: Path, *arguments: str | Path) -> None:
    """Run Python; afterwards node 0 must have heard everything from both others."""
    status, said = start(*arguments, heard=heard)
    assert status == 0, said
    numbers = list(range(1000, 1040))
    assert heard.read_text().splitlines() == [f"1 {numbers}", f"2 {numbers}"]


@needs_ding
@pytest.mark.parametrize("mq_type", ["shm", "zmq", "tcp", "mq:nng", "torchrpc"])
def test_workers_hear_every_event_of_each_other(mq_type: str, tmp_path: Path) -> None:
    """Over any backend, with nothing lost, and all of them end."""
    run(tmp_path / "heard", HERE / "ding_program.py", mq_type, tmp_path / "heard")


@needs_ding
def test_the_command_is_ditask_with_our_backends(tmp_path: Path) -> None:
    """With DI-engine's own options, and the program's main function by its name."""
    command = ["-m", "mq.integrations.ding", "--mq-type", "shm"]
    command += ["--parallel-workers", "3", "--startup-interval", "0"]
    program = ["--package", str(HERE), "--main", "ding_program.told"]
    run(tmp_path / "heard", *command, *program)


PROGRAM = """
import inspect
from ding.framework import Parallel
from mq.integrations import ding

before = inspect.signature(Parallel.runner)
ding.register()
assert inspect.signature(Parallel.runner) == before
for mq_type in ("nng", "shm"):
    assert callable(Parallel.runner(1, mq_type, None, "ipc"))
    try:
        Parallel.runner(1, mq_type, max_retry=2)
    except TypeError as error:
        assert "max_retry" in str(error), error
    else:
        raise AssertionError(f"{mq_type} takes max_retry")
"""


@needs_ding
def test_arguments_are_those_of_di_engine() -> None:
    """By place or by name, over its own queue and ours; what it has not is refused."""
    status, said = start("-c", PROGRAM)
    assert status == 0, said


@needs_ding
def test_workers_wait_for_each_other_at_a_barrier(tmp_path: Path) -> None:
    """DI-engine's own, told as for its mesh by how many each worker is attached to."""
    path = tmp_path / "steps"
    status, said = start(HERE / "ding_barrier.py", "shm", path)
    assert status == 0, said
    nodes = path.read_text().split()
    assert [sorted(nodes[:3]), sorted(nodes[3:])] == [["0", "1", "2"]] * 2


@needs_ding
@pytest.mark.parametrize(
    ("mq_type", "reason"),
    [
        ("shmm", "no transport 'shmm'; did you mean 'shm'?"),
        ("tls", "tls needs certificate="),
    ],
)
def test_the_last_line_says_why_no_worker_can_run(
    mq_type: str, reason: str, tmp_path: Path
) -> None:
    """Whether it is known before they start, or each finds out."""
    status, said = start(HERE / "ding_program.py", mq_type, tmp_path / "heard")
    assert status == 1
    assert reason in said.splitlines()[-1]


@needs_ding
def test_a_worker_whose_handler_raised_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """DI-engine's listener ends by it: the worker is no subscriber, and emits on."""
    path = tmp_path / "listening"
    status, said = start(HERE / "ding_deaf.py", "shm", path)
    assert status == 0, said
    assert path.read_text() == "['node-2'] []"
    assert "node 1 hears no more events: ValueError: no such work" in said
