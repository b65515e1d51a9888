"""The store writes the engine's blocks itself: one copy, and a fence."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

import akv
from akv.core.events import WindowFetched
from akv.device.cuda import CudaDevice
from akv.pipeline.route import Route
from akv.store import LocalStore, MemoryStore
from akv.store.late import LateStore
from akv.testing.stores import GatedStore, WrappedStore
from harness import (
    BLOCKS,
    OBJECT,
    Memory,
    Recorder,
    load_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from akv.core.keys import BlockKey
    from akv.store import BlockStore, Buffer, Outcome

pytestmark = pytest.mark.anyio

HASHES = prompt(1, 12)
DIRECT = akv.Config(
    store="memory:",
    transfer="direct",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=20,
)


class Seen(WrappedStore):
    """Keeps what kind of buffers came."""

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self.scattered: set[bool] = set()

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        self.scattered |= {not isinstance(buffer, memoryview) for buffer in buffers}
        return super().get_into(keys, buffers)


async def stored(store: BlockStore, count: int = 12) -> None:
    """The first blocks of the prompt, by way of staging."""
    memory = Memory()
    for number in range(count):
        memory.write(number, HASHES[number])
    config = dataclasses.replace(DIRECT, transfer="staged")
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        outcome = await session.save(save_spec(HASHES[:count], range(count)))
        assert outcome.stored == count


async def test_a_direct_load_puts_every_byte_in_its_place() -> None:
    store = MemoryStore(slot_bytes=OBJECT)
    await stored(store)
    memory, seen = Memory(), Seen(store)
    ids = [31, 0, 7, 30, 2, 9, 11, 12, 13, 25, 1, 3]
    async with akv.open_session(
        DIRECT, memory.geometry, memory.device, store=seen
    ) as session:
        assert (await session.load(load_spec(HASHES, ids))).landed
    assert seen.scattered == {True}
    for number, block_hash in zip(ids, HASHES, strict=True):
        assert memory.holds(number, block_hash)
    for number in set(range(BLOCKS)) - set(ids):
        assert memory.untouched(number)


async def test_saves_store_the_same_objects_whatever_the_way_of_loads() -> None:
    store = MemoryStore(slot_bytes=OBJECT)
    memory = Memory()
    for number, block_hash in enumerate(HASHES):
        memory.write(number, block_hash)
    async with akv.open_session(
        DIRECT, memory.geometry, memory.device, store=store
    ) as session:
        outcome = await session.save(save_spec(HASHES, range(12)))
        assert (outcome.stored, outcome.dropped) == (12, 0)
        again = await session.save(save_spec(HASHES, range(12), job_id=2))
        assert (again.existed, again.dropped) == (12, 0)
    other = Memory()
    config = dataclasses.replace(DIRECT, transfer="staged")
    async with akv.open_session(
        config, other.geometry, other.device, store=store
    ) as session:
        assert (await session.load(load_spec(HASHES, range(12)))).landed
    assert all(other.holds(number, HASHES[number]) for number in range(12))


async def test_blocks_that_are_gone_fail_and_no_others() -> None:
    store = MemoryStore(slot_bytes=OBJECT)
    await stored(store, 5)
    memory = Memory()
    async with akv.open_session(
        DIRECT, memory.geometry, memory.device, store=store
    ) as session:
        outcome = await session.load(load_spec(HASHES[:6], range(6)))
    assert outcome.failed_blocks == (5,)
    assert all(memory.holds(number, HASHES[number]) for number in range(5))
    assert memory.untouched(5)


@pytest.mark.parametrize("ending", ["cancelled", "past its deadline"])
async def test_a_direct_load_does_not_end_before_the_call_that_writes(
    ending: str,
) -> None:
    """However it ends, nothing writes into the blocks afterwards."""
    store = MemoryStore(slot_bytes=OBJECT)
    await stored(store)
    memory = Memory()
    gated = GatedStore(store, gated=["get_into"])
    deadline = 0.05 if ending == "past its deadline" else 20
    config = dataclasses.replace(DIRECT, load_deadline=deadline)
    ended = anyio.Event()
    outcomes: list[akv.LoadOutcome] = []

    async def load(session: akv.Session, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                outcomes.append(await session.load(load_spec(HASHES, range(12))))
        finally:
            ended.set()

    async with (
        akv.open_session(
            config, memory.geometry, memory.device, store=gated
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        scope = anyio.CancelScope()
        tasks.start_soon(load, session, scope)
        await anyio.to_thread.run_sync(gated.wait_until_held)
        if ending == "cancelled":
            scope.cancel()
        with anyio.move_on_after(0.2):
            await ended.wait()
        assert not ended.is_set()
        assert all(map(memory.untouched, range(BLOCKS)))
        gated.open()
        await ended.wait()
        before = [memory.block(number).tobytes() for number in range(BLOCKS)]
    assert [memory.block(number).tobytes() for number in range(BLOCKS)] == before
    if ending == "cancelled":
        assert not outcomes
    else:
        assert "load_deadline" in outcomes[0].reason


async def test_auto_is_direct_where_the_store_says_so(tmp_path: Path) -> None:
    """Shared memory is; a disk, or a wrapper that says nothing, is not."""
    memory = Memory()

    def route(store: BlockStore, transfer: str = "auto") -> Route:
        return Route(
            store,
            memory.device,
            memory.geometry,
            transfer=transfer,
            staged_bytes=OBJECT,
        )

    with_memory = LocalStore.open(
        f"local:/dev/shm/{tmp_path.name}-direct?capacity=1MiB", slot_bytes=OBJECT
    )
    try:
        assert route(with_memory).is_direct()
        assert not route(with_memory, "staged").is_direct()
        assert not route(WrappedStore(with_memory)).is_direct()
        assert route(WrappedStore(with_memory), "direct").is_direct()
        late = LateStore("local:", lambda: with_memory)
        assert not route(late).is_direct()
        assert late.exists([]) == []
        assert route(late).is_direct()
    finally:
        with_memory.close()
        shutil.rmtree(f"/dev/shm/{tmp_path.name}-direct")
    assert not route(MemoryStore()).is_direct()


async def test_direct_with_memory_that_only_a_device_reaches_is_refused() -> None:
    import torch

    memory = Memory()
    device = CudaDevice(
        memory.geometry, [torch.from_numpy(layer) for layer in memory.layers]
    )
    with pytest.raises(akv.ConfigError, match="transfer"):
        async with akv.open_session(
            DIRECT, memory.geometry, device, store=MemoryStore(slot_bytes=OBJECT)
        ):
            pass


async def test_loads_of_the_same_blocks_share_every_get() -> None:
    """Eight at once, by way of staging: each object is fetched once."""
    store = MemoryStore(slot_bytes=OBJECT)
    await stored(store)
    memory = Memory()
    gated = GatedStore(store, gated=["get_into"])
    recorder = Recorder([])
    config = dataclasses.replace(DIRECT, transfer="staged", max_load_bytes=16 * OBJECT)
    landed: list[bool] = []

    async def load(session: akv.Session, number: int) -> None:
        ids = range(4 * number, 4 * number + 4)
        spec = load_spec(HASHES[:4], ids, load_id=number, name=f"r{number}")
        landed.append((await session.load(spec)).landed)

    async with (
        akv.open_session(
            config, memory.geometry, memory.device, store=gated, observer=recorder
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        for number in range(8):
            tasks.start_soon(load, session, number)
        await anyio.to_thread.run_sync(gated.wait_until_held)
        await anyio.wait_all_tasks_blocked()
        gated.open()
    assert landed == [True] * 8
    fetched = [key for verb, keys in gated.calls if verb == "get_into" for key in keys]
    assert len(fetched) == 4
    for number in range(8):
        assert all(memory.holds(4 * number + n, HASHES[n]) for n in range(4))
    fetches = [event for event in recorder.events if isinstance(event, WindowFetched)]
    assert sum(event.bytes for event in fetches) == 4 * OBJECT


async def test_who_shares_a_get_is_not_cancelled_with_whoever_began_it() -> None:
    store = MemoryStore(slot_bytes=OBJECT)
    await stored(store, 2)
    memory = Memory()
    gated = GatedStore(store, gated=["get_into"])
    config = dataclasses.replace(DIRECT, transfer="staged", max_load_bytes=16 * OBJECT)
    outcomes: list[akv.LoadOutcome] = []

    async def load(session: akv.Session, ids: range, scope: anyio.CancelScope) -> None:
        with scope:
            outcomes.append(await session.load(load_spec(HASHES[:2], ids)))

    async with (
        akv.open_session(
            config, memory.geometry, memory.device, store=gated
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        first, second = anyio.CancelScope(), anyio.CancelScope()
        tasks.start_soon(load, session, range(2), first)
        await anyio.to_thread.run_sync(gated.wait_until_held)
        tasks.start_soon(load, session, range(2, 4), second)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        gated.open()
    assert [outcome.landed for outcome in outcomes] == [True]
    assert memory.holds(2, HASHES[0])
    assert all(map(memory.untouched, (0, 1)))
    assert len([verb for verb, _ in gated.calls if verb == "get_into"]) == 1
