"""One frozen record for each fact that akv wants to be known.

Whoever notices a fact emits it to an :class:`Observer`; what becomes of it (a
log line, a number, a mark on a timeline) is decided in ``akv.sinks``. Names
are dotted facts in the past tense. Units: ``seconds`` are durations,
``bytes`` are bytes, ``t`` is ``time.monotonic()``, which on Linux is one
clock for all processes of a machine. There is one record for each request or
window, never one for each block.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol

__all__ = (
    "BreakerClosed",
    "BreakerOpened",
    "CacheReset",
    "Event",
    "LoadCancelled",
    "LoadDeclined",
    "LoadFailed",
    "LoadLanded",
    "LoadPromised",
    "LoadStarted",
    "LookupAnswered",
    "LookupExpired",
    "LookupFailed",
    "LookupSkipped",
    "LookupStarted",
    "MemoryQuarantined",
    "MemoryReleased",
    "NullObserver",
    "Observer",
    "SaveCopied",
    "SaveDropped",
    "SaveStarted",
    "SaveStored",
    "SessionClosed",
    "SessionOpened",
    "StoreOpened",
    "StoreUnavailable",
    "WindowFetched",
    "WindowPlaced",
    "as_dict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact; ``t`` is when it was noticed."""

    name: ClassVar[str] = "akv.event"
    t: float = field(default_factory=time.monotonic)


class Observer(Protocol):
    """Takes events. Called from any thread; must not block and not raise."""

    def on(self, event: Event) -> None:
        """Take note of ``event``."""
        ...


class NullObserver:
    """An observer that nobody listens behind."""

    def on(self, event: Event) -> None:
        """Do nothing."""


def as_dict(event: Event) -> dict[str, object]:
    """``event`` as plain JSON values, its name under ``event``."""
    values: dict[str, object] = {"event": event.name}
    for item in fields(event):
        values[item.name] = getattr(event, item.name)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened(Event):
    """A store is open; ``bytes_capacity`` is 0 where it has no limit."""

    name: ClassVar[str] = "akv.store.opened"
    url: str
    objects: int
    bytes_capacity: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnavailable(Event):
    """The store cannot be used; until it can, lookups miss, saves are dropped."""

    name: ClassVar[str] = "akv.store.unavailable"
    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOpened(Event):
    """The store is left alone: lookups find nothing, saves are dropped."""

    name: ClassVar[str] = "akv.breaker.opened"
    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerClosed(Event):
    """The store is back, after ``seconds``."""

    name: ClassVar[str] = "akv.breaker.closed"
    url: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Event):
    """A session takes work. ``staging_bytes`` is 0 where it moves no blocks."""

    name: ClassVar[str] = "akv.session.opened"
    role: str
    store: str
    staging_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed(Event):
    """A session is closed; ``hung_calls`` native calls had not come back."""

    name: ClassVar[str] = "akv.session.closed"
    role: str
    seconds: float
    hung_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStarted(Event):
    """The store is asked for ``blocks`` blocks from ``first_block`` on."""

    name: ClassVar[str] = "akv.lookup.started"
    request_id: str
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupAnswered(Event):
    """``found`` of the blocks asked for are there, without a gap."""

    name: ClassVar[str] = "akv.lookup.answered"
    request_id: str
    first_block: int
    found: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupExpired(Event):
    """The lookup's deadline passed; the engine goes on with what is known."""

    name: ClassVar[str] = "akv.lookup.expired"
    request_id: str
    found: int
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed(Event):
    """The store could not answer; what was not answered counts as a miss."""

    name: ClassVar[str] = "akv.lookup.failed"
    request_id: str
    found: int
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSkipped(Event):
    """The store was not asked, and why."""

    name: ClassVar[str] = "akv.lookup.skipped"
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPromised(Event):
    """The engine was promised tokens ``[local, usable)``."""

    name: ClassVar[str] = "akv.load.promised"
    request_id: str
    num_tokens: int
    local: int
    hit: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDeclined(Event):
    """Nothing was promised, and why."""

    name: ClassVar[str] = "akv.load.declined"
    request_id: str
    num_tokens: int
    local: int
    hit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted(Event):
    """A load has become a task."""

    name: ClassVar[str] = "akv.load.started"
    request_id: str
    load_id: int
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFetched(Event):
    """A window is in staging, but for ``failed`` objects.

    ``wait_seconds`` were spent on waiting for staging, ``seconds`` in the store.
    """

    name: ClassVar[str] = "akv.load.window_fetched"
    request_id: str
    load_id: int
    window: int
    objects: int
    bytes: int
    failed: int
    wait_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlaced(Event):
    """A window has been copied into the engine's blocks."""

    name: ClassVar[str] = "akv.load.window_placed"
    request_id: str
    load_id: int
    window: int
    objects: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLanded(Event):
    """Every object of a load is in the engine's blocks."""

    name: ClassVar[str] = "akv.load.landed"
    request_id: str
    load_id: int
    objects: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed(Event):
    """``failed`` of a load's objects did not land; the engine computes them."""

    name: ClassVar[str] = "akv.load.failed"
    request_id: str
    load_id: int
    objects: int
    failed: int
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCancelled(Event):
    """A load ended because its request did."""

    name: ClassVar[str] = "akv.load.cancelled"
    request_id: str
    load_id: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A save has become a task."""

    name: ClassVar[str] = "akv.save.started"
    request_id: str
    job_id: int
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCopied(Event):
    """The engine's blocks are no longer needed for this save."""

    name: ClassVar[str] = "akv.save.copied"
    request_id: str
    job_id: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStored(Event):
    """A save has ended: ``stored`` are new, ``existed`` were there already."""

    name: ClassVar[str] = "akv.save.stored"
    request_id: str
    job_id: int
    stored: int
    existed: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDropped(Event):
    """``objects`` will not be saved, and nothing behind them either."""

    name: ClassVar[str] = "akv.save.dropped"
    request_id: str
    objects: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuarantined(Event):
    """A native call outlived its wait; its memory stays out of use till then."""

    name: ClassVar[str] = "akv.memory.quarantined"
    bytes: int
    total_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReleased(Event):
    """Memory came back from quarantine, as its call has ended."""

    name: ClassVar[str] = "akv.memory.released"
    bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset(Event):
    """Everything saved before is unreachable; ``generation`` is the new one."""

    name: ClassVar[str] = "akv.cache.reset"
    namespace: str
    generation: int
