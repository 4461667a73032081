"""Reports say what was measured, completely, and read well in a browser."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench_results import LOSSY, TRANSPORTS, row, whole_run, write
from fresh_python import output_of
from pages import Page, seen

from bench import advice, plan, report, rows, tables
from bench.model import fit, models
from bench.rows import Cell, Result, read
from bench.summary import Run, gather, published

pytest.importorskip("matplotlib", reason="the plots need matplotlib")
plots = importlib.import_module("bench.plots")

OURS = [name for name in TRANSPORTS if ":" not in name or name.startswith("zmq")]
WITH_SIZES = {"rate": 64, "fanin": 20_000, "stream": 40_000_000}
WITH_SIZES |= {"fanout": 10_000_000, "mixed": 640_000_000}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = []
    for number, (ours, bare) in enumerate([(10.0, 20.0), (30.0, 20.0), (2.0, 20.0)]):
        rows += [row("zmq:tcp", ours, number, carried_bytes=2e8)]
        rows += [row("raw:zmq:tcp", bare, number), row("limit:tcp", 5.0, number)]
    gone = row("nng:tcp", 1.0)
    skipped = Result(
        *(gone.transport, gone.workload, gone.nbytes, gone.round),
        status="skipped",
        reason="pynng is not installed",
    )
    return write(tmp_path / "results.jsonl", [*rows, skipped])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on everything."""
    found = tmp_path_factory.mktemp("report")
    facts = {"planned cells": "1000"}
    path = write(found / "results.jsonl", whole_run(), facts)
    told = report.write(report.load([path]), found)
    assert told == [f"report: {found / 'report.html'}"]
    return found


@pytest.mark.parametrize(
    ("control", "said"),
    [("cubic", []), ("bbr", ["were left to BBR"]), (rows.UNPACED, ["use Reno, too"])],
)
def test_a_report_says_whether_bare_libraries_were_paced(
    control: str, said: list[str], tmp_path: Path
) -> None:
    """Older runs left them to the system's congestion control, ours not."""
    path = write(tmp_path / "results.jsonl", [row("zmq:tcp", 1.0)], {"tcp": control})
    text = " ".join(report.method(report.load([path])))
    assert [
        words for words in ("were left to BBR", "use Reno, too") if words in text
    ] == said


def test_rows_come_back_as_they_were_written(results: Path) -> None:
    """The file of JSON lines holds everything that a report needs."""
    facts, rows = read(results)
    assert facts["cpu"] == "a fast one"
    assert rows[1] == row("raw:zmq:tcp", 20.0)
    assert rows[-1].reason == "pynng is not installed"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"record": "other"}\n', r"line 12: not a row.*'other'"),
        (b"\x00\xff\xfe\n", r"line 12: not a row"),
        (b"[1, 2]\n", r"line 12: not a row"),
        (b'{"record": "result", "transport": "x"}\n', r"line 12: not a row"),
        (
            b'{"record":"result","transport":"x","workload":"rate","nbytes":1,"round":0'
            b',"status":"ok","metrics":{"value":0},"processes":[]}\n',
            r"line 12: .*the value 0 is no measurement",
        ),
    ],
)
def test_a_broken_file_of_results_is_refused_by_line(
    line: bytes, said: str, results: Path
) -> None:
    """Whoever edited the file by hand is told where it broke."""
    results.write_bytes(results.read_bytes() + line)
    with pytest.raises(ValueError, match=said):
        read(results)


