"""The README's first example runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_runs_as_printed(tmp_path: Path) -> None:
    """Copied into a file of its own and started, it prints what it says."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = tmp_path / "example.py"
    script.write_text(code)

    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout.splitlines() == [
        f"actor {step} tensor([2., 2., 2., 2.])" for step in range(3)
    ]
