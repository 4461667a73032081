"""What a report says in rows and columns, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from bench import plan
from bench.baselines import is_baseline, raw_of, served
from bench.model import models
from bench.rows import size_text
from bench.summary import LEAST, Published, Row, Run, nearest, number, published

NOTES = {
    "latency": "One message at a time, one way: the round trip with an empty answer, "
    "less half an empty round trip. `+view`: subscribers read the publisher's memory; "
    "`+loan`: it was filled in place, too, before the time began; so was that of "
    "`raw:iceoryx2:loan`, while all others copy within their time.",
    "fanout": "One way to the last of three subscribers, as for latency.",
    "rate": "Delivered per second, one dictionary per message. raw: one message per "
    "frame, its payload by msgpack; the faster of PUSH/PULL and PUB/SUB (`:pubsub`), "
    "which loses what its queue of 1000 cannot hold; for nng Pair0 in place of "
    "PUSH/PULL. `raw:nng-bus` is what DI-engine does (Bus0, pickle), and loses, too. "
    "send and recv us: processor time per message of the calling threads.",
    "fanin": "Delivered per second from three publishers.",
    "stream": "Received GB/s (10^9 bytes), back to back.",
    "mixed": "Half the round trip of 64-byte messages while large ones flow; raw sends "
    "both over one socket.",
    "mixed-busy": "The same, with a subscriber that computes in pure Python.",
    "actor-learner": "Two actors stepping CartPole and a learner: transitions per "
    "second at the learner; ages of the weights acted on.",
    "codec": "Encoding and decoding together, without a wire.",
    "import": "`import mq` in a new interpreter; the target is 100 ms.",
}
_TOO_FEW = ", ".join(f"{name} of fewer than {least}" for name, least in LEAST.items())
_SAMPLED = f" samples: the fewest of a round; not told: {_TOO_FEW}."
_EXTRA = {
    "p90": "p90",
    "p99": "p99",
    "lost": "lost",
    "send_us": "send us",
    "recv_us": "recv us",
    "encode_us": "encode us",
    "decode_us": "decode us",
    "bulk_gb_per_s": "bulk GB/s",
    "weights_age_ms": "weights' age ms",
    "weights_age_p99_ms": "age p99 ms",
}
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


class Text(NamedTuple):
    """Rows as text.

    Attributes:
        title: A workload, or what else the rows are about.
        note: What the figures are.
        problems: Rows without a value, or with some rounds missing, and why.
    """

    title: str
    note: str
    head: list[str]
    lines: list[list[str]]
    problems: list[str]


def workloads(run: Run) -> list[Text]:
    """One table per workload, in the order of the plan."""
    return [
        _workload(run, workload, rows)
        for workload in plan.WORKLOADS
        if (rows := [row for row in run.rows if row.workload == workload])
    ]


def _workload(run: Run, workload: str, rows: list[Row]) -> Text:
    unit = plan.WORKLOADS[workload].unit
    figures = published()[0] if workload == "latency" else {}
    extra = [name for name in _EXTRA if any(name in row.metrics for row in rows)]
    middle = "p50 " if "p99" in extra else ""
    sampled = any("samples" in row.metrics for row in rows)
    head = ["size", "transport", "rounds", *(["samples"] if sampled else [])]
    head += [f"{middle}{unit}", *(_EXTRA[name] for name in extra)]
    head += ["raw", "/raw", "limit", "/limit", "CPU s/GB", "sender MB", "receiver MB"]
    head += ["published ms"] if figures else []
    lines = []
    for row in rows:
        if not row.values:  # named with its reason below the table
            continue
        line = [size_text(row.nbytes) if row.nbytes else "-", row.transport]
        line += [_rounds(row), *([_samples(row)] if sampled else [])]
        line.append(number(row.value))
        line += [_figure(row, name) for name in extra]
        line += _compared(run, row)
        line.append(number(median(row.cpu_per_gb) if row.cpu_per_gb else None))
        line += [_megabytes(row.sender_bytes), _megabytes(row.receiver_bytes)]
        line += [_nearest(row, figures)] if figures else []
        lines.append(line)
    problems = [
        " ".join(filter(None, (row.transport, _size(row), row.problem)))
        for row in rows
        if row.problem
    ]
    note = NOTES[workload] + (_SAMPLED if sampled else "") + _served(rows)
    return Text(workload, note, head, lines, problems)


def _rounds(row: Row) -> str:
    """How many have a value, and of how many that were tried."""
    tried = len({*row.values, *row.problems})
    return f"{len(row.values)} of {tried}" if row.problems else f"{tried}"


def _samples(row: Row) -> str:
    return f"{row.samples():,.0f}" if row.metrics.get("samples") else "-"


def _figure(row: Row, name: str) -> str:
    """The median of a metric; of what was lost the sum, which one round cannot hide."""
    if name == "lost" and name in row.metrics:
        return f"{row.lost():,.0f}"
    return number(row.metric(name))


def _served(rows: list[Row]) -> str:
    """What a note says of rows whose servers are not counted."""
    known = [row.transport for row in rows if row.values and served(row.transport)]
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(known))
    return f" {names}: CPU s/GB and MB without the servers'." if names else ""


def _size(row: Row) -> str:
    return f"{size_text(row.nbytes)}:" if row.nbytes else ""


def _megabytes(values: list[int]) -> str:
    return number(max(values) / 1e6 if values else None)


def _compared(run: Run, row: Row) -> list[str]:
    """The raw value and ratio, the limit's value and ratio."""
    if is_baseline(row.transport):
        return ["-"] * 4
    cells = []
    for other in (run.raw(row), run.limit(row)):
        value = number(other.value if other else None)
        if other and len(raw_of(row.transport)) > 1 and other is not run.limit(row):
            value += f" {other.transport}"  # the fastest of several
        cells += [value, number(row.ratio(other))]
    return cells


