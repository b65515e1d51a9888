"""A session from outside: what comes back is what was saved, or is said to be not."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

import akv
from akv.store import BlockStore, Failure, MemoryStore, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import (
    BLOCKS,
    OBJECT,
    Memory,
    Recorder,
    load_spec,
    lookup_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from akv.core.keys import BlockKey

pytestmark = pytest.mark.anyio

HASHES = prompt(1, 12)
SMALL = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=20,
    lookup_deadline=5,
)


@asynccontextmanager
async def session_on(
    store: BlockStore,
    memory: Memory,
    config: akv.Config = SMALL,
    recorder: Recorder | None = None,
) -> AsyncIterator[akv.Session]:
    """A session that is back at its starting numbers when it is left."""
    async with akv.open_session(
        config,
        memory.geometry,
        memory.device,
        store=store,
        observer=recorder or Recorder([]),
    ) as session:
        yield session
        await session.flush()
        numbers = await session.statistics()
        with anyio.fail_after(10):
            # A load that failed does not wait for what it had fetched ahead.
            while numbers.load_staging and numbers.load_staging.quarantined:
                numbers = await session.statistics()
        assert (numbers.loads, numbers.saves, numbers.lookups) == (0, 0, 0)
        for staging in (numbers.load_staging, numbers.save_staging):
            assert staging is not None
            assert (staging.free, staging.waiting, staging.quarantined) == (
                staging.buffers,
                0,
                0,
            )


async def saved(session: akv.Session, memory: Memory, count: int = 12) -> None:
    """Compute and save the first blocks of the prompt."""
    for number in range(count):
        memory.write(number, HASHES[number])
    outcome = await session.save(save_spec(HASHES[:count], range(count)))
    assert (outcome.stored, outcome.dropped) == (count, 0)


async def test_what_was_saved_is_found_and_loaded_byte_for_byte() -> None:
    """Into other blocks, in another order; blocks beside them are not touched."""
    memory, other = Memory(), Memory()
    store = MemoryStore(slot_bytes=OBJECT)
    async with session_on(store, memory) as session:
        await saved(session, memory)
    async with session_on(store, other) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 12
        ids = [31, 0, 7, 30, 2, 9, 11, 12, 13, 25, 1, 3]
        outcome = await session.load(load_spec(HASHES, ids))
        assert outcome.landed
    for number, block_hash in zip(ids, HASHES, strict=True):
        assert other.holds(number, block_hash)
    for number in set(range(BLOCKS)) - set(ids):
        assert other.untouched(number)


async def test_a_lookup_ends_at_the_first_gap() -> None:
    """A prefix with a hole is as long as what is before the hole."""
    memory = Memory()
    store = MemoryStore(slot_bytes=OBJECT)
    async with session_on(store, memory) as session:
        await saved(session, memory, 6)
        await session.save(save_spec(HASHES[8:10], (8, 9), chain=2))
        assert await session.lookup(lookup_spec(HASHES)) == 6
        assert await session.lookup(lookup_spec(HASHES, first_block=8)) == 2
        assert await session.lookup(lookup_spec(HASHES, first_block=12)) == 0


async def test_a_lookup_asks_only_beyond_what_the_engine_has() -> None:
    """100 blocks, 90 local: the store is asked for the last 10."""
    hashes = prompt(2, 100)
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=())
    async with session_on(store, Memory()) as session:
        await session.lookup(lookup_spec(hashes, first_block=90))
    (call,) = (keys for verb, keys in store.calls if verb == "exists")
    assert [key[-32:] for key in call] == list(hashes[90:])


async def test_a_miss_near_the_start_of_a_long_prompt_costs_one_small_call() -> None:
    """Of 8,000 blocks 64 are asked for."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=())
    async with session_on(store, Memory()) as session:
        assert await session.lookup(lookup_spec(prompt(3, 8000))) == 0
    assert [len(keys) for _, keys in store.calls] == [64]


