"""What happened to each request, put together from the records of all processes.

A request id may come back: in another run that wrote to the same log, or after a
preemption. Each scheduler's process that knows the id gives one :class:`Story`;
what the worker's process did is told in the story that was going on.
Pure.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from akv.core.events import (
    READING_OFF,
    BreakerClosed,
    BreakerOpened,
    KeySpaceUsed,
    LoadCancelled,
    LoadDeclined,
    LoadFailed,
    LoadJoined,
    LoadLanded,
    LoadPromised,
    LoadStarted,
    LookupAnswered,
    LookupCancelled,
    LookupExpired,
    LookupFailed,
    LookupSkipped,
    LookupStarted,
    SaveCancelled,
    SaveCopied,
    SaveDropped,
    SaveStarted,
    SaveStored,
    SessionOpened,
    StoreUnavailable,
    WindowFetched,
    WindowPlaced,
)
from akv.trace.reading import LogError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from akv.trace.reading import Log, Record

__all__ = (
    "Background",
    "Drop",
    "Load",
    "Lookup",
    "Save",
    "Stories",
    "Story",
    "covered",
    "tell",
)


@dataclass(slots=True)
class Lookup:
    """One question to the store; times in seconds, ``asked`` and so on in blocks."""

    started: float
    pid: int
    first_block: int = 0
    asked: int = 0
    space: str = ""
    found: int = 0
    ended: float | None = None
    seconds: float = 0.0
    outcome: str = "not answered"
    """``answered``, ``expired``, ``failed``, ``skipped``, ``cancelled`` or
    ``not answered``."""
    reason: str = ""
    deadline: float = 0.0
    missed: str = ""


@dataclass(slots=True)
class Load:
    """One load; ``fetched`` and ``placed`` are the events of its windows."""

    started: float
    pid: int
    load_id: int
    objects: int = 0
    bytes: int = 0
    deadline: float = 0.0
    ended: float | None = None
    seconds: float = 0.0
    outcome: str = "under way"
    """``landed``, ``failed``, ``cancelled`` or ``under way``."""
    reason: str = ""
    failed: int = 0
    fetched: list[tuple[float, WindowFetched]] = field(default_factory=list)
    placed: list[tuple[float, WindowPlaced]] = field(default_factory=list)

    @property
    def wait(self) -> float:
        """Seconds in which a window waited for staging."""
        starts = [(at - event.seconds, event) for at, event in self.fetched]
        return covered([(at - event.wait_seconds, at) for at, event in starts])

    @property
    def fetch(self) -> float:
        """Seconds in which a window was on its way from the store."""
        return covered([(at - event.seconds, at) for at, event in self.fetched])

    @property
    def place(self) -> float:
        """Seconds in which a window was copied into the engine's blocks."""
        return covered([(at - event.seconds, at) for at, event in self.placed])

    @property
    def landed(self) -> int:
        """Objects that are in the engine's blocks and may be used."""
        return 0 if self.outcome == "cancelled" else self.objects - self.failed


@dataclass(slots=True)
class Save:
    """One save."""

    started: float
    pid: int
    job_id: int
    request_id: str
    objects: int = 0
    bytes: int = 0
    space: str = ""
    block: str = ""
    copied: float | None = None
    ended: float | None = None
    seconds: float = 0.0
    stored: int = 0
    existed: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Blocks that were not saved."""

    at: float
    request_id: str
    objects: int
    reason: str
    job_id: int
    block: str


@dataclass(slots=True)
class Story:
    """One life of a request; token numbers are None where no role decided."""

    request_id: str
    pid: int
    began: float
    ended: float
    space: str = ""
    promised: LoadPromised | None = None
    declined: LoadDeclined | None = None
    joined: list[LoadJoined] = field(default_factory=list)
    """Loads of other requests that it waited for."""
    lookups: list[Lookup] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    decisions: list[Record] = field(default_factory=list)
    """Promises, refusals and waits for others, in order."""

    @property
    def lookup_seconds(self) -> float:
        """From the first question to the last answer, the store's part only."""
        return sum(lookup.seconds for lookup in self.lookups)

    @property
    def load_seconds(self) -> float:
        """In loads, from their start to their end."""
        return sum(load.seconds for load in self.loads)

    @property
    def promised_tokens(self) -> int:
        """Tokens that the engine was promised."""
        promised = self.promised
        return 0 if promised is None else promised.usable - promised.local

    @property
    def counts(self) -> bool:
        """Whether a scheduler decided, and the request is one of a hit ratio."""
        declined = self.declined
        if declined is None:
            return self.promised is not None
        return declined.reason != READING_OFF

    def rounded(self, block_tokens: int) -> tuple[int, int]:
        """Tokens that were found and not promised: rounded off, and left as not
        worth loading; both 0 where the log does not tell.
        """
        promised = self.promised
        if promised is None or not block_tokens:
            return 0, 0
        whole = min(promised.hit, promised.num_tokens - 1)
        whole = whole // block_tokens * block_tokens
        return promised.hit - whole, max(0, whole - promised.usable)


