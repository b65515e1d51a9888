"""Staging memory, handed out first come, first served, and its quarantine.

A pool is one piece of memory cut into equal buffers, each as large as one
window. Who waits for a buffer holds none but those of native calls and copies
that are under way, and these come back when the call ends, whether the wait
succeeds or not. So two loads, or two saves, can never each hold what the other
needs. A buffer whose native call outlived its wait goes to quarantine and is
back in the pool at the moment the call ends, not before. When quarantine holds
its limit nothing is handed out and nobody waits: a store that keeps that much
is not to be given more.

Used on the loop only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from akv.core.errors import SessionClosedError, StoreError
from akv.core.events import (
    MemoryQuarantined,
    MemoryReleased,
    Observer,
    QuarantineFull,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from akv.pipeline.native import Call

__all__ = (
    "BufferPool",
    "BufferPoolStatistics",
    "QuarantineFullError",
    "StagingBuffer",
)

QUARANTINE_SHARE = 0.75
"""The part of a pool that may be in quarantine."""


class QuarantineFullError(StoreError):
    """No staging memory till calls end that nobody waits for any longer."""


@dataclass(frozen=True, slots=True, eq=False)
class StagingBuffer:
    """One buffer of a pool, owned by whoever acquired it."""

    memory: npt.NDArray[np.uint8]

    def rows(self, objects: int, object_bytes: int) -> npt.NDArray[np.uint8]:
        """The front of the buffer as ``[objects, object_bytes]``."""
        return self.memory[: objects * object_bytes].reshape(objects, object_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPoolStatistics:
    """Buffers and their state, as of now.

    While ``quarantined`` is at ``quarantine_limit`` nothing is handed out.
    """

    buffers: int
    buffer_bytes: int
    free: int
    quarantined: int
    quarantine_limit: int
    waiting: int


class BufferPool:
    """``buffers`` pieces of ``memory``, of ``buffer_bytes`` each."""

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        *,
        buffer_bytes: int,
        observer: Observer,
    ) -> None:
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._count = memory.nbytes // buffer_bytes
        self._free = [
            StagingBuffer(memory[n * buffer_bytes : (n + 1) * buffer_bytes])
            for n in range(self._count)
        ]
        self._waiters: deque[tuple[anyio.Event, list[StagingBuffer]]] = deque()
        self._quarantined = 0
        self._closed = False
        self._limit = max(1, int(self._count * QUARANTINE_SHARE))
        self._observer = observer

    @property
    def bytes(self) -> int:
        """Bytes of all buffers together."""
        return self._memory.nbytes

    @property
    def memory(self) -> memoryview:
        """All buffers as one piece, for a store that wants to know it."""
        return self._memory.data

    def statistics(self) -> BufferPoolStatistics:
        """Numbers as of now."""
        return BufferPoolStatistics(
            buffers=self._count,
            buffer_bytes=self._buffer_bytes,
            free=len(self._free),
            quarantined=self._quarantined,
            quarantine_limit=self._limit,
            waiting=len(self._waiters),
        )

    def acquire_nowait(self) -> StagingBuffer | None:
        """A buffer, if one is free and nobody has waited longer for it."""
        over = self._closed or self._quarantined >= self._limit
        if self._free and not self._waiters and not over:
            return self._free.pop()
        return None

    async def acquire(self) -> StagingBuffer:
        """A buffer, after all who asked before.

        :raises QuarantineFullError: the quarantine is full, now or while waiting
        :raises SessionClosedError: the pool is closed, now or while waiting

        Cancellation: a buffer that was granted in the same moment goes to the
        next in line; nothing is lost.
        """
        buffer = self.acquire_nowait()
        if buffer is not None:
            return buffer
        if self._closed or self._quarantined >= self._limit:
            raise self._over()
        waiter: tuple[anyio.Event, list[StagingBuffer]] = (anyio.Event(), [])
        self._waiters.append(waiter)
        try:
            await waiter[0].wait()
        except BaseException:
            if waiter[1]:
                self.release(waiter[1].pop())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        if not waiter[1]:
            raise self._over()
        return waiter[1].pop()

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back; nothing may touch its memory any more."""
        if self._waiters:
            event, granted = self._waiters.popleft()
            granted.append(buffer)
            event.set()
        else:
            self._free.append(buffer)

    def release_after(self, buffer: StagingBuffer, call: Call[Any]) -> None:
        """Give a buffer back as soon as ``call`` can no longer touch it."""
        self.release_at_end(buffer, call)
        self.quarantine(call)

    def release_at_end(self, buffer: StagingBuffer, call: Call[Any]) -> None:
        """Give a buffer back when ``call`` ends, which may be now.

        Whoever still waits for the call does not hold the buffer any more.
        """
        call.on_end(lambda: self.release(buffer))

    def quarantine(self, call: Call[Any]) -> None:
        """Nobody waits for ``call`` any longer; count its buffer until it ends."""
        if call.ended:
            return
        call.give_up()
        self._quarantined += 1
        call.on_end(self._returned)
        self._observer.on(
            MemoryQuarantined(
                bytes=self._buffer_bytes,
                total_bytes=self._quarantined * self._buffer_bytes,
                reason="its native call has not ended",
            )
        )
        if self._quarantined == self._limit:
            self._observer.on(
                QuarantineFull(
                    bytes=self._quarantined * self._buffer_bytes,
                    limit_bytes=self._limit * self._buffer_bytes,
                )
            )
            self._send_away()

    def close(self) -> None:
        """Hand nothing out any more; whoever waits is told that it is over."""
        self._closed = True
        self._send_away()

    def _send_away(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for event, _ in waiters:
            event.set()

    def _over(self) -> QuarantineFullError | SessionClosedError:
        if self._closed:
            return SessionClosedError("the session ends")
        return QuarantineFullError(
            f"{self._quarantined} of {self._count} staging buffers are in quarantine: "
            "the store has not ended calls that nobody waits for any longer"
        )

    def _returned(self) -> None:
        self._quarantined -= 1
        self._observer.on(
            MemoryReleased(
                bytes=self._buffer_bytes,
                total_bytes=self._quarantined * self._buffer_bytes,
            )
        )
