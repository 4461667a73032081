"""`mq bench report` of applications: one table, published rows, runs joined."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from bench_results import app_row, dqn_row, pipeline_rows, row, shards_rows, write
from pages import Page, seen

from bench import command, report
from bench.apps.dqn import curves
from bench.apps.dqn.cells import returns_name
from bench.apps.report import Source, joined
from bench.rows import Result, environment

pytest.importorskip("matplotlib", reason="the plots need matplotlib")

OURS = ("inproc", "shm")
CARTPOLE, PONG = "CartPole-v1", "ALE/Pong-v5"


def skipped(one: Result, reason: str) -> Result:
    """The same cell, not run."""
    name = (one.transport, one.workload, one.nbytes, one.round)
    return Result(*name, status="skipped", reason=reason)


def dqn_rows() -> list[Result]:
    """inproc reaches the goal with its first seed, shm with none."""
    rows = [dqn_row("inproc", CARTPOLE, 0, reached=90_000.0, best=476.0)]
    rows += [dqn_row("shm", CARTPOLE, seed, best=300.0, lost=1.0) for seed in (0, 1)]
    rows.append(skipped(dqn_row("inproc", CARTPOLE, 1), "another seed reached it"))
    return rows + [dqn_row(name, PONG, 0) for name in OURS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of each application, and the returns of one."""
    root = tmp_path_factory.mktemp("apps")
    rows = {
        "pipeline": pipeline_rows(OURS),
        "shards": shards_rows("cpu", OURS, "raw:torchrpc"),
        "dqn": dqn_rows(),
    }
    paths = []
    for name, own in rows.items():
        (root / name).mkdir()
        facts = {"command": f"mq bench apps --apps {name}", name: "passes=10"}
        paths.append(write(root / name / "results.jsonl", own, facts))
    for transport, seed in (("inproc", 0), ("shm", 0), ("shm", 1)):
        name = returns_name(f"dqn {CARTPOLE} seed={seed}", transport, 0)
        lines = [f"{10 * place},{place}" for place in range(200)]
        (root / "dqn" / name).write_text("\n".join(["steps,return", *lines]))
    few = {"inproc": ["900,-21"], "shm": ["900,-21", "1800,-19"]}
    for transport, lines in few.items():
        name = returns_name(f"dqn {PONG} seed=0", transport, 0)
        (root / "dqn" / name).write_text("\n".join(["steps,return", *lines]))
    return paths


