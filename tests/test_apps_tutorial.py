"""Every step of the tutorial runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
SECTIONS = re.split(r"^## ", TUTORIAL.read_text(), flags=re.MULTILINE)[1:]

pytest.importorskip("gymnasium", reason="the tutorial plays CartPole")


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def run_step(number: int, folder: Path) -> list[str]:
    """Write the files of all steps so far, run this one; what it printed."""
    for section in SECTIONS[:number]:
        for code in blocks(section, "python"):
            name = re.match(r"# (\w+\.py)\n", code)
            assert name is not None, f"a file without its name: {code[:40]}"
            (folder / name[1]).write_text(code)
    (script,) = blocks(SECTIONS[number - 1], "sh")
    group = f"tutorial-{os.getpid()}-{number}"  # another run may be under way
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", script.replace("MQ_GROUP=tutorial", f"MQ_GROUP={group}")],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_step_1_plays_an_episode(tmp_path: Path) -> None:
    """Without a queue."""
    (line,) = run_step(1, tmp_path)
    assert re.fullmatch(r"return [1-9]\d*", line)


def test_step_2_publishes_what_was_played(tmp_path: Path) -> None:
    """Chunk by chunk, in order, none missing."""
    assert run_step(2, tmp_path) == [f"one {number} 32" for number in range(10)]


@pytest.mark.parametrize("step", [3, 4])
def test_steps_3_and_4_learn_over_two_backends(step: int, tmp_path: Path) -> None:
    """The same files, another environment, and nothing lost."""
    *progress, last = run_step(step, tmp_path)
    assert any("mean return" in line for line in progress)
    chunks, lost = re.fullmatch(r"done: (\d+) .*, (\d+) lost", last).groups()  # type: ignore[union-attr]
    assert int(chunks) * 32 >= 5000
    assert lost == "0"


def test_step_5_goes_on_with_who_takes_the_place_of_the_killed(tmp_path: Path) -> None:
    """However long the learner had nobody."""
    assert run_step(5, tmp_path)[-1].startswith("done: ")
