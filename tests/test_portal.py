"""The bridge between threads that must not wait and the loop that may."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import akv
from akv.portal import (
    Answer,
    CancelLoad,
    Ended,
    Forget,
    KeySpaceSoon,
    LoadEnded,
    Portal,
    PostKeySpace,
    PostLoad,
    PostLookup,
    PostSave,
    SaveCopiedOut,
    SaveEnded,
    _Run,
)
from akv.session import Session
from akv.store import BlockStore, MemoryStore
from akv.testing.stores import GatedStore
from harness import (
    BLOCKS,
    OBJECT,
    SPACE,
    Memory,
    descriptors,
    load_spec,
    lookup_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HASHES = prompt(1, 8)
CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=20,
)


@contextmanager
def portal_on(memory: Memory, store: BlockStore) -> Iterator[Portal]:
    """A portal that is closed at the end, in time."""
    portal = Portal.start(CONFIG, memory.geometry, memory.device, store=store)
    try:
        yield portal
    finally:
        if isinstance(store, GatedStore):
            store.open()
        assert portal.close()
        assert not portal.alive


def drained(portal: Portal, count: int) -> list[Ended]:
    """The next ``count`` reports."""
    ended: list[Ended] = []
    deadline = time.monotonic() + 20
    while len(ended) < count and time.monotonic() < deadline:
        ended += portal.drain()
        time.sleep(0.001)
    assert len(ended) == count
    return ended


def saved(portal: Portal, memory: Memory) -> None:
    """Compute and save the prompt."""
    for number, block_hash in enumerate(HASHES):
        memory.write(number, block_hash)
    portal.post([PostSave(save_spec(HASHES, range(8)), None)])
    copied, ended = drained(portal, 2)
    assert isinstance(copied, SaveCopiedOut)
    assert isinstance(ended, SaveEnded)
    assert ended.dropped == 0


def test_a_step_is_posted_at_once_and_reported_once() -> None:
    """Save, look up, load: each comes back once, with what became of it."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:
        saved(portal, memory)
        answer = Answer()
        portal.post([PostLookup(lookup_spec(HASHES), answer)])
        while answer.found is None:
            time.sleep(0.001)
        assert answer.found == 8
        specs = [
            load_spec(HASHES[:2], (20 + 2 * n, 21 + 2 * n), load_id=n) for n in range(6)
        ]
        portal.post([PostLoad(spec) for spec in specs])
        ended = drained(portal, 6)
        assert {e.spec.load_id for e in ended if isinstance(e, LoadEnded)} == set(
            range(6)
        )
        assert all(memory.holds(20 + n, HASHES[n % 2]) for n in range(12))
        assert portal.drain() == []


def test_a_cancelled_load_is_reported_and_its_blocks_are_left_alone() -> None:
    """Abort while the store's call is under way."""
    memory = Memory()
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("get_into",))
    with portal_on(memory, store) as portal:
        portal.post([PostLoad(load_spec(HASHES, range(8), load_id=7))])
        store.wait_until_held()
        portal.post([CancelLoad(7), CancelLoad(7), CancelLoad(99)])
        (ended,) = drained(portal, 1)
        assert isinstance(ended, LoadEnded)
        assert ended.failed_blocks == tuple(range(8))
        store.open()
    assert portal.drain() == []
    assert all(memory.untouched(number) for number in range(BLOCKS))


def test_a_load_cancelled_in_the_step_that_posts_it_is_reported() -> None:
    """The task has not run yet when the cancellation comes."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:
        for number in range(200):
            spec = load_spec(HASHES, range(8), load_id=number)
            portal.post([PostLoad(spec), CancelLoad(number)])
        ended = drained(portal, 200)
        assert len({e.spec.load_id for e in ended if isinstance(e, LoadEnded)}) == 200


def test_a_spec_that_does_not_fit_fails_alone() -> None:
    """A bad command neither ends the loop nor loses the next one."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:
        saved(portal, memory)
        portal.post([PostLoad(load_spec(HASHES[:1], (99,), load_id=1))])
        portal.post([PostLoad(load_spec(HASHES[:1], (9,), load_id=2))])
        first, second = sorted(
            (e for e in drained(portal, 2) if isinstance(e, LoadEnded)),
            key=lambda e: e.spec.load_id,
        )
        assert first.failed_blocks == (99,)
        assert "block 99 of 32" in first.reason
        assert second.failed_blocks == ()


def test_closing_reports_every_load_and_every_save() -> None:
    """Whatever is under way: failed, dropped, once each."""
    memory = Memory()
    store = GatedStore(
        MemoryStore(slot_bytes=OBJECT), gated=("get_into", "put_from", "exists")
    )
    with portal_on(memory, store) as portal:
        for n in range(5):
            portal.post([PostLoad(load_spec(HASHES[:1], (n,), load_id=n))])
            portal.post(
                [PostSave(save_spec(HASHES[1:2], (n + 5,), job_id=n, chain=n), None)]
            )
        store.wait_until_held(2)
        threading.Timer(0.2, store.open).start()
        portal.close()
        ended = portal.drain()
    loads = [e.spec.load_id for e in ended if isinstance(e, LoadEnded)]
    copied = [e.spec.job_id for e in ended if isinstance(e, SaveCopiedOut)]
    saves = [e.spec.job_id for e in ended if isinstance(e, SaveEnded)]
    assert sorted(loads) == sorted(copied) == sorted(saves) == list(range(5))


