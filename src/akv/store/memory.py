"""A store in a dict: for tests, for trying things out, and as the model.

It answers as every store must, in a few lines that can be read at a glance,
so property tests compare the others with it. Nothing outlives the process;
stores of one name share their objects for as long as one of them is open.
Bytes are copied in and out under one lock: the caller's buffers are never
kept and never handed out. Callable from any thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akv.core.errors import StoreError
from akv.store.base import Failure, Outcome, Status, StoreStatistics
from akv.store.buffers import copy_in, copy_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer

__all__ = ("MemoryStore",)


@dataclass(slots=True)
class _Object:
    value: bytes
    protected_until: float = 0.0


class _Contents:
    """What stores of one name share; all of it under ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # In the order of last use: the first is the next to be evicted.
        self.objects: dict[BlockKey, _Object] = {}
        self.generations: dict[bytes, int] = {}
        self.used = 0


_named: weakref.WeakValueDictionary[str, _Contents] = weakref.WeakValueDictionary()
_naming = threading.Lock()


class MemoryStore:
    """A :class:`~akv.store.base.BlockStore` in this process's own memory.

    :param capacity: bytes; 0 means no limit of its own. Full, it drops what
        was used longest ago and is under no promise.
    :param slot_bytes: the longest object it takes; 0 means any
    :param name: share the objects of the stores of this name; "" shares none
    """

    def __init__(
        self,
        *,
        capacity: int = 0,
        slot_bytes: int = 0,
        lease: float = 5.0,
        name: str = "",
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._slot_bytes = slot_bytes
        self._lease = lease
        with _naming:
            self._contents = _named.get(name) or _Contents()
            if name:
                _named[name] = self._contents
        self._closed = False
        self._hits = self._misses = self._puts = self._exists = 0
        self._no_room = self._evictions = self._failures = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._contents.objects)} objects"
        return f"<MemoryStore {state}>"

    @property
    def url(self) -> str:
        """``memory:`` and the name."""
        return f"memory:{self._name}"

    @property
    def lease(self) -> float:
        """Seconds for which a promised key is protected from eviction."""
        return self._lease

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Say for each key HIT or MISS."""
        with self._contents.lock:
            self._check_open()
            until = time.monotonic() + self._lease if promise else 0.0
            return [self._look(key, until) for key in keys]

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Copy whole objects into the caller's writable buffers."""
        with self._contents.lock:
            self._check_open()
            pairs = zip(keys, buffers, strict=True)
            return [self._get(key, buffer) for key, buffer in pairs]

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Store the buffers' bytes; a key that exists keeps its old ones."""
        with self._contents.lock:
            self._check_open()
            pairs = zip(keys, buffers, strict=True)
            return [self._put(key, buffer) for key, buffer in pairs]

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Make objects unreadable: REMOVED or MISS."""
        with self._contents.lock:
            self._check_open()
            return [Status.REMOVED if self._drop(key) else Status.MISS for key in keys]

    def clear(self, prefix: bytes) -> int:
        """Remove all objects whose key begins with ``prefix``; how many."""
        with self._contents.lock:
            self._check_open()
            doomed = [key for key in self._contents.objects if key.startswith(prefix)]
            for key in doomed:
                self._drop(key)
            return len(doomed)

    def generation(self, scope: bytes) -> int:
        """The generation of a scope; 0 if never raised."""
        with self._contents.lock:
            self._check_open()
            return self._contents.generations.get(scope, 0)

    def raise_generation(self, scope: bytes) -> int:
        """Raise the generation of a scope by one; the new one."""
        with self._contents.lock:
            self._check_open()
            self._contents.generations[scope] = (
                self._contents.generations.get(scope, 0) + 1
            )
            return self._contents.generations[scope]

    def statistics(self) -> StoreStatistics:
        """Numbers as of now."""
        with self._contents.lock:
            self._check_open()
            return StoreStatistics(
                url=self.url,
                objects=len(self._contents.objects),
                bytes_used=self._contents.used,
                bytes_capacity=self._capacity,
                hits=self._hits,
                misses=self._misses,
                puts=self._puts,
                exists=self._exists,
                no_room=self._no_room,
                evictions=self._evictions,
                failures=self._failures,
            )

    def close(self) -> None:
        """Let go of everything. Twice is no error; other calls then raise."""
        with self._contents.lock:
            self._closed = True
            self._contents = _Contents()

    def _check_open(self) -> None:
        if self._closed:
            msg = "this store is closed"
            raise StoreError(msg)

    def _look(self, key: BlockKey, until: float) -> Outcome:
        found = self._contents.objects.get(key)
        if found is None:
            self._misses += 1
            return Status.MISS
        self._hits += 1
        if until:
            found.protected_until = max(found.protected_until, until)
            self._use(key, found)
        return Status.HIT

    def _get(self, key: BlockKey, buffer: Buffer) -> Outcome:
        found = self._contents.objects.get(key)
        if found is None:
            self._misses += 1
            return Status.MISS
        if len(found.value) != buffer.nbytes:
            self._failures += 1
            return Failure(
                f"the object has {len(found.value)} bytes, its buffer {buffer.nbytes}"
            )
        copy_in(buffer, memoryview(found.value))
        self._hits += 1
        self._use(key, found)
        return Status.HIT

    def _put(self, key: BlockKey, buffer: Buffer) -> Outcome:
        if not key or 0 < self._slot_bytes < buffer.nbytes:
            self._failures += 1
            return Failure(
                f"{buffer.nbytes} bytes under a key of {len(key)}: objects have at "
                f"most {self._slot_bytes} bytes, keys at least one"
            )
        found = self._contents.objects.get(key)
        if found is not None:
            self._exists += 1
            self._use(key, found)
            return Status.EXISTS
        if self._capacity and not self._make_room(buffer.nbytes):
            self._no_room += 1
            return Status.NO_ROOM
        value = bytearray(buffer.nbytes)
        copy_out(buffer, memoryview(value))
        self._contents.objects[key] = _Object(bytes(value))
        self._contents.used += buffer.nbytes
        self._puts += 1
        return Status.STORED

    def _make_room(self, size: int) -> bool:
        if size > self._capacity:
            return False
        now = time.monotonic()
        missing = self._contents.used + size - self._capacity
        doomed: list[BlockKey] = []
        for key, found in self._contents.objects.items():
            if missing <= 0:
                break
            if found.protected_until <= now:
                doomed.append(key)
                missing -= len(found.value)
        if missing > 0:
            return False
        for key in doomed:
            self._drop(key)
        self._evictions += len(doomed)
        return True

    def _use(self, key: BlockKey, found: _Object) -> None:
        del self._contents.objects[key]
        self._contents.objects[key] = found

    def _drop(self, key: BlockKey) -> bool:
        found = self._contents.objects.pop(key, None)
        if found is None:
            return False
        self._contents.used -= len(found.value)
        return True
