"""O of the bug log: numbers that reach vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

import json
import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from bugs.rig import Rig, serve, step_until
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from akv.core.events import (
    LoadFailed,
    LoadLanded,
    LoadStarted,
    LookupAnswered,
    SaveDropped,
)
from akv.sinks.metrics import METRICS, Kind, PrometheusSink
from akv.testing.stores import GatedStore
from akv.vllm.stats import AkvPromMetrics, AkvStats, Counters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from akv.core.events import Event
    from engine.engine import Engine

ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}


class Server:
    """What an API server has of akv: the handler, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: partial(kind, registry=self.registry)
            for kind in (Gauge, Counter, Histogram)
        }
        self.metrics = AkvPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            types,
            ["model_name", "engine"],
            ENGINES,
        )

    def value(self, name: str, engine: int = 0, **labels: str) -> float:
        """One number of one engine, as a scrape would read it."""
        labels |= {"model_name": "model", "engine": str(engine)}
        found = self.registry.get_sample_value(f"vllm:akv_{name}", labels)
        assert found is not None, f"no sample {name} {labels}"
        return found

    def samples(self, prefix: str = "vllm:akv_") -> dict[tuple[str, str, str], float]:
        """All samples of engine 0, without their engine's labels."""
        return _samples(self.registry, prefix, {"engine": "0"})


def _samples(
    registry: CollectorRegistry, prefix: str, of: dict[str, str]
) -> dict[tuple[str, str, str], float]:
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            if any(sample.labels.get(key) != value for key, value in of.items()):
                continue
            own = {
                key: value
                for key, value in sample.labels.items()
                if key not in {"model_name", "engine", "le"}
            }
            name = sample.name.removeprefix(prefix)
            label = next(iter(own.values()), "")
            found[name, label, sample.labels.get("le", "")] = sample.value
    return found


def counted(*events: Event) -> AkvStats:
    """One interval in which these happened, as it comes out of another process."""
    counters = Counters()
    for event in events:
        counters.on(event)
    stats = counters.take()
    assert stats is not None
    return AkvStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)))


def landed(seconds: float, load_id: int = 1) -> LoadLanded:
    """A load of 3 blocks that took so long."""
    return LoadLanded(
        request_id="r", load_id=load_id, objects=3, bytes=300, seconds=seconds
    )


@pytest.mark.parametrize(
    "data",
    [
        {"teleports": 1},
        {"loads_landed": 7.5},
        {"load_bytes": "many"},
        {"load_bytes": True},
        {"load_bytes": -1},
        {"load_bytes": math.nan},
        {"load_bytes": math.inf},
        {"load_bytes": None},
        {"load_bytes/extra": 1},
        {"load_seconds": 1},
        {"load_seconds/landed": 1},
        {"load_seconds/landed/7": 2},
        {"load_seconds/landed/7": 10**12, "load_seconds/landed/7/sum": 1.0},
        {"load_seconds/landed/-7": 2},
        {"load_seconds/landed/999": 2, "load_seconds/landed/999/sum": 1.0},
        {"requests/promised/1": 2},
        {"": 1},
        {"////": [1, 2]},
    ],
    ids=str,
)
def test_numbers_that_nobody_knows_are_counted_as_other(data: dict[str, Any]) -> None:
    """O1: nothing raises in the API server; what is not known is seen."""
    server = Server()
    server.metrics.observe(data, 0)
    assert server.value("other_total") == 1
    assert server.value("load_bytes_total") == 0


def test_an_operation_that_nobody_knows_goes_to_other() -> None:
    """O1: a label value of a newer worker is counted under 'other'."""
    server = Server()
    data = {
        "requests/teleported": 2,
        "stores_dropped/eaten": 3,
        "load_seconds/teleported/7": 2,
        "load_seconds/teleported/7/sum": 0.03,
    }
    server.metrics.observe(data, 0)
    assert server.value("requests_total", outcome="other") == 2
    assert server.value("stores_dropped_total", reason="other") == 3
    assert server.value("load_seconds_count", outcome="other") == 2
    assert server.value("other_total") == 0