async def test_lookups_of_one_turn_share_a_call() -> None:
    """200 requests in one step: one call, not 200."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=())
    async with (
        session_on(store, Memory()) as session,
        anyio.create_task_group() as tasks,
    ):
        for seed in range(200):
            tasks.start_soon(session.lookup, lookup_spec(prompt(seed, 4)))
    assert len(store.calls) <= 3
    assert sum(len(keys) for _, keys in store.calls) == 800


async def test_a_lookup_that_is_late_answers_what_it_knows() -> None:
    """The deadline passes while the store hangs: nothing found, no error."""
    config = akv.Config(lookup_deadline=0.01)
    recorder = Recorder([])
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("exists",))
    async with session_on(store, Memory(), config, recorder) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 0
        store.open()
    assert "akv.lookup.expired" in recorder.names()


@pytest.mark.parametrize("error", [akv.StoreError("gone"), ValueError("odd")])
async def test_a_store_that_fails_a_lookup_has_nothing(error: Exception) -> None:
    """Whatever it raises, the engine computes, and the next lookup works."""
    faults = [Fault(error=error)]
    store = FaultyStore(
        MemoryStore(slot_bytes=OBJECT), lambda *_: faults.pop() if faults else None
    )
    recorder = Recorder([])
    memory = Memory()
    async with session_on(store, memory, recorder=recorder) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 0
        assert "akv.lookup.failed" in recorder.names()
        await saved(session, memory, 4)
        assert await session.lookup(lookup_spec(HASHES)) == 4


BAD = {
    "an error code": Failure("transfer failed", -800),
    "evicted after the lookup": Status.MISS,
    "a short read": Failure("17 of 768 bytes"),
    "an answer that belongs to a put": Status.STORED,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_exactly_what_did_not_land_is_reported(bad: Status | Failure) -> None:
    """Block 5 fails: 0 to 4 landed, 5 and all after it are reported, once."""
    store = MemoryStore(slot_bytes=OBJECT)
    memory, other = Memory(), Memory()
    async with session_on(store, memory) as session:
        await saved(session, memory)

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        places = [n for n, key in enumerate(keys) if key.endswith(HASHES[5])]
        return (
            Fault(outcomes={places[0]: bad}) if verb == "get_into" and places else None
        )

    async with session_on(FaultyStore(store, decide), other) as session:
        outcome = await session.load(load_spec(HASHES, range(12)))
        assert not outcome.landed
        failed = set(outcome.failed_blocks)
        assert 5 in failed
        for number in set(range(12)) - failed:
            assert other.holds(number, HASHES[number])
        assert set(range(5)).isdisjoint(failed)
        assert set(range(8, 12)) <= failed
        assert outcome.failed_hashes == (HASHES[5],)
        # A key that was promised and could not be read is a miss for a while.
        assert await session.lookup(lookup_spec(HASHES)) == 5


async def test_an_error_of_the_store_fails_the_whole_window_and_no_more() -> None:
    """The second call raises; what the first one brought stays."""
    store = MemoryStore(slot_bytes=OBJECT)
    memory, other = Memory(), Memory()
    async with session_on(store, memory) as session:
        await saved(session, memory)
    calls = 0

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        nonlocal calls
        calls += verb == "get_into"
        return Fault(error=OSError("wire")) if calls == 2 else None

    async with session_on(FaultyStore(store, decide), other) as session:
        outcome = await session.load(load_spec(HASHES, range(12)))
    assert outcome.reason == "OSError: wire"
    landed = sorted(set(range(12)) - set(outcome.failed_blocks))
    assert landed == list(range(len(landed)))
    assert landed
    assert all(other.holds(number, HASHES[number]) for number in landed)


async def test_a_load_larger_than_all_of_staging_runs_through_in_windows() -> None:
    """Staging holds 8 objects, the load has 12."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=())
    memory = Memory()
    async with session_on(store, memory) as session:
        await saved(session, memory)
        outcome = await session.load(load_spec(HASHES, range(20, 32)))
        assert outcome.landed
    assert max(len(keys) for verb, keys in store.calls if verb == "get_into") <= 2


