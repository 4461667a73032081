"""The HTML report: one file, without a script and without the network."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from bench import advice, tables
from bench.apps.app import ALONE
from bench.apps.report import conditions
from bench.baselines import is_baseline
from bench.plots import Plot
from bench.summary import Run, number, published
from bench.tables import Text

_GOOD, _FAIR = 1.05, 1.5
_TO_THE_LEFT = ("transport", "workload", "system", "scope", "backend", "tensors")


class Section(NamedTuple):
    """A workload in the report: its plots, its table, and what follows from it.

    Attributes:
        shown: Whether the table is seen at once, though there are plots.
    """

    table: Text
    plots: list[Plot]
    further: list[Text]
    shown: bool = False


class About(NamedTuple):
    """What a page says besides its figures.

    Attributes:
        facts: The conditions of each file.
        conditions: The same in rows.
        method: How it was measured, in sentences.
        remarks: What is missing or does not fit together, in sentences.
    """

    title: str
    facts: Sequence[Mapping[str, str]]
    conditions: Text
    method: Sequence[str]
    remarks: Sequence[str]


def render(run: Run, apps: Sequence[Text], plots: Sequence[Plot], about: About) -> str:
    """The page.

    Args:
        apps: The table of all applications, and those of each; empty if none was run.
    """
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
    ).get_template("page.html.j2")
    figures = published()[1] if run.of("latency") else []
    return template.render(
        about=about,
        purposes=_purposes(run),
        local_only=advice.local_only(run),
        scores=advice.scores(run),
        small=advice.small_size(run),
        large=advice.large_size(run),
        losses=advice.losses(run),
        overview=apps[0] if apps else None,
        sections=_sections(run, plots) + _of_apps(apps[1:], plots),
        published=[*figures, *(conditions() if apps else [])],
        ratio=_ratio,
        rows=_rows,
        prose=_prose,
        anchor=_anchor,
        svg=lambda plot: Markup(plot.svg()),
    )


def _of_apps(texts: Sequence[Text], plots: Sequence[Plot]) -> list[Section]:
    return [
        Section(text, [plot for plot in plots if plot.section == text.title], [], True)
        for text in texts
    ]


def _anchor(title: str) -> str:
    """The id of a section."""
    return title.replace(" ", "-").replace("/", "-")


def _purposes(
    run: Run,
) -> list[tuple[str, advice.Choice | None, advice.Choice | None]]:
    found = []
    grouped = itertools.groupby(advice.choices(run), lambda choice: choice.purpose)
    for purpose, group in grouped:
        by_reach = {choice.reach: choice for choice in group}
        found.append((purpose, by_reach.get("host"), by_reach.get("network")))
    return found


def _sections(run: Run, plots: Sequence[Plot]) -> list[Section]:
    found = []
    for table in tables.workloads(run):
        further: list[Text | None] = []
        if table.title == "latency":
            further = [tables.two_terms(run), tables.against_each(run)]
        own = [plot for plot in plots if plot.section == table.title]
        found.append(Section(table, own, [one for one in further if one]))
    # What people look at first comes first.
    first = ("import", "codec")
    return sorted(found, key=lambda section: section.table.title in first)


def _prose(text: str) -> Markup:
    """Words between backticks as code."""
    parts = [
        Markup("<code>{}</code>" if place % 2 else "{}").format(part)
        for place, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


def _ratio(value: float | None, faster_above: bool = False) -> Markup:
    """A cell with a ratio, coloured by how good it is: of times, or else of rates."""
    if value is None:
        return Markup("<td>-</td>")
    slower = 1 / value if faster_above else value
    kind = "good" if slower <= _GOOD else "fair" if slower <= _FAIR else "poor"
    return Markup('<td class="{}">{}</td>').format(kind, number(value))


def _rows(table: Text) -> Markup:
    left = [name in _TO_THE_LEFT for name in table.head]
    lines = [_line("th", table.head, left)]
    names = [name for name in ("transport", "backend") if name in table.head]
    place = table.head.index(names[-1]) if names else None
    for line in table.lines:
        raw = place is not None and _beside(line[place])
        lines.append(_line("td", line, left, "raw" if raw else ""))
    body = Markup("\n").join(lines)
    return Markup('<div class="scroll"><table>\n{}\n</table></div>').format(body)


def _beside(name: str) -> bool:
    """Whether a row is what ours are compared with."""
    return is_baseline(name) or name == ALONE or name.startswith("published")


def _line(tag: str, cells: Sequence[str], left: list[bool], kind: str = "") -> Markup:
    shown = Markup("").join(
        Markup("<{0}{1}>{2}</{0}>").format(
            Markup(tag), Markup(' class="left"') if to_left else "", escape(cell)
        )
        for cell, to_left in zip(cells, left, strict=True)
    )
    return Markup('<tr class="{}">{}</tr>').format(kind, shown)
