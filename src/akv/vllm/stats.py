"""akv's numbers in vLLM's terms: the metrics line, and Prometheus.

``Counters`` is a sink that adds events up; ``AkvStats`` is what one interval
came to, passed from the worker to the scheduler and on to the API server,
where one part of vLLM logs it and ``AkvPromMetrics`` exposes it. Names,
labels and buckets are those of the table in ``akv.sinks.metrics``.

An interval is plain numbers by name, all of them additive, and only of what
happened in it::

    load_bytes                  a counter, or by how much a gauge has changed
    requests/promised           the same with its label value
    load_seconds/landed/7       observations that fell into bucket 7,
    load_seconds/landed/7/sum   and their sum

so an interval is as small as the table, however much has happened.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from akv.sinks.metrics import METRICS, Kind, Meter, Metric, build_metrics

if TYPE_CHECKING:
    from akv.core.events import Event

__all__ = ("AkvPromMetrics", "AkvStats", "Counters")

_PREFIX = "vllm:akv_"
_MOST_AT_ONCE = 1 << 16
"""Observations of one bucket in one interval; more is no honest number."""

_LINE: dict[str, tuple[str, str]] = {
    "lookups_answered": ("lookup_seconds", "answered"),
    "lookup_blocks_found": ("hit_blocks", ""),
    "lookups_expired": ("lookup_seconds", "expired"),
    "lookups_failed": ("lookup_seconds", "failed"),
    "loads_promised": ("requests", "promised"),
    "tokens_promised": ("hit_tokens", ""),
    "loads_landed": ("load_seconds", "landed"),
    "load_bytes": ("load_bytes", ""),
    "loads_failed": ("load_seconds", "failed"),
    "load_blocks_failed": ("load_failed_blocks", "*"),
    "loads_cancelled": ("load_seconds", "cancelled"),
    "saves": ("save_seconds", "stored"),
    "save_blocks_stored": ("save_blocks", "stored"),
    "save_blocks_existed": ("save_blocks", "existed"),
    "save_bytes": ("save_bytes", ""),
    "save_blocks_dropped": ("stores_dropped", "*"),
}
"""Fields of the metrics line: a metric and one of its label values, or all."""

_MEANS = {
    "lookup_mean_ms": ("lookup_seconds", "answered"),
    "load_mean_ms": ("load_seconds", "landed"),
    "save_mean_ms": ("save_seconds", "stored"),
}


class AkvStats(KVConnectorStats):
    """Sums of one interval: plain numbers by name, all of them additive."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> AkvStats:
        """Add the numbers of ``other``; what is no number is left out."""
        for name, value in other.data.items():
            if _is_number(value):
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The fields of the metrics line that are not 0, means in milliseconds."""
        counts, sums = self._totals()
        line: dict[str, int | float] = {}
        for field, (name, label) in _LINE.items():
            if label == "*":
                total = sum(n for key, n in counts.items() if key[0] == name)
            else:
                total = counts.get((name, label), 0)
            if total:
                line[field] = total
        for field, series in _MEANS.items():
            if counts.get(series):
                line[field] = round(1000 * sums[series] / counts[series], 3)
        return dict(sorted(line.items()))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def _totals(
        self,
    ) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
        """Of each series: its value or observations, and the sum of these."""
        counts: dict[tuple[str, str], float] = {}
        sums: dict[tuple[str, str], float] = {}
        for key, value in self.data.items():
            name, label, bucket, is_sum = _parts(key)
            if name not in METRICS or not _is_number(value):
                continue
            totals = sums if is_sum else counts
            series = (name, label)
            totals[series] = totals.get(series, 0) + value
            if bucket and not is_sum:
                sums.setdefault(series, 0.0)
        return counts, sums


class AkvPromMetrics(KVConnectorPromMetrics):
    """akv's metrics in vLLM's Prometheus registry, ``vllm:akv_...``.

    One for each API server, with vLLM's labels for each engine that it
    speaks to. Never raises, whatever the numbers are: a raise in this place
    ends all requests of the server. What it does not know is counted in
    ``vllm:akv_other``, a label value that it does not know under ``other``.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {
            Kind.COUNTER: self._counter_cls,
            Kind.GAUGE: self._gauge_cls,
            Kind.HISTOGRAM: self._histogram_cls,
        }
        self._metrics = build_metrics(classes, _PREFIX, labelnames)
        self._children: dict[tuple[int, str, str], Any] = {}
        self._gauges: dict[tuple[int, str, str], float] = {}
        for engine in per_engine_labelvalues:
            for name, metric in METRICS.items():
                for label in metric.series:
                    self._child(engine, metric, label)
                    if metric.kind is Kind.GAUGE:
                        self._gauges[engine, name, label] = 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the numbers of one interval of one engine."""
        if engine_idx not in self.per_engine_labelvalues:
            return
        for key, value in (transfer_stats_data or {}).items():
            if not self._observed(transfer_stats_data, str(key), value, engine_idx):
                self._child(engine_idx, METRICS["other"], "").inc(1)

    def _observed(
        self, data: dict[str, Any], key: str, value: Any, engine: int
    ) -> bool:
        name, label, bucket, is_sum = _parts(key)
        metric = METRICS.get(name)
        if metric is None or not _is_number(value):
            return False
        if metric.kind is not Kind.HISTOGRAM:
            if bucket or (label and not metric.label):
                return False
            return self._moved(metric, metric.value_of(label), value, engine)
        if is_sum:
            return True
        if not bucket.isdecimal() or not 0 <= value <= _MOST_AT_ONCE:
            return False
        place, total = int(bucket), data.get(f"{key}/sum")
        if place > len(metric.buckets) or not _is_number(total):
            return False
        child = self._child(engine, metric, metric.value_of(label))
        count = int(value)
        mean = _within(metric, place, total / count) if count else 0.0
        # The same count and sum, through the one way in that all clients have.
        for _ in range(count):
            child.observe(mean)
        return True

    def _moved(self, metric: Metric, label: str, by: float, engine: int) -> bool:
        child = self._child(engine, metric, label)
        if metric.kind is Kind.GAUGE:
            key = (engine, metric.name, label)
            self._gauges[key] = self._gauges.get(key, 0) + by
            child.set(self._gauges[key])
        elif by >= 0:
            child.inc(by)
        else:
            return False
        return True

    def _child(self, engine: int, metric: Metric, label: str) -> Any:
        key = (engine, metric.name, label)
        child = self._children.get(key)
        if child is None:
            values = list(self.per_engine_labelvalues[engine])
            values += [label] if metric.label else []
            child = self._children[key] = self._metrics[metric.name].labels(*values)
        return child


class Counters:
    """Adds events up between two calls of ``take``. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Any] = {}
        self._meter = Meter(self._add)

    def take(self) -> AkvStats | None:
        """What came together since the last call, or None for nothing."""
        if not self._sums:
            return None
        with self._lock:
            sums, self._sums = self._sums, {}
        return AkvStats(data=sums)

    def on(self, event: Event) -> None:
        """Add ``event``."""
        with self._lock:
            self._meter.on(event)

    def set(self, gauge: str, value: float) -> None:
        """Bring a gauge to ``value``, which no event tells."""
        with self._lock:
            self._meter.set(gauge, value)

    def _add(self, name: str, label: str, by: float) -> None:
        metric, sums = METRICS[name], self._sums
        key = f"{name}/{label}" if label else name
        if metric.kind is Kind.HISTOGRAM:
            bucket = f"{name}/{label}/{metric.bucket(by)}"
            sums[bucket] = sums.get(bucket, 0) + 1
            key = f"{bucket}/sum"
        elif not by:
            return
        sums[key] = sums.get(key, 0) + by


def _parts(key: str) -> tuple[str, str, str, bool]:
    """Name, label value, bucket, and whether it is the sum of a bucket."""
    name, _, rest = str(key).partition("/")
    label, _, rest = rest.partition("/")
    bucket, _, rest = rest.partition("/")
    return name, label, bucket, rest == "sum"


def _within(metric: Metric, place: int, mean: float) -> float:
    """``mean``, brought back into its bucket where rounding has moved it out."""
    bounds = (-math.inf, *metric.buckets, math.inf)
    return min(max(mean, math.nextafter(bounds[place], math.inf)), bounds[place + 1])


def _is_number(value: object) -> TypeGuard[int | float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
