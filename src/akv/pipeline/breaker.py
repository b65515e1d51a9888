"""A breaker that probes by itself, so that no request has to be the probe.

Lives on the loop. Opened by calls that fail or do not come back in time; from
then on a task of the session asks the store once an interval whether it is
there, in a thread of its own, and closes the breaker when it is. One event
for each change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from akv.core.breaker import (
    BreakerState,
    Closed,
    HalfOpen,
    Open,
    failed,
    probe,
    succeeded,
)
from akv.core.events import BreakerClosed, BreakerOpened, Observer
from akv.store.base import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.pipeline.native import NativePool
    from akv.store.base import Outcome

__all__ = ("Breaker",)

THRESHOLD = 3
"""Failures in a row that open the breaker."""

INTERVAL = 2.0
"""Seconds between two probes of a store that is left alone."""


class Breaker:
    """Tells whether a store may be called."""

    def __init__(
        self,
        *,
        url: str,
        observer: Observer,
        threshold: int = THRESHOLD,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._observer = observer
        self._threshold = threshold
        self._interval = interval
        self._clock = clock
        self._state: BreakerState = Closed()
        self._opened_at = 0.0
        self._opened = anyio.Event()
        self._closed = anyio.Event()
        self._closed.set()

    def __repr__(self) -> str:
        return f"<Breaker {self._state}>"

    @property
    def closed(self) -> bool:
        """Whether the store may be called."""
        return isinstance(self._state, Closed)

    def failure(self, reason: str) -> None:
        """A call failed, or did not come back in time."""
        now = self._clock()
        was_closed = self.closed
        self._state = failed(
            self._state, now, threshold=self._threshold, interval=self._interval
        )
        if was_closed and not self.closed:
            self._opened_at = now
            self._closed = anyio.Event()
            self._opened.set()
            self._observer.on(BreakerOpened(url=self._url, reason=reason))

    def trip(self, reason: str) -> None:
        """Open at once, whatever went before."""
        for _ in range(self._threshold):
            self.failure(reason)

    def success(self) -> None:
        """A call came back well."""
        was_probe = isinstance(self._state, HalfOpen)
        self._state = succeeded(self._state)
        if was_probe:
            self._closed.set()
            self._observer.on(
                BreakerClosed(url=self._url, seconds=self._clock() - self._opened_at)
            )

    def heard(self, outcomes: Sequence[Outcome]) -> None:
        """A call came back with these; it failed if each of them did."""
        first = outcomes[0] if outcomes else None
        if isinstance(first, Failure) and all(
            isinstance(outcome, Failure) for outcome in outcomes
        ):
            self.failure(first.reason)
        else:
            self.success()

    async def wait_closed(self) -> None:
        """Wait until the store may be called. Cancellation: stops waiting."""
        while not self.closed:
            await self._closed.wait()

    async def watch(self, ask: Callable[[], object], pool: NativePool) -> None:
        """Probe with ``ask`` in ``pool`` whenever the breaker is open, for ever.

        A probe that does not come back keeps the breaker open; no second one
        is begun beside it. Cancellation: a probe under way ends unwatched.
        """
        while True:
            await self._opened.wait()
            self._opened = anyio.Event()
            while isinstance(self._state, Open):
                await anyio.sleep(max(0.0, self._state.retry_at - self._clock()))
                self._state = probe(self._state, self._clock())
                if not isinstance(self._state, HalfOpen):
                    continue
                try:
                    await pool.run(ask)
                except Exception as error:  # noqa: BLE001
                    self.failure(str(error))
                else:
                    self.success()
