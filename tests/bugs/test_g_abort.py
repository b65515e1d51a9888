"""G of the bug log: who goes away leaves no block, no second report, no late byte."""

from __future__ import annotations

from itertools import permutations

import anyio
import anyio.to_thread
import pytest
from bugs.rig import Rig, Watch, serve, step_until

import akv
from akv.store import MemoryStore
from akv.testing.stores import GatedStore
from engine.shapes import INLINE_SHAPES, Shape
from engine.workload import Workload, run_workload
from harness import BLOCKS, OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
HASHES = prompt(1, 8)
ORDERS = list(permutations(("abort", "load", "save")))
SMALL = akv.Config(max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT)


@every_shape
def test_a_get_that_outlives_its_request_writes_no_block_of_another(
    rig: Rig, shape: Shape
) -> None:
    """G1: abort while the get hangs; B gets the blocks; then the get returns."""
    rig.seed(range(113))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(num_blocks=10, **shape.options) as engine:
        engine.add_request(range(113), 3, "A")
        step_until(engine, lambda: "A" in engine.monitor.loads)
        step_until(engine, lambda: rig.worker(GatedStore).held)
        engine.abort("A")
        # Eight of nine blocks were A's: B cannot run without them.
        engine.add_request(range(500, 570), 40, "B")
        step_until(engine, lambda: engine.outputs["B"])
        assert engine.monitor.reports["A"] == 1
        rig.worker(GatedStore).open()
        # Each step checks every byte of B.
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.monitor.reports["A"] == 1


@every_shape
@pytest.mark.parametrize("held", [True, False], ids=["held", "at once"])
def test_two_hundred_aborted_loads_leak_no_block(
    rig: Rig, shape: Shape, held: bool
) -> None:
    """G3: abort at step k, the load ends later, or in the same moment."""
    rig.seed(range(65))
    gated = ("get_into",) if held else ()
    rig.through(lambda inner: GatedStore(inner, gated=gated))
    with rig.engine(**shape.options) as engine:
        for number in range(200):
            name = f"r-{number}"
            engine.add_request(range(65), 3, name)
            step_until(engine, lambda name=name: name in engine.monitor.loads)  # type: ignore[misc]
            if number % 2:
                engine.abort(name)
            else:
                engine.abort_during_step(name)
                engine.step()
            if held:
                rig.worker(GatedStore).let_go()
            engine.run()
        engine.idle_until_quiet()
        rig.worker(GatedStore).open()
        engine.assert_clean()
        assert set(engine.monitor.reports.values()) == {1}
        assert len(engine.monitor.reports) == 200


@every_shape
def test_no_report_is_for_a_load_that_was_not_asked_for_or_made_twice(
    rig: Rig, shape: Shape
) -> None:
    """G5: every third step an abort; the monitor judges each report."""
    traffic = Workload(requests=60, abort_rate=0.3, forced_reset_rate=0.02)
    with rig.engine(num_blocks=32, **shape.options) as engine:
        report = run_workload(engine, 7, workload=traffic)
        assert report.aborted > 10
        assert report.loads > 0


@pytest.mark.parametrize("shape", INLINE_SHAPES[::3], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_load_and_a_save_of_one_id_end_in_any_order_around_its_abort(
    rig: Rig, shape: Shape, order: tuple[str, ...]
) -> None:
    """G6: the save has references of its own, so only the load is reported."""
    rig.seed(range(65))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    gate = rig.gate_copies_out()
    with rig.engine(**shape.options) as engine:
        engine.add_request(range(500, 565), 1, "r")
        engine.run()
        gate.wait_until_held()
        # The id comes back while a save of its first life still holds blocks.
        engine.add_request(range(65), 3, "r")
        step_until(engine, lambda: "r" in engine.monitor.loads)
        step_until(engine, lambda: rig.worker(GatedStore).held)
        connector = engine.scheduler.get_kv_connector()
        for event in order:
            if event == "abort":
                engine.abort("r") if "r" in engine.scheduler.requests else None
            elif event == "load":
                rig.worker(GatedStore).open()
                step_until(engine, lambda: not engine.monitor.outstanding)
            else:
                gate.open()
                step_until(engine, lambda: not connector.has_pending_push_work())
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert engine.monitor.reports["r"] == 1
        engine.reset_prefix_cache()
        assert serve(engine, range(500, 565), "again") == 64


@every_shape
@pytest.mark.parametrize("quit_first", ["A", "B"])
def test_an_abort_does_not_hurt_who_waits_for_the_same_blocks(
    rig: Rig, shape: Shape, quit_first: str
) -> None:
    """G7: A and B wait for one prefix, one of them leaves before the get began."""
    rig.seed(range(65))
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with rig.engine(**shape.options) as engine:
        watch = Watch(engine)
        engine.add_request(range(65), 3, "A")
        engine.add_request([*range(64), 7], 3, "B")
        step_until(engine, lambda: (None, False) in engine.monitor.answers.get("B", ()))
        step_until(engine, lambda: watch.loads)
        engine.abort(quit_first)
        engine.run_steps(5)
        rig.worker(GatedStore).open()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        (other,) = {"A", "B"} - {quit_first}
        assert engine.finish_reasons[other] == "length"


async def in_quarantine(session: akv.Session) -> int:
    """Buffers for loads whose native call has not come back."""
    staging = (await session.statistics()).load_staging
    assert staging is not None
    return staging.quarantined


@pytest.mark.anyio
async def test_a_cancelled_loads_memory_is_out_of_use_until_its_thread_returns() -> (
    None
):
    """G9: cancel while the get is in its thread: the slot waits for the thread."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("get_into",))
    async with akv.open_session(
        SMALL, memory.geometry, memory.device, store=store
    ) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.load, load_spec(HASHES, range(8)))
            await anyio.to_thread.run_sync(store.wait_until_held)
            tasks.cancel_scope.cancel()
        assert (await session.statistics()).loads == 0
        assert await in_quarantine(session) > 0
        store.open()
        with anyio.fail_after(10):
            while await in_quarantine(session):
                pass
    assert all(memory.untouched(number) for number in range(BLOCKS))


@pytest.mark.anyio
async def test_a_put_that_began_ends_though_whoever_waited_had_no_time() -> None:
    """G10: a save in a caller's 50 ms: the put runs to its end, and is found."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("put_from",))
    memory.write(0, HASHES[0])
    async with akv.open_session(
        SMALL, memory.geometry, memory.device, store=store
    ) as session:
        with anyio.move_on_after(0.05) as scope:
            await session.save(save_spec(HASHES[:1], (0,)))
        assert scope.cancelled_caught
        memory.write(0, b"another!")
        await anyio.to_thread.run_sync(store.wait_until_held)
        store.open()
        with anyio.fail_after(10):
            while await session.lookup(lookup_spec(HASHES[:1])) == 0:
                pass
        assert (await session.load(load_spec(HASHES[:1], (3,)))).landed
    assert memory.holds(3, HASHES[0])
