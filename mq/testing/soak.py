"""``python -m mq.testing.soak --backend shm --minutes 30``: full speed, and deaths.

Publishers and subscribers of mixed sizes at full speed; every few seconds one of them
is killed and comes back. In rounds of some seconds, at whose end everything published
must have arrived: per publisher without a gap, double or wrong byte. Two publishers and
two subscribers live all the time; at the end they have no more memory, descriptors and
threads than after the first round, and nobody leaves a file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

import mq
from mq import registry
from mq.seconds import positive_seconds
from mq.testing import worker
from mq.testing.harness import Group
from mq.testing.member import Future, Member

ROUND_SECONDS: Final = 10.0
LIFE_SECONDS: Final = (1.0, 4.0)
"""Between two deaths."""
PATIENCE: Final = 60.0
SIZES: Final = (0, 64, 1250, 20_000, 40_000, 300_000, 1_250_000, 20_000_000)
WEIGHTS: Final = (2, 30, 20, 20, 10, 10, 7, 1)
STEADY: Final = ("pub-steady", "sub-steady", "pub-loan", "sub-copy")
MORTAL: Final = ("pub-a", "pub-b", "sub-a", "sub-b")
MOST_HELD: Final = 6
LOOKS: Final = 20
GROWTH_BYTES: Final = 48 << 20
"""By which resident memory may differ: allocators keep some of what they have freed."""


@dataclass
class Report:
    """What one member has seen in a round.

    Attributes:
        problems: In words, the first few.
        messages, nbytes: Published or received.
        newest: By incarnation, the sequence published or received last.
    """

    problems: list[str] = field(default_factory=list)
    messages: int = 0
    nbytes: int = 0
    newest: dict[str, int] = field(default_factory=dict)


# -- in the members ----------

_stop = threading.Event()
_targets: dict[str, int] = {}
_seen: dict[str, int] = {}


def be_quick_to_give_back(worker: worker.Worker) -> None:
    """Keep no memory for long that is not in use, so that it can be measured."""
    from mq import join

    join.IDLE_MEMORY_SECONDS = 0.5  # type: ignore[misc]


def be_nice(worker: worker.Worker, niceness: int) -> None:
    """Leave the processor to others first."""
    os.nice(niceness)


def publish(queue: mq.MQ, seed: int, lend: bool) -> Report:
    """Publish until `stop`, then a last message; every byte is the sequence's."""
    rng = random.Random(seed)
    memory = np.empty(max(SIZES), np.uint8)
    report = Report()
    incarnation = queue.describe()["incarnation"]
    sequence = _seen.get(incarnation, -1) + 1
    while True:
        last = _stop.is_set()
        size = 100 if last else rng.choices(SIZES, WEIGHTS)[0]
        if lend and rng.random() < 0.5:
            with queue.loan("t", (size,), np.uint8, timeout=PATIENCE) as array:
                array[:] = sequence % 251
        else:
            array = memory[:size]
            array[:] = sequence % 251
            queue.publish("t", array, timeout=PATIENCE)
        del array
        if not sequence % 50:
            queue.publish("newest", memory[:1_000_000], timeout=0)
        _seen[incarnation] = report.newest[incarnation] = sequence
        report.messages += 1
        report.nbytes += size
        sequence += 1
        if last:
            queue.flush(PATIENCE)
            _stop.clear()
            return report


def receive(queue: mq.MQ, seed: int) -> Report:
    """Receive and check until all targets are reached; hold a few views meanwhile."""
    rng = random.Random(seed)
    held: deque[Any] = deque()
    report = Report()
    heard = time.monotonic()
    while True:
        # What publishers sent that were then killed may come after all else.
        complete = _stop.is_set() and _is_complete()
        try:
            message = queue.recv(timeout=0 if complete else 0.5)
        except mq.RecvTimeout:
            if complete:
                break
            if _stop.is_set() and time.monotonic() - heard > PATIENCE:
                report.problems.append(f"waits for {_targets}, has {_seen}")
                break
            continue
        except mq.MQError as error:
            report.problems.append(repr(error))
            continue
        heard = time.monotonic()
        if message.topic == "t":
            _check(message, report)
        held.append(message)
        while len(held) > rng.randrange(MOST_HELD):
            del message
            message = held.popleft()
            if message.topic == "t" and not _is_whole(message):
                report.problems.append(f"message {message.sequence} changed")
    _stop.clear()
    _targets.clear()
    report.newest.update(_seen)
    del report.problems[20:]
    return report


