"""When each slot was last of use: eviction order and lookup promises in one.

A tick is the wall-clock millisecond until which a slot is wanted: a get or a
put sets it to now, a promise to now plus the lease. So the smallest tick is
the oldest use, and whatever lies in the future must not be evicted. The
array is in the slab, shared by all processes and written without a lock:
ticks are hints, the index alone says what a slot holds, and a tick that was
lost or written late costs a cache miss, never a wrong byte.
"""

from __future__ import annotations

import time
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ("LONGEST_LEASE", "Slots", "Ticks", "now_ms")

Slots: TypeAlias = npt.NDArray[np.int64] | list[int]
"""Slot numbers; an array where there are many."""

LONGEST_LEASE = 300.0
"""Seconds. A tick further ahead was written before the clock was set back."""


def now_ms() -> int:
    """The wall clock, because a store on a disk outlives a boot."""
    return time.time_ns() // 1_000_000


class Ticks:
    """The ticks of all slots; ``values`` is a view that the slab owns."""

    def __init__(self, values: npt.NDArray[np.uint64]) -> None:
        self._values = values

    def use(self, slots: Slots) -> None:
        """Say that ``slots`` were of use now; what is promised stays so."""
        now = now_ms()
        wanted = np.maximum(self._values[slots], np.uint64(now))
        # A tick from before the clock was set back must not live on.
        wanted[wanted > _horizon(now)] = now
        self._values[slots] = wanted

    def promise(self, slots: Slots, until: int) -> None:
        """Keep ``slots`` from eviction until then, in ms of :func:`now_ms`."""
        self._values[slots] = until

    def start(self, slots: Slots) -> None:
        """Forget the slots' past: they hold new objects."""
        self._values[slots] = now_ms()

    def oldest(self, busy: list[int], count: int) -> list[int]:
        """Up to ``count`` evictable slots, oldest first.

        ``busy`` are slots that hold no object that could be evicted.
        """
        now = now_ms()
        ticks = self._values.copy()
        ticks[ticks > _horizon(now)] = 0
        ticks[np.asarray(busy, dtype=np.int64)] = np.iinfo(np.uint64).max
        candidates = np.flatnonzero(ticks <= np.uint64(now))
        if len(candidates) > count:
            nearest = np.argpartition(ticks[candidates], count - 1)[:count]
            candidates = candidates[nearest]
        order = np.argsort(ticks[candidates], kind="stable")
        return [int(slot) for slot in candidates[order]]


def _horizon(now: int) -> np.uint64:
    return np.uint64(now + int(LONGEST_LEASE * 1000))
