"""The pipeline learns what one process learns, over every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.apps import placing
from bench.apps.app import ALONE, AppCell
from bench.apps.command import BACKENDS, main_of, measure
from bench.apps.pipeline.cells import APP
from bench.apps.pipeline.resnet import Size, shards
from bench.apps.pipeline.stages import Task
from bench.apps.placing import CUDA
from bench.rows import Result
from bench.summary import gather
from mq import registry

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=registry.check(CUDA) or "no GPU"
)
SMALL = Size((1, 1, 1, 1), 8, 10)


def run(transport: str, task: Task, output: Path) -> dict[str, float]:
    result = measure(APP, AppCell(transport, "p", 0, limit=90.0, task=task), output)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    return result.metrics


def losses(metrics: dict[str, float]) -> list[float]:
    return [metrics[f"loss{batch}"] for batch in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_stages_have_the_losses_of_one_process(
    backend: str, tmp_path: Path
) -> None:
    """Micro-batch by micro-batch, through backward and optimiser, to 1e-5."""
    task = Task(SMALL, image=32, batch=8, split=4)
    alone = losses(run(ALONE, task, tmp_path))

    piped = run(backend, task, tmp_path)

    assert losses(piped) == pytest.approx(alone, abs=1e-5)
    assert alone[0] != alone[2], "nothing was learnt"
    assert 0 < piped["transport_share"] < 1
    assert 0 < piped["carried_bytes"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["zmq", "shm", CUDA])
def test_stages_on_gpus_have_the_losses_of_one_process(
    backend: str, tmp_path: Path
) -> None:
    """Through host memory or from device to device, with one GPU or two."""
    task = Task(SMALL, image=32, batch=8, split=4, device="cuda")
    alone = losses(run(ALONE, task, tmp_path))

    assert losses(run(backend, task, tmp_path)) == pytest.approx(alone, abs=1e-2)


@pytest.mark.parametrize(("gpus", "there"), [(1, 0), (2, 1), (3, 1)])
def test_each_stage_tells_torchrpc_where_the_other_is(
    gpus: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both on one GPU, or each on one of the first two; others need not be told."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    names = ("stage0", "stage1")
    maps = [placing.options(CUDA, "cuda", rank, names) for rank in (0, 1)]
    assert maps == [
        {"device_map": {"stage1": {0: there}}, "map_name": "stage0"},
        {"device_map": {"stage0": {there: 0}}, "map_name": "stage1"},
    ]
    task = Task(device="cuda")
    assert task.delivered(1) == {"device": f"cuda:{there}"}
    assert placing.options("shm", "cuda", 0, names) == {}
    assert placing.options(CUDA, "cpu", 0, names) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the remedy."""
    with pytest.raises(SystemExit):
        main_of(APP, ["--stage-device", "cuda"])
    assert "--stage-device cpu" in capsys.readouterr().err


def test_the_split_changes_what_batch_norm_sees(tmp_path: Path) -> None:
    """So a comparison is between equal micro-batches only."""
    one, four = (
        losses(run(ALONE, Task(SMALL, image=32, batch=8, split=split), tmp_path))
        for split in (1, 4)
    )
    assert one[0] != pytest.approx(four[0], abs=1e-5)


def test_the_network_is_resnet_50() -> None:
    """With as many parameters as published, in two shards of which both have some."""
    counts = [sum(p.numel() for p in part.parameters()) for part in shards(Size(), 0)]
    assert sum(counts) == 25_557_032
    assert min(counts) > 1_000_000


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    """In words, before anything is started."""
    with pytest.raises(ValueError, match="10 cannot be split into 4"):
        Task(batch=10, split=4)


def test_the_table_compares_with_one_process_and_the_published_times() -> None:
    """The speed-up is over the fastest split of one process."""
    task = "pipeline num_split=2"
    loss = {f"loss{batch}": 1.0 for batch in range(3)}
    alone = Result(ALONE, task, 0, 0, "ok", metrics={"value": 30.0, **loss})
    faster = Result(ALONE, "pipeline num_split=1", 0, 0, "ok", metrics={"value": 20.0})
    piped = Result("shm", task, 0, 0, "ok", metrics={"value": 10.0, **loss})
    by_split, text = APP.tables(gather([alone, faster, piped]))
    lines = {line[0]: line[1:] for line in by_split.lines}
    assert lines["shm"] == ["-", "10.0", "-", "2.00"]
    assert lines["published: torchrpc, over num_split=1"] == [
        *("16.5", "12.3", "1.00", "1.33"),
    ]
    line = dict(zip(text.head, text.lines[-1], strict=True))
    assert (line["backend"], line["speed-up"], line["published s"]) == (
        "shm",
        "2.00",
        "12.3",
    )
    assert line["loss differs by"] == "0"


def test_it_runs_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m bench.apps.pipeline --backend` ends with the report's path."""
    arguments = ["--backend", "inproc", "--quick", "--num-split", "2"]
    assert main_of(APP, [*arguments, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"report: {tmp_path / 'report.html'}" in said
    text = (tmp_path / "report.md").read_text()
    assert "`python -m bench.apps.pipeline --backend inproc" in text
    assert "| inproc |" in text