async def test_a_load_of_nothing_has_landed() -> None:
    """A spec whose every block is masked out is finished at once."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("get_into",))
    async with session_on(store, Memory()) as session:
        assert (await session.load(load_spec((), ()))).landed
    assert store.calls == []


async def test_a_spec_that_does_not_fit_is_refused_before_anything_is_touched() -> None:
    """A block that the engine does not have."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=())
    async with session_on(store, Memory()) as session:
        with pytest.raises(akv.PlanError, match="block 32 of 32"):
            await session.load(load_spec(HASHES[:1], (32,)))
        freed: list[int] = []
        with pytest.raises(akv.PlanError, match="block 32 of 32"):
            await session.save(
                save_spec(HASHES[:1], (32,)), on_copied=partial(freed.append, 1)
            )
        assert freed == [1]
    assert store.calls == []


async def test_a_load_that_misses_its_deadline_keeps_what_has_landed() -> None:
    """The third window hangs: the first two stay, the rest has failed."""
    inner = MemoryStore(slot_bytes=OBJECT)
    memory, other = Memory(), Memory()
    async with session_on(inner, memory) as session:
        await saved(session, memory)
    store = GatedStore(inner, gated=("get_into",))
    store.let_go(2)
    config = akv.Config(
        max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT, load_deadline=0.2
    )
    recorder = Recorder([])
    async with session_on(store, other, config, recorder) as session:
        outcome = await session.load(load_spec(HASHES, range(12)))
        assert outcome.failed_blocks == tuple(range(4, 12))
        assert "load_deadline" in outcome.reason
        numbers = await session.statistics()
        assert numbers.load_staging is not None
        assert numbers.load_staging.quarantined >= 1
        assert "akv.memory.quarantined" in recorder.names()
        for number in range(4, 12):
            assert other.untouched(number)
        store.open()
        while numbers.load_staging.quarantined:
            numbers = await session.statistics()
            assert numbers.load_staging is not None
    for number in range(4):
        assert other.holds(number, HASHES[number])
    for number in range(4, 12):
        assert other.untouched(number)


async def test_a_cancelled_load_writes_nothing_after_it_has_ended() -> None:
    """The store's call goes on into akv's own memory; the engine's is free."""
    inner = MemoryStore(slot_bytes=OBJECT)
    memory, other = Memory(), Memory()
    async with session_on(inner, memory) as session:
        await saved(session, memory)
    store = GatedStore(inner, gated=("get_into",))
    async with session_on(store, other) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.load, load_spec(HASHES, range(12)))
            await anyio.to_thread.run_sync(store.wait_until_held)
            tasks.cancel_scope.cancel()
        begun = len(store.calls)
        store.open()
        numbers = await session.statistics()
        assert numbers.load_staging is not None
        while numbers.load_staging.quarantined:
            numbers = await session.statistics()
            assert numbers.load_staging is not None
        assert len(store.calls) == begun
        assert all(other.untouched(number) for number in range(BLOCKS))
        # The same session goes on working.
        assert (await session.load(load_spec(HASHES, range(12)))).landed


async def test_one_load_that_hangs_does_not_hold_up_the_others() -> None:
    """One get never answers; ten loads behind it land."""
    inner = MemoryStore(slot_bytes=OBJECT)
    memory = Memory()
    async with session_on(inner, memory) as session:
        await saved(session, memory)
    store = GatedStore(inner, gated=("get_into",))
    async with (
        session_on(store, memory) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.load, load_spec(HASHES[:1], (31,)))
        await anyio.to_thread.run_sync(store.wait_until_held)
        store._gated = frozenset()
        for load_id in range(10):
            spec = load_spec(HASHES, range(12, 24), load_id=load_id)
            assert (await session.load(spec)).landed
        store.open()


