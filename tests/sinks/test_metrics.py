"""The table of metrics, what events add to it, and the sink for prometheus-client."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import akv
from akv.core.errors import ConfigError
from akv.core.events import (
    READING_OFF,
    BreakerClosed,
    BreakerOpened,
    Event,
    LoadDeclined,
    LoadFailed,
    LoadPromised,
    LoadStarted,
    MemoryQuarantined,
    SaveCopied,
    SaveDropped,
    SaveStarted,
    SaveStored,
    SessionClosed,
    SessionOpened,
    WindowFetched,
)
from akv.core.shed import Marks
from akv.pipeline.shed import Shedder
from akv.sinks.metrics import METRICS, OTHER, Kind, Meter, PrometheusSink
from akv.store import MemoryStore
from akv.store.base import Failure, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Outcome

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)


class Sums:
    """What a meter added, by metric and label; how often, for histograms."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.meter = Meter(self._add)

    def _add(self, name: str, label: str, value: float) -> None:
        metric = METRICS[name]
        assert label in metric.series, f"{name} has no {label!r}"
        by = 1 if metric.kind is Kind.HISTOGRAM else value
        self.totals[f"{name} {label}".strip()] += by  # type: ignore[assignment]

    def of(self, *events: Event) -> dict[str, float]:
        """The totals that are not 0 after these events."""
        for event in events:
            self.meter.on(event)
        return {name: total for name, total in self.totals.items() if total}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """One number, as a scrape would read it."""
    found = registry.get_sample_value(f"akv_{name}", labels)
    assert found is not None, f"no sample akv_{name} {labels}"
    return found


def test_names_say_their_unit_and_labels_are_few() -> None:
    """Snake case, unit last, no more label values than a person can list."""
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.help.endswith(".")
        assert bool(metric.label) == bool(metric.values)
        assert len(set(metric.values)) == len(metric.values) <= 8
        if metric.kind is Kind.HISTOGRAM:
            assert name.endswith("_seconds")
            assert list(metric.buckets) == sorted(set(metric.buckets))


def test_a_bucket_holds_what_is_not_above_its_bound() -> None:
    """As Prometheus has it: le means less or equal."""
    metric = METRICS["load_seconds"]
    bounds = metric.buckets
    assert [metric.bucket(bound) for bound in bounds] == list(range(len(bounds)))
    assert metric.bucket(0.0) == 0
    assert metric.bucket(bounds[-1] + 1) == len(bounds)


def test_tokens_of_requests_that_may_not_read_are_no_misses() -> None:
    """Only requests that could have hit are in the denominator."""
    sums = Sums()
    declined = LoadDeclined(
        request_id="a", num_tokens=100, local=32, hit=0, reason="nothing found"
    )
    off = LoadDeclined(
        request_id="b", num_tokens=70, local=0, hit=0, reason=READING_OFF
    )
    promised = LoadPromised(request_id="c", num_tokens=65, local=16, hit=64, usable=64)
    assert sums.of(declined, off, promised) == {
        "requests declined": 1,
        "requests promised": 1,
        "queried_tokens": 68 + 49,
        "hit_tokens": 48,
    }


def test_the_same_load_begun_twice_is_in_flight_once() -> None:
    """A sink that two sessions share must not drift when their ids collide."""
    sums = Sums()
    started = LoadStarted(request_id="r", load_id=1, objects=2, bytes=64)
    assert sums.of(started, started) == {
        "inflight_operations load": 1,
        "inflight_bytes load": 64,
        "queued_operations load": 1,
    }


def test_what_waits_is_in_the_queue_until_it_moves_or_ends() -> None:
    """A load until its first window has come, a save until it has been copied."""
    sums = Sums()
    loads = [
        LoadStarted(request_id="r", load_id=number, objects=2, bytes=64)
        for number in (1, 2)
    ]
    save = SaveStarted(request_id="r", job_id=1, objects=4, bytes=64)
    assert sums.of(*loads, save)["queued_operations load"] == 2
    assert sums.totals["queued_operations save"] == 1
    window = WindowFetched(
        request_id="r",
        load_id=1,
        window=0,
        objects=1,
        bytes=32,
        failed=0,
        shared=False,
        wait_seconds=0.0,
        seconds=0.1,
    )
    copied = SaveCopied(request_id="r", job_id=1, seconds=0.1)
    sums.of(window, window, copied)
    assert sums.totals["queued_operations load"] == 1
    assert sums.totals["queued_operations save"] == 0
    assert sums.totals["inflight_operations load"] == 2
    failed = LoadFailed(
        request_id="r", load_id=2, objects=2, failed=2, reason="", seconds=0.1
    )
    sums.of(failed)
    assert sums.totals["queued_operations load"] == 0