def test_a_last_line_that_was_cut_off_is_left_out(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a full disk or the end of the machine; the rest stays of use."""
    rows = read(results)[1]
    results.write_bytes(results.read_bytes()[:-20])
    assert read(results)[1] == rows[:-1]
    said = f"{results}, line 11: left out, as it was cut off\n"
    assert capsys.readouterr().err == said
    results.write_bytes(results.read_bytes().splitlines()[0][:-20])
    with pytest.raises(ValueError, match="line 1: not a row"):
        read(results)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("transport", 3, r"Expected `str`, got `int` - at `\$\.transport`"),
        ("workload", 5, "workload"),
        ("nbytes", "x", "nbytes"),
        ("nbytes", -5, "-5 is no number of bytes"),
        ("round", None, "round"),
        ("status", "weird", "weird"),
        ("metrics", {"value": float("inf")}, "malformed"),
        ("metrics", {"value": 1.0, "p50": float("nan")}, "malformed"),
        ("metrics", {"value": "1"}, "metrics"),
        ("metrics", {}, "value"),
        ("processes", [{"ranks": "all"}], "ranks"),
    ],
)
def test_a_row_of_another_kind_is_refused_by_line(
    name: str, given: object, said: str, results: Path
) -> None:
    """Of wrong types, not finite, or of a status that there is not."""
    changed = asdict(row("zmq:tcp", 1.0)) | {"record": "result", name: given}
    with results.open("a") as file:
        file.write(json.dumps(changed) + "\n")
    with pytest.raises(ValueError, match=f"line 12: not a row of .*{said}"):
        read(results)


def test_a_plan_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """The report tells how much of it was measured."""
    path = write(tmp_path / "results.jsonl", [], {"planned cells": "some"})
    with pytest.raises(ValueError, match=r"line 1: .*planned cells: 'some'"):
        read(path)


def test_a_round_that_is_there_twice_counts_once() -> None:
    """As in a file to which another was added by hand."""
    rows = [row("zmq:tcp", 1.0, 0, lost=3.0), row("zmq:tcp", 9.0, 0, lost=5.0)]
    (found,) = gather(rows)
    assert (found.value, found.lost(), found.metric("p50")) == (1.0, 3.0, 1.0)


def test_ratios_are_medians_over_rounds(results: Path) -> None:
    """Ours is divided by raw within each round, not by a median of all rounds."""
    rows = {one.transport: one for one in gather(read(results)[1])}
    assert rows["zmq:tcp"].value == 10
    assert rows["zmq:tcp"].ratio(rows["raw:zmq:tcp"]) == 0.5
    assert rows["zmq:tcp"].ratio(rows["nng:tcp"]) is None


def test_the_report_compares_and_names_what_is_missing(results: Path) -> None:
    """Ours, ratios, costs, the published figure with its conditions, every reason."""
    text = report.markdown(report.load([results]))
    found = [li for li in text.splitlines() if li.startswith("| 40 MB | zmq:tcp")]
    cells = [cell.strip() for cell in found[0].strip("|").split("|")]
    assert cells[2:5] == ["3", "10.0", "20.0"]  # rounds, p50, p99
    assert cells[5:9] == ["20.0", "0.500", "5.00", "2.00"]
    assert cells[9] == "2.00"  # 0.4 s for 0.2 GB
    assert cells[10:12] == ["0.0000100", "3.00"]  # MB of sender and receiver
    assert "173 nng-tcp" in found[0]
    assert "200 Gbit/s InfiniBand" in text
    assert "nng:tcp 40 MB: skipped: pynng is not installed" in text
    assert "mq bench --quick" in text
    assert "skipped: pynng is not installed" in report.terminal(report.load([results]))


def test_published_figures_are_of_the_sizes_measured() -> None:
    """Every default size of the latency workload has published figures, but one."""
    figures, conditions = published()
    sizes = {*plan.WORKLOADS["latency"].sizes}
    assert sizes - {*figures} == {plan.UNPUBLISHED_SIZE}
    assert any("intra-node" in line for line in conditions)


def test_the_two_terms_of_a_model_are_found_again() -> None:
    """Times that follow the model exactly give its terms back."""
    model = fit({n: 0.2 + n / 4e6 for n in (1250, 1_250_000, 640_000_000)})
    assert model is not None
    assert model.per_message_us == pytest.approx(200)
    assert model.gb_per_s == pytest.approx(4)
    assert model.worst == pytest.approx(1)


def test_neither_term_of_a_model_is_negative() -> None:
    """A size that costs nothing has no bandwidth; too few sizes have no model."""
    falling = fit({1000: 3.0, 1_000_000: 2.0, 1_000_000_000: 1.0})
    assert falling is not None
    assert falling.gb_per_s is None
    assert falling.per_message_us > 0
    steep = fit({1000: 0.0001, 1_000_000: 1.0, 1_000_000_000: 2000.0})
    assert steep is not None
    assert steep.per_message_us == 0
    assert steep.worst > 1
    assert fit({1000: 1.0, 2000: 2.0}) is None


def run() -> Run:
    return Run(gather(whole_run()))


def test_the_model_is_a_row_of_every_transport() -> None:
    """Per message and bandwidth of ours, of raw and of the limits are in the report."""
    assert set(models(run())) == set(TRANSPORTS)
    shown = tables.two_terms(run())
    assert shown is not None
    line = next(line for line in shown.lines if line[0] == "zmq:ipc")
    assert [line[1], line[2]] == ["210", "3.17"]  # the rounds drift by a tenth


def test_several_baselines_are_compared_one_by_one_and_with_the_fastest() -> None:
    """Of several the fastest stands in the table, and each has a column of its own."""
    latency = next(one for one in tables.workloads(run()) if one.title == "latency")
    line = next(li for li in latency.lines if li[:2] == ["40 MB", "shm"])
    assert line[latency.head.index("raw")].endswith("raw:torch.multiprocessing")
    each = tables.against_each(run())
    assert each is not None
    assert each.head[4:6] == ["/raw:zmq:ipc", "/raw:torch.multiprocessing"]
    line = next(li for li in each.lines if li[:3] == ["latency", "40 MB", "shm"])
    assert line[4:6] == ["0.168", "0.200"]


def lost_in_one_of_three(status: str = "ok") -> Run:
    """A transport of ours and a bare library that lose in the second round."""
    flow = {"sent": 1000.0, "lost": 0.0}
    bad = flow | {"lost": 5.0}
    rows = [row("tcp", 9.0, n, "rate", 64, **flow) for n in (0, 2)]
    rows += [row(LOSSY, 9.0, n, "rate", 64, **flow) for n in (0, 2)]
    mine = row("tcp", 9.0, 1, "rate", 64, **bad)
    if status == "failed":
        mine = replace(mine, status="failed", reason="5 message(s) were lost")
    return Run(gather([*rows, mine, row(LOSSY, 9.0, 1, "rate", 64, **bad)]))


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_what_was_lost_in_any_round_is_in_the_table(status: str) -> None:
    """Of ours in short, too, though the round has failed; beside it only of others."""
    run = lost_in_one_of_three(status)
    (rate,) = tables.workloads(run)
    assert {line[rate.head.index("lost")] for line in rate.lines} == {"5"}
    assert [one.lost for one in advice.scores(run)] == [5]
    assert advice.losses(run) == [(LOSSY, 5, 3000)]


def test_the_short_answer_names_the_fastest_for_each_purpose_and_reach() -> None:
    """Threads of one process are no answer for processes, nor one host for several."""
    found = {(one.purpose, one.reach): one for one in advice.choices(run())}
    large = "one message at a time (40 MB)"
    assert found[large, "host"].transport == "shm"
    assert found[large, "network"].transport == "zmq:tcp"
    scores = {one.transport: one for one in advice.scores(run())}
    assert list(scores) == [*OURS, "nng:tcp", "torchrpc:cpu"]
    assert scores["zmq:ipc"].small_raw == pytest.approx(2, rel=0.01)
    assert scores["zmq:ipc"].rate_raw == pytest.approx(0.5)  # messages per second
    assert scores["zmq:ipc"].lost == 0
    assert advice.losses(run()) == [(LOSSY, 500, 2000)]


def test_a_loan_is_not_ranked_without_saying_what_its_time_leaves_out(
    tmp_path: Path,
) -> None:
    """Nor is it compared with what copies within its time, or with a copy."""
    rows = [row(name, ms) for name, ms in (("shm+loan", 0.1), ("shm+view", 2.0))]
    rows += [row("raw:iceoryx2", 4.0), row("limit:memcpy", 1.0), row("shm", 3.0)]
    found = report.load([write(tmp_path / "results.jsonl", rows)])
    text = report.markdown(found)
    assert "shm+loan, 100 us (the time to fill the memory is not in it; " in text
    assert "without a loan shm+view, 2.00 ms)" in text
    by_name = {one.transport: one for one in found.run.rows}
    lent, view = by_name["shm+loan"], by_name["shm+view"]
    assert found.run.raws(lent) == []
    assert found.run.limit(lent) is None
    assert view.ratio(found.run.raw(view)) == 0.5
    filled = Run([*found.run.rows, *gather([row("raw:iceoryx2:loan", 0.05)])])
    assert lent.ratio(filled.raw(lent)) == 2


def test_a_ratio_to_raw_is_the_same_wherever_it_stands(tmp_path: Path) -> None:
    """Ours by theirs in the unit of the table; the method says what is faster."""
    rates = {"zmq:ipc": 50.0, "raw:zmq:ipc": 100.0}
    rows = [row(name, value, 0, "rate", 64) for name, value in rates.items()]
    text = report.markdown(report.load([write(tmp_path / "results.jsonl", rows)]))
    found = []
    for title in ("In short", "rate"):
        lines = text.partition(f"## {title}\n")[2].partition("\n##")[0].splitlines()
        head = next(line for line in lines if "transport" in line).split(" | ")
        ours = next(line for line in lines if "| zmq:ipc |" in line).split(" | ")
        found.append(ours[len(head) - 1 - head[::-1].index("/raw")])
    assert found == ["0.500", "0.500"]
    assert "below 1 ours is faster where that is a time, above 1 where it" in text


def test_names_and_reasons_are_no_html(tmp_path: Path) -> None:
    """A reason may name an object; a reader of Markdown would take it for a tag."""
    gone = Cell("nng:tcp", "latency", 40_000_000)
    rows = [row("a<b>", 1.0), Result.of(gone, "failed", "<Socket & Co> is `<closed>`")]
    facts = {"cpu": "<i>fast</i>"}
    path = write(tmp_path / "results.jsonl", rows, facts)
    text = report.markdown(report.load([path]))
    assert "| 40 MB | a&lt;b&gt; |" in text
    assert "(40 MB): a&lt;b&gt;, " in text
    assert "| cpu | &lt;i&gt;fast&lt;/i&gt; |" in text
    assert "failed: &lt;Socket &amp; Co&gt; is `<closed>`" in text


def test_servers_that_are_not_counted_are_named() -> None:
    """Redis and Ray do part of the work in processes of their own."""
    names = ("raw:redis", "raw:ray", "raw:zenoh")
    rows = [row(name, 1.0, number) for number in (0, 1) for name in names]
    (table,) = tables.workloads(Run(gather([*rows, row("shm", 1.0)])))
    said = "`raw:redis`, `raw:ray`: CPU s/GB and MB without the servers'."
    assert table.note.endswith(f" {said}")
    (table,) = tables.workloads(Run(gather([row("raw:zenoh", 1.0)])))
    assert "servers" not in table.note


LOCAL = ("auto", "auto+view", "torchrpc:cpu", "zmq")


def test_what_goes_another_way_on_one_host_is_no_answer_for_other_hosts(
    tmp_path: Path,
) -> None:
    """Though it reaches them: its time here is that of shared memory, or of ipc."""
    rows = [row(name, 0.01) for name in LOCAL]
    rows += [row(name, 1.0) for name in ("shm", "zmq:tcp")]
    path = write(tmp_path / "results.jsonl", rows)
    found = report.load([path])
    best = {(one.purpose, one.reach): one for one in advice.choices(found.run)}
    large = "one message at a time (40 MB)"
    assert best[large, "host"].transport == "auto"
    assert best[large, "network"].transport == "zmq:tcp"
    reaches = {one.transport: one.reach for one in advice.scores(found.run)}
    assert {reaches[name] for name in LOCAL} == {"network"}
    said = "not ranked for other hosts, as on one host they go another way: "
    (named,) = re.findall(f"{said}(.*)", report.markdown(found))
    assert {*named.split(", ")} == {*LOCAL}
    (plot,) = (one for one in plots.draw(found.run) if one.name == "published")
    here, far = ({*axes.get_legend_handles_labels()[1]} for axes in plot.figure.axes)
    assert {*LOCAL} <= here
    assert not {*LOCAL} & far
    report.write(report.load([path]), tmp_path)
    text = re.sub(r"\s+", " ", Page((tmp_path / "report.html").read_text()).text)
    assert "Not ranked for other hosts, as on one host they go another way" in text


def expected_series() -> set[str]:
    found = {f"latency/{name}" for name in TRANSPORTS if not name.startswith("raw:")}
    for name in OURS:
        found |= {f"latency-panels/{name}", f"latency-panels/{name}/published"}
        found.add(f"published/{name}")
    found |= {f"latency-raw/{name}" for name in OURS if name != "inproc"}
    found |= {
        "latency-panels/zmq:ipc/raw:zmq:ipc",
        "latency-panels/zmq:tcp/limit:tcp",
        "latency-panels/shm/raw:torch.multiprocessing",
        "latency-panels/shm/limit:memcpy",
        "published/cross-node/nng-tcp",
        "published/intra-node/shm",
    }
    measured = [name for name in TRANSPORTS if not name.startswith("limit:")]
    for workload, nbytes in WITH_SIZES.items():
        found |= {f"{workload}/{nbytes}/{name}" for name in measured}
    return found | {f"loss/64/{name}" for name in [*measured, LOSSY]}


def test_every_series_is_in_the_page(directory: Path) -> None:
    """Each plot is there with all of its series, and nothing comes from outside."""
    text = (directory / "report.html").read_text()
    page = Page(text)
    assert expected_series() <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not page.outside
    assert "<script" not in text
    assert not re.findall(r"url\((?!#)", text)


def test_the_page_says_what_it_is_about(directory: Path) -> None:
    """Conditions, models, costs, losses and what is missing are in words."""
    page = Page((directory / "report.html").read_text())
    for words in (
        "In short",
        "ours look again and again before they sleep",
        "the bare libraries wait as they do by themselves: they sleep at once",
        "a fast one",
        "mq bench --quick",
        "Two-term model",
        "CPU s/GB",
        "200 Gbit/s InfiniBand",
        "500 of 2,000",
        "pynng is not installed",
        "rank 1 died of signal 9",
        "of 1000 planned cells were measured",
    ):
        assert words in page.text


def test_a_picture_of_every_plot_lies_beside_the_page(directory: Path) -> None:
    """They can be put into other documents."""
    page = Page((directory / "report.html").read_text())
    plots = {name.removeprefix("plot-") for name in page.ids if "plot-" in name}
    assert {"latency", "latency-panels", "published", "rate", "loss"} <= plots
    for name in plots:
        data = (directory / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000


def test_a_browser_shows_every_series_and_complains_of_nothing(
    directory: Path, tmp_path: Path
) -> None:
    """The page is laid out, each series has a size on it, and the console is empty."""
    found = seen(directory / "report.html", tmp_path)
    assert found["errors"] == []
    flat = {name for name, size in found["series"].items() if not size > 0}
    assert expected_series() - set(found["series"]) == set()
    lossless = {f"loss/64/{name}" for name in TRANSPORTS}
    assert flat <= lossless  # a bar of length 0 is all that may be invisible


def test_without_matplotlib_there_is_the_markdown_report(
    results: Path, tmp_path: Path
) -> None:
    """What is missing is named with its remedy; nothing fails."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from bench.report import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(results), "--output", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "matplotlib is not installed: pip install 'tensormq[bench]'" in first
    assert last == f"report: {tmp_path / 'new' / 'report.md'}"
    assert (tmp_path / "new" / "report.md").exists()


def test_a_report_without_applications_loads_no_torch(
    results: Path, tmp_path: Path
) -> None:
    """It takes seconds, and nothing of it is drawn."""
    program = (
        "import sys; from bench.report import main\n"
        f"assert main([{str(results)!r}, '--output', {str(tmp_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    assert output_of(program).endswith("report.html\n")


@pytest.mark.parametrize(
    ("workload", "nbytes"), [("rate", 64), ("latency", 1250), ("import", 0)]
)
def test_a_report_on_one_cell_is_a_report(
    workload: str, nbytes: int, tmp_path: Path
) -> None:
    """Whatever little was measured before an interrupt is shown."""
    only = row("mq" if workload == "import" else "zmq:ipc", 2.0, 0, workload, nbytes)
    path = write(tmp_path / "results.jsonl", [only])
    report.write(report.load([path]), tmp_path)
    assert workload in Page((tmp_path / "report.html").read_text()).text


def test_a_report_on_nothing_is_a_report(tmp_path: Path) -> None:
    """So is one on no cell at all."""
    path = write(tmp_path / "results.jsonl", [])
    report.write(report.load([path]), tmp_path)
    assert "Conditions" in (tmp_path / "report.html").read_text()
