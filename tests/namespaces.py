"""Namespaces: of networks, with wires between them, and of what is mounted."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest


def inside(name: str) -> list[str]:
    """What a command begins with that runs in a namespace."""
    return ["ip", "netns", "exec", name]


def with_mounts(script: str) -> list[str]:
    """What a command begins with that finds something else mounted.

    Args:
        script: Mounts it, run by a shell that is in a mount namespace of its own.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare to make a mount namespace with")
    command = [unshare, "--mount"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    command += ["sh", "-c", f'{script} && exec "$0" "$@"']
    possible = subprocess.run(
        [*command, "true"], capture_output=True, timeout=30, check=False
    )
    if possible.returncode:
        pytest.skip(f"no mount namespace can be made: {possible.stderr.decode()}")
    return command


def run(*command: str) -> str:
    """What a command prints; where it fails the test is skipped."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode:
        pytest.skip(f"no network namespace: {done.stderr.strip()[-200:]}")
    return done.stdout


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces and a wire between them: 10.77.0.1 and 10.77.0.2 on ``veth0``.

    The wire has no link yet: the second end is down.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("no network namespace: there is no ip, or no tc (iproute2)")
    first, second = names = [f"mq{os.getpid()}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            delete = ["ip", "netns", "del", name]
            stack.callback(functools.partial(subprocess.run, delete, timeout=30))
        ends = [("veth0", "netns", name) for name in names]
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", first, "link", "set", "veth0", "up")
        yield first, second


def link_up(names: Sequence[str]) -> None:
    """Have the wire between two namespaces carry; the kernel sees that a little later.

    Until it has, an interface is not of those that TensorPipe takes.
    """
    run("ip", "-n", names[1], "link", "set", "veth0", "up")
    deadline = time.monotonic() + 30.0
    for name in names:
        while "state UP" not in run("ip", "-n", name, "link", "show", "veth0"):
            assert time.monotonic() < deadline, "the wire has no link"


@contextlib.contextmanager
def slow_wire(rate: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces, and a wire between them that carries so much."""
    with two_namespaces() as names:
        link_up(names)
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "300ms")
        for name in names:
            run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", *shape)
        yield names