def test_engines_are_told_apart_and_a_strange_one_is_left_out() -> None:
    """O1: labels as vLLM's own; an engine that came later ends no request."""
    server = Server()
    for engine, size in ((0, 300), (1, 600), (2, 900)):
        server.metrics.observe({"load_bytes": size}, engine)
    server.metrics.observe({}, 0)
    server.metrics.observe(None, 1)  # type: ignore[arg-type]
    assert server.value("load_bytes_total", 0) == 300
    assert server.value("load_bytes_total", 1) == 600


def test_both_ways_have_the_same_names_labels_and_numbers() -> None:
    """vLLM's endpoint and an embedder's show the same for the same events."""
    events: list[Event] = [
        LoadStarted(request_id="r", load_id=1, objects=3, bytes=300),
        LoadStarted(request_id="r", load_id=2, objects=3, bytes=300),
        landed(0.004),
        landed(0.25, load_id=3),
        LoadFailed(
            request_id="r",
            load_id=4,
            objects=3,
            failed=2,
            reason="lost after lookup",
            seconds=99.0,
        ),
        SaveDropped(request_id="r", objects=4, reason="no room in the store"),
        LookupAnswered(request_id="r", first_block=0, found=3, seconds=0.0002),
    ]
    alone = CollectorRegistry()
    sink, counters, server = PrometheusSink(alone), Counters(), Server()
    for event in events:
        sink.on(event)
        counters.on(event)
        stats = counters.take()
        assert stats is not None
        server.metrics.observe(stats.data, 0)
    assert server.samples() == _samples(alone, "akv_", {})
    assert server.value("load_seconds_bucket", outcome="landed", le="0.25") == 2


observations = st.lists(
    st.one_of(
        st.floats(0, 100),
        st.sampled_from(METRICS["load_seconds"].buckets),
    ),
    min_size=1,
    max_size=40,
)


@given(st.lists(observations, min_size=1, max_size=4))
def test_a_histogram_comes_through_exactly(steps: list[list[float]]) -> None:
    """Buckets and count are exact, the sum up to rounding, whatever is put together."""
    server, together = Server(), AkvStats()
    wanted = Histogram(
        "wanted", "", buckets=METRICS["load_seconds"].buckets, registry=None
    )
    for seconds in steps:
        together = together.aggregate(counted(*map(landed, seconds)))
        for value in seconds:
            wanted.observe(value)
    server.metrics.observe(together.data, 0)
    total = 0.0
    for sample in next(iter(wanted.collect())).samples:
        if sample.name == "wanted_bucket":
            le = sample.labels["le"]
            found = server.value("load_seconds_bucket", outcome="landed", le=le)
            assert found == sample.value
        elif sample.name == "wanted_sum":
            total = sample.value
    found = server.value("load_seconds_sum", outcome="landed")
    assert found == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_an_interval_is_as_small_as_the_table() -> None:
    """Ten thousand loads are no more to send than a hundred of all durations."""

    def loads(count: int) -> Iterable[Event]:
        return (landed(0.0001 * 1.2 ** (number % 80)) for number in range(count))

    few, many = counted(*loads(100)), counted(*loads(10_000))
    assert few.data.keys() == many.data.keys()
    most = sum(
        len(metric.series) * (2 * len(metric.buckets) + 2 or 1)
        for metric in METRICS.values()
    )
    assert len(many.data) < most
    assert len(json.dumps(many.data)) < 4096


def test_intervals_of_several_workers_are_added_up() -> None:
    """As vLLM does it: pickled, aggregated, the scheduler's part last."""
    first, second = counted(landed(0.004)), counted(landed(0.004), landed(0.03))
    total = pickle.loads(pickle.dumps(first)).aggregate(second)
    assert total.reduce() == {
        "load_bytes": 900,
        "load_mean_ms": 12.667,
        "loads_landed": 3,
    }
    stranger = AkvStats(data={"a": [1], "b": "x", "load_bytes": 100, "c": 2})
    assert total.aggregate(stranger).reduce()["load_bytes"] == 1000
    total.reset()
    assert total.is_empty()


def test_an_interval_in_which_nothing_happened_is_nothing() -> None:
    """None is cheaper for vLLM than an empty one."""
    counters = Counters()
    counters.set("pinned_blocks", 0)
    assert counters.take() is None
    counters.set("pinned_blocks", 5)
    counters.set("pinned_blocks", 3)
    taken = counters.take()
    assert taken is not None
    assert taken.data == {"pinned_blocks": 3}
    assert counters.take() is None


