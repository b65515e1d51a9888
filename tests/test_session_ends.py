"""How operations of a session end when what they wait for does not, or ends badly."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import akv
from akv.core.errors import SessionClosedError
from akv.store import MemoryStore
from akv.testing.stores import GatedStore, WrappedStore
from harness import (
    OBJECT,
    Memory,
    Recorder,
    load_spec,
    lookup_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from akv.core.keys import BlockKey

HASHES = prompt(1, 12)
CONFIG = akv.Config(
    max_load_bytes=64 * OBJECT, max_save_bytes=64 * OBJECT, load_deadline=20
)


class Held:
    """A device whose copies out, or in, wait until the test lets them go."""

    def __init__(self, memory: Memory, held: str, error: Exception | None) -> None:
        self._device = memory.device
        self._held = held
        self._error = error
        self.there, self.free = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._device, name)
        if name != self._held:
            return method

        def held(*args: Any) -> None:
            self.there.set()
            self.free.wait()
            if self._error is not None:
                raise self._error
            method(*args)

        return held


@pytest.mark.anyio
async def test_a_copy_that_fails_after_the_deadline_has_landed_nothing() -> None:
    """What was not written is failed, also when nobody waited for it any longer."""
    memory = Memory()
    device: Any = Held(memory, "scatter", OSError("device lost"))
    store = MemoryStore(slot_bytes=OBJECT)
    config = dataclasses.replace(CONFIG, load_deadline=0.5)
    async with akv.open_session(
        config, memory.geometry, device, store=store
    ) as session:
        for number in range(4):
            memory.write(number, HASHES[number])
        await session.save(save_spec(HASHES[:4], range(4)))

        async def let_go() -> None:
            await anyio.to_thread.run_sync(device.there.wait, 5)
            await anyio.sleep(0.7)  # well behind the deadline
            device.free.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_go)
            outcome = await session.load(load_spec(HASHES[:4], range(8, 12)))
    assert outcome.failed_blocks == (8, 9, 10, 11)
    assert all(memory.untouched(number) for number in range(8, 12))


@pytest.mark.anyio
async def test_everybody_who_flushes_is_told() -> None:
    """However many there are."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory = Memory()
    async with (
        akv.open_session(
            CONFIG, memory.geometry, memory.device, store=store
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(session.save, save_spec(HASHES[:2], range(2)))
        await anyio.to_thread.run_sync(store.wait_until_held)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as flushes:
                for _ in range(3):
                    flushes.start_soon(session.flush)
                await anyio.wait_all_tasks_blocked()
                store.open()


class Odd(WrappedStore):
    """Answers questions with something that is no list of outcomes."""

    answer: Any = None

    def exists(self, keys: Sequence[BlockKey], *, promise: bool = False) -> Any:
        return self.answer

    def get_into(self, keys: Any, buffers: Any) -> Any:
        return self.answer


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [None, 7, {}, {"a": 1}, "hit"])
async def test_an_answer_that_is_no_list_is_the_stores_failure(answer: object) -> None:
    """It ends one lookup, or one load, and not the session."""
    memory, store = Memory(), Odd(MemoryStore(slot_bytes=OBJECT))
    store.answer = answer
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 0
        outcome = await session.load(load_spec(HASHES[:4], range(4)))
        assert outcome.failed_blocks == (0, 1, 2, 3)
    assert all(map(memory.untouched, range(4)))


@pytest.mark.anyio
async def test_a_get_that_hangs_is_one_failure_however_many_wait_for_it() -> None:
    """Eight loads of one prefix: one call, and the store is not left alone for it."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("get_into",))
    memory = Memory()
    config = dataclasses.replace(CONFIG, load_deadline=2, transfer="staged")
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        await session.save(save_spec(HASHES[:2], range(2)))
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                ids = range(2 + 2 * number, 4 + 2 * number)
                spec = load_spec(HASHES[:2], ids, load_id=number)
                tasks.start_soon(session.load, spec)
        assert sum(verb == "get_into" for verb, _ in store.calls) == 1
        assert session.store_works
        store.open()


@pytest.mark.anyio
async def test_who_waits_for_a_store_is_told_that_the_session_ends(
    tmp_path: Path,
) -> None:
    """There is nobody left who would open it."""
    memory = Memory()
    config = dataclasses.replace(CONFIG, store=f"local:{tmp_path}/not/there")
    refused = anyio.Event()

    async def wait(session: akv.Session) -> None:
        with pytest.raises(SessionClosedError):
            await session.key_space("tests", bytes(16))
        refused.set()

    async with anyio.create_task_group() as tasks:
        async with akv.open_session(config, memory.geometry) as session:
            tasks.start_soon(wait, session)
            await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            await refused.wait()


@pytest.mark.anyio
async def test_loads_that_wait_for_staging_end_with_their_session() -> None:
    """Failed and said so, long before their deadline; none is raised in a group."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("get_into",))
    memory = Memory()
    config = dataclasses.replace(
        CONFIG, max_load_bytes=2 * OBJECT, transfer="staged", load_deadline=3600
    )
    outcomes: list[akv.LoadOutcome] = []
    six = anyio.Event()

    async def load(session: akv.Session, number: int) -> None:
        spec = load_spec(prompt(number, 1), [number], load_id=number)
        outcomes.append(await session.load(spec))
        if len(outcomes) == 6:
            six.set()

    async with anyio.create_task_group() as tasks:
        async with akv.open_session(
            config, memory.geometry, memory.device, store=store
        ) as session:
            for number in range(8):
                tasks.start_soon(load, session, number)
            await anyio.to_thread.run_sync(store.wait_until_held, 2)
            await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            await six.wait()
        store.open()
    assert not any(outcome.landed for outcome in outcomes)


@pytest.mark.anyio
async def test_a_save_that_came_too_late_gives_its_blocks_back() -> None:
    """Once, and before it is told that the session has closed."""
    memory, copied = Memory(), []
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=MemoryStore(slot_bytes=OBJECT)
    ) as session:
        pass
    with pytest.raises(SessionClosedError):
        await session.save(
            save_spec(HASHES[:2], range(2)), on_copied=lambda: copied.append(1)
        )
    assert copied == [1]


