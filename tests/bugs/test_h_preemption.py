"""H of the bug log: a preemption while akv still reads or writes the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bugs.rig import Rig, Watch, serve, step_until, until_answered

from akv.testing.stores import GatedStore
from engine.shapes import INLINE_SHAPES, Shape

if TYPE_CHECKING:
    from engine.engine import Engine

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)

ALL_PINNED = {"max_pinned_fraction": 1}


def crowded(rig: Rig, shape: Shape, num_blocks: int) -> Engine:
    """An engine in which a more urgent request takes the blocks of others."""
    return rig.engine(
        ALL_PINNED, num_blocks=num_blocks, policy="priority", **shape.options
    )


def preempt(engine: Engine, victim: str, tokens: int = 100) -> None:
    """Let an urgent request grow until the victim has lost its blocks."""
    before = engine.preemptions
    engine.add_request(range(5000, 5097), tokens, "urgent")
    until_answered(engine, "urgent")
    step_until(engine, lambda: engine.preemptions > before)
    assert engine.scheduler.requests[victim].num_preemptions > 0


@every_shape
def test_what_a_save_reads_is_not_handed_out_by_a_preemption(
    rig: Rig, shape: Shape
) -> None:
    """H1: the copy of a block hangs, its request is preempted: old bytes land."""
    gate = rig.gate_copies_out()
    with crowded(rig, shape, 22) as engine:
        engine.add_request(range(65), 100, "victim", priority=1)
        step_until(engine, lambda: engine.outputs["victim"])
        gate.wait_until_held()
        preempt(engine, "victim")
        # The urgent one takes and writes whatever the pool still has.
        engine.run_steps(50)
        gate.open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
    with rig.engine() as engine:
        assert serve(engine, range(65), "victim again") == 64
        assert serve(engine, range(5000, 5097), "urgent again") == 96


@every_shape
def test_a_request_comes_back_with_a_load_while_its_saves_are_under_way(
    rig: Rig, shape: Shape
) -> None:
    """H3: preempted, admitted again with a hit before its puts have returned."""
    rig.seed(range(32))
    rig.through(lambda inner: GatedStore(inner, gated=("put_from",)))
    with crowded(rig, shape, 18) as engine:
        watch = Watch(engine)
        engine.add_request(range(65), 90, "victim", priority=1)
        step_until(engine, lambda: engine.outputs["victim"])
        assert engine.monitor.loads["victim"] == [32]
        rig.worker(GatedStore).wait_until_held()
        # It grows until it has had every block of the pool.
        preempt(engine, "victim", tokens=170)
        step_until(engine, lambda: len(engine.monitor.loads["victim"]) == 2)
        # Its first life's put has not returned.
        assert rig.worker(GatedStore).held
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.monitor.reports["victim"] == 2
        assert len({spec.load_id for spec in watch.loads}) == len(watch.loads)


@every_shape
def test_saves_of_a_preempted_request_end_and_are_not_lost_to_later_ones(
    rig: Rig, shape: Shape
) -> None:
    """H5: preempt with three saves pending, compute again, save again: all there."""
    rig.through(lambda inner: GatedStore(inner, gated=("put_from",)))
    options = {**shape.options, "max_num_batched_tokens": 32}
    with rig.engine(ALL_PINNED, num_blocks=18, policy="priority", **options) as engine:
        watch = Watch(engine)
        engine.add_request(range(97), 80, "victim", priority=1)
        step_until(engine, lambda: engine.outputs["victim"])
        assert [len(spec) for spec in watch.saves] == [2, 2, 2]
        preempt(engine, "victim")
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
    rig.plain()
    with rig.engine() as engine:
        assert serve(engine, range(97), "victim again") == 96
