"""What sessions do at this moment, from the events that they write. Pure.

Records come in as they are read; :meth:`Live.snapshot` says what they come to
over the last seconds. Bounded: only so many operations and seconds are kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from akv.core.events import (
    READING_OFF,
    BreakerClosed,
    BreakerOpened,
    LoadCancelled,
    LoadDeclined,
    LoadFailed,
    LoadLanded,
    LoadPromised,
    LoadStarted,
    LookupAnswered,
    LookupExpired,
    LookupFailed,
    LookupSkipped,
    LookupStarted,
    MemoryQuarantined,
    MemoryReleased,
    SaveCancelled,
    SaveDropped,
    SaveStarted,
    SaveStored,
    SessionClosed,
    SessionOpened,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from akv.trace.reading import Record

__all__ = ("Live", "Rates", "Running", "Snapshot")

_MOST_OPEN = 10_000
_MOST_POINTS = 200_000

_Place: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One session that is open, as its events tell."""

    source: str
    role: str
    pid: int
    rank: int
    store: str
    breaker: str
    """``closed`` while the store works, else ``open: `` and why."""
    loads: int
    load_bytes: int
    """Bytes of loads that have begun and not ended."""
    saves: int
    save_bytes: int
    quarantined_bytes: int
    quiet_seconds: float
    """Since its last event: a killed session is open and quiet for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the last ``seconds``. Ratios are 0 to 1, None where nothing was asked."""

    seconds: float
    requests_per_second: float
    lookups_per_second: float
    loads_per_second: float
    load_bytes_per_second: float
    save_bytes_per_second: float
    token_hit_ratio: float | None
    """Tokens promised of those of the prompts, as vLLM's scheduler decided."""
    block_hit_ratio: float | None
    """Blocks found of those asked for."""
    lookups_late: int
    loads_failed: int
    blocks_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything, as of the newest record or ``now``."""

    at: float
    rates: Rates
    sessions: tuple[Running, ...]


@dataclass(slots=True)
class _Session:
    opened: SessionOpened
    rank: int
    breaker: str
    loads: OrderedDict[tuple[str, int], int]
    saves: OrderedDict[int, int]
    last: float
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class _Point:
    """One thing that counts, at its time."""

    at: float
    what: str
    amount: float = 1.0
    of: float = 0.0


class Live:
    """Takes records and forgets what is older than ``seconds``."""

    def __init__(self, *, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._points: deque[_Point] = deque(maxlen=_MOST_POINTS)
        self._sessions: dict[_Place, _Session] = {}
        self._first: float | None = None
        self._last = 0.0

    def add(self, records: Iterable[Record]) -> None:
        """Take note of these, which are in the order of their files."""
        for record in records:
            if self._first is None:
                self._first = record.at
            self._last = max(self._last, record.at)
            place = (record.source, record.pid)
            event = record.event
            if isinstance(event, SessionOpened):
                before = self._sessions.get(place)
                # Repeated at the start of the next file.
                if before is None or before.opened != event:
                    self._sessions[place] = _Session(
                        opened=event,
                        rank=record.rank,
                        breaker="closed",
                        loads=OrderedDict(),
                        saves=OrderedDict(),
                        last=record.at,
                    )
            elif isinstance(event, SessionClosed):
                self._sessions.pop(place, None)
            else:
                session = self._sessions.get(place)
                if session is not None:
                    _state(session, record)
                self._count(record)

    def snapshot(self, now: float | None = None) -> Snapshot:
        """What it comes to at ``now``, by default the time of the newest record."""
        now = self._last if now is None else max(now, self._last)
        while self._points and self._points[0].at < now - self._seconds:
            self._points.popleft()
        first = now if self._first is None else self._first
        seconds = max(min(self._seconds, now - first), 1e-9)
        sums: dict[str, float] = {}
        for point in self._points:
            sums[point.what] = sums.get(point.what, 0.0) + point.amount
            sums[f"of {point.what}"] = sums.get(f"of {point.what}", 0.0) + point.of
        asked, blocks = sums.get("of tokens", 0.0), sums.get("of blocks", 0.0)
        return Snapshot(
            at=now,
            rates=Rates(
                seconds=seconds,
                requests_per_second=sums.get("requests", 0.0) / seconds,
                lookups_per_second=sums.get("lookups", 0.0) / seconds,
                loads_per_second=sums.get("loads", 0.0) / seconds,
                load_bytes_per_second=sums.get("load bytes", 0.0) / seconds,
                save_bytes_per_second=sums.get("save bytes", 0.0) / seconds,
                token_hit_ratio=sums.get("tokens", 0.0) / asked if asked else None,
                block_hit_ratio=sums.get("blocks", 0.0) / blocks if blocks else None,
                lookups_late=int(sums.get("late", 0.0)),
                loads_failed=int(sums.get("failed", 0.0)),
                blocks_dropped=int(sums.get("dropped", 0.0)),
            ),
            sessions=tuple(
                Running(
                    source=source,
                    role=session.opened.role,
                    pid=pid,
                    rank=session.rank,
                    store=session.opened.store,
                    breaker=session.breaker,
                    loads=len(session.loads),
                    load_bytes=sum(session.loads.values()),
                    saves=len(session.saves),
                    save_bytes=sum(session.saves.values()),
                    quarantined_bytes=session.quarantined,
                    quiet_seconds=now - session.last,
                )
                for (source, pid), session in sorted(self._sessions.items())
            ),
        )

    def _count(self, record: Record) -> None:
        def point(what: str, amount: float = 1.0, of: float = 0.0) -> None:
            self._points.append(_Point(record.at, what, amount, of))

        event = record.event
        match event:
            case LoadPromised():
                point("requests")
                point("tokens", event.usable - event.local, event.num_tokens)
            case LoadDeclined() if event.reason != READING_OFF:
                point("requests")
                point("tokens", 0.0, event.num_tokens)
            case LookupStarted():
                point("blocks", 0.0, event.blocks)
            case LookupAnswered() | LookupFailed():
                point("lookups")
                point("blocks", event.found)
            case LookupSkipped():
                point("lookups")
            case LookupExpired():
                point("lookups")
                point("late")
                point("blocks", event.found)
            case LoadLanded():
                point("loads")
                point("load bytes", event.bytes)
            case LoadFailed():
                point("loads")
                point("failed")
            case SaveStored():
                point("save bytes", event.bytes)
            case SaveDropped():
                point("dropped", event.objects)
            case _:
                pass


def _state(session: _Session, record: Record) -> None:
    event = record.event
    session.last = record.at
    match event:
        case BreakerOpened() | StoreUnavailable():
            session.breaker = f"open: {event.reason}"
        case BreakerClosed():
            session.breaker = "closed"
        case LoadStarted():
            session.loads[event.request_id, event.load_id] = event.bytes
        case LoadLanded() | LoadFailed() | LoadCancelled():
            session.loads.pop((event.request_id, event.load_id), None)
        case SaveStarted():
            session.saves[event.job_id] = event.bytes
        case SaveStored() | SaveDropped() | SaveCancelled():
            session.saves.pop(event.job_id, None)
        case MemoryQuarantined() | MemoryReleased():
            session.quarantined = event.total_bytes
        case _:
            pass
    for kept in (session.loads, session.saves):
        while len(kept) > _MOST_OPEN:
            kept.popitem(last=False)
