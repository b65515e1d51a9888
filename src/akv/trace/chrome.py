"""A log as Chrome's trace format, which Perfetto and chrome://tracing open. Pure.

https://ui.perfetto.dev shows one track for each lane of a process, and an arrow
from each lookup by way of the promise to the landing of its load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from akv.trace.timeline import LANES, bars, processes, rows

if TYPE_CHECKING:
    from akv.trace.reading import Log
    from akv.trace.story import Stories

__all__ = ("chrome_trace",)

_ROWS = 1000
"""Track ids that are kept for the rows of one lane."""


def chrome_trace(log: Log, stories: Stories) -> dict[str, Any]:
    """One JSON object; times in microseconds from the first record on."""
    placed = rows(bars(stories))
    names = processes(placed, stories)
    zero = min(
        [bar.start for bar, _ in placed] + [record.at for record in log.records[:1]],
        default=0.0,
    )
    events: list[dict[str, Any]] = []
    for order, (pid, name) in enumerate(names.items()):
        events.append(_meta("process_name", pid, 0, name=name))
        events.append(_meta("process_sort_index", pid, 0, sort_index=order))
    for pid, lane, row in sorted(
        {(bar.pid, LANES.index(bar.lane), row) for bar, row in placed}
    ):
        title = LANES[lane] + (f" {row + 1}" if row else "")
        track = lane * _ROWS + row
        events.append(_meta("thread_name", pid, track, name=title))
        events.append(_meta("thread_sort_index", pid, track, sort_index=track))
    for bar, row in placed:
        track = LANES.index(bar.lane) * _ROWS + row
        start, end = 1e6 * (bar.start - zero), 1e6 * (bar.end - zero)
        where = {"pid": bar.pid, "tid": track}
        events.append(
            {
                "name": bar.name,
                "cat": bar.lane,
                "ph": "X",
                "ts": round(start, 3),
                "dur": round(end - start, 3),
                "args": bar.args,
                **where,
            }
        )
        if bar.flow:
            # An arrow is bound to the bar that its time lies in.
            at = start if bar.flow != "f" else start + 0.99 * (end - start)
            arrow = {
                "name": "request",
                "cat": "request",
                "ph": bar.flow,
                "id": bar.story,
                "ts": round(at, 3),
                **where,
            }
            events.append(arrow | ({"bp": "e"} if bar.flow == "f" else {}))
    events += [
        {
            "name": record.event.name,
            "cat": "store",
            "ph": "i",
            "s": "p",
            "ts": round(1e6 * (record.at - zero), 3),
            "pid": record.pid,
            "tid": 0,
            "args": {"reason": getattr(record.event, "reason", "")},
        }
        for record in stories.background.outages
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