def _is_complete() -> bool:
    return all(_seen.get(who, -1) >= newest for who, newest in _targets.items())


def _is_whole(message: mq.Message) -> bool:
    return bool((message.payload == message.sequence % 251).all())


def _check(message: mq.Message, report: Report) -> None:
    incarnation, sequence = message.incarnation, message.sequence
    expected = _seen.get(incarnation, sequence - 1) + 1
    if sequence != expected:
        report.problems.append(f"{message.sender}: {sequence} in place of {expected}")
    if not _is_whole(message):
        report.problems.append(f"{message.sender}: message {sequence} is wrong")
    _seen[incarnation] = sequence
    report.messages += 1
    report.nbytes += message.payload.nbytes


def stop(queue: mq.MQ, targets: dict[str, int]) -> None:
    """End `publish`, or `receive` once these have been received."""
    _targets.update(targets)
    _stop.set()


def measure(queue: mq.MQ) -> tuple[int, int, int]:
    """Resident bytes, descriptors, threads but for those of the harness."""
    gc.collect()
    _trim_heaps()
    descriptors = len(worker.descriptors())
    for _ in range(LOOKS):  # the keeper opens a file of the rendezvous now and then
        threading.Event().wait(0.02)
        descriptors = min(descriptors, len(worker.descriptors()))
    threads = [t for t in threading.enumerate() if not t.name.startswith("mq-test-")]
    return worker.resident_bytes(), descriptors, len(threads)