async def test_the_blocks_of_a_save_are_free_long_before_the_store_has_them() -> None:
    """The put hangs; the engine may write its blocks again, and old bytes land."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory, other = Memory(), Memory()
    memory.write(0, HASHES[0])
    async with (
        session_on(store, memory) as session,
        anyio.create_task_group() as tasks,
    ):
        copied = anyio.Event()
        tasks.start_soon(
            partial(session.save, save_spec(HASHES[:1], (0,)), on_copied=copied.set)
        )
        await copied.wait()
        memory.write(0, b"another!")
        store.open()
    async with session_on(store.inner, other) as session:
        assert (await session.load(load_spec(HASHES[:1], (3,)))).landed
    assert other.holds(3, HASHES[0])


async def test_nothing_is_saved_behind_a_block_that_was_dropped() -> None:
    """Block 3 finds no room: 0 to 2 are stored, no later one, in no later save."""

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        places = [n for n, key in enumerate(keys) if key.endswith(HASHES[3])]
        if verb == "put_from" and places:
            return Fault(outcomes={places[0]: Status.NO_ROOM})
        return None

    inner = MemoryStore(slot_bytes=OBJECT)
    memory = Memory()
    async with session_on(FaultyStore(inner, decide), memory) as session:
        for number in range(12):
            memory.write(number, HASHES[number])
        first = await session.save(save_spec(HASHES[:8], range(8)))
        assert (first.stored, first.dropped) == (3, 5)
        assert first.reason == "no room in the store"
        second = await session.save(save_spec(HASHES[8:], range(8, 12), job_id=2))
        assert (second.stored, second.dropped) == (0, 4)
        other = await session.save(save_spec(HASHES[8:], range(8, 12), chain=2))
        assert other.stored == 4
    assert inner.statistics().objects == 7


async def test_a_key_that_is_there_counts_as_stored() -> None:
    """Another writer won: no failure, no retry, no hole."""

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb == "exists":
            return Fault(outcomes=dict.fromkeys(range(len(keys)), Status.MISS))
        return None

    inner = MemoryStore(slot_bytes=OBJECT)
    memory = Memory()
    async with session_on(FaultyStore(inner, decide), memory) as session:
        await saved(session, memory, 4)
        again = await session.save(save_spec(HASHES[:6], range(6), chain=2))
        assert (again.stored, again.existed, again.dropped) == (2, 4, 0)


async def test_an_exception_in_a_save_gives_the_blocks_back_and_spares_the_next() -> (
    None
):
    """exists raises for job 1; job 2 is as if nothing had been."""
    faults = [Fault(error=OSError("wire"))]
    store = FaultyStore(
        MemoryStore(slot_bytes=OBJECT), lambda *_: faults.pop() if faults else None
    )
    memory = Memory()
    freed: list[int] = []
    async with session_on(store, memory) as session:
        outcome = await session.save(
            save_spec(HASHES[:2], (0, 1)), on_copied=partial(freed.append, 1)
        )
        assert (outcome.dropped, outcome.reason) == (2, "OSError: wire")
        outcome = await session.save(
            save_spec(HASHES[:2], (0, 1), job_id=2, chain=2),
            on_copied=partial(freed.append, 2),
        )
        assert outcome.stored == 2
    assert freed == [1, 2]


async def test_saves_of_one_chain_reach_the_store_in_order() -> None:
    """The second job waits for the first, so that a hole can be seen in time."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory = Memory()
    async with (
        session_on(store, memory) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.save, save_spec(HASHES[:1], (0,), job_id=1))
        await anyio.to_thread.run_sync(store.wait_until_held)
        tasks.start_soon(session.save, save_spec(HASHES[1:2], (1,), job_id=2))
        await anyio.wait_all_tasks_blocked()
        assert [verb for verb, _ in store.calls].count("put_from") == 1
        store.open()
    puts = [keys for verb, keys in store.calls if verb == "put_from"]
    assert [keys[0][-32:] for keys in puts] == list(HASHES[:2])


@pytest.mark.parametrize("chains", [1, 40])
async def test_more_saves_than_staging_holds_never_wait_for_each_other(
    chains: int,
) -> None:
    """Forty saves of several windows at once, of one request or of forty."""
    memory = Memory()
    with anyio.fail_after(20):
        async with session_on(MemoryStore(slot_bytes=OBJECT), memory) as session:
            outcomes = []

            async def save(number: int) -> None:
                spec = save_spec(
                    prompt(number, 8), range(8), job_id=number, chain=number % chains
                )
                outcomes.append(await session.save(spec))

            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(save, number)
    assert [outcome.stored for outcome in outcomes] == [8] * 40


