"""The switch that makes failures of skips."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import NEEDS

TESTS = Path(__file__).parent
SKIPPING = """
import pytest

def test_page():
    pytest.skip("there is no browser: firefox")

@pytest.mark.skipif(True, reason="only root can become another user")
def test_user():
    pass

@pytest.mark.xfail(reason="only root")
def test_xfail():
    raise ValueError

def test_plain():
    pass
"""


def run(directory: Path, need: str) -> str:
    """What pytest says of tests that skip for want of a browser and of root."""
    (directory / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "needs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(directory), str(directory)],
        env={**os.environ, "MQ_NEED": need, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("need", "outcomes"),
    [
        ("", "1 passed, 2 skipped, 1 xfailed"),
        ("browser", "1 failed, 1 passed, 1 skipped, 1 xfailed"),
        ("browser,root", "1 failed, 1 passed, 1 xfailed, 1 error"),
        ("gpu", "1 passed, 2 skipped, 1 xfailed"),
    ],
)
def test_what_is_needed_is_not_skipped(
    need: str, outcomes: str, tmp_path: Path
) -> None:
    """Other skips remain what they are."""
    said = run(tmp_path, need)

    assert outcomes in said
    assert ("MQ_NEED asks for root. Skipped: only root" in said) is ("root" in need)


def test_an_unknown_need_is_refused(tmp_path: Path) -> None:
    """It would never be missed."""
    assert "MQ_NEED has browsr; what it knows: browser" in run(tmp_path, "browsr")


@pytest.mark.parametrize("need", NEEDS)
def test_each_need_is_in_the_reason_of_a_test(need: str) -> None:
    """A reason that is put in other words must be so in both places."""
    sources = [p.read_text() for p in TESTS.glob("*.py") if "needs" not in p.stem]
    skips = [s for s in sources if re.search(r"skip(if)?\(", s)]

    assert any(re.search(NEEDS[need], source) for source in skips)