@pytest.mark.asyncio
async def test_closing_goes_on_whoever_cancels_it_again() -> None:
    """A second ``task.cancel()`` ends no wait for a copy of the engine's blocks."""
    memory, recorder = Memory(), Recorder([])
    device: Any = Held(memory, "gather", None)
    saves = set()

    async def main() -> None:
        async with akv.open_session(
            CONFIG,
            memory.geometry,
            device,
            store=MemoryStore(slot_bytes=OBJECT),
            observer=recorder,
        ) as session:
            save = session.save(save_spec(HASHES[:2], range(2)))
            saves.add(asyncio.create_task(save))
            await asyncio.sleep(3600)

    task = asyncio.create_task(main())
    await asyncio.to_thread(device.there.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
    device.free.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert "akv.session.closed" in recorder.names()
    await asyncio.gather(*saves, return_exceptions=True)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2 * 24576, dtype=np.uint8)[::2],
        np.zeros((96, 256), dtype=np.uint8, order="F"),
        np.zeros((96, 256), dtype=np.uint8),
        np.zeros(24576 // 4, dtype=np.float32),
    ],
    ids=["every second byte", "columns first", "two dimensions", "float32"],
)
def test_memory_that_is_not_flat_bytes_is_refused(array: Any) -> None:
    """With what was given and how to give it; before a block is moved."""
    memory = Memory()
    with pytest.raises(akv.PlanError, match=r"memory 1 is .*give flat bytes"):
        akv.HostDevice(memory.geometry, [memory.layers[0], array, memory.layers[2]])
    locked = memory.layers[1].copy()
    locked.flags.writeable = False
    with pytest.raises(akv.PlanError, match="memory 1 cannot be written"):
        akv.HostDevice(memory.geometry, [memory.layers[0], locked, memory.layers[2]])


def test_places_count_from_zero() -> None:
    """A negative one would be taken from the end."""
    spec = lookup_spec(HASHES)
    with pytest.raises(akv.PlanError, match="first_block is -2"):
        dataclasses.replace(spec, first_block=-2)
    with pytest.raises(akv.PlanError, match="askable_blocks is -1"):
        dataclasses.replace(spec, askable_blocks=-1)
    with pytest.raises(akv.PlanError, match="usable is -5"):
        dataclasses.replace(load_spec(HASHES, range(12)), usable=-5)
