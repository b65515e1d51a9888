"""I of the bug log: a save always ends, leaves no hole, and others' work counts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from bugs.rig import OBJECT as ENGINE_OBJECT
from bugs.rig import CountingStore, Rig, Watch, serve

import akv
from akv.core.errors import StoreError
from akv.core.shed import Marks
from akv.pipeline.shed import Shedder
from akv.store import MemoryStore, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore, WrappedStore
from engine.shapes import INLINE_SHAPES, Shape
from harness import OBJECT, Memory, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Outcome

every_shape = pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
HASHES = prompt(1, 8)
SMALL = akv.Config(
    max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT, lookup_deadline=10
)


@every_shape
@pytest.mark.parametrize(
    "error", [StoreError("gone"), OSError("wire"), ValueError("odd")], ids=repr
)
def test_an_exists_that_raises_ends_its_job_and_spares_the_next(
    rig: Rig, shape: Shape, error: Exception
) -> None:
    """I1: job 1 is reported done and its references dropped; job 2 is stored."""
    faults = [Fault(error=error)]

    def wrap(inner: object) -> FaultyStore:
        worker = not rig.opened

        def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
            return faults.pop() if worker and verb == "exists" and faults else None

        return FaultyStore(inner, decide)  # type: ignore[arg-type]

    rig.through(wrap)
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "job 1", max_tokens=1)
        assert faults == []
        assert rig.store.statistics().objects == 0
        serve(engine, range(1000, 1065), "job 2", max_tokens=1)
        assert rig.store.statistics().objects == 4


def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has found no room is given up at once."""
    monkeypatch.setattr(
        "akv.pipeline.save.Shedder", partial(Shedder, marks=Marks(retries=()))
    )


@every_shape
@pytest.mark.parametrize("retries", [True, False])
def test_nothing_is_saved_behind_a_block_that_found_no_room_and_later_all_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, shape: Shape, *, retries: bool
) -> None:
    """I3: -200 twice, then ok: tried again, or no hole and filled by the next save."""
    if not retries:
        no_retries(monkeypatch)
    refusals = 2

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        nonlocal refusals
        if verb != "put_from" or not refusals:
            return None
        refusals -= 1
        return Fault(outcomes={len(keys) // 2: Status.NO_ROOM})

    rig.through(lambda inner: FaultyStore(inner, decide))
    with rig.engine(max_num_batched_tokens=64, **shape.options) as engine:
        stored = []
        for number in range(3):
            serve(engine, range(129), f"r-{number}", max_tokens=1)
            stored.append(rig.store.statistics().objects)
            assert engine.reset_prefix_cache()
    # At once; or blocks 0 and 1, then 2 and 3 of what is missing, then the rest:
    # always a whole prefix.
    assert stored == ([8, 8, 8] if retries else [2, 4, 8])
    rig.plain()
    with rig.engine() as engine:
        assert serve(engine, range(129), "reader") == 128


@every_shape
def test_what_the_store_has_evicted_is_saved_again_when_it_is_computed_again(
    rig: Rig, shape: Shape
) -> None:
    """I3: what was stored once is not taken for stored when a lookup missed it."""
    rig.through(CountingStore)
    with rig.engine(**shape.options) as engine:
        serve(engine, range(65), "first", max_tokens=1)
        rig.store.remove(rig.worker(CountingStore).keys("put_from"))
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "second", max_tokens=1) == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "third", max_tokens=1) == 64


class _NoLease(WrappedStore):
    """Promises nothing, so that whatever is oldest can be evicted."""

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Without a promise."""
        return self.inner.exists(keys)


@every_shape
def test_a_store_smaller_than_the_traffic_keeps_what_was_used_last(
    rig: Rig, shape: Shape
) -> None:
    """I3: evictions all the time; the newest prompt is always found again."""
    settings = {"store": f"memory:{rig.name}?capacity={12 * ENGINE_OBJECT}"}
    rig.through(_NoLease)
    with rig.engine(settings, **shape.options) as engine:
        for turn in range(3):
            for start in (0, 1000, 2000):
                name = f"{turn}-{start}"
                serve(engine, range(start, start + 129), name, max_tokens=1)
                assert engine.reset_prefix_cache()
                again = serve(engine, range(start, start + 129), f"{name} again")
                assert again == 128
                assert engine.reset_prefix_cache()


@pytest.mark.anyio
async def test_a_reader_finds_what_a_flush_has_waited_for() -> None:
    """I5: a flush is there to wait for: durable, not only computed."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("put_from",))
    memory.write(0, HASHES[0])
    async with (
        akv.open_session(SMALL, memory.geometry, memory.device, store=store) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(session.save, save_spec(HASHES[:1], (0,))))
        await anyio.to_thread.run_sync(store.wait_until_held)
        assert await session.lookup(lookup_spec(HASHES[:1])) == 0
        store.open()
        with anyio.fail_after(10):
            await session.flush()
        assert await session.lookup(lookup_spec(HASHES[:1])) == 1


@pytest.mark.anyio
async def test_the_second_of_two_writers_of_one_key_has_stored_it_too() -> None:
    """I9: exists said no to both; the one that came second is not a failure."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("put_from",))
    outcomes: list[akv.SaveOutcome] = []
    for number in range(2):
        memory.write(number, HASHES[number])

    async def save(session: akv.Session, job: int) -> None:
        spec = save_spec(HASHES[:2], (0, 1), job_id=job, chain=job)
        outcomes.append(await session.save(spec))

    async with (
        akv.open_session(SMALL, memory.geometry, memory.device, store=store) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(save, session, 1)
        tasks.start_soon(save, session, 2)
        await anyio.to_thread.run_sync(store.wait_until_held, 2)
        store.open()
    assert sum(outcome.stored for outcome in outcomes) == 2
    assert sum(outcome.existed for outcome in outcomes) == 2
    assert all(outcome.dropped == 0 for outcome in outcomes)


@every_shape
def test_saves_beyond_the_share_of_blocks_they_may_hold_are_dropped_without_a_hole(
    rig: Rig, shape: Shape
) -> None:
    """I: pins are bounded by a share of the pool, whatever a copy takes."""
    gate = rig.gate_copies_out()
    with rig.engine(
        {"max_pinned_fraction": 0.1}, num_blocks=64, **shape.options
    ) as engine:
        watch = Watch(engine)
        for number in range(4):
            engine.add_request(range(1000 * number, 1000 * number + 65), 1)
        engine.run()
        assert sum(len(spec) for spec in watch.saves) == 6
        connector = engine.scheduler.get_kv_connector()
        assert connector._s.debug_state()["pinned blocks"] == 6
        gate.open()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean()
        assert connector._s.debug_state()["pinned blocks"] == 0
        assert engine.reset_prefix_cache()
        loaded = [
            serve(engine, range(1000 * n, 1000 * n + 65), f"again-{n}")
            for n in range(4)
        ]
    assert sum(loaded) == 6 * 16