@dataclass(slots=True)
class Background:
    """What is true of processes and not of one request."""

    sessions: dict[int, SessionOpened] = field(default_factory=dict)
    """The newest session of each process."""
    spaces: dict[str, KeySpaceUsed] = field(default_factory=dict)
    """Key spaces by their short names."""
    outages: list[Record] = field(default_factory=list)
    """When the store was left alone, and why; and when it came back."""
    saves: dict[str, list[Save]] = field(default_factory=dict)
    """Saves by the short name of their first block."""
    saved_spaces: dict[str, float] = field(default_factory=dict)
    """When something was first saved in each key space."""
    drops: dict[str, list[Drop]] = field(default_factory=dict)
    """Dropped saves by the short name of the first block that was dropped."""

    def block_tokens(self, pid: int) -> int:
        """Tokens of a block, 0 where the log does not tell."""
        session = self.sessions.get(pid)
        known = [one.block_tokens for one in self.sessions.values()]
        return session.block_tokens if session else max(known, default=0)

    def outage_at(self, at: float, pid: int) -> Record | None:
        """The outage that a process was in at a time."""
        last: Record | None = None
        for record in self.outages:
            if record.at > at:
                break
            if record.pid == pid:
                last = None if isinstance(record.event, BreakerClosed) else record
        return last


