"""The oldest libraries that are tested are the oldest that are allowed."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def allowed() -> dict[str, Version]:
    """The oldest version of each library that setup.cfg allows, but for torch."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    lines = config["options"]["install_requires"] + extras["tensordict"]
    found = {}
    for requirement in map(Requirement, lines.split()):
        (bound,) = requirement.specifier
        assert bound.operator == ">="
        found[requirement.name] = Version(bound.version)
    del found["torch"]  # in the environment there is the one that is pinned
    return found


def pinned() -> dict[str, list[Version]]:
    """What tests/oldest.txt has of each, for one version of Python or another."""
    found: dict[str, list[Version]] = {}
    for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            found.setdefault(requirement.name, []).append(Version(pin.version))
    return found


def test_the_oldest_allowed_are_those_that_are_tested() -> None:
    """By its first two numbers; a newer Python has wheels of newer ones only."""
    oldest = {name: min(versions) for name, versions in pinned().items()}
    assert {name: version.release[:2] for name, version in oldest.items()} == {
        name: (*version.release, 0)[:2] for name, version in allowed().items()
    }


@pytest.mark.parametrize("name", sorted(pinned()))
def test_the_oldest_are_what_runs(name: str) -> None:
    """Under `make oldest`."""
    if "oldest" not in os.environ.get("PYTHONPATH", ""):
        pytest.skip(
            "`make oldest` runs it, with the oldest libraries beside the others"
        )
    assert Version(importlib.metadata.version(name)) in pinned()[name]
