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
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = (
    "READING_OFF",
    "BreakerClosed",
    "BreakerOpened",
    "CacheReset",
    "Event",
    "KeySpaceUsed",
    "LoadCancelled",
    "LoadDeclined",
    "LoadFailed",
    "LoadJoined",
    "LoadLanded",
    "LoadPromised",
    "LoadStarted",
    "LookupAnswered",
    "LookupCancelled",
    "LookupExpired",
    "LookupFailed",
    "LookupSkipped",
    "LookupStarted",
    "MemoryQuarantined",
    "MemoryReleased",
    "NullObserver",
    "Observer",
    "QuarantineFull",
    "SaveCancelled",
    "SaveCopied",
    "SaveDropped",
    "SaveStarted",
    "SaveStored",
    "SavesResumed",
    "SavesShed",
    "SessionClosed",
    "SessionOpened",
    "StoreOpened",
    "StoreUnavailable",
    "WindowFetched",
    "WindowPlaced",
    "as_dict",
    "from_dict",
)

READING_OFF = "reading is off for this request"
"""Why nothing was promised to a request that may not read the cache.

Such a request is no miss, and is left out of every hit ratio.
"""


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


def from_dict(values: Mapping[str, Any]) -> Event | None:
    """The event that :func:`as_dict` made ``values`` of; None for a stranger.

    What the event does not have is left out, and what came to it later has its
    default, so that logs of other versions can be read.
    """
    kind = _kinds().get(str(values.get("event")))
    if kind is None:
        return None
    names = {item.name for item in fields(kind)}
    try:
        return kind(**{key: values[key] for key in names & values.keys()})
    except TypeError:
        return None


@cache
def _kinds() -> dict[str, type[Event]]:
    return {kind.name: kind for kind in Event.__subclasses__()}


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
    """A session takes work. ``staging_bytes`` is 0 where it moves no blocks.

    ``block_tokens`` are the tokens of a block; ``unix_seconds`` is the time of day
    at ``t``, by which logs of several machines are laid side by side.
    """

    name: ClassVar[str] = "akv.session.opened"
    role: str
    store: str
    staging_bytes: int
    block_tokens: int = 0
    unix_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed(Event):
    """A session is closed; ``hung_calls`` native calls had not come back."""

    name: ClassVar[str] = "akv.session.closed"
    role: str
    seconds: float
    hung_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpaceUsed(Event):
    """From now on keys are made in this key space.

    Two deployments find each other's blocks only if all of it is the same.
    ``space`` is its short name, by which lookups and saves refer to it.
    """

    name: ClassVar[str] = "akv.key_space.used"
    namespace: str
    fingerprint: str
    generation: int
    epoch: str
    space: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStarted(Event):
    """The store is asked for ``blocks`` blocks from ``first_block`` on.

    ``space`` is the short name of the key space in which it is asked.
    """

    name: ClassVar[str] = "akv.lookup.started"
    request_id: str
    first_block: int
    blocks: int
    space: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupAnswered(Event):
    """``found`` of the blocks asked for are there, without a gap.

    ``missed`` is the short name of the first block that is not.
    """

    name: ClassVar[str] = "akv.lookup.answered"
    request_id: str
    first_block: int
    found: int
    seconds: float
    missed: str = ""


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
class LookupCancelled(Event):
    """A lookup ended because nobody waits for it any longer."""

    name: ClassVar[str] = "akv.lookup.cancelled"
    request_id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSkipped(Event):
    """The store was not asked, and why."""

    name: ClassVar[str] = "akv.lookup.skipped"
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPromised(Event):
    """The engine was promised tokens ``[local, usable)``.

    ``land_seconds`` is when the ``bytes``, with ``queued_bytes`` of other loads
    before them, were expected to land, and ``compute_seconds`` when the engine
    would have computed as much; null where that is not known. ``reason`` says why
    it was not all that was found, or why in spite of the numbers.
    """

    name: ClassVar[str] = "akv.load.promised"
    request_id: str
    num_tokens: int
    local: int
    hit: int
    usable: int
    load_id: int = 0
    bytes: int = 0
    queued_bytes: int = 0
    land_seconds: float | None = None
    compute_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDeclined(Event):
    """Nothing was promised, and why.

    The seconds are those of :class:`LoadPromised`, where they were the reason.
    """

    name: ClassVar[str] = "akv.load.declined"
    request_id: str
    num_tokens: int
    local: int
    hit: int
    reason: str
    bytes: int = 0
    queued_bytes: int = 0
    land_seconds: float | None = None
    compute_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJoined(Event):
    """A request waits for the load of another one, ``leader``.

    That load, ``load_id``, brings tokens ``[local, usable)`` of this one, too.
    """

    name: ClassVar[str] = "akv.load.joined"
    request_id: str
    leader: str
    load_id: int
    local: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted(Event):
    """A load has become a task, with so many seconds to land."""

    name: ClassVar[str] = "akv.load.started"
    request_id: str
    load_id: int
    objects: int
    bytes: int
    deadline: float = 0.0


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
    shared: bool
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
    """A save has become a task.

    ``block`` is the short name of its first block, ``space`` that of the key space.
    """

    name: ClassVar[str] = "akv.save.started"
    request_id: str
    job_id: int
    objects: int
    bytes: int
    space: str = ""
    block: str = ""


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
    """``objects`` will not be saved, and nothing behind them either.

    ``block`` is the short name of the first one; ``job_id`` is 0 where the drop
    came before there was a job.
    """

    name: ClassVar[str] = "akv.save.dropped"
    request_id: str
    objects: int
    reason: str
    job_id: int = 0
    block: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCancelled(Event):
    """A save ended in the middle, as its session closes or nobody wants it."""

    name: ClassVar[str] = "akv.save.cancelled"
    request_id: str
    job_id: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesShed(Event):
    """The store is slow or full: saves are dropped but for a trickle that tries it."""

    name: ClassVar[str] = "akv.saves.shed"
    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesResumed(Event):
    """A try went well, after ``seconds``: saves begin again as they come."""

    name: ClassVar[str] = "akv.saves.resumed"
    url: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuarantined(Event):
    """A native call outlived its wait; its memory stays out of use till then."""

    name: ClassVar[str] = "akv.memory.quarantined"
    bytes: int
    total_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineFull(Event):
    """As much memory is in quarantine as may be: nothing moves till calls end."""

    name: ClassVar[str] = "akv.memory.quarantine_full"
    bytes: int
    limit_bytes: int


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