def test_a_closed_portal_answers_at_once() -> None:
    """Lookups find nothing, loads fail, saves are dropped; nothing hangs."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:
        pass
    answer = Answer()
    portal.post(
        [
            PostLookup(lookup_spec(HASHES), answer),
            PostLoad(load_spec(HASHES, range(8))),
            PostSave(save_spec(HASHES, range(8)), None),
            Forget(SPACE, HASHES),
        ]
    )
    assert answer.found == 0
    load, copied, save = portal.drain()
    assert isinstance(load, LoadEnded)
    assert load.failed_blocks == tuple(range(8))
    assert isinstance(copied, SaveCopiedOut)
    assert isinstance(save, SaveEnded)
    with pytest.raises(akv.SessionClosedError):
        portal.call(lambda session: session.flush(), timeout=1)


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    """The first error is shown, and no thread stays."""
    before = threading.active_count()
    config = akv.Config(store="nonsense:")
    with pytest.raises(akv.ConfigError, match="nonsense"):
        Portal.start(config, Memory().geometry)
    while threading.active_count() > before:
        time.sleep(0.001)


def test_fifty_portals_leave_no_thread_and_no_descriptor() -> None:
    """Open and close, again and again, in one process."""

    def once() -> None:
        with portal_on(Memory(), MemoryStore(slot_bytes=OBJECT)) as portal:
            portal.post([PostLoad(load_spec(HASHES, range(8)))])
            drained(portal, 1)

    once()
    threads, files = threading.active_count(), descriptors()
    for _ in range(50):
        once()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert descriptors() <= files


def test_a_call_from_the_portals_own_loop_is_refused() -> None:
    """It would wait for itself."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:

        async def inner(session: Session) -> None:
            del session
            portal.call(lambda s: s.flush(), timeout=1)

        with pytest.raises(akv.WrongThreadError, match="own loop"):
            portal.call(inner, timeout=5)


def test_a_call_from_a_running_loop_is_refused() -> None:
    """It would stop the loop; the message says what to use."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:

        async def host() -> None:
            portal.call(lambda s: s.flush(), timeout=1)

        with pytest.raises(akv.WrongThreadError, match="open_session"):
            asyncio.run(host())


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    """With TimeoutError, and the portal goes on."""
    memory = Memory()
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    with portal_on(memory, store) as portal:
        portal.post([PostSave(save_spec(HASHES, range(8)), None)])
        store.wait_until_held()
        with pytest.raises(TimeoutError):
            portal.call(lambda session: session.flush(), timeout=0.05)
        store.open()
        portal.call(lambda session: session.flush(), timeout=10)


def test_a_forked_child_gets_a_clear_error() -> None:
    """The loop lives in the parent."""
    memory = Memory()
    with portal_on(memory, MemoryStore(slot_bytes=OBJECT)) as portal:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                portal.post([])
            except akv.WrongThreadError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        text = os.read(reader, 4096).decode()
        os.close(reader)
    assert "forked child" in text
    assert "open another one" in text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_task_reports_what_it_was_for_and_ends_in_order(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load and those beside it are reported once; later work is refused with it."""
    memory = Memory()
    plain = Session.load

    async def load(self: Session, spec: akv.LoadSpec, *, mark: object = None) -> object:
        if spec.load_id == 3:
            raise error
        return await plain(self, spec, mark=mark)

    monkeypatch.setattr(Session, "load", load)
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("get_into",))
    with portal_on(memory, store) as portal:
        portal.post([PostLoad(load_spec(HASHES, range(8), load_id=n)) for n in (1, 2)])
        store.wait_until_held()
        portal.post([PostLoad(load_spec(HASHES, range(8), load_id=3))])
        store.open()
        ended = {
            e.spec.load_id: e for e in drained(portal, 3) if isinstance(e, LoadEnded)
        }
        assert sorted(ended) == [1, 2, 3]
        assert type(error).__name__ in ended[3].reason
        portal.close()
        assert portal.drain() == []
        portal.post([PostLoad(load_spec(HASHES, range(8), load_id=4))])
        (late,) = portal.drain()
        assert isinstance(late, LoadEnded)
        assert type(error).__name__ in late.reason


def test_calls_and_lookups_are_answered_though_their_tasks_never_ran() -> None:
    """Posted in the turn of the loop in which the portal closes."""
    for _ in range(200):
        portal = Portal.start(
            CONFIG, Memory().geometry, store=MemoryStore(slot_bytes=OBJECT)
        )
        answers = [Answer() for _ in range(5)]
        outcomes: list[object] = []

        def call(portal: Portal = portal, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(portal.call(lambda s: s.flush(), timeout=20))
            except akv.SessionClosedError as error:
                outcomes.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        portal._stop = True
        portal.post([PostLookup(lookup_spec(HASHES), answer) for answer in answers])
        started = time.monotonic()
        assert portal.close()
        caller.join(10)
        assert time.monotonic() - started < 5
        assert len(outcomes) == 1
        assert all(answer.found is not None for answer in answers)


def test_a_call_whose_task_is_cancelled_before_it_begins_is_refused() -> None:
    """What was begun and never ran is refused when the loop has ended."""
    portal = Portal("tests")
    outcomes: list[str] = []
    soon = KeySpaceSoon()

    async def never(session: Session) -> None:
        raise AssertionError

    run = _Run(never, lambda: outcomes.append("refused"))
    answer = Answer()
    for command in (
        run,
        PostLookup(lookup_spec(HASHES), answer),
        PostLoad(load_spec(HASHES, range(8))),
        PostKeySpace("tests", b"f" * 16, soon),
    ):
        portal._begun[id(command)] = command
    portal._opened.set_result(None)
    portal._failed(akv.SessionClosedError("over"))
    assert outcomes == ["refused"]
    assert answer.found == 0
    assert soon.known.is_set()
    (ended,) = portal.drain()
    assert isinstance(ended, LoadEnded)
    portal._bell.close()
