"""`mq bench apps`: what it runs, what it refuses, what it reports."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench import command as bench
from bench.apps import command, placing, report
from bench.apps.app import App, AppCell, load
from bench.apps.dqn import cells as dqn
from bench.apps.pipeline import cells as pipeline
from bench.apps.pipeline.stages import Task
from bench.rows import Result, read
from bench.summary import gather


def test_all_applications_are_reported_beside_the_published_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file of rows and one report; those are read by the bench's own reader."""
    arguments = ["apps", "--apps", "pipeline,shards", "--backend", "inproc", "--quick"]
    assert bench.main([*arguments, "--output", str(tmp_path)]) == 0
    facts, results = read(tmp_path / "results.jsonl")
    assert {row.workload.split()[0] for row in results} == {"pipeline", "shards"}
    assert all(row.status == "ok" for row in results)
    assert "apps" in facts["command"]
    told = f"image=128 batch=64 batches=3 stage_device={placing.default()} --quick"
    assert facts["pipeline"] == told
    text = (tmp_path / "report.md").read_text()
    for figure in ("## Pipeline", "## Two shards", "9.08", "2.31", "two GPUs"):
        assert figure in text
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out


def test_the_published_times_are_the_reference() -> None:
    """Nine of them, of three workloads."""
    workloads = ("pipeline", "cuda-rpc", "atari-dqn")
    found = {
        name: [one.seconds for one in report.published(name)] for name in workloads
    }
    assert [len(found[name]) for name in workloads] == [4, 2, 3]
    assert found["cuda-rpc"][0] / found["cuda-rpc"][1] == pytest.approx(33.7, abs=0.1)
    assert any("A100" in line for line in report.conditions())


def test_the_dqn_table_has_every_figure() -> None:
    """Of a row that reached its goal, and of one that could not be run."""
    metrics = {
        "value": 0.5,
        "steps_per_s": 2000.0,
        "idle_share": 0.25,
        "transport_share": 0.125,
        "weights_age_ms": 9.0,
        "weights_age_p99_ms": 30.0,
        "lost": 0.0,
        "best": 476.0,
        "reached": 100_000.0,
    }
    game = "dqn CartPole-v1 seed=0"
    done = Result("shm", game, 0, 0, "ok", metrics=metrics)
    skipped = Result("torchrpc:cuda", game, 0, 0, "skipped", "no GPU")
    (text,) = dqn.APP.tables(gather([done, skipped]))
    assert text.lines[0][1:6] == ["shm", "100,000", "476", "0.500", "2,000"]
    assert text.lines[0][6:] == ["12.5 %", "25.0 %", "9.00", "30.0", "0"]
    assert text.problems == [f"torchrpc:cuda {game}: skipped: no GPU"]


def planned(name: str, *arguments: str) -> list[str]:
    """The workloads of an application's full run over one backend, in order."""
    app = load(name)
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.quick, options.rounds = False, 1
    cells = app.cells(options, ["shm"])
    return [cell.workload for cell in cells if cell.transport == "shm"]


def test_a_full_run_has_all_splits_and_seeds() -> None:
    """Micro-batches 1, 2, 4 and 8, three seeds; others where they are asked for."""
    splits = [f"pipeline num_split={split}" for split in (1, 2, 4, 8)]
    assert planned("pipeline") == splits
    assert planned("pipeline", "--num-split", "2,4") == splits[1:3]
    seeds = [f"dqn CartPole-v1 seed={seed}" for seed in (0, 1, 2)]
    assert planned("dqn") == [*seeds, "dqn ALE/Pong-v5 seed=0"]
    assert planned("dqn", "--game", "CartPole-v1", "--seeds", "2, 0") == [
        *(seeds[2], seeds[0]),
    ]
    games = ["--game", "CartPole-v1, ALE/Pong-v5,CartPole-v1"]
    assert planned("dqn", *games) == [*seeds, "dqn ALE/Pong-v5 seed=0"]


def test_how_the_dqn_learns_can_be_chosen() -> None:
    """Rewards per return, turns, priorities and collectors, in every cell."""
    parser = argparse.ArgumentParser()
    dqn.APP.add_arguments(parser)
    arguments = ["--n-step", "2", "--in-step", "--prioritized", "--collectors", "4"]
    for given, expected in (
        (arguments, (2, True, True, 4)),
        ([], (3, False, False, 2)),
    ):
        options = parser.parse_args(given)
        options.quick, options.rounds = False, 1
        tasks = [cell.task.task for cell in dqn.APP.cells(options, ["shm"])]
        found = {
            (one.n_step, one.in_step, one.prioritized, one.collectors) for one in tasks
        }
        assert found == {expected}