def test_a_save_that_is_stored_in_part_ends_once() -> None:
    """A drop of a part is followed by one more event, a drop of all is the end."""
    part, whole = (
        SaveStarted(request_id="r", job_id=n, objects=4, bytes=64) for n in (1, 2)
    )
    drop = SaveDropped(request_id="r", job_id=1, objects=3, reason="no room here")
    stored = SaveStored(
        request_id="r", job_id=1, stored=1, existed=0, bytes=16, seconds=0.1
    )
    sums = Sums()
    assert sums.of(part, drop)["inflight_operations save"] == 1
    assert sums.of(stored) == {
        "stores_dropped no_room": 3,
        "save_seconds stored": 1,
        "save_bytes": 16,
        "save_blocks stored": 1,
    }
    drop_all = SaveDropped(request_id="r", job_id=2, objects=4, reason="what is this?")
    totals = sums.of(whole, drop_all)
    assert totals["stores_dropped other"] == 4
    assert totals["save_seconds dropped"] == 1
    assert "inflight_operations save" not in totals


def test_gauges_go_back_when_the_last_session_is_closed() -> None:
    """A breaker that was open, or memory that was lost, is of a session."""
    opened = SessionOpened(role="a", store="memory:", staging_bytes=0)
    closed = SessionClosed(role="a", seconds=0.1, hung_calls=1)
    sums = Sums()
    trouble = (
        BreakerOpened(url="memory:", reason="x"),
        MemoryQuarantined(bytes=8, total_bytes=8, reason="x"),
        LoadStarted(request_id="r", load_id=1, objects=1, bytes=8),
    )
    sums.of(opened, opened, *trouble)
    assert sums.of(closed)["quarantined_bytes"] == 8
    assert sums.of(closed) == {}
    assert sums.of(opened, trouble[0]) == {"breakers_open": 1}
    assert sums.of(BreakerClosed(url="memory:", seconds=1.0)) == {}


def test_operations_in_flight_are_bounded() -> None:
    """A host that never tells of ends costs a bounded table, and no wrong number."""
    sums = Sums()
    for number in range((1 << 16) + 10):
        sums.meter.on(LoadStarted(request_id="r", load_id=number, objects=1, bytes=1))
    assert sums.totals["inflight_operations load"] == 1 << 16
    end = LoadFailed(
        request_id="r", load_id=1 << 16, objects=1, failed=1, reason="", seconds=0.1
    )
    sums.meter.on(end)
    assert sums.totals["inflight_operations load"] == 1 << 16


async def _worked(store: FaultyStore | GatedStore | MemoryStore) -> CollectorRegistry:
    """Save, look up and load four blocks, as well as the store lets us."""
    registry = CollectorRegistry()
    memory = Memory()
    async with akv.open_session(
        CONFIG,
        memory.geometry,
        memory.device,
        store=store,
        observer=PrometheusSink(registry),
    ) as session:
        for number, block_hash in enumerate(HASHES):
            memory.write(number, block_hash)
        await session.save(save_spec(HASHES, (0, 1, 2, 3)))
        await session.lookup(lookup_spec(HASHES))
        await session.load(load_spec(HASHES, (4, 5, 6, 7)))
    return registry


