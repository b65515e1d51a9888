"""Lookups that want to know the same ask once."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

import akv
from akv.store import MemoryStore
from akv.store.base import Failure
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey

pytestmark = pytest.mark.anyio
CONFIG = akv.Config(
    lookup_deadline=5, max_load_bytes=64 * OBJECT, max_save_bytes=64 * OBJECT
)
HASHES = prompt(1, 12)


def held_store() -> GatedStore:
    """A store that holds the question whether something is there."""
    return GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("exists",))


async def fill(session: akv.Session, store: GatedStore, blocks: int) -> None:
    """Let these blocks of ``HASHES`` be there, and forget the calls for it."""
    await session.save(save_spec(HASHES[:blocks], range(blocks)))
    store.calls.clear()


def asked(store: GatedStore) -> list[int]:
    """How many keys each call asked for."""
    return [len(keys) for verb, keys in store.calls if verb == "exists"]


async def test_equal_prompts_ask_for_each_key_once() -> None:
    """50 requests in one step with one prompt, and each has the answer."""
    store, memory = held_store(), Memory()
    store.open()
    found: list[int] = []
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        await fill(session, store, 9)

        async def look() -> None:
            found.append(await session.lookup(lookup_spec(HASHES)))

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(look)
    assert found == [9] * 50
    assert asked(store) == [12]


async def test_prompts_with_one_beginning_ask_for_it_once_in_a_call() -> None:
    """And each one gets the answers for its own keys, in its own order."""
    store, memory = held_store(), Memory()
    store.open()
    found: dict[int, int] = {}
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        await fill(session, store, 9)

        async def look(tail: int) -> None:
            hashes = (*HASHES[:tail], *prompt(100 + tail, 4))
            found[tail] = await session.lookup(lookup_spec(hashes))

        async with anyio.create_task_group() as tasks:
            for tail in range(1, 11):
                tasks.start_soon(look, tail)
    assert found == {tail: min(tail, 9) for tail in range(1, 11)}
    assert sum(asked(store)) == 10 + 10 * 4


async def test_who_comes_while_the_answer_is_on_its_way_waits_for_it() -> None:
    """A later step, the same prompt: no second call; one may leave all the same."""
    store, memory = held_store(), Memory()
    found: list[int] = []
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:

        async def look(scope: anyio.CancelScope) -> None:
            with scope:
                found.append(await session.lookup(lookup_spec(HASHES)))

        async with anyio.create_task_group() as tasks:
            leaving = anyio.CancelScope()
            tasks.start_soon(look, leaving)
            await anyio.to_thread.run_sync(store.wait_until_held)
            tasks.start_soon(look, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            leaving.cancel()
            await checkpoint()
            store.open()
        assert found == [0]
        assert asked(store) == [12]
        # It is answered now, and whoever comes later asks anew.
        assert await session.lookup(lookup_spec(HASHES)) == 0
        assert asked(store) == [12, 12]


async def test_who_comes_late_to_a_call_that_hangs_makes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that has used up its share of the deadline takes nobody with it."""
    monkeypatch.setattr("akv.pipeline.lookup._JOIN_SHARE", -1.0)
    store, memory = held_store(), Memory()
    async with (
        akv.open_session(
            CONFIG, memory.geometry, memory.device, store=store
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.lookup, lookup_spec(HASHES))
        await anyio.to_thread.run_sync(store.wait_until_held)
        tasks.start_soon(session.lookup, lookup_spec(HASHES))
        await anyio.to_thread.run_sync(store.wait_until_held, 2)
        store.open()
    assert asked(store) == [12, 12]


async def test_lookups_that_only_queued_are_no_failures_of_the_store() -> None:
    """They expire, and the store, which nobody asked, is not left alone for it."""
    store, memory = held_store(), Memory()
    store.open()
    config = dataclasses.replace(CONFIG, lookup_deadline=0.25)
    busy = threading.Event()
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        await fill(session, store, 4)
        pool = session._pools["lookup"]
        calls = [pool.submit(busy.wait) for _ in range(16)]
        try:
            for number in range(4):
                assert await session.lookup(lookup_spec(prompt(number, 12))) == 0
            assert not asked(store)
            assert session.store_works
        finally:
            busy.set()
        for call in calls:
            await call.wait()
        assert await session.wait_for(lookup_spec(HASHES[:4]), deadline=10) == 4


async def test_lookups_end_with_their_session_and_not_at_their_deadline() -> None:
    """Whoever still asked finds nothing more, at once."""
    store, memory = held_store(), Memory()
    config = dataclasses.replace(CONFIG, lookup_deadline=3600)
    found: list[int] = []

    async def look(session: akv.Session, number: int) -> None:
        found.append(await session.lookup(lookup_spec(prompt(number, 500))))

    with anyio.fail_after(60):
        async with (
            anyio.create_task_group() as tasks,
            akv.open_session(
                config, memory.geometry, memory.device, store=store
            ) as session,
        ):
            for number in range(4):
                tasks.start_soon(look, session, number)
            await anyio.to_thread.run_sync(store.wait_until_held)
            store.open()
    assert found == [0] * 4


@pytest.mark.parametrize("unasked", [True, False])
async def test_a_store_that_could_not_be_asked_has_said_nothing_of_its_keys(
    *, unasked: bool
) -> None:
    """They are found as soon as it is back; others are misses for a while."""
    memory, failing = Memory(), True

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb != "get_into" or not failing:
            return None
        silent = Failure("silent", -901, unasked=unasked)
        return Fault(outcomes=dict.fromkeys(range(len(keys)), silent))

    store = FaultyStore(MemoryStore(slot_bytes=OBJECT), decide)
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        await session.save(save_spec(HASHES[:9], range(9)))
        outcome = await session.load(load_spec(HASHES[:9], range(9)))
        assert outcome.failed_blocks
        failing = False
        assert await session.lookup(lookup_spec(HASHES)) == (9 if unasked else 0)
