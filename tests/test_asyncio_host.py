"""akv in other people's programs: plain asyncio, uvloop, and anyio on trio."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import uvloop

import akv
from akv.session import CLOSE_GRACE
from akv.store import MemoryStore
from akv.testing import GatedStore
from harness import OBJECT, Memory, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from pathlib import Path

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)


@pytest.mark.asyncio
async def test_it_works_in_a_plain_asyncio_host() -> None:
    """No anyio in the host at all."""
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
        memory.write(0, HASHES[0])
        outcome = await session.save(save_spec(HASHES[:1], (0,)))
        assert outcome.stored == 1
        loaded = await session.load(load_spec(HASHES[:1], (5,)))
        assert loaded.landed
    assert np.array_equal(memory.block(0), memory.block(5))


@pytest.mark.asyncio
async def test_lookups_can_be_gathered_and_cancelled_like_any_task() -> None:
    """asyncio's own gather and cancel, nothing else."""
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
        tasks = [
            asyncio.create_task(session.lookup(lookup_spec(prompt(n, 4))))
            for n in range(20)
        ]
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[3], asyncio.CancelledError)
        assert [r for n, r in enumerate(results) if n != 3] == [0] * 19


@pytest.mark.asyncio
async def test_asyncios_own_timeout_ends_a_load_and_the_next_one_lands() -> None:
    """The store holds the load; what was cancelled leaves nothing behind."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("get_into",))
    geometry, device = memory.geometry, memory.device
    async with akv.open_session(CONFIG, geometry, device, store=store) as session:
        memory.write(0, HASHES[0])
        await session.save(save_spec(HASHES[:1], (0,)))
        spec = load_spec(HASHES[:1], (5,))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.load(spec)
        assert (await session.statistics()).loads == 0
        store.open()
        assert (await session.load(spec)).landed
    assert memory.holds(5, HASHES[0])


class HostError(Exception):
    """Something that went wrong in the host."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error",
    [
        HostError("of the host"),
        ExceptionGroup("the host's own", [HostError()]),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_hosts_error_comes_out_as_itself(error: BaseException) -> None:
    """In no group, and the very same object; an exit as well."""
    memory = Memory()
    caught: BaseException | None = None
    try:
        async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
            raise error
    except BaseException as found:  # noqa: BLE001
        caught = found
    assert caught is error
    with pytest.raises(akv.SessionClosedError):
        await session.lookup(lookup_spec(HASHES))


@pytest.mark.asyncio
@pytest.mark.timeout(60)
async def test_cancelling_the_host_ends_everything_within_the_grace_time() -> None:
    """A load and a lookup are under way in a store that does not answer."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("get_into", "exists"))
    begun = asyncio.Event()
    ended: list[str] = []

    async def work(session: akv.Session, name: str) -> None:
        try:
            if name == "load":
                await session.load(load_spec(HASHES, (0, 1, 2, 3)))
            else:
                await session.lookup(lookup_spec(HASHES))
        finally:
            ended.append(name)

    async def host() -> None:
        config = akv.Config(
            max_load_bytes=8 * OBJECT,
            max_save_bytes=8 * OBJECT,
            load_deadline=60,
            lookup_deadline=60,
        )
        geometry, device = memory.geometry, memory.device
        async with (
            akv.open_session(config, geometry, device, store=store) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(work(session, "load"))
            tasks.create_task(work(session, "lookup"))
            await asyncio.to_thread(store.wait_until_held, 2)
            begun.set()

    task = asyncio.create_task(host())
    await begun.wait()
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["load", "lookup"]
    assert time.monotonic() - started < CLOSE_GRACE + 5
    assert all(memory.untouched(number) for number in range(4))
    store.open()


def test_it_works_under_uvloop_without_anyio_in_the_host() -> None:
    """asyncio's own runner, with another loop."""
    loops: list[str] = []

    async def host() -> int:
        loops.append(type(asyncio.get_running_loop()).__module__)
        memory = Memory()
        async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
            memory.write(0, HASHES[0])
            await session.save(save_spec(HASHES[:1], (0,)))
            return await session.lookup(lookup_spec(HASHES))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(host()) == 1
    assert loops == ["uvloop"]


@pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
    scope="module",
)
@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.anyio
async def test_every_call_works_on_every_loop(
    kind: str, anyio_backend: Any, tmp_path: Path
) -> None:
    """Save, flush, wait, look up, load, cancel, numbers: the stores know no loop."""
    url = "memory:" if kind == "memory" else f"local:{tmp_path}/store?capacity=1MiB"
    config = akv.Config(store=url, max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT)
    memory = Memory()
    async with akv.open_session(config, memory.geometry, memory.device) as session:
        for number, block_hash in enumerate(HASHES):
            memory.write(number, block_hash)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.save, save_spec(HASHES, range(4)))
            found = await session.wait_for(lookup_spec(HASHES), deadline=30)
        await session.flush()
        assert found == len(HASHES)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.load(load_spec(HASHES, (4, 5, 6, 7)))
        assert scope.cancelled_caught
        assert (await session.load(load_spec(HASHES, (8, 9, 10, 11)))).landed
        numbers = await session.statistics()
        assert (numbers.loads, numbers.saves, numbers.lookups) == (0, 0, 0)
    for number, block_hash in zip((8, 9, 10, 11), HASHES, strict=True):
        assert memory.holds(number, block_hash)
