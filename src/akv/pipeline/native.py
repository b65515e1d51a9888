"""Calls that block, in threads of akv's own, and the fence around each.

A pool has a fixed number of threads and belongs to one kind of work, so that
hung gets cannot starve lookups. A call that has begun cannot be stopped: who
waits for it may give up, and the :class:`Call` then still tells when it has
ended, which is the point from which its memory may be used again. A call
that has not begun can be withdrawn, and then never begins. A thread whose call
was given up is replaced, up to a limit; when that is reached as well, calls
end with an error at once, since nothing would ever come to serve them.

Everything but the work itself runs on the loop. The threads are daemons,
since a thread that hangs in native code must not keep the process alive;
they lose no error, as whatever happens in them is a call's outcome.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from akv.core.errors import AkvError, DeadlineError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

__all__ = (
    "Bell",
    "Call",
    "LoopHandle",
    "NativePool",
    "PoolStatistics",
    "fence_all",
    "to_the_end",
)

T = TypeVar("T")

SPARES = 8
"""Threads that a pool starts in place of such whose call was given up."""

_ring = ctypes.PyDLL(None).eventfd_write
_ring.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopHandle:
    """Lets any thread run a function on the loop that made it."""

    def __init__(self) -> None:
        self._post: Callable[..., object]
        try:
            self._post = asyncio.get_running_loop().call_soon_threadsafe
        except RuntimeError:
            import trio

            self._post = trio.lowlevel.current_trio_token().run_sync_soon

    def post(self, function: Callable[..., object], *args: object) -> bool:
        """Run ``function`` on the loop soon; False if the loop is gone."""
        try:
            self._post(function, *args)
        except RuntimeError:
            return False
        return True


class Bell:
    """Wakes a task from any thread without a wait for the interpreter's lock.

    Whoever calls into a loop writes to a socket, and Python lets go of its
    lock for that: the thread that is woken takes it, and the caller may get
    it back milliseconds later. This one writes to an eventfd with the lock
    held, which takes a microsecond. Several rings may be heard as one.
    """

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Wake the task; not after :meth:`close`."""
        _ring(self._file, 1)

    async def wait(self) -> None:
        """Until the bell was rung since the last time."""
        await anyio.wait_readable(self._file)
        os.eventfd_read(self._file)

    def close(self) -> None:
        """Let go of the file; nobody may ring or wait any more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class Call(Generic[T]):
    """One call into blocking code: waiting, running or ended.

    Made by :meth:`NativePool.submit`; to be used on the loop.
    """

    def __init__(self, function: Callable[[], T], pool: NativePool) -> None:
        self._function: Callable[[], T] | None = function
        self._pool = pool
        self.ended_event = anyio.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of this call runs any more, nor ever will."""
        return self.ended_event.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it raised; None if it has not ended, or ended well."""
        return self._error

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop when the call has ended, or now."""
        if self.ended:
            callback()
        else:
            self._callbacks.append(callback)

    async def wait(self) -> T:
        """Its result, or its error.

        Cancellation: the waiting stops, the call does not.
        """
        await self.ended_event.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    async def fence(self) -> None:
        """Wait for its end and for nothing less, where it touches the engine's blocks.

        Cancellation, also a second one by the task's own ``cancel()``, is
        raised when the call has ended.
        """
        cancelled: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not self.ended:
                try:
                    await self.ended_event.wait()
                except anyio.get_cancelled_exc_class() as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    def give_up(self) -> None:
        """Nobody waits for it any longer; its pool goes on without its thread."""
        if not self.ended:
            self._pool._give_up(self)

    def _take(self) -> Callable[[], T] | None:
        function, self._function = self._function, None
        return function

    def _end(self, result: T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self.ended_event.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


async def fence_all(calls: Iterable[Call[Any]]) -> None:
    """:meth:`Call.fence` for each of them; a cancellation is raised at the end."""
    cancelled: BaseException | None = None
    for call in calls:
        try:
            await call.fence()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def to_the_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` to its end, however often this task is cancelled meanwhile.

    A cancellation, also by the task's own ``cancel()``, is raised afterwards.
    """
    with anyio.CancelScope(shield=True):
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # trio, where a shield holds
            await work()
            return
        task = loop.create_task(work())
        cancelled: BaseException | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        task.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Calls of one pool, as of now.

    ``given_up`` of the ``running`` ones nobody waits for any longer.
    """

    threads: int
    running: int
    queued: int
    ended: int
    given_up: int


class NativePool:
    """A fixed number of threads for one kind of blocking call, FIFO.

    Made and used on the loop. The queue has no bound of its own: who submits
    holds a permit (staging, a lookup's place), and those are bounded. There
    are never more than ``threads + spares`` threads.
    """

    def __init__(self, name: str, threads: int, spares: int = SPARES) -> None:
        self._name = name
        self._limit = threads
        self._most = threads + spares
        self._loop = LoopHandle()
        self._condition = threading.Condition()
        self._queue: deque[Call[Any]] = deque()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._idle = 0
        self._running: set[Call[Any]] = set()
        self._given_up: set[Call[Any]] = set()
        self._ended = 0
        self._closed = False

    def statistics(self) -> PoolStatistics:
        """Numbers as of now."""
        with self._condition:
            return PoolStatistics(
                threads=len(self._threads),
                running=len(self._running),
                queued=len(self._queue),
                ended=self._ended,
                given_up=len(self._given_up),
            )

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Queue a call; it begins when a thread is free.

        Where no thread can come any more, as all hang in calls that were
        given up, it has ended already: waiting for it raises DeadlineError.
        """
        call = Call(function, self)
        with self._condition:
            if self._closed:
                raise SessionClosedError(f"the {self._name} threads are closed")
            stuck = self._stuck()
            if stuck is None:
                self._queue.append(call)
                self._staff()
        if stuck is not None:
            call._take()
            call._end(None, stuck)
        return call

    async def run(self, function: Callable[[], T]) -> T:
        """Submit and wait, for calls that hold no memory of akv's.

        Cancellation: a call that has not begun never begins; one that has
        runs to its end unwatched, and its result is dropped.
        """
        call = self.submit(function)
        try:
            return await call.wait()
        except BaseException:
            if not self.withdraw(call):
                call.give_up()
            raise

    def withdraw(self, call: Call[Any]) -> bool:
        """Keep a call from beginning; False if it has begun already."""
        with self._condition:
            if call not in self._queue:
                return call.ended
            self._queue.remove(call)
            call._take()
        call._end(None, SessionClosedError("withdrawn"))
        return True

    async def close(self, grace: float) -> int:
        """Begin nothing more and wait ``grace`` seconds for what runs.

        Returns how many calls had not ended by then; their threads go on.
        """
        with self._condition:
            self._closed = True
            queued = tuple(self._queue)
            self._condition.notify_all()
            running = tuple(self._running)
        for call in queued:
            self.withdraw(call)
        with anyio.move_on_after(grace):
            for call in running:
                await call.ended_event.wait()
        return sum(not call.ended for call in running)

    def _give_up(self, call: Call[Any]) -> None:
        queued: tuple[Call[Any], ...] = ()
        with self._condition:
            if call not in self._running:
                return
            self._given_up.add(call)
            stuck = self._stuck()
            if stuck is not None:
                queued = tuple(self._queue)
                self._queue.clear()
        if stuck is None:
            # Soon and not now: whoever gives up may be about to withdraw others.
            self._loop.post(self._replace)
        for other in queued:
            other._take()
            other._end(None, stuck)

    def _replace(self) -> None:
        with self._condition:
            if self._queue:
                self._staff()

    def _stuck(self) -> DeadlineError | None:
        if len(self._given_up) < self._most:
            return None
        return DeadlineError(
            f"all {self._most} {self._name} threads hang in calls that were given up"
        )

    def _staff(self) -> None:
        if self._idle >= len(self._queue):
            self._condition.notify()
        elif len(self._threads) < min(self._limit + len(self._given_up), self._most):
            thread = threading.Thread(
                target=self._work,
                name=f"akv-{self._name}-{self._started}",
                daemon=True,
            )
            self._started += 1
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._closed:
                        return
                    self._idle += 1
                    self._condition.wait()
                    self._idle -= 1
                call = self._queue.popleft()
                function = call._take()
                self._running.add(call)
            result: Any = None
            error: BaseException | None = None
            try:
                result = function() if function is not None else None
            except Exception as caught:  # noqa: BLE001
                error = caught
            except BaseException as caught:  # noqa: BLE001
                # An exit in a pool's thread ends this call, never the loop.
                error = AkvError(f"{type(caught).__name__}: {caught}")
                error.__cause__ = caught
            with self._condition:
                self._running.discard(call)
                self._given_up.discard(call)
                self._ended += 1
                surplus = len(self._threads) > self._limit + len(self._given_up)
                if surplus:
                    self._threads.discard(threading.current_thread())
            self._loop.post(call._end, result, error)
            del call, function, result, error
            if surplus:
                return
