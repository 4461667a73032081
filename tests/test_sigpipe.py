"""Programs that SIGPIPE ends: no peer's death does so, all else as before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, threading
from mq.sigpipe import blocked, spared

def write():
    try:
        os.write(ours, b"x")
    except BrokenPipeError:
        print("broken", flush=True)
    return "written"

theirs, ours = os.pipe()
os.close(theirs)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
"""


def said_by(lines: str) -> tuple[int, list[str]]:
    """Exit status, and what the program with these lines at its end has printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + lines],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    return done.returncode, done.stdout.split()


def test_a_call_is_spared_and_what_comes_after_it_is_not() -> None:
    status, said = said_by("print(spared(write), flush=True); write()")
    assert said == ["broken", "written"]
    assert status == -signal.SIGPIPE


@pytest.mark.parametrize(
    "disposition", ["signal.SIG_IGN", "lambda *_: print('handled', flush=True)"]
)
def test_no_handler_of_it_is_called(disposition: str) -> None:
    """It may end the program, as that of many that print into pipes."""
    before = f"signal.signal(signal.SIGPIPE, {disposition})\n"
    status, said = said_by(f"{before}print(spared(write), flush=True)")
    assert said == ["broken", "written"]
    assert status == 0


def test_who_blocks_it_finds_none_that_was_not_there() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})"
    lines = f"{block}; spared(write); print(len(signal.sigpending()), flush=True)"
    status, said = said_by(lines)
    assert said == ["broken", "0"]
    assert status == 0


@pytest.mark.parametrize("call", range(4))
def test_a_handler_that_raises_leaves_it_as_it_was(call: int) -> None:
    """These calls run handlers once they have done what they are for."""
    lines = f"""
calls = []

def raising(usual):
    def call(*arguments):
        done = usual(*arguments)
        calls.append(done)
        if len(calls) == {call} + 1:
            raise TimeoutError
        return done
    return call

mask = signal.pthread_sigmask
signal.pthread_sigmask = raising(mask)
signal.sigtimedwait = raising(signal.sigtimedwait)
try:
    spared(write)
except TimeoutError:
    print(len(mask(signal.SIG_BLOCK, ())), flush=True)
"""
    status, said = said_by(lines)
    assert said == ["broken"] * (call > 1) + ["0"]
    assert status == 0


def test_who_blocks_it_already_still_has_it_afterwards() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})"
    unblock = block.replace("SIG_BLOCK", "SIG_UNBLOCK")
    lines = f"{block}; write(); spared(write); print('still', flush=True); {unblock}"
    status, said = said_by(lines)
    assert said == ["broken", "broken", "still"]
    assert status == -signal.SIGPIPE


def test_threads_that_are_begun_meanwhile_never_have_it() -> None:
    lines = """
thread = threading.Thread(target=write)
with blocked():
    thread.start()
thread.join()
write()
"""
    status, said = said_by(lines)
    assert said == ["broken"]
    assert status == -signal.SIGPIPE
