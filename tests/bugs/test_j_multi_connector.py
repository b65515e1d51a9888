"""J of the bug log: akv as one of several children of vLLM's MultiConnector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from bugs.rig import CountingStore, Rig, serve, step_until
from prometheus_client import Counter, Gauge, Histogram

import akv.vllm
from engine.engine import Engine
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from akv.core.spec import LoadSpec

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


def multi_engine(rig: Rig, shape: Shape, *children: str, **options: Any) -> Engine:
    """An engine whose connector has these children, in this order."""
    akv.vllm.register()
    kinds = {
        "akv": {
            "kv_connector": "AkvConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": rig.extra,
        },
        "other": {
            "kv_connector": "ReferenceConnector",
            "kv_connector_module_path": "engine.reference",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": rig.name},
        },
    }
    return Engine(
        "MultiConnector",
        None,
        extra_config={"connectors": [kinds[child] for child in children]},
        **shape.options,
        **options,
    )


def child_of(engine: Engine, number: int) -> Any:
    """One child of the scheduler's role."""
    return engine.scheduler.get_kv_connector().sub_connectors[number]


def akv_loads(connector: Any) -> list[LoadSpec]:
    """The loads that akv will hand to its worker, as they come."""
    loads: list[LoadSpec] = []
    build = connector.build_connector_meta

    def building(output: Any) -> Any:
        metadata = build(output)
        loads.extend(metadata.loads)
        return metadata

    connector.build_connector_meta = building
    return loads


def quiet(engine: Engine) -> None:
    """Serve on until nothing is left, and check everything."""
    engine.run()
    engine.idle_until_quiet()
    engine.assert_outputs()
    engine.assert_clean()


@every_shape
def test_a_promise_that_was_not_taken_leaves_no_job(rig: Rig, shape: Shape) -> None:
    """J1: akv offers 64, an earlier child is chosen: no load, no empty save job."""
    with multi_engine(rig, shape, "other", "akv") as engine:
        engine.add_request(range(65), 1, "cold")
        quiet(engine)
        engine.step_empty()
        assert engine.reset_prefix_cache()
        second = child_of(engine, 1)
        loads = akv_loads(second)
        engine.add_request(range(65), 3, "warm")
        quiet(engine)
        assert engine.external_tokens("warm") == 64
        assert engine.monitor.reports["warm"] == 1
        assert loads == []
        state = second.debug_state()
        assert not any(state.values()), state


@every_shape
def test_a_request_whose_load_has_ended_is_not_offered_another(
    rig: Rig, shape: Shape
) -> None:
    """J3: asked again after the load, also by hand: (0, False)."""
    rig.seed(range(65))
    with multi_engine(rig, shape, "akv", "other") as engine:
        engine.add_request(range(65), 30, "r")
        step_until(engine, lambda: engine.monitor.reports["r"])
        assert engine.external_tokens("r") == 64
        request = engine.scheduler.requests["r"]
        first = child_of(engine, 0)
        for local in (0, 16, 64):
            assert first.get_num_new_matched_tokens(request, local) == (0, False)
        quiet(engine)
        assert engine.monitor.loads["r"] == [64]


@every_shape
@pytest.mark.parametrize(
    ("order", "loaded"), [(("akv", "other"), 96), (("other", "akv"), 32)]
)
def test_the_first_child_with_a_hit_wins_and_is_counted_once(
    rig: Rig, shape: Shape, order: tuple[str, str], loaded: int
) -> None:
    """J4: the other child has 2 blocks, akv has 6; one load, one report."""
    with Engine(
        "ReferenceConnector",
        "engine.reference",
        extra_config={"store": rig.name},
        **shape.options,
    ) as engine:
        serve(engine, range(33), "two blocks", max_tokens=1)
    rig.seed(range(97))
    with multi_engine(rig, shape, *order) as engine:
        # The reference child knows only what it saved itself in this engine.
        if order[0] == "other":
            engine.add_request(range(33), 1, "two blocks")
            quiet(engine)
            engine.step_empty()
            assert engine.reset_prefix_cache()
        engine.add_request(range(97), 3, "r")
        quiet(engine)
        assert engine.monitor.loads["r"] == [loaded]
        assert engine.monitor.reports["r"] == 1


def test_a_hit_is_offered_beyond_what_the_call_says_is_there(rig: Rig) -> None:
    """J4: what MultiConnector passes on as computed is where akv's offer begins."""
    rig.seed(range(97))
    rig.through(CountingStore)
    with rig.engine() as engine:
        connector = engine.scheduler.get_kv_connector()
        engine.add_request(range(97), 3, "r")
        request = engine.scheduler.requests["r"]
        engine.run_steps(1)
        while connector.get_num_new_matched_tokens(request, 32)[0] is None:
            pass
        for local, need in ((0, 96), (32, 64), (80, 16), (96, 0)):
            answer = connector.get_num_new_matched_tokens(request, local)
            assert answer == (need, need > 0)
        quiet(engine)


def test_numbers_of_akv_never_end_the_api_server(rig: Rig) -> None:
    """O1: inside MultiConnector vLLM asserts that each child has a handler."""
    with multi_engine(rig, INLINE_SHAPES[0], "akv") as engine:
        kind = type(engine.scheduler.get_kv_connector())
        metrics = kind.build_prom_metrics(
            engine.vllm_config,
            {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
            ["model_name", "engine"],
            {0: ["model", "0"]},
        )
    for data in ({"loads_landed": 1}, {"no such number": 7.5}, {"odd": "text"}, {}):
        metrics.observe({"AkvConnector": data}, 0)
