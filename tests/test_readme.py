"""The README's first example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

from fresh_python import printed_by

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_runs_as_printed(tmp_path: Path) -> None:
    """Copied into a file of its own and started, it prints what it says."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert printed_by(code, tmp_path) == [
        f"actor {step} tensor([2., 2., 2., 2.])" for step in range(3)
    ]
