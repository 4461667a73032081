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


@pytest.mark.skipif(importlib.util.find_spec("ding") is None, reason=MISSING)
@pytest.mark.parametrize("mq_type", ["shm", "zmq", "tcp", "mq:nng", "torchrpc:cpu"])
def test_workers_hear_every_event_of_each_other(mq_type: str, tmp_path: Path) -> None:
    """Over any backend, with nothing lost, and all of them end."""
    heard = tmp_path / "heard"
    done = subprocess.run(
        [sys.executable, HERE / "ding_program.py", mq_type, heard],
        cwd=HERE.parent,
        env=os.environ | {"WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = list(range(1000, 1040))
    assert heard.read_text().splitlines() == [f"1 {numbers}", f"2 {numbers}"]