@pytest.mark.parametrize("every", [False, True])
def test_a_seed_that_reached_the_goal_ends_its_backend(
    every: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others go on; what was left out says why; the progress names every cell."""
    reached = ("shm", "seed=0"), ("zmq", "seed=1")
    run: list[tuple[str, str]] = []

    def measured(app: App, cell: AppCell, output: Path) -> Result:
        key = (cell.transport, cell.workload.split()[-1])
        run.append(key)
        metrics = {"value": 1.0} | ({"reached": 9.0} if key in reached else {})
        return Result.of(cell, "ok", metrics=metrics)

    monkeypatch.setattr(command, "measure", measured)
    arguments = ["--game", "CartPole-v1", "--backend", "inproc,shm,zmq"]
    arguments += ["--every-seed"] if every else []
    assert command.main_of(dqn.APP, [*arguments, "--output", str(tmp_path)]) == 0
    skipped = {("shm", "seed=1"), ("shm", "seed=2"), ("zmq", "seed=2")}
    all_of_them = [
        (name, f"seed={seed}")
        for seed in (0, 1, 2)
        for name in ("inproc", "shm", "zmq")
    ]
    assert run == [one for one in all_of_them if every or one not in skipped]
    said = capsys.readouterr()
    assert "[1/9] about" in said.err
    assert "[9/9]" in said.err
    text = (tmp_path / "report.md").read_text()
    assert ("shm, zmq dqn CartPole-v1 seed=2: skipped" in text) is not every
    assert "planned cells were measured" not in text


def test_a_run_that_lost_messages_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are kept, and its seed counts as not tried."""

    def measured(app: App, cell: AppCell, output: Path) -> Result:
        lost = 2.0 if cell.workload.endswith("seed=0") else 0.0
        metrics = {"value": 1.0, "reached": 9.0, "lost": lost}
        return Result.of(cell, "ok", metrics=metrics)

    monkeypatch.setattr(command, "measure", measured)
    arguments = ["--game", "CartPole-v1", "--backend", "shm"]
    assert command.main_of(dqn.APP, [*arguments, "--output", str(tmp_path)]) == 1
    first, second, third = read(tmp_path / "results.jsonl")[1]
    reason = "2 message(s) were lost that should have arrived"
    assert (first.status, first.reason, first.metrics["lost"]) == ("failed", reason, 2)
    assert (second.status, third.status) == ("ok", "skipped")
    assert f"shm dqn CartPole-v1 seed=0: failed: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["torchrpc:cuda", "cuda"])
def test_an_unusable_backend_is_a_row_with_its_reason(
    name: str, tmp_path: Path
) -> None:
    """Not a failure, and nothing is started."""
    cell = AppCell(name, "pipeline num_split=4", 0, task=Task())
    result = command.measure(pipeline.APP, cell, tmp_path)
    if result.status == "ok":
        pytest.skip("this machine has a GPU")
    assert (result.status, "CUDA" in result.reason) == ("skipped", True)


def test_a_failing_stage_fails_its_row_and_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason on stderr, and in the report."""
    arguments = ["--backend", "inproc", "--num-split", "2", "--batch", "2"]
    arguments += ["--image", "1", "--batches", "1", "--output", str(tmp_path)]
    assert command.main_of(pipeline.APP, arguments) == 1
    assert "ValueError" in capsys.readouterr().err
    assert "failed" in (tmp_path / "report.md").read_text()
    rows = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(rows[1])["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--apps", "pong"], "no application 'pong'; there are pipeline, shards, dqn"),
        (["--backend", "zqm"], "zmq"),
        (["--backend", "zmq,,shm"], "names nothing"),
        (["--rounds", "0"], "no number from 1 on"),
        (["--rounds", "²"], "no number from 1 on"),
        (["--num-split", "0"], "no number from 1 on"),
        (["--num-split", "1,1"], "no list of different numbers"),
        (["--num-split", "3"], "a batch of 64 cannot be split into 3 equal parts"),
        (["--seeds", "0,one"], "no list of different numbers"),
        (["--seeds", "0,²"], "no list of different numbers"),
        (["--seeds", "0,00"], "no list of different numbers"),
        (["--game", "CartPole-v1,"], "names nothing"),
        (["--game", "Cart Pole-v1"], "no name of a game"),
    ],
)
def test_bad_arguments_are_refused_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a sentence and status 2."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nope-v1", "gymnasium cannot make 'Nope-v1'"),
        ("Pendulum-v1", "the actions of Pendulum-v1 are"),
    ],
)
def test_a_game_that_there_is_not_is_refused_at_once(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by its cell, after all others."""
    pytest.importorskip("gymnasium", reason="it knows the games")
    with pytest.raises(SystemExit) as ended:
        planned("dqn", "--game", f"CartPole-v1,{name}")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_game_is_left_to_its_cell_where_it_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is skipped for what is not installed, be the name right or wrong."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert planned("dqn", "--game", "Nope-v1") == ["dqn Nope-v1 seed=0"]
