"""Runs the test suite in parts side by side: most of it waits for other processes.

Each part is a pytest run of its own; its output is shown in one piece when it ends.
Those begin first that take most of the processors' time, or longest. Few at a time: who
waits for a process that has no processor looks again and again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

_HERE = Path(__file__).parent
CONFORMANCE = str(_HERE / "test_conformance.py")
_BENCH = sorted(map(str, _HERE.glob("test_bench*.py")))
_APPS = sorted(map(str, _HERE.glob("test_apps_*.py")))
_NNG = "nng"
_RPC = "torchrpc or [tcp- or [tls-"
_LONG = sorted(
    str(path)
    for name in ("soak", "third_party", "torchrpc_*")
    for path in _HERE.glob(f"test_{name}.py")
)
_ENGINES = sorted(
    str(path)
    for name in (
        "*link*",
        "bad_input",
        "peak_memory",
        "rendezvous*",
        "shm_*",
        "*tls*",
        "zmq_*",
    )
    for path in _HERE.glob(f"test_{name}.py")
)
_INTERRUPTS = str(_HERE / "test_interrupts.py")
_ELSEWHERE = (CONFORMANCE, _INTERRUPTS, *_BENCH, *_APPS, *_LONG, *_ENGINES)
IN_PYTHON = "some of all, with nothing compiled"
PARTS = {
    "all else": [str(_HERE), *(f"--ignore={path}" for path in _ELSEWHERE)],
    "links and rendezvous": sorted({*_ENGINES} - {*_LONG}),
    "soak, torchrpc": _LONG,
    "conformance of the others": [CONFORMANCE, "-k", f"not ({_NNG} or {_RPC})"],
    "interrupts": [_INTERRUPTS],
    "conformance of tcp, tls and torchrpc": [
        *(CONFORMANCE, "-k", f"({_RPC}) and not {_NNG}"),
    ],
    "the bench": _BENCH,
    "conformance of nng": [CONFORMANCE, "-k", _NNG],
    IN_PYTHON: [
        *(str(_HERE / f"test_{name}.py") for name in ("codec", "mesh_flow")),
        CONFORMANCE,
        *("-k", "(test_codec or test_mesh_flow or inproc or [shm-) and not two_gib"),
    ],
    "applications": _APPS,
}
LIMIT_SECONDS = 3600.0
PROGRESS_SECONDS = 30.0


def main() -> int:
    """Run them; 1 if a part failed or took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pytest_args", nargs="*", help="for every part")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was begun
    with tempfile.TemporaryDirectory(prefix="mq-parts-") as directory:
        outputs = {name: Path(directory, f"{n}.log") for n, name in enumerate(PARTS)}
        return _run(outputs, args.pytest_args)


def _run(outputs: dict[str, Path], extra: list[str]) -> int:
    begin = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    try:
        waiting = dict(PARTS)
        spoken = begin
        while running or waiting:
            while waiting and len(running) < _most_at_once():
                name = next(iter(waiting))
                arguments = waiting.pop(name)
                with outputs[name].open("wb") as output:
                    running[name] = _start(name, [*arguments, *extra], output)
                print(f"began: {name}", flush=True)
            time.sleep(0.2)  # between looks at several processes and the clock
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                spoken = time.monotonic()
                print(_progress(spoken - begin, running, outputs), flush=True)
            late = time.monotonic() - begin > LIMIT_SECONDS
            for name, process in list(running.items()):
                if process.poll() is None and not late:
                    continue
                del running[name]
                failed += [name] if late or process.returncode else []
                if late:
                    process.kill()
                seconds = time.monotonic() - begin
                print(f"\n=== {name}: ended after {seconds:.0f} s ===", flush=True)
                print(outputs[name].read_text(errors="replace"), flush=True)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    print("failed: " + ", ".join(failed) if failed else "all parts passed", flush=True)
    return 1 if failed else 0


def _most_at_once() -> int:
    return 2 * len(os.sched_getaffinity(0)) + 1


def _progress(seconds: float, running: Iterable[str], outputs: dict[str, Path]) -> str:
    parts = []
    for name in running:
        found = re.findall(rb"\[ *(\d+)%\]", outputs[name].read_bytes())
        parts.append(f"{name} {int(found[-1]) if found else 0} %")
    return f"{seconds:.0f} s: " + ", ".join(parts)


def _start(
    name: str, arguments: list[str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    env = dict(os.environ)
    # Each of some thousand processes would compile what it imports anew.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's others spin at each import
    if name == IN_PYTHON:
        env["MQ_COMPILED"] = "0"
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)


if __name__ == "__main__":
    sys.exit(main())