@pytest.mark.anyio
async def test_a_session_that_works_is_counted() -> None:
    """One of each, with its blocks, bytes and seconds; nothing left in flight."""
    registry = await _worked(MemoryStore(name=""))
    assert value(registry, "lookup_blocks_total") == 4
    assert value(registry, "hit_blocks_total") == 4
    assert value(registry, "lookup_seconds_count", outcome="answered") == 1
    assert value(registry, "load_seconds_count", outcome="landed") == 1
    assert value(registry, "load_seconds_count", outcome="failed") == 0
    assert value(registry, "load_bytes_total") == 4 * OBJECT
    assert value(registry, "save_bytes_total") == 4 * OBJECT
    assert value(registry, "save_blocks_total", outcome="stored") == 4
    windows = value(registry, "load_fetch_seconds_count")
    assert windows >= 1
    assert value(registry, "load_queue_seconds_count") == windows
    assert value(registry, "load_place_seconds_count") == windows
    for operation in ("lookup", "load", "save"):
        assert value(registry, "inflight_operations", operation=operation) == 0
    assert value(registry, "inflight_bytes", operation="load") == 0


def _fails(verb: str, outcome: Outcome) -> Callable[[str, Sequence[BlockKey]], Fault]:
    def faults(called: str, keys: Sequence[BlockKey]) -> Fault:
        if called != verb:
            return Fault()
        return Fault(outcomes=dict.fromkeys(range(len(keys)), outcome))

    return faults


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("verb", "outcome", "metric", "reason"),
    [
        ("put_from", Status.NO_ROOM, "stores_dropped", "no_room"),
        ("put_from", Failure("the cable burns"), "stores_dropped", OTHER),
        ("get_into", Status.MISS, "load_failed_blocks", "lost"),
        ("get_into", Failure("the cable burns"), "load_failed_blocks", OTHER),
    ],
)
async def test_what_a_store_says_becomes_one_of_few_reasons(
    verb: str, outcome: Outcome, metric: str, reason: str
) -> None:
    """The sentences of the real pipelines, as labels."""
    registry = await _worked(FaultyStore(MemoryStore(name=""), _fails(verb, outcome)))
    assert value(registry, f"{metric}_total", reason=reason) == 4


@pytest.mark.anyio
async def test_deadlines_breaker_and_quarantine_are_counted() -> None:
    """A get and a put that hang; afterwards the store is left alone."""
    store = GatedStore(MemoryStore(name=""), gated=("get_into", "put_from"))
    registry = CollectorRegistry()
    memory = Memory()
    config = akv.Config(
        store="memory:",
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
        load_deadline=0.05,
        save_deadline=0.05,
    )
    async with akv.open_session(
        config,
        memory.geometry,
        memory.device,
        store=store,
        observer=PrometheusSink(registry),
    ) as session:
        await session.save(save_spec(HASHES[:1], (0,)))
        await session.load(load_spec(HASHES[:1], (4,)))
        assert value(registry, "stores_dropped_total", reason="deadline") == 1
        assert value(registry, "load_failed_blocks_total", reason="deadline") == 1
        assert value(registry, "quarantined_bytes") > 0
        await session.save(save_spec(HASHES[:2], (0, 1), job_id=2))
        assert value(registry, "stores_dropped_total", reason="behind") == 2
        session._breaker.trip("the test says so")
        assert value(registry, "breakers_open") == 1
        await session.lookup(lookup_spec(HASHES))
        await session.load(load_spec(HASHES, (4, 5, 6, 7), load_id=2))
        await session.save(save_spec(HASHES, (0, 1, 2, 3), job_id=3, chain=3))
        assert value(registry, "lookups_skipped_total") == 1
        assert value(registry, "load_failed_blocks_total", reason="breaker") == 4
        assert value(registry, "stores_dropped_total", reason="breaker") == 4
        store.open()
    assert value(registry, "breakers_open") == 0
    assert value(registry, "quarantined_bytes") == 0


@pytest.mark.anyio
async def test_what_a_full_quarantine_refuses_is_counted_as_that() -> None:
    """One call that hangs holds all that may be held of two buffers."""
    store = GatedStore(MemoryStore(name=""), gated=("get_into", "put_from"))
    registry = CollectorRegistry()
    memory = Memory()
    config = akv.Config(
        store="memory:",
        max_load_bytes=2 * OBJECT,
        max_save_bytes=2 * OBJECT,
        load_deadline=0.05,
        save_deadline=0.05,
    )
    async with akv.open_session(
        config,
        memory.geometry,
        memory.device,
        store=store,
        observer=PrometheusSink(registry),
    ) as session:
        await session.load(load_spec(HASHES[:1], (4,)))
        await session.load(load_spec(prompt(2, 1), (5,), load_id=2))
        await session.save(save_spec(HASHES[:1], (0,)))
        await session.save(save_spec(prompt(2, 1), (1,), job_id=2, chain=2))
        for metric in ("load_failed_blocks_total", "stores_dropped_total"):
            assert value(registry, metric, reason="deadline") == 1
            assert value(registry, metric, reason="quarantine") == 1
        store.open()


