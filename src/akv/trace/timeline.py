"""Requests as bars in lanes: what both kinds of pictures are drawn from. Pure.

Lanes of a process are, from the top: what its scheduler decided, the tasks of
its loop (lookups, loads, saves), waits for staging, native calls into the store,
and the copies on the streams. What overlaps in a lane gets a row of its own.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from akv.core.events import LoadJoined, LoadPromised, as_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from akv.trace.story import Load, Save, Stories, Story

__all__ = ("LANES", "Bar", "bars", "processes", "rows")

LANES = (
    "scheduler",
    "loop: lookups",
    "loop: loads",
    "loop: saves",
    "staging: waits",
    "native: gets",
    "stream: load copies",
    "stream: save copies",
)
_MOMENT = 1e-6
"""Seconds that a decision is drawn as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that took from ``start`` to ``end``, in seconds.

    ``story`` is the place of its request's story; ``flow`` says whether the
    arrow of this story begins (``s``), passes (``t``) or ends (``f``) here.
    """

    lane: str
    pid: int
    start: float
    end: float
    name: str
    request_id: str
    story: int
    outcome: str
    args: dict[str, Any]
    flow: str = ""


def bars(stories: Stories) -> Iterator[Bar]:
    """All bars, story by story."""
    for number, story in enumerate(stories.all):
        yield from _of_story(story, number)


def rows(all_bars: Iterable[Bar]) -> list[tuple[Bar, int]]:
    """Each bar with its row in its lane: the first one that is free."""
    placed: list[tuple[Bar, int]] = []
    free: dict[tuple[int, str], list[int]] = {}
    busy: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for bar in sorted(all_bars, key=lambda one: (one.start, one.end)):
        lane = (bar.pid, bar.lane)
        ends = busy.setdefault(lane, [])
        rest = free.setdefault(lane, [])
        while ends and ends[0][0] <= bar.start:
            heapq.heappush(rest, heapq.heappop(ends)[1])
        row = heapq.heappop(rest) if rest else len(ends)
        heapq.heappush(ends, (bar.end, row))
        placed.append((bar, row))
    return placed


def _of_story(story: Story, number: int) -> Iterator[Bar]:
    def bar(
        lane: str,
        pid: int,
        span: tuple[float, float],
        name: str,
        *,
        outcome: str = "",
        flow: str = "",
        **args: Any,
    ) -> Bar:
        start, end = span
        return Bar(
            lane=lane,
            pid=pid,
            start=start,
            end=max(end, start),
            name=name,
            request_id=story.request_id,
            story=number,
            outcome=outcome,
            args={"request_id": story.request_id, **args},
            flow=flow,
        )

    arrow = bool(story.lookups) and any(load.ended for load in story.loads)
    for place, lookup in enumerate(story.lookups):
        yield bar(
            LANES[1],
            lookup.pid,
            (lookup.started, lookup.ended or story.ended),
            f"lookup {lookup.outcome}",
            outcome=lookup.outcome,
            flow="s" if arrow and place == len(story.lookups) - 1 else "",
            asked_blocks=lookup.asked,
            found_blocks=lookup.found,
            reason=lookup.reason,
        )
    for record in story.decisions:
        event = record.event
        what = {LoadPromised: "promised", LoadJoined: "joined"}.get(
            type(event), "declined"
        )
        values = as_dict(event)
        values.pop("t")
        values.pop("event")
        values.pop("request_id")
        yield bar(
            LANES[0],
            record.pid,
            (record.at, record.at + _MOMENT),
            what,
            outcome="declined" if what == "declined" else "answered",
            flow="t" if arrow and event is story.promised else "",
            **values,
        )
    for load in story.loads:
        yield from _of_load(bar, story, load, arrow=arrow)
    for save in story.saves:
        yield from _of_save(bar, story, save)


def _of_load(bar: Any, story: Story, load: Load, *, arrow: bool) -> Iterator[Bar]:
    last = [one for one in story.loads if one.ended][-1:] == [load]
    yield bar(
        LANES[2],
        load.pid,
        (load.started, load.ended or story.ended),
        f"load {load.outcome}",
        outcome=load.outcome,
        flow="f" if arrow and last else "",
        load_id=load.load_id,
        objects=load.objects,
        failed=load.failed,
        bytes=load.bytes,
        reason=load.reason,
    )
    for end, event in load.fetched:
        start = end - event.seconds
        if event.wait_seconds > 0:
            yield bar(
                LANES[4],
                load.pid,
                (start - event.wait_seconds, start),
                "wait for staging",
                load_id=load.load_id,
                window=event.window,
            )
        yield bar(
            LANES[5],
            load.pid,
            (start, end),
            f"get window {event.window}",
            outcome="failed" if event.failed else "landed",
            load_id=load.load_id,
            objects=event.objects,
            bytes=event.bytes,
            failed=event.failed,
        )
    for end, placed in load.placed:
        yield bar(
            LANES[6],
            load.pid,
            (end - placed.seconds, end),
            f"place window {placed.window}",
            outcome="landed",
            load_id=load.load_id,
            objects=placed.objects,
            bytes=placed.bytes,
        )


def _of_save(bar: Any, story: Story, save: Save) -> Iterator[Bar]:
    kept = save.stored + save.existed
    outcome = "landed" if kept == save.objects else "failed"
    if save.ended is None:
        outcome = "under way"
    yield bar(
        LANES[3],
        save.pid,
        (save.started, save.ended or story.ended),
        "save",
        outcome=outcome,
        job_id=save.job_id,
        objects=save.objects,
        stored=save.stored,
        existed=save.existed,
        bytes=save.bytes,
    )
    if save.copied is not None:
        yield bar(
            LANES[7],
            save.pid,
            (save.started, save.copied),
            "copy out",
            outcome="landed",
            job_id=save.job_id,
            bytes=save.bytes,
        )


def processes(placed: Sequence[tuple[Bar, int]], stories: Stories) -> dict[int, str]:
    """The processes that have bars, with a name for each."""
    sessions = stories.background.sessions
    pids = sorted({bar.pid for bar, _ in placed})
    return {
        pid: f"{sessions[pid].role if pid in sessions else 'process'} {pid}"
        for pid in pids
    }
