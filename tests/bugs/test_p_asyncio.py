"""P of the bug log: threads, loops, forks and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from bugs.rig import Rig, serve

import akv
from akv.pipeline.budget import BufferPool, StagingBuffer
from akv.portal import Answer, CancelLoad, LoadEnded, Portal, PostLoad, PostLookup
from akv.store import MemoryStore
from akv.testing.stores import Fault, FaultyStore, GatedStore
from harness import BLOCKS, OBJECT, Memory, Recorder, load_spec, lookup_spec, prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store import BlockStore

HASHES = prompt(1, 8)
SMALL = akv.Config(
    store="memory:", max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT
)
SOURCES = Path(akv.__file__).parents[1]


def portal_on(memory: Memory, store: BlockStore) -> Portal:
    """A portal that the test closes."""
    return Portal.start(SMALL, memory.geometry, memory.device, store=store)


def until(portal: Portal, done: Any) -> None:
    """Let the loop go on until ``done()``."""
    for _ in range(20_000):
        if done():
            return
        portal.call(anyio_checkpoint, timeout=5)
    raise AssertionError("not within 20,000 turns of the loop")


async def anyio_checkpoint(session: akv.Session) -> None:
    """One turn of the loop."""
    await anyio.lowlevel.checkpoint()


def test_a_load_cancelled_as_it_starts_never_runs_on() -> None:
    """P1: cancelled in the post that starts it or in the next: ended, no late byte."""
    memory = Memory()
    portal = portal_on(memory, MemoryStore())
    rounds = 10_000
    ended: list[object] = []
    try:
        for number in range(rounds):
            spec = load_spec(HASHES, range(8), load_id=number)
            if number % 2:
                portal.post([PostLoad(spec), CancelLoad(number)])
            else:
                portal.post([PostLoad(spec)])
                portal.post([CancelLoad(number)])
            ended += portal.drain()

        def all_ended() -> bool:
            ended.extend(portal.drain())
            return len(ended) == rounds

        until(portal, all_ended)
        ids = [e.spec.load_id for e in ended if isinstance(e, LoadEnded)]
        assert sorted(ids) == list(range(rounds))
        numbers = portal.call(lambda session: session.statistics(), timeout=5)
        assert numbers.loads == 0
    finally:
        assert portal.close()
    assert portal.drain() == []
    assert all(memory.untouched(number) for number in range(BLOCKS))


@pytest.mark.anyio
async def test_lookups_that_expire_leave_no_task_and_no_call_behind() -> None:
    """P3: a thousand lookups of a hung store: what lives is bounded."""
    store = GatedStore(MemoryStore(), gated=("exists",))
    config = akv.Config(
        max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT, lookup_deadline=0.002
    )
    memory = Memory()
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        for number in range(1000):
            assert await session.lookup(lookup_spec(prompt(number, 2))) == 0
        with anyio.move_on_after(0.05):
            await anyio.sleep_forever()
        numbers = await session.statistics()
        pool = numbers.pools["lookup"]
        assert pool.running <= pool.threads <= 10
        assert pool.queued <= 2
        assert numbers.lookups == 0
        assert len(store.calls) <= pool.threads
        assert len(anyio.get_running_tasks()) <= 10
        store.open()


def test_answers_that_nobody_waits_for_any_more_are_not_asked_for() -> None:
    """P3: cancelled before its turn came: the store is not called for it."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=())
    portal = portal_on(memory, store)
    try:
        answers = [Answer() for _ in range(100)]
        for answer in answers:
            answer.cancelled = True
        portal.post([PostLookup(lookup_spec(HASHES), answer) for answer in answers])
        until(portal, lambda: all(answer.found is not None for answer in answers))
        assert store.calls == []
    finally:
        assert portal.close()


@pytest.mark.anyio
async def test_a_cancellation_in_the_tick_of_a_grant_loses_no_buffer() -> None:
    """P5: ten thousand rounds; the count of free buffers is right after each."""
    pool = BufferPool(
        np.zeros(2, dtype=np.uint8), buffer_bytes=1, observer=Recorder([])
    )

    async def hold(taken: list[StagingBuffer]) -> None:
        taken.append(await pool.acquire())

    for number in range(10_000):
        held = [await pool.acquire(), await pool.acquire()]
        taken: list[StagingBuffer] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold, taken)
            tasks.start_soon(hold, taken)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            if number % 3:
                pool.release(held.pop())
                tasks.cancel_scope.cancel()
            else:
                tasks.cancel_scope.cancel()
                pool.release(held.pop())
        for buffer in held + taken:
            pool.release(buffer)
        numbers = pool.statistics()
        assert (numbers.free, numbers.waiting) == (2, 0)


def test_a_forked_child_gets_a_clear_error_from_every_hook_that_posts(rig: Rig) -> None:
    """P7: the loop and its thread are the parent's; the child is told so at once."""
    with rig.engine() as engine:
        serve(engine, range(65), "parent")
        portal = engine.scheduler.get_kv_connector()._s._portal
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            text = "no error"
            try:
                portal.call(lambda session: session.statistics(), timeout=5)
            except akv.WrongThreadError as error:
                text = str(error)
            finally:
                os.write(writer, text.encode())
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        said = os.read(reader, 4096).decode()
        os.close(reader)
        assert "forked child" in said
        serve(engine, range(65), "parent again")


EXITS = """
import sys
from harness import Memory, load_spec, lookup_spec, prompt
import akv
from akv.portal import Answer, Portal, PostLoad, PostLookup
from akv.store import MemoryStore
from akv.testing.stores import GatedStore

memory = Memory()
gated = ("exists", "get_into") if sys.argv[1] == "hung" else ()
store = GatedStore(MemoryStore(), gated=gated)
config = akv.Config(max_load_bytes=8 << 10, max_save_bytes=8 << 10)
portal = Portal.start(config, memory.geometry, memory.device, store=store)
hashes = prompt(1, 4)
portal.post([PostLookup(lookup_spec(hashes), Answer()),
             PostLoad(load_spec(hashes, range(4)))])
if gated:
    store.wait_until_held(2)
print("over")
"""


@pytest.mark.parametrize("state", ["idle", "hung"])
def test_a_process_that_just_ends_ends_without_a_word(state: str) -> None:
    """P9: no close(), calls under way or not: no traceback, no hang, exit code 0."""
    paths = [str(SOURCES), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXITS, state],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("over\n", "", 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_raised_in_a_store_fails_a_load_and_no_more(
    error: BaseException,
) -> None:
    """P10: not an Exception, in a load's call: reported failed, the loop lives."""
    memory = Memory()
    faults = [error]

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb == "get_into" and faults:
            raise faults.pop()
        return None

    portal = portal_on(memory, FaultyStore(MemoryStore(), decide))
    ended: list[object] = []

    def drained() -> bool:
        ended.extend(portal.drain())
        return bool(ended)

    try:
        portal.post([PostLoad(load_spec(HASHES, range(8)))])
        until(portal, drained)
        (one,) = ended
        assert isinstance(one, LoadEnded)
        assert one.failed_blocks == tuple(range(8))
        assert portal.alive
        answer = Answer()
        portal.post([PostLookup(lookup_spec(HASHES), answer)])
        until(portal, lambda: answer.found is not None)
    finally:
        assert portal.close()
    assert not [t for t in threading.enumerate() if t.name == "akv-portal-loop"]
