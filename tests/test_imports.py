"""Who may import whom, and what `import mq` loads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fresh_python import ROOT, output_of

HEAVY = {"torch", "numpy", "zmq", "pynng", "tensordict"}
SLOW = {"asyncio.base_events", "difflib", "importlib.metadata"}


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, types excepted."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files(folder: str) -> list[Path]:
    """All Python files below a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


def starts(name: str, *prefixes: str) -> bool:
    """Whether a module is one of these packages or in one of them."""
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def test_importing_mq_loads_neither_torch_nor_numpy_nor_an_engine() -> None:
    """A program pays for a transport when it connects, not when it imports mq."""
    code = "import sys; old = {*sys.modules}; import mq; print(*{*sys.modules} - old)"
    loaded = set(output_of(code).split())

    assert "mq.queue" in loaded
    assert not loaded & (HEAVY | SLOW)
    assert not {name for name in loaded if starts(name, "transports", "bench")}


@pytest.mark.parametrize("path", files("transports"), ids=lambda p: p.name)
def test_a_transport_imports_only_the_link_contract(path: Path) -> None:
    """A backend never knows another backend, the queue, the codec or the mesh."""
    stem = path.stem.strip("_").split("_")[0]
    allowed = (
        "mq.transport",
        "mq.errors",
        "mq.log",
        "mq.mesh.poller",
        "mq.addresses",
        "mq.credentials",
        "mq.descriptors",
        "mq.forks",
        "mq.openssl",
        "mq.stream",
        "mq.lending",
        "mq.segments",
        "mq.sigpipe",
        "mq.borrowing",
        "mq.devices",
        "mq.options",
        "mq.threads",
    )
    for name in imported(path) - {"mq", "transports"}:
        if starts(name, "mq"):
            assert starts(name, *allowed), name
        if starts(name, "transports"):
            assert name.partition(".")[2].strip("_").startswith(stem), name


@pytest.mark.parametrize("path", files("mq"), ids=lambda p: str(p.relative_to(ROOT)))
def test_mq_imports_no_transport_and_no_engine(path: Path) -> None:
    """Transports are loaded by their string, in the registry."""
    names = imported(path)

    assert not {n for n in names if starts(n, "transports", "zmq", "pynng", "tests")}
    if "cli.py" not in path.name:
        assert not {n for n in names if starts(n, "bench")}


@pytest.mark.parametrize("path", files("bench"), ids=lambda p: p.name)
def test_the_bench_uses_the_public_interface(path: Path) -> None:
    """What the bench measures is what users get."""
    internal = ("mq.mesh", "mq.queue", "mq.join", "transports")

    assert not {n for n in imported(path) if starts(n, *internal)}
