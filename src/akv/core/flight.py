"""Single flight: who waits for whose load, so that no object is fetched twice.

Of requests that want the same blocks at once one loads them, and the others wait
for that load and for no other: each of its blocks is one that they would load
themselves. When it has landed the engine's own prefix cache has the blocks. When
it has failed or nobody wants it any more, one of those who waited makes its own
load, and the others wait for that one. Pure; one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.spec import LoadSpec

__all__ = ("Flight", "Flights", "Follower")

_MOST_FAILURES = 2
"""Loads of the same blocks that may fail before nobody tries another."""


@dataclass(slots=True, eq=False)
class Flight:
    """A load under way, for whoever may wait for it.

    :ivar failures: loads of its blocks that are known to have failed before it
    :ivar failed: some of its blocks did not land
    :ivar over: nobody can get anything from it any more
    """

    spec: LoadSpec
    failures: int = 0
    failed: bool = False
    over: bool = False


@dataclass(slots=True)
class Follower:
    """What a request that may wait remembers.

    :ivar flight: what it waits for, or has waited for last
    :ivar until: when it stops waiting for anybody; 0 before it has waited
    :ivar given_up: it loads nothing and waits for nobody
    """

    flight: Flight | None = None
    until: float = 0.0
    failures: int = 0
    given_up: bool = False


class Flights:
    """The loads under way of one engine, by the first block of each."""

    def __init__(self) -> None:
        self._by_first: dict[bytes, list[Flight]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def began(self, spec: LoadSpec, follower: Follower) -> Flight:
        """``spec`` is under way for a request that may have waited before."""
        flight = Flight(spec, follower.failures)
        self._by_first.setdefault(spec.spans[0].hashes[0], []).append(flight)
        return flight

    def ended(self, flight: Flight) -> None:
        """``flight`` has landed or failed, or nobody wants it. Twice is no error."""
        flight.over = True
        first = flight.spec.spans[0].hashes[0]
        others = [one for one in self._by_first.get(first, ()) if one is not flight]
        if others:
            self._by_first[first] = others
        else:
            self._by_first.pop(first, None)

    def clear(self) -> None:
        """Nobody waits for what is under way now."""
        for flights in self._by_first.values():
            for flight in flights:
                flight.over = True
        self._by_first.clear()

    def waits(
        self,
        follower: Follower,
        wanted: Sequence[bytes],
        first: int,
        last: int,
        *,
        now: float,
        patience: float,
    ) -> bool:
        """Whether a request that wants blocks ``[first, last)`` should wait.

        Then ``follower.flight`` says for what: the longest load that begins at
        block ``first`` and has none that is not wanted; once chosen, also when the
        request has come by some of its blocks meanwhile. After ``patience`` seconds
        of waiting, or when two loads in a row have failed, it gives up.

        :param wanted: the request's block hashes, from block 0 on
        """
        before = follower.flight
        if before is not None and before.failed:
            follower.failures = max(follower.failures, before.failures + 1)
            follower.given_up |= follower.failures >= _MOST_FAILURES
        best: Flight | None = None
        longest = 0
        if before is not None and not before.over:
            span = before.spec.spans[0]
            if first < span.first_block + len(span) <= last:
                best, longest = before, len(span)
        for flight in self._by_first.get(wanted[first], ()):
            count = len(flight.spec)
            if not longest < count <= last - first:
                continue
            # A hash stands for all blocks before it, so the last one tells.
            if wanted[first + count - 1] == flight.spec.spans[-1].hashes[-1]:
                best, longest = flight, count
        if best is None:
            return False
        follower.until = follower.until or now + patience
        follower.given_up |= now > follower.until
        if follower.given_up:
            return False
        follower.flight = best
        return True
