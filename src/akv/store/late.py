"""A store that could not be opened, and may still come.

With ``on_store_unavailable = degrade`` the host goes on without a cache.
Until the store can be opened every call raises, so that whoever watches the
store leaves it alone; the watcher's own probe is what opens it, in its own
thread, and memory that was registered meanwhile is registered then.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from akv.core.errors import StoreUnavailableError
from akv.store.base import BlockStore, MovesDirectly, RegistersMemory, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer, Outcome

__all__ = ("LateStore",)

_REST, _QUICK = 10, 2.0
"""A try that fails within so many seconds costs nothing; of others a multiple."""


class LateStore:
    """Opens the store with ``open_now`` when :meth:`exists` is called.

    Any thread; the first call that can opens it for all. After a long try
    there is a long rest: a client that is set up in vain may keep the
    interpreter's lock for seconds, and the host shall go on.
    """

    def __init__(
        self,
        url: str,
        open_now: Callable[[], BlockStore],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._clock = clock
        self._not_before = 0.0
        self._open_now = open_now
        self._lock = threading.Lock()
        self._inner: BlockStore | None = None
        self._memory: list[memoryview] = []
        self._closed = False

    @property
    def url(self) -> str:
        """The address of the store, whether it is there or not."""
        return self._url

    @property
    def lease(self) -> float:
        """The store's lease; 0 while it is not there."""
        return 0.0 if self._inner is None else self._inner.lease

    @property
    def direct_from(self) -> int | None:
        """As the store says; None while it is not there."""
        inner: object = self._inner
        return inner.direct_from if isinstance(inner, MovesDirectly) else None

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Ask the store, opening it first if need be.

        :raises StoreUnavailableError: it is still not there
        """
        return self._opened().exists(keys, promise=promise)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().get_into(keys, buffers)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().put_from(keys, buffers)

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().remove(keys)

    def clear(self, prefix: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().clear(prefix)

    def generation(self, scope: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().generation(scope)

    def raise_generation(self, scope: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self._there().raise_generation(scope)

    def register(self, memory: memoryview) -> None:
        """Register ``memory`` with the store, as soon as it is there."""
        with self._lock:
            self._memory.append(memory)
            inner = self._inner
        if inner is not None and isinstance(inner, RegistersMemory):
            inner.register(memory)

    def unregister(self, memory: memoryview) -> None:
        """Let go of memory that was registered."""
        with self._lock:
            self._memory = [one for one in self._memory if one is not memory]
            inner = self._inner
        if inner is not None and isinstance(inner, RegistersMemory):
            inner.unregister(memory)

    def statistics(self) -> StoreStatistics:
        """The store's numbers; all zero while it is not there."""
        if self._inner is not None:
            return self._inner.statistics()
        return StoreStatistics(url=self._url, objects=0, bytes_used=0, bytes_capacity=0)

    def close(self) -> None:
        """Close the store if it was opened."""
        with self._lock:
            self._closed = True
            inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _there(self) -> BlockStore:
        inner = self._inner
        if inner is None:
            msg = f"{self._url} could not be opened so far"
            raise StoreUnavailableError(msg)
        return inner

    def _opened(self) -> BlockStore:
        with self._lock:
            if self._inner is None and not self._closed:
                began = self._clock()
                if began < self._not_before:
                    return self._there()
                try:
                    inner = self._open_now()
                finally:
                    ended = self._clock()
                    long = max(0.0, ended - began - _QUICK)
                    self._not_before = ended + _REST * long
                if isinstance(inner, RegistersMemory):
                    for memory in self._memory:
                        inner.register(memory)
                self._inner = inner
        return self._there()
