"""Gets and puts, window by window, with one outcome for each key.

A get is good when as many bytes came as the buffer has, within the lease,
and the object is still there afterwards: then nobody can have written its
memory meanwhile, be it by an eviction, a removal by force or a master that
was restarted and gave the memory away. Anything else leaves the buffer
without meaning. Each get takes its own lease as it begins, so the age of a
promise does not matter. A put asks first what is there: Mooncake answers 0
for a key that exists, and for one whose writer has died half-way.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from akv.core.errors import StoreError, StoreUnavailableError
from akv.store.base import Failure, Outcome, Status
from akv.store.buffers import copy_in, copy_out
from akv.store.mooncake.codes import is_unreachable, outcome_of
from akv.store.mooncake.turns import Claims, Turns
from akv.store.mooncake.windows import CALLS_AT_ONCE, Part, Runs, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from akv.store.mooncake.client import Client
    from akv.store.mooncake.link import Link
    from akv.store.mooncake.memory import Memory

__all__ = ("Transfers",)

_NOT_READY = -703
_LEASE_EXPIRED = -707
_RETRIES = 4
_PAUSE = 0.005


class Transfers:
    """Moves the bytes of one store. Any thread."""

    def __init__(
        self,
        link: Link,
        memory: Memory,
        *,
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._memory = memory
        self._lease = lease
        self._clock = clock
        self._claims = Claims()
        self._gets = threading.BoundedSemaphore(CALLS_AT_ONCE)
        self._puts = threading.BoundedSemaphore(CALLS_AT_ONCE)
        self.turns = Turns()

    def get(self, parts: Sequence[Part]) -> dict[int, Outcome]:
        """Read into the parts' buffers; what became of each ``at``."""
        return self._each_window(parts, self._get_window)

    def put(self, parts: Sequence[Part]) -> dict[int, Outcome]:
        """Store the parts' buffers; keys differ. What became of each ``at``."""
        outcomes = self._each_window(parts, self._put_window)
        for attempt in range(_RETRIES):
            # Another process is at it, or has died at it: mostly the former.
            left = [part for part in parts if _is_unfinished(outcomes[part.at])]
            if not left:
                break
            time.sleep(_PAUSE * 2**attempt)
            outcomes |= self._each_window(left, self._put_window)
        return outcomes

    def _each_window(
        self,
        parts: Sequence[Part],
        move: Callable[[list[Part]], dict[int, Outcome]],
    ) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        rest = list(windows(parts, piece_bytes=self._memory.piece_bytes))
        while rest:
            window = rest.pop(0)
            came = move(window)
            outcomes |= came
            (outcome, *others) = came.values()
            if all(other == outcome for other in others) and _ends_the_call(outcome):
                for part in (part for window in rest for part in window):
                    outcomes[part.at] = outcome
                break
        return outcomes

    def _get_window(self, window: list[Part]) -> dict[int, Outcome]:
        with self._use(window, self._gets) as (client, places, views):
            keys = [part.key for part in window]
            started = self._clock()
            try:
                codes = client.get(keys, places)
            except StoreUnavailableError:
                raise
            except StoreError as error:
                return {part.at: Failure(str(error)) for part in window}
            seconds = self._clock() - started
            self._link.transferred(client, codes, seconds)
            outcomes = {
                part.at: self._judge(code, part.buffer.nbytes, seconds)
                for part, code in zip(window, codes, strict=True)
            }
            came = [part for part in window if outcomes[part.at] is Status.HIT]
            if not came:
                return outcomes
            still = client.exist([part.key for part in came])
            for part, code in zip(came, still, strict=True):
                if code != 1:
                    outcomes[part.at] = Status.MISS if code == 0 else outcome_of(code)
            for part, view in zip(window, views, strict=True):
                if view is not None and outcomes[part.at] is Status.HIT:
                    copy_in(part.buffer, view)
            return outcomes

    def _judge(self, code: int, size: int, seconds: float) -> Outcome:
        if code < 0:
            return outcome_of(code)
        if code != size:
            return Failure(f"the object has {code} bytes, its buffer {size}")
        if seconds > self._lease:
            reason = (
                f"the bytes came after {seconds:.1f} s, the lease is {self._lease} s"
            )
            return Failure(reason, _LEASE_EXPIRED)
        return Status.HIT

    def _put_window(self, window: list[Part]) -> dict[int, Outcome]:
        with self._claims.claim(part.key for part in window) as mine:
            outcomes = self._put_claimed([part for part in window if part.key in mine])
        others = [part for part in window if part.key not in mine]
        if others:
            self._claims.wait((part.key for part in others), self._lease)
            # By now they are there, or the other put has failed as this one may.
            with self._claims.claim(part.key for part in others) as mine:
                outcomes |= self._put_claimed([p for p in others if p.key in mine])
            for part in others:
                if part.key not in mine:
                    reason = "another put of this key has not ended"
                    outcomes[part.at] = Failure(reason, _NOT_READY)
        return outcomes

    def _put_claimed(self, window: list[Part]) -> dict[int, Outcome]:
        if not window:
            return {}
        with self._link.use() as client:
            found = client.look([part.key for part in window])
        outcomes: dict[int, Outcome] = {}
        absent: list[Part] = []
        for part, code in zip(window, found, strict=True):
            if code >= 0:
                outcomes[part.at] = Status.EXISTS
            elif code == _NOT_READY:
                reason = "somebody has begun to write it and has not ended"
                outcomes[part.at] = Failure(reason, code)
            elif outcome_of(code) is Status.MISS:
                absent.append(part)
            else:
                outcomes[part.at] = outcome_of(code)
        return outcomes | (self._put_absent(absent) if absent else {})

    def _put_absent(self, window: list[Part]) -> dict[int, Outcome]:
        with self._use(window, self._puts) as (client, places, views):
            for part, view in zip(window, views, strict=True):
                if view is not None:
                    copy_out(part.buffer, view)
            started = self._clock()
            try:
                codes = client.put([part.key for part in window], places)
            except StoreUnavailableError:
                raise
            except StoreError as error:
                return {part.at: Failure(str(error)) for part in window}
            self._link.transferred(client, codes, self._clock() - started)
            return {
                part.at: Status.STORED if code >= 0 else outcome_of(code)
                for part, code in zip(window, codes, strict=True)
            }

    @contextmanager
    def _use(
        self, window: list[Part], calls: threading.BoundedSemaphore
    ) -> Iterator[tuple[Client, list[Runs], list[memoryview | None]]]:
        """The client, and for each part its runs and its scratch, if it has any."""
        if not calls.acquire(timeout=self._lease):
            msg = f"{CALLS_AT_ONCE} calls have not ended within {self._lease} s"
            raise StoreError(msg)
        try:
            with self._link.use() as client, self.turns.transfer(self._lease):
                direct = [part.runs for part in window if part.runs is not None]
                if direct:
                    yield client, direct, [None] * len(window)
                    return
                with self._memory.piece(self._lease) as piece:
                    places: list[Runs] = []
                    views: list[memoryview | None] = []
                    offset = 0
                    for part in window:
                        end = offset + part.buffer.nbytes
                        places.append([(piece.address + offset, end - offset)])
                        views.append(piece.view[offset:end])
                        offset = end
                    yield client, places, views
        finally:
            calls.release()


def _is_unfinished(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.code == _NOT_READY


def _ends_the_call(outcome: Outcome) -> bool:
    """Whether the next window would fare no better than one that came to this."""
    if isinstance(outcome, Failure):
        return outcome.code is not None and is_unreachable(outcome.code)
    return outcome is Status.NO_ROOM
