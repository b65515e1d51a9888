"""Threads for calls that block: what hangs is bounded and starves nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from pipeline.machines import LoopMachine

import akv
from akv.pipeline.budget import BufferPool, QuarantineFullError, StagingBuffer
from akv.pipeline.native import SPARES, Call, NativePool
from akv.portal import CancelLoad, Ended, LoadEnded, Portal, PostLoad
from akv.store import MemoryStore
from akv.testing import GatedStore
from harness import OBJECT, Memory, Recorder, load_spec, lookup_spec, prompt

pytestmark = pytest.mark.anyio
HASHES = prompt(1, 8)
SMALL = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=20,
    lookup_deadline=20,
)


async def until(condition: object) -> None:
    """Turn the loop until ``condition()``."""
    assert callable(condition)
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_64_hung_gets_leave_10_lookups_their_threads() -> None:
    """One pool hangs, the other answers."""
    memory = Memory()
    store = GatedStore(MemoryStore(), gated=("get_into",))
    async with (
        akv.open_session(SMALL, memory.geometry, memory.device, store=store) as session,
        anyio.create_task_group() as tasks,
    ):
        for number in range(64):
            spec = load_spec(prompt(number, 8), range(8), load_id=number)
            tasks.start_soon(session.load, spec)
        await anyio.to_thread.run_sync(store.wait_until_held, 2)
        with anyio.fail_after(5):
            for _ in range(10):
                assert await session.lookup(lookup_spec(HASHES)) == 0
        tasks.cancel_scope.cancel()
        store.open()


async def test_threads_that_hang_are_replaced_and_go_when_their_calls_end() -> None:
    """As many as there are spares; then calls end at once; then all is as before."""
    pool = NativePool("tests", 2)
    gate = threading.Event()
    for lost in range(2 + SPARES):
        # A call behind each that hangs is served, as long as there are spares.
        with anyio.move_on_after(10) as scope:
            call = pool.submit(gate.wait)
            await until(lambda count=lost + 1: pool.statistics().running == count)
            call.give_up()
            call.give_up()
        assert not scope.cancelled_caught
        if lost + 1 < 2 + SPARES:
            assert await pool.run(lambda: "served") == "served"
    numbers = pool.statistics()
    assert (numbers.given_up, numbers.threads) == (2 + SPARES, 2 + SPARES)
    with pytest.raises(akv.DeadlineError, match="10 tests threads hang"):
        await pool.run(lambda: None)
    gate.set()
    await until(lambda: pool.statistics().given_up == 0)
    assert await pool.run(lambda: "again") == "again"
    await until(lambda: pool.statistics().threads <= 2)
    assert await pool.close(5) == 0


async def test_calls_that_wait_for_the_last_thread_end_when_it_is_lost() -> None:
    """They would wait for nothing."""
    pool = NativePool("tests", 1, spares=0)
    gate = threading.Event()
    hung = pool.submit(gate.wait)
    await until(lambda: pool.statistics().running == 1)
    behind = pool.submit(lambda: None)
    hung.give_up()
    with pytest.raises(akv.DeadlineError, match="hang"):
        await behind.wait()
    gate.set()
    assert await pool.close(5) == 0


async def test_a_fence_is_not_left_before_the_call_has_ended() -> None:
    """However often the task is cancelled, the scope's way or the task's own."""
    pool = NativePool("tests", 1)
    gate = threading.Event()
    call = pool.submit(gate.wait)
    left = anyio.Event()

    scope = anyio.CancelScope()
    hosts: list[asyncio.Task[object]] = []

    async def fenced() -> None:
        host = asyncio.current_task()
        assert host is not None
        hosts.append(host)
        try:
            with scope:
                await call.fence()
        except asyncio.CancelledError:
            while host.uncancel():
                pass
        finally:
            assert call.ended
            left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fenced)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
            scope.cancel()
            hosts[0].cancel()
        await anyio.lowlevel.checkpoint()
        assert not left.is_set()
        gate.set()
    assert left.is_set()
    assert await pool.close(5) == 0


async def test_a_full_quarantine_alarms_once_and_makes_nobody_wait() -> None:
    """Who waits, and who comes, hears it; when a call ends, it is over."""
    recorder = Recorder([])
    pool = NativePool("tests", 4)
    staging = BufferPool(np.zeros(4, np.uint8), buffer_bytes=1, observer=recorder)
    gates = [threading.Event() for _ in range(4)]
    calls = [pool.submit(gate.wait) for gate in gates]
    buffers = [await staging.acquire() for _ in range(4)]
    refused: list[str] = []

    async def wait_for_one() -> None:
        try:
            await staging.acquire()
        except QuarantineFullError as error:
            refused.append(str(error))

    await until(lambda: pool.statistics().running == 4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_one)
        await anyio.wait_all_tasks_blocked()
        for buffer, call in zip(buffers[:3], calls[:3], strict=True):
            staging.release_after(buffer, call)
    assert len(refused) == 1
    assert "3 of 4 staging buffers are in quarantine" in refused[0]
    staging.release(buffers[3])
    assert staging.acquire_nowait() is None
    await wait_for_one()
    assert len(refused) == 2
    assert recorder.names().count("akv.memory.quarantine_full") == 1
    gates[0].set()
    await until(lambda: staging.statistics().quarantined == 2)
    assert staging.acquire_nowait() is not None
    for gate in gates:
        gate.set()
    await until(lambda: staging.statistics().quarantined == 0)
    assert await pool.close(5) == 0


def test_a_load_into_a_full_quarantine_is_reported_failed_at_once() -> None:
    """Not after its deadline of 20 s; and the alarm was given once."""
    memory = Memory()
    recorder = Recorder([])
    store = GatedStore(MemoryStore(), gated=("get_into",))
    portal = Portal.start(
        SMALL, memory.geometry, memory.device, store=store, observer=recorder
    )
    ended: list[Ended] = []

    async def one_turn(session: akv.Session) -> None:
        await session.statistics()

    def drained(count: int) -> None:
        for _ in range(5000):
            ended.extend(portal.drain())
            if len(ended) == count:
                return
            portal.call(one_turn, timeout=5)
        raise AssertionError(ended)

    try:
        for number in range(3):
            spec = load_spec(prompt(number, 1), (number,), load_id=number)
            portal.post([PostLoad(spec)])
            store.wait_until_held(number + 1)
            portal.post([CancelLoad(number)])
            drained(number + 1)
        portal.post([PostLoad(load_spec(HASHES, range(8), load_id=9))])
        started = time.monotonic()
        drained(4)
        assert time.monotonic() - started < 5
        last = ended[-1]
        assert isinstance(last, LoadEnded)
        assert last.failed_blocks == tuple(range(8))
        assert "quarantine" in last.reason
        assert recorder.names().count("akv.memory.quarantine_full") == 1
    finally:
        store.open()
        assert portal.close()


class Waiter:
    """A task that wants a buffer."""

    def __init__(self, staging: BufferPool) -> None:
        self.scope = anyio.CancelScope()
        self.buffer: StagingBuffer | None = None
        self.refused = False
        self.staging = staging

    async def run(self) -> None:
        """Get one, be refused, or be cancelled."""
        with self.scope:
            try:
                self.buffer = await self.staging.acquire()
            except QuarantineFullError:
                self.refused = True


class StagingMachine(LoopMachine):
    """Buffers against a list: first come, first served, none lost, none twice.

    Cancelling comes in the same turn of the loop as a grant, or not.
    """

    SIZE = 4

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder([])
        self.on_loop(self._make)
        self.limit = self.staging.statistics().quarantine_limit
        self.waiting: deque[Waiter] = deque()
        self.holders: list[Waiter] = []
        self.quarantined: list[Call[None]] = []
        self.alarms = 0

    def _make(self) -> None:
        self.pool = NativePool("never", 0, spares=0)
        self.pool._most = 1  # no thread: calls end when the machine says so
        self.staging = BufferPool(
            np.zeros(self.SIZE, np.uint8), buffer_bytes=1, observer=self.recorder
        )

    @property
    def full(self) -> bool:
        """Whether quarantine is at its limit."""
        return len(self.quarantined) >= self.limit

    @property
    def free(self) -> int:
        """Buffers that the model thinks are free."""
        return self.SIZE - len(self.holders) - len(self.quarantined)

    def granted(self) -> None:
        """Move whoever the model says is served now."""
        while self.waiting and self.free > 0:
            self.holders.append(self.waiting.popleft())

    @rule(cancel=st.booleans())
    def acquire(self, cancel: bool) -> None:
        """One more wants a buffer; perhaps it is gone in the same turn."""
        waiter = self.on_loop(Waiter, self.staging)
        self.portal.start_task_soon(waiter.run)
        self.on_loop(lambda: None)
        if self.full:
            assert waiter.refused
            return
        self.waiting.append(waiter)
        self.granted()
        if cancel:
            self.cancel(len(self.waiting))

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        """Somebody who waits goes away."""
        if not self.waiting:
            return
        waiter = self.waiting[number % len(self.waiting)]
        self.on_loop(waiter.scope.cancel)
        self.waiting.remove(waiter)

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 99), cancel=st.booleans())
    def release(self, number: int, cancel: bool) -> None:
        """A holder gives back; the next in line may be gone in the same turn."""
        holder = self.holders.pop(number % len(self.holders))
        buffer = holder.buffer
        assert buffer is not None
        gone = self.waiting[0] if cancel and self.waiting else None

        def both() -> None:
            self.staging.release(buffer)
            if gone is not None:
                gone.scope.cancel()

        self.on_loop(both)
        if gone is not None:
            # It may have got the buffer before it heard.
            self.waiting.popleft()
            if gone.buffer is not None:
                self.holders.append(gone)
        self.granted()

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 99), hung=st.booleans())
    def give_to_a_call(self, number: int, hung: bool) -> None:
        """A holder leaves its buffer to a call that has ended, or that has not."""
        holder = self.holders.pop(number % len(self.holders))
        buffer = holder.buffer
        assert buffer is not None
        call: Call[None] = Call(lambda: None, self.pool)

        def leave() -> None:
            if not hung:
                call._end(None, None)
            self.staging.release_after(buffer, call)

        self.on_loop(leave)
        if hung:
            self.quarantined.append(call)
            self.alarms += len(self.quarantined) == self.limit
            if self.full:
                assert all(waiter.refused for waiter in self.waiting)
                self.waiting.clear()
        self.granted()

    @precondition(lambda self: self.quarantined)
    @rule(number=st.integers(0, 99))
    def call_ends(self, number: int) -> None:
        """A call in quarantine ends."""
        call = self.quarantined.pop(number % len(self.quarantined))
        self.on_loop(call._end, None, None)
        self.granted()

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        """Counts, order of service, no buffer twice, one alarm for each time."""
        numbers = self.staging.statistics()
        assert numbers.free == self.free
        assert numbers.waiting == len(self.waiting)
        assert numbers.quarantined == len(self.quarantined)
        held = [waiter.buffer for waiter in self.holders]
        assert None not in held
        assert len({id(buffer) for buffer in held}) == len(held)
        assert all(waiter.buffer is None for waiter in self.waiting)
        assert self.recorder.names().count("akv.memory.quarantine_full") == self.alarms

    def teardown(self) -> None:
        """Nobody waits at the end."""
        for waiter in self.waiting:
            self.on_loop(waiter.scope.cancel)
        super().teardown()


class PoolMachine(LoopMachine):
    """Calls against a model: each ends once, in order, withdrawn ones never begin."""

    THREADS, MOST = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.calls: dict[int, Call[int]] = {}
        self.gates: dict[int, threading.Event] = {}
        self.queued: deque[int] = deque()
        self.running: list[int] = []
        self.given_up: set[int] = set()
        self.ended: dict[int, str] = {}
        self.on_loop(self._make)

    def _make(self) -> None:
        self.pool = NativePool("machine", self.THREADS, spares=self.MOST - self.THREADS)

    def work(self, number: int) -> int:
        """In a thread: until the machine says so."""
        self.begun.append(number)
        self.gates[number].wait(20)
        return number

    def begin(self) -> None:
        """Let the model's threads take what they can, and wait for the real ones."""
        limit = min(self.THREADS + len(self.given_up), self.MOST)
        while self.queued and len(self.running) < limit:
            self.running.append(self.queued.popleft())
        if len(self.given_up) >= self.MOST:
            for number in self.queued:
                self.ended[number] = "stuck"
            self.queued.clear()

        async def caught_up() -> None:
            await until(
                lambda: (
                    self.pool.statistics().running == len(self.running)
                    and len(self.begun)
                    == len(self.running)
                    + sum(how == "well" for how in self.ended.values())
                    and all(self.calls[n].ended for n in self.ended)
                )
            )

        self.portal.call(caught_up)

    @rule()
    def submit(self) -> None:
        """One more call."""
        number = len(self.calls)
        self.gates[number] = threading.Event()

        def submit() -> None:
            self.calls[number] = self.pool.submit(lambda: self.work(number))

        self.on_loop(submit)
        if len(self.given_up) >= self.MOST:
            self.ended[number] = "stuck"
        else:
            self.queued.append(number)
        self.begin()

    @precondition(lambda self: self.calls)
    @rule(number=st.integers(0, 999))
    def withdraw(self, number: int) -> None:
        """Only one that has not begun can be."""
        number %= len(self.calls)
        withdrawn = self.on_loop(self.pool.withdraw, self.calls[number])
        assert withdrawn == (number not in self.running)
        if number in self.queued:
            self.queued.remove(number)
            self.ended[number] = "withdrawn"
        self.begin()

    @precondition(lambda self: self.calls)
    @rule(number=st.integers(0, 999))
    def give_up(self, number: int) -> None:
        """Nobody waits any longer; a thread is replaced if the call had one."""
        number %= len(self.calls)
        self.on_loop(self.calls[number].give_up)
        if number in self.running:
            self.given_up.add(number)
        self.begin()

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 999))
    def end(self, number: int) -> None:
        """A call returns."""
        number = self.running.pop(number % len(self.running))
        self.given_up.discard(number)
        self.ended[number] = "well"
        self.gates[number].set()
        self.begin()

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        """Numbers, bounds, and how each call ended."""
        numbers = self.pool.statistics()
        assert numbers.running == len(self.running)
        assert numbers.queued == len(self.queued)
        assert numbers.given_up == len(self.given_up)
        assert numbers.threads <= self.MOST
        assert len(set(self.begun)) == len(self.begun)
        for number, call in self.calls.items():
            assert call.ended == (number in self.ended)
            assert (number in self.begun) == (
                number in self.running or self.ended.get(number) == "well"
            )

    def teardown(self) -> None:
        """Closing withdraws what waits and counts what hangs."""
        hung = len(self.running)

        async def close() -> None:
            assert await self.pool.close(0.0) == hung
            for gate in self.gates.values():
                gate.set()
            await until(lambda: all(call.ended for call in self.calls.values()))

        self.portal.call(close)
        super().teardown()


TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNativePool = PoolMachine.TestCase
TestNativePool.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None
)
