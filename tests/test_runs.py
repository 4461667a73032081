"""`make test` and `make stress` leave nothing behind when somebody ends them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STRESS = "import stress; stress.CONFORMANCE = sys.argv.pop(); sys.exit(stress.main())"
PARTS = "import parts; parts.PARTS = {'one': []}; sys.exit(parts.main())"
SECONDS = 60.0


@pytest.mark.parametrize("code", [STRESS, PARTS], ids=["stress", "parts"])
def test_ended_from_outside_it_ends_what_it_began(tmp_path: Path, code: str) -> None:
    """As CI does it, by SIGTERM."""
    line = tmp_path / "line"
    os.mkfifo(line)
    endless = tmp_path / "test_endless.py"
    endless.write_text(
        "import os, signal\n"
        "def test_endless():\n"
        f"    os.write(os.open({str(line)!r}, os.O_WRONLY), b'x')\n"
        "    signal.pause()\n"
    )
    reader = os.open(line, os.O_RDONLY | os.O_NONBLOCK)
    run = subprocess.Popen(
        [sys.executable, "-c", f"import sys; {code}", "--", str(endless)],
        cwd=HERE,
        stdout=subprocess.DEVNULL,
    )
    try:
        assert said(reader) == b"x"
        begun = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert begun
        run.send_signal(signal.SIGTERM)
        assert run.wait(SECONDS) == 143
        assert said(reader) == b"", "the test still runs"
        assert not [pid for pid in begun if Path("/proc", pid).exists()]
    finally:
        os.close(reader)
        run.kill()
        run.wait()


def said(reader: int) -> bytes:
    """What comes next; nothing once nobody can say anything any more."""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    assert poller.poll(SECONDS * 1000), "nothing was said"
    return os.read(reader, 10)
