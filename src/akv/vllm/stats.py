"""akv's numbers in vLLM's terms: what the engine logs every few seconds.

``Counters`` is a sink that adds events up; ``AkvStats`` is what one interval
came to, passed from the worker to the scheduler and on to the logger. Names
that a reader does not know are added up like all others and never raise.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from akv.core.events import (
    Event,
    LoadCancelled,
    LoadFailed,
    LoadLanded,
    LoadPromised,
    LookupAnswered,
    LookupExpired,
    LookupFailed,
    SaveDropped,
    SaveStored,
)

__all__ = ("AkvPromMetrics", "AkvStats", "Counters")


class AkvStats(KVConnectorStats):
    """Sums of one interval: plain numbers by name, all of them additive."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> AkvStats:
        """Add the numbers of ``other``; strangers' are left out."""
        for name, value in other.data.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers, and the mean seconds of a load and of a lookup."""
        numbers: dict[str, int | float] = dict(sorted(self.data.items()))
        for kind, count in (
            ("load", "loads_landed"),
            ("lookup", "lookups_answered"),
            ("save", "saves"),
        ):
            seconds = numbers.pop(f"{kind}_seconds", 0.0)
            if numbers.get(count):
                numbers[f"{kind}_mean_ms"] = round(1000 * seconds / numbers[count], 3)
        return numbers

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class AkvPromMetrics(KVConnectorPromMetrics):
    """akv's place among vLLM's Prometheus handlers; it takes everything.

    Inside MultiConnector vLLM asserts, in the API server, that each child with
    statistics has a handler.
    """

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take note of nothing, whatever the numbers are."""


class Counters:
    """Adds events up between two calls of ``take``. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Any] = {}

    def take(self) -> AkvStats | None:
        """What came together since the last call, or None for nothing."""
        if not self._sums:
            return None
        with self._lock:
            sums, self._sums = self._sums, {}
        return AkvStats(data=sums)

    def on(self, event: Event) -> None:
        """Add ``event``."""
        match event:
            case LookupAnswered():
                self._add(
                    lookups_answered=1,
                    lookup_blocks_found=event.found,
                    lookup_seconds=event.seconds,
                )
            case LookupExpired():
                self._add(lookups_expired=1)
            case LookupFailed():
                self._add(lookups_failed=1)
            case LoadPromised():
                self._add(loads_promised=1, tokens_promised=event.usable - event.local)
            case LoadLanded():
                self._add(
                    loads_landed=1, load_bytes=event.bytes, load_seconds=event.seconds
                )
            case LoadFailed():
                self._add(loads_failed=1, load_blocks_failed=event.failed)
            case LoadCancelled():
                self._add(loads_cancelled=1)
            case SaveStored():
                self._add(
                    saves=1,
                    save_blocks_stored=event.stored,
                    save_blocks_existed=event.existed,
                    save_bytes=event.bytes,
                    save_seconds=event.seconds,
                )
            case SaveDropped():
                self._add(save_blocks_dropped=event.objects)
            case _:
                pass

    def _add(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0) + value