@pytest.mark.anyio
async def test_saves_that_are_shed_are_counted_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one found no room, so the next ones do not try."""
    marks = Marks(full=0.0, pause=60.0, longest_pause=60.0, retries=())
    monkeypatch.setattr("akv.pipeline.save.Shedder", partial(Shedder, marks=marks))
    store = FaultyStore(MemoryStore(name=""), _fails("put_from", Status.NO_ROOM))
    registry = CollectorRegistry()
    memory = Memory()
    async with akv.open_session(
        CONFIG,
        memory.geometry,
        memory.device,
        store=store,
        observer=PrometheusSink(registry),
    ) as session:
        for number in range(1, 4):
            spec = save_spec(prompt(number, 1), (0,), job_id=number, chain=number)
            await session.save(spec)
        assert value(registry, "sheds_open") == 1
        shed = value(registry, "stores_dropped_total", reason="shed")
        full = value(registry, "stores_dropped_total", reason="no_room")
        assert (shed + full, shed) in {(3, 1), (3, 2)}
    assert value(registry, "sheds_open") == 0


@pytest.mark.anyio
async def test_cancelled_operations_are_counted_and_not_in_flight() -> None:
    """A lookup, a load and a save whose tasks are cancelled in the middle."""
    store = GatedStore(MemoryStore(name=""), gated=("exists", "get_into"))
    registry = CollectorRegistry()
    memory = Memory()
    async with akv.open_session(
        CONFIG,
        memory.geometry,
        memory.device,
        store=store,
        observer=PrometheusSink(registry),
    ) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.lookup, lookup_spec(HASHES))
            tasks.start_soon(session.load, load_spec(HASHES, (4, 5, 6, 7)))
            tasks.start_soon(session.save, save_spec(HASHES, (0, 1, 2, 3)))
            await anyio.to_thread.run_sync(store.wait_until_held, 3)
            for operation in ("lookup", "load", "save"):
                assert value(registry, "inflight_operations", operation=operation) == 1
            assert value(registry, "inflight_bytes", operation="load") == 4 * OBJECT
            assert value(registry, "queued_operations", operation="load") == 1
            tasks.cancel_scope.cancel()
        for operation in ("lookup", "load", "save"):
            assert value(registry, "inflight_operations", operation=operation) == 0
            seconds = f"{operation}_seconds_count"
            assert value(registry, seconds, outcome="cancelled") == 1
        store.open()


def test_two_sinks_in_one_registry_are_refused_with_the_way_out() -> None:
    """prometheus-client's own message names no way out."""
    registry = CollectorRegistry()
    PrometheusSink(registry)
    with pytest.raises(ConfigError, match="CollectorRegistry of its own"):
        PrometheusSink(registry)


def test_the_default_registry_is_the_clients() -> None:
    """And a process that has no client is told how to get one."""
    script = """
import sys
sys.modules["prometheus_client"] = None
from akv.sinks.metrics import PrometheusSink
try:
    PrometheusSink()
except ValueError as error:
    print(error)
del sys.modules["prometheus_client"]
import prometheus_client
PrometheusSink()
print("akv_load_bytes_total 0.0" in prometheus_client.generate_latest().decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, second = done.stdout.splitlines()
    assert "pip install 'akv-connector[prometheus]'" in first
    assert second == "True"


def test_every_series_is_there_before_anything_happens() -> None:
    """A rate of a counter that appears with its first event has lost that event."""
    registry = CollectorRegistry()
    PrometheusSink(registry)
    text = generate_latest(registry).decode()
    for name, metric in METRICS.items():
        suffix = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}
        for label in metric.series:
            labels = f'{{{metric.label}="{label}"}}' if metric.label else ""
            assert f"\nakv_{name}{suffix[metric.kind]}{labels} 0.0\n" in text
