"""A store that fails is left alone, and comes back alone."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

import akv
from akv.core.errors import StoreUnavailableError
from akv.pipeline.breaker import Breaker
from akv.store import BlockStore, MemoryStore
from akv.store.late import LateStore
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import OBJECT, Memory, Recorder, load_spec, lookup_spec, prompt, save_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from akv.core.keys import BlockKey

pytestmark = pytest.mark.anyio

HASHES = prompt(1, 4)
CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    lookup_deadline=5,
)


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe every 20 ms."""
    monkeypatch.setattr("akv.session.Breaker", partial(Breaker, interval=0.02))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="akv-late-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


async def works(session: akv.Session) -> None:
    """Wait until the store is in use again."""
    with anyio.fail_after(10):
        await session._breaker.wait_closed()


async def test_a_store_that_fails_is_left_alone_and_comes_back() -> None:
    """Three failures, then not one call but the probes, then hits again."""
    broken = True
    inner = MemoryStore(slot_bytes=OBJECT)

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        del verb, keys
        return Fault(error=akv.StoreError("no answer")) if broken else None

    store = GatedStore(FaultyStore(inner, decide), gated=())
    memory, recorder = Memory(), Recorder([])
    memory.write(0, HASHES[0])
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=recorder
    ) as session:
        for _ in range(3):
            assert await session.lookup(lookup_spec(HASHES)) == 0
        assert not session.store_works
        asked = [keys for _, keys in store.calls if len(keys) == 4]
        for _ in range(50):
            assert await session.lookup(lookup_spec(HASHES)) == 0
        dropped = await session.save(save_spec(HASHES[:1], (0,)))
        failed = await session.load(load_spec(HASHES[:1], (1,)))
        assert dropped.reason == failed.reason
        assert "left alone" in failed.reason
        assert [keys for _, keys in store.calls if len(keys) == 4] == asked
        broken = False
        await works(session)
        assert (await session.save(save_spec(HASHES[:1], (0,), chain=2))).stored == 1
        assert await session.lookup(lookup_spec(HASHES)) == 1
    names = recorder.names()
    assert names.count("akv.breaker.opened") == names.count("akv.breaker.closed") == 1
    assert names.count("akv.lookup.skipped") == 50


async def test_a_probe_that_hangs_holds_nothing_up() -> None:
    """No second probe beside it; lookups are answered at once meanwhile."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("exists",))
    config = akv.Config(lookup_deadline=0.02)
    memory = Memory()
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        with anyio.fail_after(10):
            while session.store_works:  # a call that only queued does not count
                assert await session.lookup(lookup_spec(HASHES)) == 0
                await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(store.wait_until_held, 1)
        for _ in range(100):
            assert await session.lookup(lookup_spec(HASHES)) == 0
        store.open()
        await works(session)


async def test_a_store_that_was_not_there_at_start_is_used_when_it_is(
    folder: Path,
) -> None:
    """Degraded at first; opened by the probe, no restart of anything."""
    memory, recorder = Memory(), Recorder([])
    config = akv.Config(
        store=f"local:{folder}/not/yet?capacity=1MiB",
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
    )
    async with akv.open_session(
        config, memory.geometry, memory.device, observer=recorder
    ) as session:
        assert await session.lookup(lookup_spec(HASHES)) == 0
        (folder / "not").mkdir()
        await works(session)
        memory.write(0, HASHES[0])
        assert (await session.save(save_spec(HASHES[:1], (0,)))).stored == 1
        assert await session.lookup(lookup_spec(HASHES)) == 1
    assert recorder.names()[:2] == ["akv.store.unavailable", "akv.breaker.opened"]


async def test_a_key_space_waits_for_a_store_that_is_not_there(folder: Path) -> None:
    """Nothing is looked up in a generation that nobody knows."""
    memory = Memory()
    config = akv.Config(store=f"local:{folder}/not/yet?capacity=1MiB")
    async with akv.open_session(config, memory.geometry) as session:
        with anyio.move_on_after(0.05) as scope:
            await session.key_space("tests", b"f" * 16)
        assert scope.cancelled_caught
        (folder / "not").mkdir()
        space = await session.key_space("tests", b"f" * 16)
        assert space.generation == 0


def test_a_store_that_takes_long_to_fail_is_tried_less_often() -> None:
    """Setting up a client may keep the interpreter's lock all the while."""
    now, tries = 0.0, []

    def open_now() -> BlockStore:
        nonlocal now
        tries.append(now)
        now += 7.0
        raise StoreUnavailableError("not there")

    late = LateStore("memory:", open_now, clock=lambda: now)
    for _ in range(60):
        with pytest.raises(StoreUnavailableError):
            late.exists([])
        now += 2.0
    assert tries == [0.0, 57.0, 114.0]
