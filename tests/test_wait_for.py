"""A reader waits for a writer, with a deadline, and for nothing longer than that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

import akv
from akv.store import MemoryStore
from akv.testing.stores import Fault, FaultyStore
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

    from akv.core.events import Event
    from akv.core.keys import BlockKey

pytestmark = pytest.mark.anyio

CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    lookup_deadline=5,
)


class Told(Recorder):
    """Keeps every event, and rings when one of this name has come."""

    def __init__(self, name: str) -> None:
        super().__init__([])
        self.name = name
        self.event = anyio.Event()

    def on(self, event: Event) -> None:
        """Keep it; on the loop."""
        super().on(event)
        if event.name == self.name:
            self.event.set()


async def test_a_reader_waits_for_what_a_writer_stores_later(tmp_path: Path) -> None:
    """Two sessions on one local store; the writer begins when the reader waits."""
    hashes = prompt(1, 8)
    config = akv.Config(
        store=f"local:{tmp_path}/store?capacity=1MiB",
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
        lookup_deadline=5,
    )
    memory, other = Memory(), Memory()
    for number, block in enumerate(hashes):
        memory.write(number, block)
    asked = Told("akv.lookup.answered")
    async with (
        akv.open_session(config, memory.geometry, memory.device) as writer,
        akv.open_session(
            config, other.geometry, other.device, observer=asked
        ) as reader,
        anyio.create_task_group() as tasks,
    ):
        found: list[int] = []

        async def read() -> None:
            found.append(await reader.wait_for(lookup_spec(hashes), deadline=20))
            assert (await reader.load(load_spec(hashes, range(8)))).landed

        tasks.start_soon(read)
        await asked.event.wait()
        assert found == []
        assert (await writer.save(save_spec(hashes[:4], range(4)))).stored == 4
        later = save_spec(hashes[4:], range(4, 8), job_id=2)
        assert (await writer.save(later)).stored == 4
    assert found == [8]
    assert all(other.holds(number, block) for number, block in enumerate(hashes))


async def test_a_reader_has_what_is_there_when_its_deadline_passes() -> None:
    """Three of eight blocks, and those beyond the engine's own only."""
    hashes = prompt(1, 8)
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry, memory.device) as session:
        await session.save(save_spec(hashes[:3], range(3)))
        with anyio.fail_after(10):
            assert await session.wait_for(lookup_spec(hashes), deadline=0.1) == 3
            beyond = lookup_spec(hashes, first_block=2)
            assert await session.wait_for(beyond, deadline=0.1) == 1
            # All there, or nothing to ask for: no wait at all.
            assert await session.wait_for(lookup_spec(hashes[:3]), deadline=60) == 3
            nothing = lookup_spec(hashes, first_block=8)
            assert await session.wait_for(nothing, deadline=60) == 0


async def test_a_reader_does_not_wait_for_a_store_that_is_left_alone() -> None:
    """What was found before is the answer, at once."""
    hashes = prompt(1, 4)
    broken = False

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        del verb, keys
        return Fault(error=akv.StoreError("no answer")) if broken else None

    memory = Memory()
    store = FaultyStore(MemoryStore(slot_bytes=OBJECT), decide)
    asked = Told("akv.lookup.answered")
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=asked
    ) as session:
        await session.save(save_spec(hashes[:1], (0,)))
        found: list[int] = []

        async def read() -> None:
            found.append(await session.wait_for(lookup_spec(hashes), deadline=60))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await asked.event.wait()
                broken = True
        assert found == [1]
        assert not session.store_works
        assert await session.wait_for(lookup_spec(hashes), deadline=60) == 0


async def test_a_reader_that_waits_holds_up_no_close_and_can_be_cancelled() -> None:
    """It has what is known when its session closes; cancelled it has nothing."""
    hashes = prompt(1, 4)
    memory = Memory()
    asked = Told("akv.lookup.answered")
    found: list[int] = []
    with anyio.fail_after(10):
        async with (
            anyio.create_task_group() as tasks,
            akv.open_session(
                CONFIG, memory.geometry, memory.device, observer=asked
            ) as session,
        ):
            await session.save(save_spec(hashes[:1], (0,)))
            with anyio.move_on_after(0.05) as scope:
                await session.wait_for(lookup_spec(hashes), deadline=60)
            assert scope.cancelled_caught
            assert (await session.statistics()).lookups == 0

            async def read() -> None:
                spec = lookup_spec(hashes)
                found.append(await session.wait_for(spec, deadline=60))

            asked.event = anyio.Event()
            tasks.start_soon(read)
            await asked.event.wait()
        assert found == [1]
        assert await session.wait_for(lookup_spec(hashes), deadline=60) == 0


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
async def test_a_reader_must_say_how_long_it_waits(deadline: float) -> None:
    """Nobody waits for ever."""
    memory = Memory()
    async with akv.open_session(CONFIG, memory.geometry) as session:
        with pytest.raises(akv.ConfigError, match=r"deadline=.*seconds above 0"):
            await session.wait_for(lookup_spec(prompt(1, 1)), deadline=deadline)