@pytest.fixture(scope="module")
def directory(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One report on all three."""
    found = tmp_path_factory.mktemp("report")
    assert report.write(report.load(files), found) == [
        f"report: {found / 'report.html'}"
    ]
    return found


def table(text: str, title: str) -> dict[str, dict[str, str]]:
    """The lines of a section's table in Markdown, by their backend."""
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [
        li.strip("| ").split(" | ") for li in section.splitlines() if li[:1] == "|"
    ]
    head, _, *rest = lines
    place = head.index("backend")
    return {line[place]: dict(zip(head, line, strict=True)) for line in rest}


def test_one_table_has_every_application_backend_and_published_figure(
    directory: Path,
) -> None:
    """A line for each backend, and below it for each system with published figures."""
    text = (directory / "report.md").read_text()
    lines = table(text, "Applications")
    published = ("torchrpc", "bare RPC, staged", "bare RPC, direct", "nng-tcp")
    published += ("torchrpc-cpu", "torchrpc-ib")
    expected = [*OURS, "raw:torchrpc", "alone", *(f"published: {p}" for p in published)]
    assert list(lines) == expected
    shm = lines["shm"]
    assert shm["pipeline, 8 splits: s"] == "13.0"
    assert shm["speed-up"] == "1.54"  # of one process, 20 s without micro-batches
    assert (shm["shards, cpu: s"], shm["/bare RPC"]) == ("1.50", "0.500")
    assert (shm["CartPole-v1: 475 after steps"], shm["lost"]) == ("not reached", "2")
    assert lines["inproc"]["CartPole-v1: 475 after steps"] == "90,000, seed 0"
    assert lines["inproc"]["ALE/Pong-v5: s/100 iterations"] == "0.500"
    figures = {name: set(line.values()) for name, line in lines.items()}
    for name, figure in zip(
        published, ("9.08", "2.31", "0.0687", "128", "29.4", "28.8"), strict=True
    ):
        assert figure in figures[f"published: {name}"]


def test_the_pipeline_is_shown_by_the_number_of_splits(directory: Path) -> None:
    """Seconds and speed-up for 1, 2, 4 and 8, and the published ones below."""
    lines = table((directory / "report.md").read_text(), "Pipeline by number of splits")
    assert list(lines["shm"].values())[1:5] == ["16.0", "15.0", "14.0", "13.0"]
    assert list(lines["shm"].values())[5:] == ["1.25", "1.33", "1.43", "1.54"]
    beside = list(lines["published: torchrpc, over num_split=1"].values())
    assert beside[1:] == [
        "16.5",
        "12.3",
        "10.2",
        "9.08",
        "1.00",
        "1.33",
        "1.62",
        "1.81",
    ]


def test_a_seed_that_did_not_reach_the_goal_says_so(directory: Path) -> None:
    """And one that need not be run says why."""
    text = (directory / "report.md").read_text()
    lines = table(text, f"DQN on {CARTPOLE}")
    assert lines["shm"]["475 after steps"] == "not reached"
    assert lines["shm"]["best mean return"] == "300"
    assert "inproc dqn CartPole-v1 seed=1: skipped: another seed reached it" in text


def series() -> set[str]:
    found = {
        "pipeline/alone",
        "pipeline/published",
        "dqn-CartPole-v1-goal/inproc,_seed_0",
    }
    for name in OURS:
        found |= {f"pipeline/{name}", f"pipeline/{name}/transport"}
        found |= {f"shards/{name},_cpu", f"dqn-ALE-Pong-v5/{name}"}
        found.add(f"dqn-CartPole-v1-returns/{name}/seed_0")
        found.add(f"dqn-ALE-Pong-v5-returns/{name}/seed_0")
    found.add("dqn-CartPole-v1-returns/shm/seed_1")
    found |= {f"shards/published:_bare_RPC,_{how}" for how in ("staged", "direct")}
    systems = ("nng-tcp", "torchrpc-cpu", "torchrpc-ib")
    return found | {f"dqn-ALE-Pong-v5/published:_{name}" for name in systems}


def test_the_page_has_every_plot_table_and_condition(directory: Path) -> None:
    """Nothing comes from outside, each id is there once and without a space."""
    text = (directory / "report.html").read_text()
    page = Page(text)
    assert series() <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not [name for name in page.ids if " " in name]
    assert not page.outside
    for words in (
        "Applications over every backend",
        "mq bench apps --apps shards",
        "pipeline/results.jsonl",
        "two GPUs",
        "A100",
        "another seed reached it",
    ):
        assert words in page.text
    for name in page.ids:
        if name.startswith("plot-"):
            assert (
                directory / f"{name.removeprefix('plot-')}.png"
            ).stat().st_size > 5000


def test_a_curve_of_few_episodes_says_that_they_are_few(directory: Path) -> None:
    """However few there are they are drawn, and the caption says of how many."""
    page = Page((directory / "report.html").read_text())
    for episodes in (10, 100):
        assert f"the last {episodes} episodes, or of as many as there" in page.text
    assert curves.means([(900, -21.0), (1800, -19.0)], 10) == [(900, -21), (1800, -20)]
    many = [(10 * place, float(place)) for place in range(1, 1001)]
    drawn = curves.means(many, 100)
    assert drawn[-1] == (10_000, 950.5)
    assert len(drawn) < 400
    assert curves.window([many]) == 100
    assert curves.window([many, many[:99]]) == 10


def test_a_browser_shows_every_series(directory: Path, tmp_path: Path) -> None:
    """Each has a size on the page, and the console is empty."""
    found = seen(directory / "report.html", tmp_path)
    assert found["errors"] == []
    assert series() <= {name for name, size in found["series"].items() if size > 0}


def test_the_command_joins_files(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `mq bench report A.jsonl B.jsonl --output DIR`."""
    arguments = ["report", *map(str, files), "--output", str(tmp_path / "new")]
    assert command.main(arguments) == 0
    assert f"report: {tmp_path / 'new' / 'report.html'}" in capsys.readouterr().out
    assert "| shm |" in (tmp_path / "new" / "report.md").read_text()


def test_a_run_of_transports_stands_in_the_same_report(
    files: list[Path], tmp_path: Path
) -> None:
    """Beside the applications; a second one is refused by name, for its ratios."""
    transports = write(tmp_path / "transports.jsonl", [row("zmq:tcp", 10.0)])
    report.write(report.load([transports, *files]), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "Transports and applications compared" in page.text
    assert {"latency/zmq:tcp", "pipeline/shm"} <= set(page.ids)
    other = write(tmp_path / "other.jsonl", [row("zmq:tcp", 10.0)])
    with pytest.raises(ValueError, match=r"other\.jsonl: a second run of transports"):
        report.load([transports, other])
    with pytest.raises(ValueError, match=r"other\.jsonl is given twice"):
        report.load([other, other])


def test_a_copy_of_a_run_is_no_further_round(tmp_path: Path) -> None:
    """Under another name, too, it is the same measurement."""
    rows = [app_row("shm", "shards cpu", 1.0)]
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name in "ab"]
    with pytest.raises(ValueError, match=r"b\.jsonl and .*a\.jsonl hold the same run"):
        report.load(paths)


def test_what_two_runs_measured_counts_as_further_rounds() -> None:
    """Ratios stay within a run, and what only one could run is not missing."""
    cuda = app_row("torchrpc:cuda", "shards direct", 0.5)
    first = [app_row("shm", "shards cpu", 1.0), skipped(cuda, "no GPU")]
    second = [app_row("shm", "shards cpu", 3.0, 0), cuda]
    sources = [Source(Path("a"), first), Source(Path("b"), second)]
    found = [(one.result.round, one.folder.name, one.number) for one in joined(sources)]
    assert found == [(0, "a", 0), (1, "b", 0), (1, "b", 0)]
    one_each = [Source(Path("a"), first[:1]), Source(Path("b"), [cuda])]
    assert [one.result.round for one in joined(one_each)] == [0, 0]


def test_runs_that_differ_say_so(tmp_path: Path) -> None:
    """Another machine, small tasks, and what was not reached."""
    facts = {"command": "mq bench apps", "cores": "2"}
    rows = shards_rows("cpu", ["shm"], "raw:torchrpc")
    one = write(tmp_path / "one.jsonl", rows, facts)
    facts = {"cores": "4", "planned cells": "9", "command": "mq bench apps --quick"}
    other = write(tmp_path / "other.jsonl", rows, facts)
    said = "\n".join(report.remarks(report.load([one, other])))
    assert "cores: 2; 4" in said
    assert "other.jsonl: 2 of 9 planned cells" in said
    assert "other.jsonl: the tasks of --quick are small" in said
    assert "one.jsonl:" not in said


def test_runs_of_different_tasks_are_not_joined(tmp_path: Path) -> None:
    """A median over both would be of nothing; different workloads may differ."""
    rows = shards_rows("cpu", ["shm"], "raw:torchrpc")
    facts = {"shards": "passes=10", "dqn": "steps=10"}
    one = write(tmp_path / "one.jsonl", [*rows, dqn_row("shm", PONG, 0)], facts)
    facts["shards"] = "passes=5 --quick"
    other = write(tmp_path / "other.jsonl", rows, facts)
    said = r"one\.jsonl and other\.jsonl .* 'shards cpu': passes=10; passes=5 --quick"
    with pytest.raises(ValueError, match=said):
        report.load([one, other])
    facts = {"dqn": "steps=20"}
    cartpole = write(tmp_path / "c.jsonl", [dqn_row("shm", CARTPOLE, 0)], facts)
    assert len(report.load([one, cartpole]).apps) == 4


def test_gpu_rows_are_compared_with_their_like(tmp_path: Path) -> None:
    """Staged by staged bare RPC, direct by direct, each beside its published row."""
    rows = shards_rows("staged", [*OURS, "torchrpc:cpu"], "raw:torchrpc")
    rows.append(app_row("torchrpc:cuda", "shards direct", 0.1, transport_share=0.1))
    rows.append(app_row("raw:torchrpc:cuda", "shards direct", 0.25))
    text = report.markdown(report.load([write(tmp_path / "gpu.jsonl", rows)]))
    lines = table(text, "Applications")
    assert lines["shm"]["shards, staged: s"] == "1.50"
    assert lines["torchrpc:cuda"]["shards, direct: s"] == "0.100"
    assert lines["torchrpc:cuda"]["/bare RPC"] == "0.400"
    ratios = {name: line["staged / direct"] for name, line in lines.items()}
    assert (ratios["torchrpc:cuda"], ratios["raw:torchrpc:cuda"]) == ("15.0", "12.0")
    assert (ratios["shm"], ratios["published: bare RPC, direct"]) == ("-", "33.7")
    shards = table(text, "Two shards")
    assert shards["torchrpc:cuda"]["staged / direct"] == "15.0"
    assert shards["torchrpc:cpu"]["staged / direct"] == "-"
    assert lines["published: bare RPC, staged"]["shards, staged: s"] == "2.31"
    assert lines["published: bare RPC, staged"]["shards, direct: s"] == "-"
    assert lines["published: bare RPC, direct"]["shards, direct: s"] == "0.0687"


def test_the_conditions_name_gpus_driver_and_what_applications_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are any; torch is not imported to find out."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not {"gpu", "gpu driver", "cuda"} & set(environment([]))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Fast, A1, 550.54'\necho 'Fast, A1, 550.54'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    facts = environment([])
    assert (facts["gpu"], facts["gpu driver"]) == ("2 x Fast, A1", "550.54")
    assert (facts["cuda"], facts["CUDA_VISIBLE_DEVICES"]) == ("12.4", "1")
    assert facts["ale-py"] == version("ale-py")
    monkeypatch.delitem(sys.modules, "torch")
    assert "cuda" not in environment([])
    assert "torch" not in sys.modules


@pytest.mark.parametrize("workload", ["pipeline", "dqn CartPole-v1", "shards gpu"])
def test_a_row_of_no_application_is_refused_by_name(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file's name and the status of wrong usage."""
    path = write(tmp_path / "odd.jsonl", [app_row("shm", workload, 1.0)])
    assert report.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert f"odd.jsonl: there is no workload '{workload}'" in said


def test_runs_of_applications_are_not_for_compare(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the command that joins them."""
    assert command.main(["compare", str(files[0]), str(files[1])]) == 2
    assert "mq bench report" in capsys.readouterr().err