async def test_flush_waits_for_what_has_begun() -> None:
    """A reader that must see what a writer wrote waits for the writer's flush."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory = Memory()
    async with (
        session_on(store, memory) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.save, save_spec(HASHES[:1], (0,)))
        await anyio.to_thread.run_sync(store.wait_until_held)
        with anyio.move_on_after(0.02) as scope:
            await session.flush()
        assert scope.cancelled_caught
        store.open()
        await session.flush()
        assert await session.lookup(lookup_spec(HASHES)) == 1


async def test_a_reset_hides_everything_of_before() -> None:
    """The generation is the store's, so others who open it later see it too."""
    store = MemoryStore(slot_bytes=OBJECT)
    async with session_on(store, Memory()) as session:
        space = await session.key_space("tests", b"f" * 16)
        after = await session.reset(space)
        assert after.prefix != space.prefix
        assert (await session.key_space("tests", b"f" * 16)).generation == 1
        assert (await session.key_space("others", b"f" * 16)).generation == 0


@pytest.mark.parametrize("name", ["max_load_bytes", "max_save_bytes"])
async def test_staging_too_small_for_a_block_is_said_at_start(name: str) -> None:
    """With the number that is needed."""
    memory = Memory()
    config = akv.Config(**{"store": "memory:", name: OBJECT})  # type: ignore[arg-type]
    with pytest.raises(akv.ConfigError, match=f"{name}=768.*at least 1536"):
        async with akv.open_session(config, memory.geometry, memory.device):
            pass


async def test_a_session_without_memory_looks_up_and_says_what_it_cannot() -> None:
    """The scheduler's role has no blocks to move."""
    memory = Memory()
    async with akv.open_session(
        akv.Config(store="memory:"), memory.geometry
    ) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 0
        with pytest.raises(akv.ConfigError, match="without memory"):
            await session.load(load_spec(HASHES, range(12)))


async def test_closing_is_bounded_though_a_call_hangs() -> None:
    """The grace time passes, the hung call is counted, its memory stays."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("exists",))
    memory = Memory()
    recorder = Recorder([])
    with anyio.fail_after(20):
        async with (
            akv.open_session(
                SMALL, memory.geometry, memory.device, store=store, observer=recorder
            ) as session,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(session.lookup, lookup_spec(HASHES))
            await anyio.to_thread.run_sync(store.wait_until_held)
            tasks.cancel_scope.cancel()
    store.open()
    (closed,) = (e for e in recorder.events if e.name == "akv.session.closed")
    assert closed.hung_calls == 1  # type: ignore[attr-defined]


async def test_an_error_of_the_host_leaves_the_session_as_it_is() -> None:
    """Not wrapped in a group: ``except ValueError`` around a session works."""
    memory = Memory()
    error = ValueError("the host's own")
    with pytest.raises(ValueError, match="own") as caught:
        async with akv.open_session(SMALL, memory.geometry, memory.device):
            raise error
    assert caught.value is error


async def test_a_closed_session_takes_no_work() -> None:
    """With a sentence, not with an error from somewhere below."""
    memory = Memory()
    async with akv.open_session(SMALL, memory.geometry, memory.device) as session:
        pass
    with pytest.raises(akv.SessionClosedError, match="no lookup begins"):
        await session.lookup(lookup_spec(HASHES))


@pytest.mark.parametrize(("setting", "works"), [("degrade", True), ("stop", False)])
async def test_a_store_that_cannot_be_opened_degrades_or_stops(
    setting: str, works: bool
) -> None:
    """By one setting, with one event that says why."""
    memory = Memory()
    config = akv.Config(
        store="local:/proc/akv-cannot-be-here?capacity=1MiB",
        on_store_unavailable=setting,
    )
    recorder = Recorder([])
    opened: Callable[[], object] = lambda: akv.open_session(  # noqa: E731
        config, memory.geometry, memory.device, observer=recorder
    )
    if works:
        async with opened() as session:  # type: ignore[attr-defined]
            assert await session.lookup(lookup_spec(HASHES)) == 0
            outcome = await session.save(save_spec(HASHES[:1], (0,)))
            assert outcome.dropped == 1
    else:
        with pytest.raises(akv.StoreUnavailableError):
            async with opened():  # type: ignore[attr-defined]
                pass
    assert recorder.names()[0] == "akv.store.unavailable"
