"""When to leave a store alone, and when to try it again.

Closed: every call is made. Open: no call is made, and nobody waits. Half
open: one call is made to see whether the store is back. Pure: whoever calls
the store tells what came of it and when, and asks before the next call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ("BreakerState", "Closed", "HalfOpen", "Open", "failed", "probe", "succeeded")


@dataclass(frozen=True, slots=True)
class Closed:
    """The store works; ``failures`` calls in a row did not."""

    failures: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """The store is left alone until ``retry_at`` (seconds, monotonic)."""

    retry_at: float


@dataclass(frozen=True, slots=True)
class HalfOpen:
    """One call is under way to see whether the store is back."""


BreakerState: TypeAlias = Closed | Open | HalfOpen


def failed(
    state: BreakerState, now: float, *, threshold: int, interval: float
) -> BreakerState:
    """The state after a call failed, or did not come back in time."""
    match state:
        case Closed(failures) if failures + 1 < threshold:
            return Closed(failures + 1)
        case Open():
            return state
        case _:
            return Open(now + interval)


def succeeded(state: BreakerState) -> BreakerState:
    """The state after a call came back well.

    A late answer to a call from before the store was left alone does not
    close it: only the probe does.
    """
    match state:
        case Open():
            return state
        case _:
            return Closed()


def probe(state: BreakerState, now: float) -> BreakerState:
    """Half open if it is time to see whether the store is back."""
    match state:
        case Open(retry_at) if now >= retry_at:
            return HalfOpen()
        case _:
            return state