def observing(engine: Engine) -> Server:
    """A server that hears what this engine's scheduler and worker count."""
    server = Server()
    worker = engine.worker.runner.connector  # type: ignore[attr-defined]
    for connector in (engine.scheduler.get_kv_connector(), worker):
        take = connector.get_kv_connector_stats

        def taking(take: Any = take) -> Any:
            stats = take()
            if stats is not None:
                server.metrics.observe(stats.to_dict(), 0)
            return stats

        connector.get_kv_connector_stats = taking
    return server


def test_an_engine_counts_what_it_did(rig: Rig) -> None:
    """Cold, then warm: tokens, blocks, bytes, pins; and all gauges back at 0."""
    with rig.engine() as engine:
        server = observing(engine)
        assert serve(engine, range(65), "cold") == 0
        engine.step_empty()
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "warm") == 64
        engine.step_empty()
        assert server.value("queried_tokens_total") == 65 + 65
        assert server.value("hit_tokens_total") == 64
        assert server.value("requests_total", outcome="promised") == 1
        assert server.value("requests_total", outcome="declined") == 1
        assert server.value("load_seconds_count", outcome="landed") == 1
        assert server.value("save_blocks_total", outcome="stored") == 4
        assert server.value("lookup_seconds_count", outcome="answered") == 2
        gauges = {name for name, metric in METRICS.items() if metric.kind is Kind.GAUGE}
        left = {
            key: value
            for key, value in server.samples().items()
            if key[0] in gauges and value
        }
        assert left == {}


def test_pins_are_seen_while_a_save_holds_them(rig: Rig) -> None:
    """The gauge is of this moment, and no event tells it."""
    gate = rig.gate_copies_out()
    with rig.engine() as engine:
        server = observing(engine)
        engine.add_request(range(65), 3, "r")
        step_until(engine, lambda: server.value("pinned_blocks") == 4)
        gate.open()
        engine.run()
        engine.idle_until_quiet()
        step_until(engine, lambda: server.value("pinned_blocks") == 0)


def test_a_request_that_may_not_read_is_no_query(rig: Rig) -> None:
    """O3: neither a miss nor in the denominator of any hit ratio."""
    with rig.engine() as engine:
        server = observing(engine)
        engine.add_request(range(65), 3, "r", skip_reading_prefix_cache=True)
        engine.run()
        engine.idle_until_quiet()
        engine.step_empty()
        for name in ("queried_tokens", "hit_tokens", "lookup_blocks"):
            assert server.value(f"{name}_total") == 0
        for outcome in ("promised", "joined", "declined"):
            assert server.value("requests_total", outcome=outcome) == 0
        step_until(
            engine, lambda: server.value("save_blocks_total", outcome="stored") == 4
        )


def test_a_store_that_hangs_is_seen_in_flight(rig: Rig) -> None:
    """What a person looks at first when nothing moves."""
    rig.seed(range(65))
    rig.through(partial(GatedStore, gated=("get_into",)))
    with rig.engine() as engine:
        server = observing(engine)
        engine.add_request(range(65), 3, "r")
        step_until(
            engine, lambda: server.value("inflight_operations", operation="load") == 1
        )
        assert server.value("inflight_bytes", operation="load") == 4 * 2048
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.step_empty()
        assert server.value("inflight_operations", operation="load") == 0
        assert server.value("inflight_bytes", operation="load") == 0


def test_a_request_that_waits_for_anothers_load_has_hit(rig: Rig) -> None:
    """The blocks came from the store, though it asked for no load of its own."""
    rig.seed(range(65))
    rig.through(partial(GatedStore, gated=("get_into",)))
    with rig.engine() as engine:
        server = observing(engine)
        engine.add_request(range(65), 3, "leader")
        worker = rig.worker(GatedStore)
        step_until(engine, lambda: worker.held)
        engine.add_request(range(65), 3, "follower")
        engine.run_steps(3)
        worker.open()
        engine.run()
        engine.idle_until_quiet()
        engine.step_empty()
        assert server.value("requests_total", outcome="promised") == 1
        assert server.value("requests_total", outcome="joined") == 1
        assert server.value("queried_tokens_total") == 65 + 65
        assert server.value("hit_tokens_total") == 64 + 64
