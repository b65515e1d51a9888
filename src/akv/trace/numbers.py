"""All requests of a log in numbers: rates, percentiles, the worst ones. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akv.trace.story import covered
from akv.trace.why import explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.trace.story import Stories, Story

__all__ = ("Percentiles", "Summary", "Worst", "hit_ratio", "summarise", "token_ratio")

_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of durations in seconds; all 0 where there is none."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """One of the slowest requests, and where its seconds went."""

    request_id: str
    seconds: float
    lookup_seconds: float
    wait_seconds: float
    fetch_seconds: float
    place_seconds: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Numbers of a log. Ratios are 0 to 1; None where nothing was asked."""

    seconds: float
    """From the first record to the last."""
    requests: int
    tokens_asked: int
    tokens_promised: int
    token_hit_ratio: float | None
    block_hit_ratio: float | None
    """Blocks found of those asked for, whatever became of them."""
    lookups: int
    lookups_per_second: float
    lookups_late: int
    lookups_failed: int
    lookups_skipped: int
    loads: int
    loads_landed: int
    loads_failed: int
    loads_cancelled: int
    load_bytes: int
    load_bytes_per_second: float
    """Bytes that landed, over the time in which loads were under way."""
    saves: int
    save_bytes: int
    blocks_dropped: int
    lookup_seconds: Percentiles
    wait_seconds: Percentiles
    """Waiting for staging, for each load."""
    fetch_seconds: Percentiles
    place_seconds: Percentiles
    load_seconds: Percentiles
    reasons: dict[str, int]
    """Requests for each reason for which less than all was served."""
    drops: dict[str, int]
    """Blocks that were not saved, for each reason."""
    worst: tuple[Worst, ...]
    outages: int


def summarise(stories: Stories, *, seconds: float) -> Summary:
    """Count everything in ``stories``, which took ``seconds``."""
    told = stories.all
    lookups = [one for story in told for one in story.lookups]
    loads = [one for story in told for one in story.loads]
    saves = [one for story in told for one in story.saves]
    drops: Counter[str] = Counter()
    for story in told:
        for drop in story.drops:
            drops[drop.reason] += drop.objects
    reasons: Counter[str] = Counter()
    for story in told:
        found = explain(story, stories.background)
        reasons.update({finding.name for finding in found})
    asked, promised = _tokens(told)
    landed = [load for load in loads if load.outcome == "landed"]
    busy = covered([(one.started, one.ended or one.started) for one in loads])
    loaded = sum(load.bytes for load in landed)
    outcomes = Counter(lookup.outcome for lookup in lookups)
    ended = [load for load in loads if load.outcome in {"landed", "failed"}]
    return Summary(
        seconds=seconds,
        requests=len(told),
        tokens_asked=asked,
        tokens_promised=promised,
        token_hit_ratio=promised / asked if asked else None,
        block_hit_ratio=hit_ratio(told),
        lookups=len(lookups),
        lookups_per_second=len(lookups) / seconds if seconds else 0.0,
        lookups_late=outcomes["expired"],
        lookups_failed=outcomes["failed"],
        lookups_skipped=outcomes["skipped"],
        loads=len(loads),
        loads_landed=len(landed),
        loads_failed=sum(load.outcome == "failed" for load in loads),
        loads_cancelled=sum(load.outcome == "cancelled" for load in loads),
        load_bytes=loaded,
        load_bytes_per_second=loaded / busy if busy else 0.0,
        saves=len(saves),
        save_bytes=sum(one.bytes for one in saves if one.stored),
        blocks_dropped=sum(drops.values()),
        lookup_seconds=_percentiles(
            [one.seconds for one in lookups if one.outcome == "answered"]
        ),
        wait_seconds=_percentiles([load.wait for load in ended]),
        fetch_seconds=_percentiles([load.fetch for load in ended]),
        place_seconds=_percentiles([load.place for load in ended]),
        load_seconds=_percentiles([load.seconds for load in ended]),
        reasons=dict(reasons.most_common()),
        drops=dict(drops.most_common()),
        worst=_worst(stories),
        outages=sum(
            record.event.name == "akv.breaker.opened"
            for record in stories.background.outages
        ),
    )


def hit_ratio(stories: Sequence[Story]) -> float | None:
    """Blocks found of those asked for; None where none was asked for."""
    lookups = [lookup for story in stories for lookup in story.lookups]
    asked = sum(lookup.asked for lookup in lookups)
    return sum(lookup.found for lookup in lookups) / asked if asked else None


def token_ratio(stories: Sequence[Story]) -> float | None:
    """Tokens promised of those of the prompts; None where none was decided."""
    asked, promised = _tokens(stories)
    return promised / asked if asked else None


def _tokens(stories: Sequence[Story]) -> tuple[int, int]:
    decided = [one for one in stories if one.counts]
    asked = sum(
        event.num_tokens
        for story in decided
        if (event := story.promised or story.declined) is not None
    )
    return asked, sum(story.promised_tokens for story in decided)


def _percentiles(values: list[float]) -> Percentiles:
    values = sorted(values)
    if not values:
        return Percentiles(count=0, p50=0.0, p90=0.0, p99=0.0, max=0.0)

    def at(share: float) -> float:
        return values[max(0, math.ceil(share * len(values)) - 1)]

    return Percentiles(
        count=len(values), p50=at(0.5), p90=at(0.9), p99=at(0.99), max=values[-1]
    )


def _worst(stories: Stories) -> tuple[Worst, ...]:
    def cost(story: Story) -> float:
        return story.lookup_seconds + story.load_seconds

    slowest = sorted(stories.all, key=cost, reverse=True)[:_WORST]
    worst = []
    for story in slowest:
        if not cost(story):
            continue
        found = explain(story, stories.background)
        worst.append(
            Worst(
                request_id=story.request_id,
                seconds=cost(story),
                lookup_seconds=story.lookup_seconds,
                wait_seconds=sum(load.wait for load in story.loads),
                fetch_seconds=sum(load.fetch for load in story.loads),
                place_seconds=sum(load.place for load in story.loads),
                reasons=tuple(dict.fromkeys(finding.name for finding in found)),
            )
        )
    return tuple(worst)
