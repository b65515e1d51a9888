"""A log as one page that needs nothing but a browser: timeline, hit ratio, stories.

Plotly draws it; its script is written into the page, so that the page opens
without a network and can be sent to somebody. Bounded: only the newest requests
are on it, and it says so.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from akv.trace.needs import need
from akv.trace.numbers import hit_ratio, token_ratio
from akv.trace.story import Stories
from akv.trace.text import clock, records_of, story_lines, summary_lines
from akv.trace.timeline import LANES, bars, processes, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.trace.numbers import Summary
    from akv.trace.reading import Log
    from akv.trace.story import Story
    from akv.trace.timeline import Bar

__all__ = ("MOST_REQUESTS", "html_page")

MOST_REQUESTS = 2000
"""Requests on a page; a browser draws so many in about a second."""

_MOST_RECORDS = 100
_BUCKETS = 60
_COLOURS = {
    "answered": "#4c8fd0",
    "landed": "#3a9a6b",
    "failed": "#cc4b4b",
    "expired": "#dd8a2f",
    "cancelled": "#8a7db8",
    "declined": "#a0a8b0",
    "skipped": "#7a5a3a",
    "": "#c9b458",
}


def html_page(log: Log, stories: Stories, summary: Summary, *, title: str) -> str:
    """The page's text, about 5 MB, nearly all of it Plotly's script.

    :raises MissingExtraError: plotly is not installed
    """
    offline = need("plotly.offline", extra="trace", what="akv trace --html")
    shown = Stories(stories.all[-MOST_REQUESTS:], stories.background)
    texts = [_text(story, shown, log) for story in shown.all]
    slowest = sorted(
        range(len(shown.all)),
        key=lambda place: -_cost(shown.all[place]),
    )[:8]
    data = {
        "figure": json.loads(_figure(shown, of_day=log.time_of_day).to_json()),
        "stories": [
            {"id": story.request_id, "text": text}
            for story, text in zip(shown.all, texts, strict=True)
        ],
        "slowest": slowest,
    }
    note = f"{len(stories.all)} requests."
    if len(shown.all) < len(stories.all):
        note = f"The last {len(shown.all)} of {len(stories.all)} requests."
    page = resources.files("akv.trace").joinpath("page.html").read_text("utf-8")
    return Template(page).substitute(
        title=html.escape(title),
        note=html.escape(note),
        summary=html.escape("\n".join(summary_lines(summary))),
        plotly=offline.get_plotlyjs(),
        # In a script nothing is escaped, so that nothing may end it.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )


def _cost(story: Story) -> float:
    return story.lookup_seconds + story.load_seconds


def _text(story: Story, shown: Stories, log: Log) -> str:
    records = records_of(story, log)
    of_day = log.time_of_day
    lines = list(
        story_lines(story, shown.background, records[:_MOST_RECORDS], of_day=of_day)
    )
    if len(records) > _MOST_RECORDS:
        lines.append(f"  and {len(records) - _MOST_RECORDS} more events")
    return "\n".join(lines)


def _figure(stories: Stories, *, of_day: bool) -> Any:
    graph = need("plotly.graph_objects", extra="trace", what="akv trace --html")
    subplots = need("plotly.subplots", extra="trace", what="akv trace --html")
    placed = rows(bars(stories))
    zero = min((bar.start for bar, _ in placed), default=0.0)
    names = processes(placed, stories)
    labels = _labels(placed, names)
    figure = subplots.make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.78, 0.22],
        vertical_spacing=0.06,
    )  # fmt: skip
    for outcome, colour in _COLOURS.items():
        chosen = [
            (bar, row)
            for bar, row in placed
            if (bar.outcome if bar.outcome in _COLOURS else "") == outcome
        ]
        if not chosen:
            continue
        figure.add_trace(
            graph.Bar(
                name=outcome or "other",
                orientation="h",
                base=[bar.start - zero for bar, _ in chosen],
                x=[bar.end - bar.start for bar, _ in chosen],
                y=[_label(bar, row, names) for bar, row in chosen],
                customdata=[bar.story for bar, _ in chosen],
                hovertext=[_hover(bar) for bar, _ in chosen],
                hoverinfo="text",
                marker={"color": colour, "line": {"width": 1, "color": colour}},
            ),
            row=1,
            col=1,
        )
    middles, ratios = _ratios(stories, zero)
    figure.add_trace(
        graph.Scatter(
            name="hit ratio",
            x=middles,
            y=ratios,
            mode="lines+markers",
            line={"color": "#1f5fa8"},
            hovertemplate="%{y:.1%}<extra></extra>",
        ),
        row=2,
        col=1,
    )
    figure.update_layout(
        barmode="overlay",
        height=max(420, 24 * len(labels) + 260),
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
        template="plotly_white",
        legend={"orientation": "h", "y": 1.04},
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=labels[::-1],
        automargin=True,
        row=1,
        col=1,
    )
    figure.update_yaxes(
        title="hit ratio", range=[-0.05, 1.05], tickformat=".0%", row=2, col=1
    )
    began = clock(zero, of_day=of_day)
    figure.update_xaxes(title=f"seconds since {began}", row=2, col=1)
    return figure


def _label(bar: Bar, row: int, names: dict[int, str]) -> str:
    return f"{names[bar.pid]} · {bar.lane}" + (f" {row + 1}" if row else "")


def _labels(placed: Sequence[tuple[Bar, int]], names: dict[int, str]) -> list[str]:
    found = {
        (bar.pid, LANES.index(bar.lane), row): _label(bar, row, names)
        for bar, row in placed
    }
    return [found[place] for place in sorted(found)]


def _hover(bar: Bar) -> str:
    known = {name: value for name, value in bar.args.items() if value != ""}
    lines = [f"<b>{html.escape(bar.name)}</b>, {1000 * (bar.end - bar.start):.3f} ms"]
    lines += [f"{name}: {html.escape(str(value))}" for name, value in known.items()]
    return "<br>".join(lines)


def _ratios(stories: Stories, zero: float) -> tuple[list[float], list[float | None]]:
    """The middle of each interval, and the hit ratio of requests begun in it."""
    last = max((story.began for story in stories.all), default=zero)
    width = max((last - zero) / _BUCKETS, 1e-3)
    buckets: dict[int, list[Story]] = {}
    for story in stories.all:
        buckets.setdefault(int((story.began - zero) / width), []).append(story)
    middles: list[float] = []
    ratios: list[float | None] = []
    for number, told in sorted(buckets.items()):
        middles.append((number + 0.5) * width)
        found = token_ratio(told)
        ratios.append(hit_ratio(told) if found is None else found)
    return middles, ratios
