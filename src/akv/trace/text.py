"""What was found out, as lines for a person and as plain values for scripts. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from akv.core.events import as_dict
from akv.core.sizes import format_size
from akv.trace.why import explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from akv.trace.numbers import Percentiles, Summary
    from akv.trace.reading import Log, Record
    from akv.trace.story import Background, Story

__all__ = (
    "clock",
    "facts",
    "milliseconds",
    "records_of",
    "story_lines",
    "summary_lines",
)

_HIDDEN = {"event", "t", "request_id"}


def facts(story: Story, background: Background) -> dict[str, Any]:
    """What is known of one request, as JSON values; seconds, tokens and bytes.

    A number that no role decided (a session has no promises) is None.
    """
    size = background.block_tokens(story.pid)
    decided = story.promised or story.declined
    promised = story.promised
    session = background.sessions.get(story.pid)
    space = background.spaces.get(story.space)
    rounded, left = story.rounded(size)
    landed = sum(load.landed for load in story.loads if load.ended is not None)
    loads = story.loads
    failed = sum(load.failed for load in loads)
    return {
        "request_id": story.request_id,
        "at": story.began,
        "pid": story.pid,
        "store": session.store if session is not None else None,
        "key_space": None
        if space is None
        else {
            "namespace": space.namespace,
            "fingerprint": space.fingerprint,
            "generation": space.generation,
            "epoch": space.epoch,
        },
        "block_tokens": size,
        "tokens_asked": decided.num_tokens if decided else None,
        "tokens_local": decided.local if decided else None,
        "tokens_hit": decided.hit if decided else None,
        "tokens_rounded_off": rounded if promised else None,
        "tokens_not_worth": left if promised else None,
        "tokens_promised": story.promised_tokens if decided else None,
        # What landed behind a block that did not cannot be used.
        "tokens_loaded": None if failed else landed * size,
        "blocks_asked": sum(lookup.asked for lookup in story.lookups),
        "blocks_found": sum(lookup.found for lookup in story.lookups),
        "blocks_loaded": landed,
        "blocks_failed": failed,
        "waited_for": [joined.leader for joined in story.joined],
        "bytes_loading": sum(load.bytes for load in loads),
        "blocks_saved": sum(save.stored + save.existed for save in story.saves),
        "blocks_dropped": sum(drop.objects for drop in story.drops),
        "lookup_seconds": story.lookup_seconds,
        "wait_seconds": sum(load.wait for load in loads),
        "fetch_seconds": sum(load.fetch for load in loads),
        "place_seconds": sum(load.place for load in loads),
        "load_seconds": story.load_seconds,
        "lookup_deadline_seconds": max(
            (lookup.deadline for lookup in story.lookups), default=0.0
        )
        or None,
        "load_deadline_seconds": max((load.deadline for load in loads), default=0.0)
        or None,
        "why_not_more": [asdict(one) for one in explain(story, background)],
    }


def story_lines(
    story: Story, background: Background, records: Iterable[Record], *, of_day: bool
) -> Iterator[str]:
    """One request for a person: numbers, reasons, then every event."""
    known = facts(story, background)
    yield f"request {story.request_id}, {clock(story.began, of_day=of_day)}"
    yield from (f"  {name:<11} {text}" for name, text in _rows(known) if text)
    yield ""
    yield "why not more"
    if not known["why_not_more"]:
        yield "  All that could be used was loaded."
    for finding in known["why_not_more"]:
        yield f"  {finding['name']}: {finding['text']}"
        if finding["advice"]:
            yield f"    -> {finding['advice']}"
    yield ""
    yield "what happened (milliseconds, role, event)"
    for record in records:
        after = 1000 * (record.at - story.began)
        yield f"  {after:>10.3f}  {record.role:<9} {_told(record)}"


def records_of(story: Story, log: Log) -> list[Record]:
    """The records of one story, in the order of time."""
    first = bisect_left(log.records, story.began, key=lambda record: record.at)
    last = bisect_right(log.records, story.ended, key=lambda record: record.at)
    return [
        record
        for record in log.records[first:last]
        if getattr(record.event, "request_id", None) == story.request_id
    ]


def summary_lines(summary: Summary) -> Iterator[str]:
    """All requests for a person."""
    yield f"{summary.requests} requests in {summary.seconds:.3g} s"
    yield (
        f"  tokens   {_share(summary.token_hit_ratio)} from the store: "
        f"{summary.tokens_promised} promised of {summary.tokens_asked}"
    )
    yield (
        f"  lookups  {summary.lookups}, {summary.lookups_per_second:.3g} a second; "
        f"{_share(summary.block_hit_ratio)} of the blocks found; "
        f"{summary.lookups_late} late, {summary.lookups_failed} failed, "
        f"{summary.lookups_skipped} not asked"
    )
    yield (
        f"  loads    {summary.loads}: {summary.loads_landed} landed, "
        f"{summary.loads_failed} failed, {summary.loads_cancelled} cancelled; "
        f"{format_size(summary.load_bytes)} at "
        f"{format_size(int(summary.load_bytes_per_second))}/s"
    )
    yield (
        f"  saves    {summary.saves}: {format_size(summary.save_bytes)}, "
        f"{summary.blocks_dropped} blocks dropped"
    )
    if summary.outages:
        yield f"  breaker  opened {summary.outages} times"
    yield ""
    heads = "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max"))
    yield f"  {'milliseconds':<18}{'count':>8}{heads}"
    for name, row in (
        ("lookup", summary.lookup_seconds),
        ("wait for staging", summary.wait_seconds),
        ("fetch", summary.fetch_seconds),
        ("place", summary.place_seconds),
        ("whole load", summary.load_seconds),
    ):
        yield f"  {name:<18}{_columns(row)}"
    yield from _counts("requests not served in full, by reason", summary.reasons)
    yield from _counts("blocks not saved, by reason", summary.drops)
    if summary.worst:
        yield ""
        yield "slowest requests (akv trace FILE --request ID tells all of one)"
        for one in summary.worst:
            parts = ", ".join(
                f"{name} {milliseconds(getattr(one, f'{name}_seconds'))}"
                for name in ("lookup", "wait", "fetch", "place")
            )
            reasons = f" ({', '.join(one.reasons)})" if one.reasons else ""
            total = milliseconds(one.seconds)
            yield f"  {total:>12}  {one.request_id}: {parts}{reasons}"


def clock(at: float, *, of_day: bool) -> str:
    """A time for a person: of day (UTC) or of the machine's monotonic clock."""
    if not of_day:
        return f"{at:.6f} s on the monotonic clock"
    moment = datetime.fromtimestamp(at, tz=UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def milliseconds(seconds: float) -> str:
    """A duration for a person."""
    return f"{1000 * seconds:.3f} ms"


def _rows(known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def tokens(name: str) -> str:
        value = known[name]
        return "" if value is None else f"{value} tokens"

    size, failed = known["block_tokens"], known["blocks_failed"]
    yield "asked", tokens("tokens_asked")
    yield "local", tokens("tokens_local")
    yield "hit", tokens("tokens_hit")
    yield "rounded off", tokens("tokens_rounded_off")
    yield "not worth", tokens("tokens_not_worth") if known["tokens_not_worth"] else ""
    yield "promised", tokens("tokens_promised")
    yield "waited for", ", ".join(known["waited_for"])
    yield (
        "looked up",
        f"{known['blocks_found']} of {known['blocks_asked']} blocks found",
    )
    yield (
        "loaded",
        f"{known['blocks_loaded']} blocks"
        + (f", {known['tokens_loaded']} tokens" if size and not failed else ""),
    )
    yield "failed", f"{failed} blocks"
    yield (
        "saved",
        f"{known['blocks_saved']} blocks, {known['blocks_dropped']} dropped",
    )
    parts = ("lookup", "wait", "fetch", "place", "load")
    names = ("lookup", "queue for staging", "fetch", "place", "whole load")
    yield (
        "time",
        ", ".join(
            f"{name} {milliseconds(known[f'{part}_seconds'])}"
            for part, name in zip(parts, names, strict=True)
        ),
    )
    deadlines = [
        f"{name} {seconds:g} s"
        for name in ("lookup", "load")
        if (seconds := known[f"{name}_deadline_seconds"]) is not None
    ]
    yield "deadline", ", ".join(deadlines)
    yield "store", known["store"] or ""
    space = known["key_space"]
    if space is not None:
        yield (
            "key space",
            f"namespace {space['namespace']!r}, fingerprint {space['fingerprint']}, "
            f"generation {space['generation']}"
            + (f", epoch {space['epoch']}" if space["epoch"].strip("0") else ""),
        )


def _told(record: Record) -> str:
    values = {
        name: value
        for name, value in as_dict(record.event).items()
        if name not in _HIDDEN and value != ""
    }
    return " ".join(
        [
            record.event.name,
            *(
                f"{name}={value:.6g}"
                if isinstance(value, float)
                else f"{name}={value!r}"
                if isinstance(value, str) and " " in value
                else f"{name}={value}"
                for name, value in values.items()
            ),
        ]
    )


def _counts(title: str, counts: dict[str, int]) -> Iterator[str]:
    if counts:
        yield ""
        yield title
        for name, count in counts.items():
            yield f"  {count:>8}  {name}"


def _share(ratio: float | None) -> str:
    return "nothing asked" if ratio is None else f"{100 * ratio:.1f} %"


def _columns(row: Percentiles) -> str:
    numbers = "".join(
        f"{1000 * value:>10.3f}" for value in (row.p50, row.p90, row.p99, row.max)
    )
    return f"{row.count:>8}{numbers}"
