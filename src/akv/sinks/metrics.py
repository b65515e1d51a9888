"""The numbers of akv: one table of metrics, and what each event adds to them.

The table is read twice: by :class:`PrometheusSink` for programs that embed
akv, and by ``akv.vllm.stats`` for vLLM, so that the names after the prefix,
labels and buckets are the same and one dashboard does for both.

Everything is additive, gauges too: they change by what an event adds to them
or takes away. So the numbers of several processes are put together by adding,
and reading them never asks a store, a loop or a session.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from akv.core.errors import ConfigError
from akv.core.events import (
    READING_OFF,
    BreakerClosed,
    BreakerOpened,
    Event,
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
    MemoryQuarantined,
    MemoryReleased,
    SaveCancelled,
    SaveCopied,
    SaveDropped,
    SavesResumed,
    SavesShed,
    SaveStarted,
    SaveStored,
    SessionClosed,
    SessionOpened,
    WindowFetched,
    WindowPlaced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

__all__ = (
    "METRICS",
    "OTHER",
    "Kind",
    "Meter",
    "Metric",
    "PrometheusSink",
    "build_metrics",
)

OTHER = "other"
"""The label value of what is none of the known ones."""

_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper bounds; the defaults of the three deadlines are among them."""

_MOST_OPEN = 1 << 16
_MOST_JOINED = 4096