def _nearest(row: Row, figures: dict[int, list[Published]]) -> str:
    if is_baseline(row.transport):
        return "-"
    wanted = nearest(row.transport)
    for entry in figures.get(row.nbytes, []):
        if (entry.scope, entry.system) == wanted:
            return f"{number(entry.milliseconds)} {entry.system}"
    return "-"


def two_terms(run: Run) -> Text | None:
    """The two-term model of every transport with enough sizes, or None."""
    lines = [
        [
            transport,
            number(model.per_message_us),
            number(model.gb_per_s),
            f"{(model.worst - 1) * 100:.0f} %",
        ]
        for transport, model in models(run).items()
    ]
    if not lines:
        return None
    note = (
        "One way time = per message + bytes / bandwidth, fitted to the medians of "
        "`latency` over all sizes by least squares of the relative errors. `off by`: "
        "the worst that a measured time differs from the model's."
    )
    head = ["transport", "per message us", "GB/s", "off by"]
    return Text("Two-term model", note, head, lines, [])


def against_each(run: Run) -> Text | None:
    """Transports with several baselines beside each of them, or None."""
    names: dict[str, None] = {}
    found = []
    for row in run.rows:
        if not row.values or len(raw_of(row.transport)) < 2:
            continue
        raws = {one.transport: row.ratio(one) for one in run.raws(row)}
        names |= dict.fromkeys(raws)
        found.append((row, raws))
    if not names:
        return None
    lines = []
    for row, raws in found:
        line = [row.workload, size_text(row.nbytes) if row.nbytes else "-"]
        line += [row.transport, number(row.value)]
        lines.append(line + [number(raws.get(name)) for name in names])
    note = (
        "Ours divided by each baseline: below 1 ours is faster where the unit is a "
        "time, above 1 where it is a rate."
    )
    head = ["workload", "size", "transport", "ours", *(f"/{name}" for name in names)]
    return Text("Beside each baseline", note, head, lines, [])


def measured_published(run: Run) -> Text | None:
    """Published latencies of the sizes that were measured, or None."""
    figures, _ = published()
    sizes = run.sizes("latency")
    lines = [
        [size_text(nbytes), entry.scope, entry.system, number(entry.milliseconds)]
        for nbytes in sizes
        for entry in figures.get(nbytes, [])
    ]
    if not lines:
        return None
    return Text("Published", "", ["size", "scope", "system", "ms"], lines, [])


def plain(text: str) -> str:
    """Text whose signs are no HTML in Markdown, but for what is between backticks."""
    return re.sub(
        r"`[^`]*`|[<>&]", lambda found: _ENTITIES.get(found[0], found[0]), text
    )


def markdown(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    """A table in Markdown, line by line."""
    rows = [head, ["---"] * len(head), *lines]
    return [
        "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in row) + " |"
        for row in rows
    ]


def aligned(head: list[str], lines: list[list[str]]) -> list[str]:
    """A table for the terminal, line by line; the second column to the left."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    shown = []
    for line in [head, *lines]:
        pairs = enumerate(zip(line, widths, strict=True))
        cells = [
            text.ljust(width) if place == 1 else text.rjust(width)
            for place, (text, width) in pairs
        ]
        shown.append("  ".join(cells).rstrip())
    return shown
