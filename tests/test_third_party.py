"""A transport of somebody else: installed, found, and held to the same rules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from suite_parts import each_part

from mq.testing import links

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds the example distribution installed."""
    source = tmp_path_factory.mktemp("source") / "example"
    target = tmp_path_factory.mktemp("installed")
    shutil.copytree(HERE / "example_transport", source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command += ["--target", str(target), str(source)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    path = os.pathsep.join([str(target), str(HERE.parent)])
    return {**os.environ, "PYTHONPATH": path}


def _run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_an_installed_transport_is_found_by_its_entry_point(
    environment: dict[str, str],
) -> None:
    """No registration in code: the distribution's metadata is enough."""
    program = "from mq import registry; print(registry.check('example'))"

    assert _run(environment, "-c", program).strip() == "None"


def test_an_unchanged_program_runs_on_it(environment: dict[str, str]) -> None:
    """The string is all that an application changes."""
    program = (
        "import mq\n"
        "a = mq.connect('example', group='third-party', name='a')\n"
        "b = mq.connect('example', group='third-party', name='b')\n"
        "b.subscribe('t'); a.publish('t', {'x': 1}); print(b.recv(10).payload)\n"
        "a.close(); b.close()\n"
    )

    assert _run(environment, "-c", program).strip() == "{'x': 1}"


PROMISES = """
import sys
import mq_example_transport
from mq.testing import PROMISES
mq_example_transport.SEND_BUFFER = int(sys.argv[1])
for promise in PROMISES.values():
    promise(mq_example_transport.ExampleLink)
print(len(PROMISES), "kept")
"""


@pytest.mark.parametrize("send_buffer", ["1048576", "212992", "65536"])
def test_its_link_keeps_what_links_promise(
    environment: dict[str, str], send_buffer: str
) -> None:
    """By the functions that an author of a transport finds in `mq.testing`.

    Whatever the kernel lets a socket buffer: most let it 212992 bytes (wmem_max).
    """
    said = _run(environment, "-c", PROMISES, send_buffer)

    assert said.strip() == f"{len(links.PROMISES)} kept"


@pytest.mark.slow
@each_part
def test_the_example_passes_the_whole_suite(
    environment: dict[str, str], part: list[str]
) -> None:
    """A link of one file keeps every clause of the contract."""
    said = _run(environment, "-m", "mq.testing", "example", *part)

    assert "FAIL" not in said
    assert said.rstrip().endswith(f"{len(part)} of {len(part)} cases passed")
