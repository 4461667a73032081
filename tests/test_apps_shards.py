"""Two shards compute what one process computes, over every backend and bare RPC."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from bench.apps.app import AppCell
from bench.apps.command import BACKENDS, main_of, measure
from bench.apps.placing import CUDA
from bench.apps.shards.cells import APP, RAW, RAW_CUDA
from bench.apps.shards.model import Task, alone
from mq import registry

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=registry.check(CUDA) or "no GPU"
)


def gradient(transport: str, task: Task, output: Path) -> float:
    result = measure(APP, AppCell(transport, "s", 0, limit=90.0, task=task), output)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    return result.metrics["gradient"]


@pytest.mark.parametrize("transport", [*BACKENDS, RAW])
def test_gradients_are_those_of_one_process(transport: str, tmp_path: Path) -> None:
    """Ten passes add up the same gradients on both sides of the queue."""
    task = Task(width=40, rows=30, passes=10)
    expected = float(alone(task)[0].abs().sum())

    assert expected > 1
    assert gradient(transport, task, tmp_path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("transport", "direct"),
    [("zmq", False), ("shm", False), (RAW, False), (CUDA, True), (RAW_CUDA, True)],
)
def test_gradients_are_the_same_between_gpus(
    transport: str, direct: bool, tmp_path: Path
) -> None:
    """Staged through host memory or direct, with one GPU or two."""
    task = Task(width=40, rows=30, device="cuda", direct=direct)
    expected = float(alone(task)[0].abs().sum())

    assert gradient(transport, task, tmp_path) == pytest.approx(expected, rel=1e-3)


def cells(device: str, quick: bool = False) -> list[AppCell]:
    options = argparse.Namespace(device=device, passes=10, width=800, rounds=1)
    options.quick = quick
    return APP.cells(options, ["shm", CUDA])


def test_a_quick_run_has_small_shards() -> None:
    """Elsewhere they are as large as the options say."""
    (asked,) = {cell.task for cell in cells("cpu")}
    (quick,) = {cell.task for cell in cells("cpu", quick=True)}
    assert (asked.width, asked.rows, asked.passes) == (800, 800, 10)
    assert quick.width * quick.rows * quick.passes < 100_000


def test_on_a_gpu_staged_and_direct_are_both_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over mq and over bare RPC, so that both ratios can be seen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [(cell.transport, cell.task.direct) for cell in cells("cuda")] == [
        ("shm", False),
        (RAW, False),
        (CUDA, True),
        (RAW_CUDA, True),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the remedy."""
    with pytest.raises(SystemExit):
        main_of(APP, ["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err


def test_without_a_gpu_the_report_says_what_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is staged on a CPU, and the published rows are not comparable."""
    arguments = ["--device", "cpu", "--backend", "inproc", "--width", "20"]
    assert main_of(APP, [*arguments, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "nothing is staged" in said
    assert "0.0687" in said