def _trim_heaps() -> None:
    """Have glibc return what is free, of which it keeps much for each thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def idle_memory(queue: mq.MQ) -> str:
    """What memory there is for messages although there are none; "" for none."""
    counters = queue.stats()
    own = sum(lender["mapped_bytes"] for lender in counters["shared"])
    with open("/proc/self/maps") as file:
        mapped = sum("/memfd:mq" in line for line in file)
    pooled = counters["pool"]["idle_bytes"]
    if not (pooled or own or mapped):
        return ""
    return f"{pooled} bytes in its pool, {own} lent, {mapped} mappings; {counters}"


# -- the script ----------

Measured = dict[str, tuple[int, int, int]]
"""Of each member what `measure` found."""


class Soak:
    """One run.

    Args:
        backend: The transport, whose members must be processes.
        seconds: How long at least.
        seed: Decides sizes and deaths.
        niceness: Of the members, above this process's; for runs beside other work.
        options: Of `mq.connect`.
    """

    def __init__(
        self,
        backend: str,
        seconds: float,
        seed: int = 0,
        niceness: int = 0,
        **options: Any,
    ) -> None:
        capabilities = registry.capabilities(backend)
        if not capabilities.separate_processes:
            raise ValueError(f"members of {backend!r} are no processes to be killed")
        self._rng = random.Random(seed)
        self._end = time.monotonic() + seconds
        self._half = self._end - seconds / 2
        self._niceness = niceness
        self._group = Group(backend, capabilities, options)
        self._group.deadline = self._end + 600.0
        self._members: dict[str, Member] = {}
        self._running: dict[str, Future] = {}
        self.problems: list[str] = []
        self.messages = self.nbytes = self.deaths = self.rounds = 0

    def run(self) -> list[str]:
        """Do it; the problems, in words."""
        try:
            for name in STEADY:
                self._start(name)
            before = self._round(measured=True)
            middle: Measured = {}
            while time.monotonic() + ROUND_SECONDS < self._end and not self.problems:
                now_measured = not middle and time.monotonic() > self._half
                middle = self._round(now_measured) or middle
            after = self._round(measured=True)
            if not self.problems:
                self._compare(before, middle, after)
                for name in MORTAL:
                    self._kill(name)
                self._group.close()
        except (AssertionError, mq.MQError) as error:
            self.problems.append(str(error))
        finally:
            self._group.end()
        return self.problems

    def _start(self, name: str) -> None:
        member = self._group.unconnected(name)
        member.ask(be_quick_to_give_back).result()
        member.ask(be_nice, self._niceness).result()
        self._group.connecting(member).result(PATIENCE)
        self._members[name] = member
        if name.startswith("sub"):
            zero_copy = name != "sub-copy"
            member.subscribe("t", zero_copy=zero_copy, depth=200, timeout=PATIENCE)
            member.subscribe(
                "newest",
                history=mq.keep_last(1),
                zero_copy=zero_copy,
                timeout=PATIENCE,
            )

    def _begin(self, name: str) -> None:
        seed = self._rng.randrange(1 << 30)
        member = self._members[name]
        if name.startswith("sub"):
            self._running[name] = member.begin(receive, seed)
        else:
            self._running[name] = member.begin(publish, seed, name == "pub-loan")

    def _kill(self, name: str) -> None:
        member = self._members.pop(name, None)
        self._running.pop(name, None)
        if member is not None:
            member.kill()
            member.end()
            self._group.forget(member)
            self.deaths += 1

    def _round(self, measured: bool = False) -> Measured:
        for name in MORTAL:
            if name not in self._members:
                self._start(name)
        for name in sorted(self._members, reverse=True):  # subscribers first
            self._begin(name)
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            threading.Event().wait(self._rng.uniform(*LIFE_SECONDS))
            name = self._rng.choice(MORTAL)
            self._kill(name)
            self._start(name)
            self._begin(name)
        self._drain()
        self.rounds += 1
        print(self, flush=True)
        if not measured:
            return {}
        self._wait_for_idle_memory()
        return {name: self._members[name].run(measure) for name in STEADY}

    def _drain(self) -> None:
        """End the round: everything that was published must have arrived."""
        newest: dict[str, int] = {}
        publishers = [name for name in self._running if name.startswith("pub")]
        for name in publishers:
            self._members[name].run(stop, {})
        for name in publishers:
            newest |= self._finish(name).newest
        subscribers = list(self._running)
        for name in subscribers:
            self._members[name].run(stop, newest)
        for name in subscribers:
            report = self._finish(name)
            self.messages += report.messages
            self.nbytes += report.nbytes

    def _finish(self, name: str) -> Report:
        report: Report = self._running.pop(name).result(2 * PATIENCE)
        self.problems += [f"{name}: {problem}" for problem in report.problems]
        return report

    def _wait_for_idle_memory(self) -> None:
        """What publishers give back, their subscribers unmap."""
        for name, member in self._members.items():
            until = time.monotonic() + PATIENCE
            while found := member.run(idle_memory):
                if time.monotonic() > until:
                    raise AssertionError(f"{name} keeps memory: {found}")
                threading.Event().wait(0.05)  # other processes are to go on

    def _compare(self, before: Measured, middle: Measured, after: Measured) -> None:
        for name in STEADY:
            (memory, *others), (memory_now, *others_now) = before[name], after[name]
            half_way = f"{middle[name][0] >> 20} -> " if middle else ""
            print(
                f"{name}: {memory >> 20} -> {half_way}{memory_now >> 20} MiB resident, "
                f"descriptors and threads {others} -> {others_now}"
            )
            if memory_now > memory + GROWTH_BYTES:
                self.problems.append(
                    f"{name} grew from {memory >> 20} to {memory_now >> 20} MiB"
                )
            if any(now > was for was, now in zip(others, others_now, strict=True)):
                self.problems.append(
                    f"{name} has more descriptors or threads: {others} -> {others_now}"
                )

    def __str__(self) -> str:
        return (
            f"round {self.rounds}: {self.messages} messages, "
            f"{self.nbytes / 1e9:.1f} GB received, {self.deaths} deaths"
        )


def main() -> int:
    """Run it; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m mq.testing.soak",
        description="Full speed in mixed sizes; members are killed and restarted.",
    )
    parser.add_argument("--backend", default="shm", help="as for mq.connect")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        seconds = positive_seconds("the time to run", 60 * arguments.minutes)
        soak = Soak(arguments.backend, seconds, arguments.seed)
    except (ValueError, mq.MQError) as error:
        parser.error(str(error))
    problems = soak.run()
    for problem in problems:
        print(f"FAIL: {problem}")
    print("failed" if problems else "nothing lost, nothing left", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