@dataclass(slots=True)
class Stories:
    """All stories of a log, oldest first."""

    all: list[Story]
    background: Background

    def of(self, request_id: str) -> list[Story]:
        """The stories of one request, by its id or the beginning of it.

        vLLM makes its ids longer than those that its clients see.

        :raises LogError: there is none, or several begin so; with the nearest names
        """
        ids = {story.request_id: None for story in self.all}
        if request_id not in ids:
            begin = [one for one in ids if one.startswith(request_id)]
            if len(begin) != 1 or not request_id:
                raise LogError(_no_request(request_id, list(ids), begin))
            request_id = begin[0]
        return [story for story in self.all if story.request_id == request_id]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of these spans lies."""
    seconds, end = 0.0, -math.inf
    for first, last in sorted(spans):
        seconds += max(0.0, last - max(first, end))
        end = max(end, last)
    return seconds


def tell(log: Log) -> Stories:
    """Put the records of a log together."""
    teller = _Teller()
    for record in log.records:
        teller.take(record)
    stories = sorted(teller.stories, key=lambda story: story.began)
    return Stories(all=stories, background=teller.background)


class _Teller:
    """Takes records in the order of time."""

    def __init__(self) -> None:
        self.stories: list[Story] = []
        self.background = Background()
        self._current: dict[str, Story] = {}
        self._loads: dict[tuple[int, str, int], Load] = {}
        self._saves: dict[tuple[int, int], Save] = {}

    def take(self, record: Record) -> None:
        """Add one record to the story that it belongs to."""
        event = record.event
        match event:
            case SessionOpened():
                self.background.sessions[record.pid] = event
            case KeySpaceUsed():
                self.background.spaces[event.space] = event
            case BreakerOpened() | BreakerClosed() | StoreUnavailable():
                self.background.outages.append(record)
            case (
                LookupStarted()
                | LookupAnswered()
                | LookupExpired()
                | LookupFailed()
                | LookupCancelled()
            ):
                self._lookup(record, event)
            case LookupSkipped():
                lookup = Lookup(record.at, record.pid, ended=record.at)
                lookup.outcome, lookup.reason = "skipped", event.reason
                self._story(record, event.request_id).lookups.append(lookup)
            case LoadPromised():
                story = self._story(record, event.request_id)
                story.promised, story.declined = event, None
                story.decisions.append(record)
            case LoadDeclined():
                story = self._story(record, event.request_id)
                story.declined = event
                story.decisions.append(record)
            case LoadJoined():
                story = self._story(record, event.request_id)
                story.joined.append(event)
                story.decisions.append(record)
            case (
                LoadStarted()
                | WindowFetched()
                | WindowPlaced()
                | LoadLanded()
                | LoadFailed()
                | LoadCancelled()
            ):
                self._load(record, event)
            case (
                SaveStarted()
                | SaveCopied()
                | SaveStored()
                | SaveDropped()
                | SaveCancelled()
            ):
                self._save(record, event)
            case _:
                pass

    def _story(self, record: Record, request_id: str, *, decides: bool = True) -> Story:
        """The story that goes on; another process that decides begins a new one."""
        story = self._current.get(request_id)
        if story is None or (decides and story.pid not in (0, record.pid)):
            story = Story(request_id, 0, record.at, record.at)
            self._current[request_id] = story
            self.stories.append(story)
        if decides:
            story.pid = record.pid
        story.ended = max(story.ended, record.at)
        return story

    def _lookup(
        self,
        record: Record,
        event: LookupStarted
        | LookupAnswered
        | LookupExpired
        | LookupFailed
        | LookupCancelled,
    ) -> None:
        story = self._story(record, event.request_id)
        if isinstance(event, LookupStarted):
            lookup = Lookup(record.at, record.pid, event.first_block, event.blocks)
            lookup.space = event.space
            story.space = event.space or story.space
            story.lookups.append(lookup)
            return
        open_ones = [one for one in story.lookups if one.ended is None]
        if not open_ones:
            return  # Its beginning is in a file that is gone.
        lookup = open_ones[0]
        lookup.ended = record.at
        lookup.seconds = record.at - lookup.started
        match event:
            case LookupAnswered():
                lookup.outcome, lookup.missed = "answered", event.missed
                lookup.found, lookup.seconds = event.found, event.seconds
            case LookupExpired():
                lookup.outcome, lookup.deadline = "expired", event.deadline
                lookup.found = event.found
            case LookupFailed():
                lookup.outcome, lookup.reason = "failed", event.reason
                lookup.found = event.found
            case LookupCancelled():
                lookup.outcome = "cancelled"

    def _load(
        self,
        record: Record,
        event: LoadStarted
        | WindowFetched
        | WindowPlaced
        | LoadLanded
        | LoadFailed
        | LoadCancelled,
    ) -> None:
        place = (record.pid, event.request_id, event.load_id)
        story = self._story(record, event.request_id, decides=False)
        if isinstance(event, LoadStarted):
            load = Load(record.at, record.pid, event.load_id, event.objects)
            load.bytes, load.deadline = event.bytes, event.deadline
            self._loads[place] = load
            story.loads.append(load)
            return
        found = self._loads.get(place)
        if found is None:
            return
        match event:
            case WindowFetched():
                found.fetched.append((record.at, event))
                return
            case WindowPlaced():
                found.placed.append((record.at, event))
                return
            case LoadLanded():
                found.outcome = "landed"
            case LoadFailed():
                found.outcome = "failed"
                found.failed, found.reason = event.failed, event.reason
            case LoadCancelled():
                found.outcome = "cancelled"
        found.ended, found.seconds = record.at, event.seconds
        del self._loads[place]

    def _save(
        self,
        record: Record,
        event: SaveStarted | SaveCopied | SaveStored | SaveDropped | SaveCancelled,
    ) -> None:
        story = self._story(record, event.request_id, decides=False)
        match event:
            case SaveStarted():
                save = Save(
                    record.at,
                    record.pid,
                    event.job_id,
                    event.request_id,
                    event.objects,
                    event.bytes,
                    event.space,
                    event.block,
                )
                self._saves[record.pid, event.job_id] = save
                story.saves.append(save)
                if event.space:
                    self.background.saved_spaces.setdefault(event.space, record.at)
                if event.block:
                    self.background.saves.setdefault(event.block, []).append(save)
            case SaveCopied():
                found = self._saves.get((record.pid, event.job_id))
                if found is not None:
                    found.copied = record.at
            case SaveStored():
                found = self._saves.pop((record.pid, event.job_id), None)
                if found is not None:
                    found.ended, found.seconds = record.at, event.seconds
                    found.stored, found.existed = event.stored, event.existed
            case SaveCancelled():
                found = self._saves.pop((record.pid, event.job_id), None)
                if found is not None:
                    found.ended, found.seconds = record.at, event.seconds
            case SaveDropped():
                drop = Drop(
                    record.at,
                    event.request_id,
                    event.objects,
                    event.reason,
                    event.job_id,
                    event.block,
                )
                story.drops.append(drop)
                found = self._saves.get((record.pid, event.job_id))
                if found is not None and found.ended is None:
                    found.ended = record.at
                if event.block:
                    self.background.drops.setdefault(event.block, []).append(drop)


def _no_request(wanted: str, ids: list[str], begin: Iterable[str]) -> str:
    begin = list(begin)
    if not ids:
        return f"no request {wanted!r}: the log has no request at all"
    inside = [one for one in ids if wanted and wanted in one]
    near = begin or inside or difflib.get_close_matches(wanted, ids, n=5, cutoff=0.4)
    if near:
        shown = ", ".join(near[:5])
        verb = "begin so" if begin else "are near it"
        more = f", and {len(near) - 5} more" if len(near) > 5 else ""
        return f"no request {wanted!r} among {len(ids)}; {verb}: {shown}{more}"
    return f"no request {wanted!r} among {len(ids)}; the last one is {ids[-1]}"