class Kind(Enum):
    """What a metric does: grows, goes up and down, or counts by size."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row of the table.

    :ivar name: without prefix, with its unit at the end; Prometheus' client
        adds ``_total`` to counters
    :ivar label: the one label, if there is one
    :ivar values: the label's values that are known; others become ``other``
    :ivar buckets: upper bounds of a histogram, without the infinite one
    """

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()

    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper bounds in seconds; every histogram here counts seconds."""
        return _SECONDS if self.kind is Kind.HISTOGRAM else ()

    @property
    def series(self) -> tuple[str, ...]:
        """The label values that there are from the start on; ``("",)`` without."""
        return self.values if self.label else ("",)

    def bucket(self, value: float) -> int:
        """The place of the bucket that ``value`` falls into."""
        return bisect_left(self.buckets, value)

    def value_of(self, text: str) -> str:
        """``text`` if it is a known label value, else ``other``."""
        return text if text in self.series else OTHER


_COUNT, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_DROPS = (
    "pins",
    "deadline",
    "behind",
    "breaker",
    "shed",
    "quarantine",
    "no_room",
    OTHER,
)
_FAILURES = ("lost", "deadline", "breaker", "quarantine", OTHER)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="queried_tokens",
            kind=_COUNT,
            help="Prompt tokens beyond what the engine had itself, of requests that "
            "may read the cache.",
        ),
        Metric(
            name="hit_tokens",
            kind=_COUNT,
            help="Of these, the tokens that came, or were promised, from the store.",
        ),
        Metric(
            name="requests",
            kind=_COUNT,
            help="Requests that may read the cache: a load was promised, another "
            "request's load was waited for, or neither.",
            label="outcome",
            values=("promised", "joined", "declined"),
        ),
        Metric(
            name="lookup_blocks",
            kind=_COUNT,
            help="Blocks that the store was asked for.",
        ),
        Metric(
            name="hit_blocks",
            kind=_COUNT,
            help="Of these, the blocks that were found without a gap.",
        ),
        Metric(
            name="lookup_seconds",
            kind=_HISTOGRAM,
            help="Seconds of a lookup, by how it ended.",
            label="outcome",
            values=("answered", "expired", "failed", "cancelled"),
        ),
        Metric(
            name="lookups_skipped",
            kind=_COUNT,
            help="Lookups that found nothing as the store was left alone.",
        ),
        Metric(
            name="load_seconds",
            kind=_HISTOGRAM,
            help="Seconds of a load, by how it ended.",
            label="outcome",
            values=("landed", "failed", "cancelled"),
        ),
        Metric(
            name="load_queue_seconds",
            kind=_HISTOGRAM,
            help="Seconds that a window of a load waited for staging memory.",
        ),
        Metric(
            name="load_fetch_seconds",
            kind=_HISTOGRAM,
            help="Seconds in which the store filled a window of a load.",
        ),
        Metric(
            name="load_place_seconds",
            kind=_HISTOGRAM,
            help="Seconds in which a window was copied into the engine's blocks.",
        ),
        Metric(
            name="load_bytes",
            kind=_COUNT,
            help="Bytes of loads of which every block landed.",
        ),
        Metric(
            name="load_failed_blocks",
            kind=_COUNT,
            help="Blocks that were promised and did not land, by reason.",
            label="reason",
            values=_FAILURES,
        ),
        Metric(
            name="save_seconds",
            kind=_HISTOGRAM,
            help="Seconds of a save, by how it ended; stored if a part of it was.",
            label="outcome",
            values=("stored", "dropped", "cancelled"),
        ),
        Metric(
            name="save_bytes",
            kind=_COUNT,
            help="Bytes that are new in the store.",
        ),
        Metric(
            name="save_blocks",
            kind=_COUNT,
            help="Blocks of saves that are in the store, new or from before.",
            label="outcome",
            values=("stored", "existed"),
        ),
        Metric(
            name="stores_dropped",
            kind=_COUNT,
            help="Blocks that were not saved, by reason.",
            label="reason",
            values=_DROPS,
        ),
        Metric(
            name="inflight_operations",
            kind=_GAUGE,
            help="Operations that have begun and not ended.",
            label="operation",
            values=("lookup", "load", "save"),
        ),
        Metric(
            name="inflight_bytes",
            kind=_GAUGE,
            help="Bytes of the loads and saves that have begun and not ended.",
            label="operation",
            values=("load", "save"),
        ),
        Metric(
            name="queued_operations",
            kind=_GAUGE,
            help="Loads of which nothing has come yet, and saves that have not been "
            "copied: the queue for staging memory and its head.",
            label="operation",
            values=("load", "save"),
        ),
        Metric(
            name="pinned_blocks",
            kind=_GAUGE,
            help="Blocks of the engine that saves hold.",
        ),
        Metric(
            name="quarantined_bytes",
            kind=_GAUGE,
            help="Staging memory of calls that outlived their wait.",
        ),
        Metric(
            name="breakers_open",
            kind=_GAUGE,
            help="Sessions that leave their store alone as it does not work.",
        ),
        Metric(
            name="sheds_open",
            kind=_GAUGE,
            help="Sessions that shed saves as their store is slow or full.",
        ),
        Metric(
            name="other",
            kind=_COUNT,
            help="Numbers from workers that this version does not know.",
        ),
    )
}
"""All metrics, by name, in the order of the docs."""

_REASONS = (
    ("max_pinned_fraction", "pins"),
    ("_deadline)", "deadline"),
    ("did not answer within", "deadline"),
    ("a block before it was dropped", "behind"),
    ("is left alone", "breaker"),
    ("saves are shed", "shed"),
    ("saves were shed", "shed"),
    ("saves wait already", "shed"),
    ("in quarantine", "quarantine"),
    ("no room", "no_room"),
    ("lost after lookup", "lost"),
)


def _class_of(reason: str, metric: str) -> str:
    """The label of a sentence: few and fixed, whatever stores say."""
    for fragment, name in _REASONS:
        if fragment in reason:
            return METRICS[metric].value_of(name)
    return OTHER


@dataclass(frozen=True, slots=True)
class _Open:
    """A load or a save in flight."""

    objects: int
    bytes: int
    since: float


class Meter:
    """Tells ``add`` what each event adds to which metric.

    ``add(name, label, value)`` gets an increase for a counter, a difference
    for a gauge, an observation for a histogram. Keeps what is in flight, at
    most 65,536 operations, and at most 4,096 requests that wait for another
    one's load; nothing else. When the last of its sessions is closed all
    gauges go back to 0. Not thread safe: whoever has one locks.
    """

    def __init__(self, add: Callable[[str, str, float], None]) -> None:
        self._add = add
        self._open: dict[tuple[str, str, int], _Open] = {}
        self._queued: set[tuple[str, str, int]] = set()
        self._joined: dict[str, LoadJoined] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._sessions = 0

    def on(self, event: Event) -> None:
        """Add what ``event`` says."""
        match event:
            case WindowFetched():
                self._moving("load", event.request_id, event.load_id)
                self._add("load_queue_seconds", "", event.wait_seconds)
                self._add("load_fetch_seconds", "", event.seconds)
            case WindowPlaced():
                self._add("load_place_seconds", "", event.seconds)
            case LookupStarted():
                self._move("inflight_operations", "lookup", 1)
                self._add("lookup_blocks", "", event.blocks)
            case LookupAnswered():
                self._looked_up("answered", event.seconds, event.found)
            case LookupExpired():
                self._looked_up("expired", event.deadline, event.found)
            case LookupFailed():
                self._looked_up("failed", event.seconds, event.found)
            case LookupCancelled():
                self._looked_up("cancelled", event.seconds, 0)
            case LookupSkipped():
                self._add("lookups_skipped", "", 1)
            case LoadPromised():
                joined = self._joined.pop(event.request_id, None)
                self._add("requests", "promised", 1)
                self._add("queried_tokens", "", event.num_tokens - event.local)
                self._add("hit_tokens", "", event.usable - event.local)
                if joined is not None and event.local >= joined.usable:
                    self._add("queried_tokens", "", joined.usable - joined.local)
                    self._add("hit_tokens", "", joined.usable - joined.local)
            case LoadJoined():
                self._joined[event.request_id] = event
                if len(self._joined) > _MOST_JOINED:
                    del self._joined[next(iter(self._joined))]
            case LoadDeclined():
                joined = self._joined.pop(event.request_id, None)
                if event.reason == READING_OFF:
                    return
                self._add("queried_tokens", "", event.num_tokens - event.local)
                if joined is not None and event.reason.endswith("brought it"):
                    self._add("requests", "joined", 1)
                    self._add("hit_tokens", "", joined.usable - joined.local)
                else:
                    self._add("requests", "declined", 1)
            case LoadStarted():
                self._begin("load", event, event.load_id)
            case LoadLanded():
                self._end("load", event.request_id, event.load_id)
                self._add("load_seconds", "landed", event.seconds)
                self._add("load_bytes", "", event.bytes)
            case LoadFailed():
                self._end("load", event.request_id, event.load_id)
                self._add("load_seconds", "failed", event.seconds)
                reason = _class_of(event.reason, "load_failed_blocks")
                self._add("load_failed_blocks", reason, event.failed)
            case LoadCancelled():
                self._end("load", event.request_id, event.load_id)
                self._add("load_seconds", "cancelled", event.seconds)
            case SaveStarted():
                self._begin("save", event, event.job_id)
            case SaveCopied():
                self._moving("save", event.request_id, event.job_id)
            case SaveStored():
                self._end("save", event.request_id, event.job_id)
                self._add("save_seconds", "stored", event.seconds)
                self._add("save_bytes", "", event.bytes)
                self._add("save_blocks", "stored", event.stored)
                self._add("save_blocks", "existed", event.existed)
            case SaveDropped():
                reason = _class_of(event.reason, "stores_dropped")
                self._add("stores_dropped", reason, event.objects)
                found = self._open.get(("save", event.request_id, event.job_id))
                # A part that was stored is told by one more event.
                if found is not None and event.objects >= found.objects:
                    self._end("save", event.request_id, event.job_id)
                    self._add("save_seconds", "dropped", event.t - found.since)
            case SaveCancelled():
                self._end("save", event.request_id, event.job_id)
                self._add("save_seconds", "cancelled", event.seconds)
            case MemoryQuarantined():
                self._move("quarantined_bytes", "", event.bytes)
            case MemoryReleased():
                self._move("quarantined_bytes", "", -event.bytes)
            case BreakerOpened():
                self._move("breakers_open", "", 1)
            case BreakerClosed():
                self._move("breakers_open", "", -1)
            case SavesShed():
                self._move("sheds_open", "", 1)
            case SavesResumed():
                self._move("sheds_open", "", -1)
            case SessionOpened():
                self._sessions += 1
            case SessionClosed():
                self._sessions = max(0, self._sessions - 1)
                if not self._sessions:
                    self._forget()
            case _:
                pass

    def set(self, name: str, value: float) -> None:
        """Bring a gauge without a label to ``value``, which no event tells."""
        self._move(name, "", value - self._gauges.get((name, ""), 0))

    def _looked_up(self, outcome: str, seconds: float, found: int) -> None:
        self._move("inflight_operations", "lookup", -1)
        self._add("lookup_seconds", outcome, seconds)
        self._add("hit_blocks", "", found)

    def _begin(self, kind: str, event: LoadStarted | SaveStarted, number: int) -> None:
        self._end(kind, event.request_id, number)
        if len(self._open) < _MOST_OPEN:
            key = (kind, event.request_id, number)
            self._open[key] = _Open(event.objects, event.bytes, event.t)
            self._queued.add(key)
            self._move("queued_operations", kind, 1)
            self._move("inflight_operations", kind, 1)
            self._move("inflight_bytes", kind, event.bytes)

    def _moving(self, kind: str, request_id: str, number: int) -> None:
        key = (kind, request_id, number)
        if key in self._queued:
            self._queued.remove(key)
            self._move("queued_operations", kind, -1)

    def _end(self, kind: str, request_id: str, number: int) -> None:
        self._moving(kind, request_id, number)
        ended = self._open.pop((kind, request_id, number), None)
        if ended is not None:
            self._move("inflight_operations", kind, -1)
            self._move("inflight_bytes", kind, -ended.bytes)

    def _move(self, name: str, label: str, by: float) -> None:
        if by:
            now = self._gauges.get((name, label), 0) + by
            self._gauges[name, label] = now
            self._add(name, label, by)

    def _forget(self) -> None:
        self._open.clear()
        self._queued.clear()
        for (name, label), value in tuple(self._gauges.items()):
            self._move(name, label, -value)


def build_metrics(
    classes: Mapping[Kind, Callable[..., Any]], prefix: str, labels: Sequence[str] = ()
) -> dict[str, Any]:
    """An object of prometheus-client for each row of the table, by its name.

    :param classes: prometheus-client's classes, or what takes their arguments
    :param prefix: what stands before each name, as ``akv_``
    :param labels: labels that come before the metric's own
    """
    made: dict[str, Any] = {}
    for metric in METRICS.values():
        options: dict[str, Any] = {
            "name": prefix + metric.name,
            "documentation": metric.help,
            "labelnames": [*labels, metric.label] if metric.label else list(labels),
        }
        if metric.kind is Kind.HISTOGRAM:
            options["buckets"] = list(metric.buckets)
        elif metric.kind is Kind.GAUGE:
            # Each process has its own part, where several serve one endpoint.
            options["multiprocess_mode"] = "sum"
        made[metric.name] = classes[metric.kind](**options)
    return made


class PrometheusSink:
    """Counts events for prometheus-client: ``akv_...`` in ``registry``.

    One for all sessions of a process whose numbers may be added up. Any
    thread; a scrape reads what has been counted and waits for nothing. Needs
    the extra ``prometheus``.

    :param registry: where the metrics are registered; None for the client's
        own default registry
    :raises ConfigError: prometheus-client is not installed, or the registry
        has these metrics already
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ModuleNotFoundError as error:
            raise ConfigError(
                "observer",
                "PrometheusSink",
                "prometheus-client is not installed: "
                "pip install 'akv-connector[prometheus]'",
            ) from error
        registry = client.REGISTRY if registry is None else registry
        classes: dict[Kind, Callable[..., Any]] = {
            Kind.COUNTER: partial(client.Counter, registry=registry),
            Kind.GAUGE: partial(client.Gauge, registry=registry),
            Kind.HISTOGRAM: partial(client.Histogram, registry=registry),
        }
        try:
            made = build_metrics(classes, "akv_")
        except ValueError as error:
            raise ConfigError(
                "registry",
                registry,
                "has akv's metrics already: give one sink to all sessions, or each "
                "sink a CollectorRegistry of its own",
            ) from error
        self._adders: dict[tuple[str, str], Callable[[float], None]] = {}
        for name, metric in METRICS.items():
            for label in metric.series:
                child = made[name].labels(label) if metric.label else made[name]
                self._adders[name, label] = (
                    child.observe if metric.kind is Kind.HISTOGRAM else child.inc
                )
        self._lock = threading.Lock()
        self._meter = Meter(lambda name, label, by: self._adders[name, label](by))

    def on(self, event: Event) -> None:
        """Count ``event``."""
        with self._lock:
            self._meter.on(event)
