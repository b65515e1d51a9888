"""The rule of ``akv.core.shed`` with a clock, a stopwatch and its events.

Lives on the loop. Puts are timed in their own threads, without their wait for
one, and one that has not ended is looked at whenever a save wants to begin.
One event for each change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from akv.core.events import Observer, SavesResumed, SavesShed
from akv.core.shed import (
    Flowing,
    Marks,
    Shedding,
    ShedState,
    admitted,
    may_begin,
    refused,
    running,
    stored,
)
from akv.store.base import Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.pipeline.native import Call

__all__ = ("Shedder", "Stopwatch")

T = TypeVar("T")


class Stopwatch:
    """Times one call, about ``nbytes`` bytes, in the thread that makes it.

    ``began`` is None until then.
    """

    def __init__(
        self, nbytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.nbytes = nbytes
        self.began: float | None = None
        self.seconds = 0.0
        self._clock = clock

    def time(self, function: Callable[[], T]) -> T:
        """Call ``function``; in the thread that makes the call."""
        self.began = self._clock()
        try:
            return function()
        finally:
            self.seconds = self._clock() - self.began


class Shedder:
    """Tells whether a window may be saved now.

    :param on_shed: called when saves begin to be shed, for those that wait
    """

    def __init__(
        self,
        *,
        url: str,
        observer: Observer,
        on_shed: Callable[[], None],
        marks: Marks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._observer = observer
        self._on_shed = on_shed
        self._clock = clock
        self._state: ShedState = Flowing()
        self._running: set[Stopwatch] = set()
        self.marks = marks or Marks()

    def __repr__(self) -> str:
        return f"<Shedder {self._state}>"

    def shedding(self) -> str:
        """Why saves are shed; empty while they are not."""
        state = self._state
        return f"saves are shed: {state.reason}" if isinstance(state, Shedding) else ""

    def refusal(self) -> str:
        """Why no save may begin now; empty if one may, perhaps as a try."""
        now = self._clock()
        for watch in self._running:
            if watch.began is not None:
                self._now(
                    running(
                        self._state,
                        now,
                        nbytes=watch.nbytes,
                        seconds=now - watch.began,
                        marks=self.marks,
                    ),
                    now,
                )
        return "" if may_begin(self._state, now) else self.shedding()

    def admit(self) -> str:
        """As :meth:`refusal`; where it is empty, one window is let through."""
        reason = self.refusal()
        if not reason:
            self._state = admitted(self._state, self._clock())
        return reason

    def stopwatch(self, nbytes: int) -> Stopwatch:
        """For a put of ``nbytes`` that is about to be submitted."""
        return Stopwatch(nbytes, self._clock)

    def watch(self, watch: Stopwatch, call: Call[Any]) -> None:
        """Look at ``watch`` until ``call`` has ended."""
        self._running.add(watch)
        call.on_end(lambda: self._running.discard(watch))

    def heard(self, watch: Stopwatch, outcomes: Sequence[Outcome]) -> None:
        """A put came back with these, and a stored one says that it moved bytes."""
        now = self._clock()
        count = outcomes.count(Status.STORED)
        if count:
            state = stored(
                self._state,
                now,
                nbytes=max(1, watch.nbytes * count // len(outcomes)),
                seconds=watch.seconds,
                marks=self.marks,
            )
            self._now(state, now)
        elif Status.NO_ROOM in outcomes:
            self._now(refused(self._state, now, marks=self.marks), now)

    def _now(self, state: ShedState, now: float) -> None:
        before, self._state = self._state, state
        match before, state:
            case Flowing(), Shedding():
                self._observer.on(SavesShed(url=self._url, reason=state.reason))
                self._on_shed()
            case Shedding(), Flowing():
                self._observer.on(
                    SavesResumed(url=self._url, seconds=now - before.since)
                )
            case _:
                pass
