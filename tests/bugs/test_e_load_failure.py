"""E of the bug log: a load that fails is said to have failed, for its blocks alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from bugs.rig import CountingStore, Rig, Watch, serve, step_until, until_answered

from akv.store.base import Failure, Outcome, Status
from akv.testing.stores import Fault, FaultyStore
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.core.keys import BlockKey
    from akv.store import BlockStore
    from engine.engine import Engine

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)


def block_of(engine: Engine, name: str, number: int) -> int:
    """The engine's id of one block of a request."""
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    block: int = table[number]
    return block


def failing(
    outcome: Outcome, *, place: int, times: int = 1
) -> Callable[[BlockStore], BlockStore]:
    """Let the ``place``-th object of the first ``times`` gets come to ``outcome``."""
    left = [times]

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb != "get_into" or len(keys) <= place or not left[0]:
            return None
        left[0] -= 1
        return Fault(outcomes={place: outcome})

    return lambda inner: FaultyStore(inner, decide)


@every_shape
@pytest.mark.parametrize(
    "outcome",
    [Status.MISS, Failure("not found", -704), Failure("transfer failed", -800)],
    ids=["miss", "not found", "transfer failed"],
)
def test_a_block_that_failed_is_reported_and_the_prefix_before_it_is_kept(
    rig: Rig, shape: Shape, outcome: Outcome
) -> None:
    """E1: get -> [ok, bad, ok, ok]: block 1 reported, once, computed cut to 16."""
    rig.seed(range(65))
    rig.through(failing(outcome, place=1))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(range(65), 3, "r")
        step_until(engine, lambda: "r" in engine.monitor.loads)
        bad = block_of(engine, "r", 1)
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert watch.failed_blocks == [{bad}]
        assert engine.monitor.reports["r"] == 1
        assert watch.scheduled["r"][0] == 65 - 16
        assert engine.monitor.loads["r"] == [64]


@every_shape
def test_a_failure_of_any_of_several_loads_is_reported_exactly_once(
    rig: Rig, shape: Shape
) -> None:
    """E2: two loads in two threads, the second one's get fails."""
    first, second = range(65), range(1000, 1065)
    rig.seed(first, second)
    calls: list[tuple[BlockKey, ...]] = []

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb != "get_into":
            return None
        calls.append(tuple(keys))
        return Fault(outcomes={2: Status.MISS}) if len(calls) == 2 else None

    rig.through(lambda inner: FaultyStore(inner, decide))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(first, 3, "first")
        engine.add_request(second, 3, "second")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert len(calls) == 2
        (failed,) = watch.failed_blocks
        assert len(failed) == 1
        assert engine.monitor.reports == {"first": 1, "second": 1}


@every_shape
def test_what_is_there_but_cannot_be_read_is_tried_once_and_then_a_miss(
    rig: Rig, shape: Shape
) -> None:
    """E4: exist -> 1 always, get -> -800 always: computed after one failure."""
    rig.seed(range(65))
    gets = 0

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        nonlocal gets
        if verb != "get_into":
            return None
        gets += 1
        return Fault(
            outcomes=dict.fromkeys(range(len(keys)), Failure("transfer failed", -800))
        )

    rig.through(lambda inner: FaultyStore(inner, decide))
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "r")
        assert engine.monitor.loads["r"] == [64]
        assert gets == 1
        # Others are not promised it either, for some seconds.
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "another") == 0
        assert gets == 1


@every_shape
def test_a_request_whose_load_failed_is_not_promised_again_after_a_preemption(
    rig: Rig, shape: Shape
) -> None:
    """E4: a preemption asks anew, and must not start the round again."""
    rig.seed(range(65))
    rig.through(failing(Status.MISS, place=1, times=1000))
    with rig.engine(num_blocks=14, policy="priority", **shape.options) as engine:
        engine.add_request(range(65), 40, "r", priority=1)
        step_until(engine, lambda: len(engine.outputs["r"]) > 3)
        engine.add_request(range(500, 597), 60, "more urgent")
        until_answered(engine, "more urgent")
        engine.run()
        engine.idle_until_quiet()
        assert engine.preemptions > 0
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.monitor.loads["r"] == [64]


@every_shape
def test_an_object_lost_after_the_lookup_is_computed_and_nobody_notices(
    rig: Rig, shape: Shape
) -> None:
    """E6: exist 1, evicted, get -704: counted, computed, no error to the user."""
    rig.seed(range(65))

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb == "get_into":
            rig.store.remove(keys)
        return None

    rig.through(lambda inner: FaultyStore(inner, decide))
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "r")
        assert engine.finish_reasons["r"] == "length"
        assert engine.monitor.loads["r"] == [64]
        # What was lost is saved again by whoever computed it.
        rig.plain()
    with rig.engine() as engine:
        assert serve(engine, range(65), "later") == 64


def test_a_load_that_failed_is_counted(rig: Rig) -> None:
    """E6: 'lost after lookup' is a number and an event with that reason."""
    rig.seed(range(65))
    rig.through(failing(Status.MISS, place=3))
    with rig.engine() as engine:
        worker = engine.worker.runner.connector  # type: ignore[attr-defined]
        totals: dict[str, int] = {}
        take = worker.get_kv_connector_stats

        def taking() -> object:
            stats = take()
            for name, value in (stats.reduce() if stats else {}).items():
                totals[name] = totals.get(name, 0) + value
            return stats

        worker.get_kv_connector_stats = taking
        serve(engine, range(65), "r")
        engine.step_empty()
    assert totals["loads_failed"] == 1
    assert totals["load_blocks_failed"] == 1


@pytest.mark.parametrize(("policy", "lines"), [("fail", 2), ("recompute", 0)])
def test_a_policy_that_would_fail_the_users_request_is_warned_of(
    rig: Rig, caplog: pytest.LogCaptureFixture, policy: str, lines: int
) -> None:
    """E6: vLLM's default fails the request of a failed load; each role warns."""
    with (
        caplog.at_level(logging.WARNING, logger="vllm.akv"),
        rig.engine(kv_load_failure_policy=policy),
    ):
        pass
    said = [r for r in caplog.records if "kv_load_failure_policy" in r.getMessage()]
    assert len(said) == lines
    assert all("recompute" in record.getMessage() for record in said)


@every_shape
def test_a_failure_is_the_failing_requests_alone(rig: Rig, shape: Shape) -> None:
    """E8: A and B want blocks 0 and 1, block 1 fails for A: A 16, B 32.

    B waits for A's load and has block 0 from it, and block 1 from A's computing.
    """
    rig.seed(range(49))
    rig.through(failing(Status.MISS, place=1))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request([*range(32), 7], 3, "A")
        engine.add_request([*range(32), 8], 3, "B")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.monitor.loads == {"A": [32]}
        first = {name: watch.scheduled[name][0] for name in "AB"}
        assert sorted(first.values()) == [1, 17]
        assert len(watch.failed_blocks) == 1


@every_shape
def test_every_load_that_is_offered_is_asynchronous(rig: Rig, shape: Shape) -> None:
    """E9: a synchronous load that fails leaves a hash on a block that is garbage."""
    rig.seed(range(65))
    rig.through(CountingStore)
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "r")
        assert (64, True) in engine.monitor.answers["r"]
        assert all(
            asynchronous is bool(tokens)
            for tokens, asynchronous in engine.monitor.answers["r"]
        )
