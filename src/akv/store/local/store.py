"""The local store: blocks in shared memory or on a disk, of this machine.

A put claims slots, copies, publishes; a get reads the record, copies, and
reads the record again: if a slot has changed hands meanwhile the bytes may
be anybody's, and it is a miss. No lock is held during a copy and nothing is
pinned, so a process that is killed at any moment leaves at most claimed
slots, which the others take back. Every method blocks and may be called from
any pool thread; the caller owns all buffers and may reuse them on return. A
handle does not survive a fork.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from akv.core.errors import AkvError, ConfigError, StoreError
from akv.store.base import Failure, Outcome, Status, StoreStatistics
from akv.store.local.address import LocalAddress
from akv.store.local.environment import IndexFullError
from akv.store.local.index import BATCH, LONGEST_KEY
from akv.store.local.opening import acquire, release
from akv.store.local.records import Claim, Record
from akv.store.local.ticks import LONGEST_LEASE, now_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer
    from akv.store.local.opening import Opened

__all__ = ("LocalStore",)


class LocalStore:
    """A :class:`~akv.store.base.BlockStore`; made by :meth:`open`."""

    def __init__(self, opened: Opened, *, path: Path, lease: float) -> None:
        self._opened = opened
        self._url = LocalAddress.url_of(path, opened.slab.layout)
        self._lease = lease
        layout = opened.slab.layout
        self._slot_bytes = layout.slot_bytes
        self._checksum = layout.checksum
        # A call must not claim most of a small store for itself.
        self._batch = max(1, min(BATCH, layout.slots // 4))
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._owed: list[Claim] = []
        self._counts: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "exists", "no_room", "evictions", "failures"),
            0,
        )

    @classmethod
    def open(cls, url: str, *, slot_bytes: int, lease: float = 5.0) -> LocalStore:
        """Open the store at ``url``, or make it.

        :param slot_bytes: the longest object; fixed when the store is made
        :param lease: seconds for which a promised key is not evicted
        """
        if not 0 <= lease <= LONGEST_LEASE:
            raise ConfigError("lease", lease, f"give 0 to {LONGEST_LEASE:.0f} seconds")
        address = LocalAddress.parse(url)
        opened = acquire(address, slot_bytes=slot_bytes)
        return cls(opened, path=address.path, lease=lease)

    def __repr__(self) -> str:
        return f"<LocalStore {self._url}{' closed' if self._closed else ''}>"

    @property
    def url(self) -> str:
        """The address as a person would write it again."""
        return self._url

    @property
    def lease(self) -> float:
        """Seconds for which a promised key is protected from eviction."""
        return self._lease

    @property
    def direct_from(self) -> int | None:
        """Any run: a call is a copy. None on a disk, which it may wait for."""
        return 1 if self._opened.place.in_memory else None

    @property
    def checksum(self) -> bool:
        """Whether each object carries a checksum that each get verifies."""
        return self._checksum

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Say for each key HIT or MISS."""
        hit, miss = Status.HIT, Status.MISS
        until = now_ms() + int(self._lease * 1000)
        with self._call() as opened:
            outcomes: list[Outcome] = []
            misses = 0
            for start in range(0, len(keys), BATCH):
                found = opened.index.find(keys[start : start + BATCH])
                misses += found.count(None)
                if promise:
                    # What stands further back in a prefix is evicted first: it is
                    # of no use without what stands before it.
                    slots = Record.slots(filter(None, found))
                    opened.slab.ticks.promise(slots, until - start // BATCH)
                outcomes += [hit if packed else miss for packed in found]
            self._tally({"hits": len(keys) - misses, "misses": misses})
            return outcomes

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Copy whole objects into the caller's writable buffers."""
        _check_pairs(keys, buffers)
        with self._call() as opened:
            outcomes: list[Outcome] = []
            for start in range(0, len(keys), BATCH):
                end = start + BATCH
                outcomes += self._get(opened, keys[start:end], buffers[start:end])
            self._tally(_counted(outcomes))
            return outcomes

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Store the buffers' bytes; a key that exists keeps its old ones."""
        _check_pairs(keys, buffers)
        with self._call() as opened:
            outcomes: list[Outcome] = []
            for start in range(0, len(keys), self._batch):
                end = start + self._batch
                outcomes += self._put(opened, keys[start:end], buffers[start:end])
            self._tally(_counted(outcomes))
            return outcomes

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Make objects unreadable: REMOVED or MISS."""
        with self._call() as opened:
            outcomes: list[Outcome] = []
            for start in range(0, len(keys), BATCH):
                batch = [key for key in keys[start : start + BATCH] if _usable(key)]
                removed = dict.fromkeys(batch, False)
                for key, was in zip(batch, opened.index.remove(batch), strict=True):
                    removed[key] = removed[key] or was
                for key in keys[start : start + BATCH]:
                    # A second time in one call finds nothing any more.
                    was = removed.pop(key, False)
                    outcomes.append(Status.REMOVED if was else Status.MISS)
            return outcomes

    def clear(self, prefix: bytes) -> int:
        """Remove all objects whose key begins with ``prefix``; how many."""
        with self._call() as opened:
            return opened.index.clear(prefix)

    def generation(self, scope: bytes) -> int:
        """The generation of a scope; 0 if never raised."""
        with self._call() as opened:
            return opened.index.generation(scope)

    def raise_generation(self, scope: bytes) -> int:
        """Raise the generation of a scope by one, for all; the new one."""
        with self._call() as opened:
            return opened.index.raise_generation(scope)

    def statistics(self) -> StoreStatistics:
        """Numbers as of now."""
        with self._call() as opened:
            objects = opened.index.objects()
            layout = opened.slab.layout
            with self._lock:
                counts = dict(self._counts)
            return StoreStatistics(
                url=self._url,
                objects=objects,
                bytes_used=objects * layout.stride,
                bytes_capacity=layout.capacity,
                **counts,
            )

    def verify(self) -> list[str]:
        """What contradicts itself in the index; empty if all is well.

        Safe beside other processes; takes a microsecond or two a slot.
        """
        with self._call() as opened:
            return opened.index.verify(self._slot_bytes)

    def close(self) -> None:
        """Let go; calls still running in other threads end first.

        Does not wait for them: the last one out closes.
        """
        if self._opened.pid != os.getpid():
            return
        with self._lock:
            last = not self._closed and self._calls == 0
            self._closed = True
        if last:
            release(self._opened)

    def _get(
        self, opened: Opened, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [Status.MISS] * len(keys)
        found: list[tuple[int, bytes, Record]] = []
        for at, packed in enumerate(opened.index.find(keys)):
            if packed is None:
                continue
            record = Record.unpack(packed)
            if record.length != buffers[at].nbytes:
                outcomes[at] = Failure(
                    f"the object has {record.length} bytes, its buffer "
                    f"{buffers[at].nbytes}"
                )
                continue
            found.append((at, packed, record))
        if not found:
            return outcomes
        opened.slab.read(
            [record.slot for *_, record in found], [buffers[at] for at, *_ in found]
        )
        # Before the second look, which says whether it was this object still.
        sound = [
            not self._checksum
            or record.checksum == _digest(_copied_bytes(opened, record, buffers[at]))
            for at, _, record in found
        ]
        again = opened.index.find([keys[at] for at, *_ in found])
        used: list[int] = []
        damaged: list[tuple[BlockKey, bytes]] = []
        for (at, packed, record), whole, now in zip(found, sound, again, strict=True):
            if packed != now:
                continue
            if not whole:
                outcomes[at] = Failure("checksum: the stored bytes have changed")
                damaged.append((keys[at], packed))
                continue
            outcomes[at] = Status.HIT
            used.append(record.slot)
        if damaged:
            # It must not be promised again.
            opened.index.remove(
                [key for key, _ in damaged], only=[packed for _, packed in damaged]
            )
        opened.slab.ticks.use(used)
        return outcomes

    def _put(
        self, opened: Opened, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        # A key that comes twice is there already the second time.
        outcomes: list[Outcome] = [Status.EXISTS] * len(keys)
        chosen: dict[BlockKey, int] = {}
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if not _usable(key):
                outcomes[at] = Failure(
                    f"a key has 1 to {LONGEST_KEY} bytes, this one {len(key)}"
                )
            elif buffer.nbytes > self._slot_bytes:
                outcomes[at] = Failure(
                    f"the object has {buffer.nbytes} bytes, slots {self._slot_bytes}"
                )
            else:
                chosen.setdefault(key, at)
        if not chosen:
            return outcomes
        try:
            for at, outcome in self._put_new(opened, chosen, buffers).items():
                outcomes[at] = outcome
        except IndexFullError as error:
            opened.index.check_readers()
            for at in chosen.values():
                outcomes[at] = Failure(str(error))
        for at, key in enumerate(keys):
            first = chosen.get(key, at)
            if first != at and outcomes[first] is not Status.STORED:
                outcomes[at] = outcomes[first]
        return outcomes

    def _put_new(
        self, opened: Opened, chosen: dict[BlockKey, int], buffers: Sequence[Buffer]
    ) -> dict[int, Outcome]:
        """Claim, copy, publish; what became of each place in ``buffers``."""
        owner = opened.owner.number
        self._pay_back(opened)
        claims, evicted = opened.index.claim(list(chosen), owner, opened.is_dead)
        self._tally({"evictions": evicted})
        held = [claim for claim in claims if isinstance(claim, Claim)]
        try:
            sources = [buffers[chosen[claim.key]] for claim in held]
            opened.slab.write([claim.slot for claim in held], sources)
            written = []
            for claim, source in zip(held, sources, strict=True):
                written_bytes = opened.slab.view(claim.slot, source.nbytes)
                checksum = _digest(written_bytes) if self._checksum else 0
                written.append((claim, source.nbytes, checksum))
            published = opened.index.publish(owner, written) if written else []
        except BaseException:
            with self._lock:
                self._owed += held
            self._pay_back(opened)
            raise
        firsts = dict(zip([claim.key for claim in held], published, strict=True))
        known = [found for found in claims if isinstance(found, bytes)]
        if known:
            opened.slab.ticks.use(Record.slots(known))
        outcomes: dict[int, Outcome] = {}
        for (key, at), found in zip(chosen.items(), claims, strict=True):
            if found is None:
                outcomes[at] = Status.NO_ROOM
            else:
                stored = firsts.get(key, False)
                outcomes[at] = Status.STORED if stored else Status.EXISTS
        return outcomes

    def _pay_back(self, opened: Opened) -> None:
        """Free what a failed put had claimed; later, if not now."""
        if not self._owed:
            return
        with self._lock:
            owed, self._owed = self._owed, []
        try:
            opened.index.give_back(opened.owner.number, owed)
        except StoreError:
            with self._lock:
                self._owed += owed

    @contextmanager
    def _call(self) -> Iterator[Opened]:
        """Keep the store open while a call runs."""
        if self._opened.pid != os.getpid():
            msg = (
                f"{self._url} was opened by the process that this one was forked "
                f"from; start it with spawn, or fork before opening"
            )
            raise AkvError(msg)
        with self._lock:
            if self._closed:
                msg = f"{self._url} is closed"
                raise StoreError(msg)
            self._calls += 1
        try:
            yield self._opened
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            last = self._closed and self._calls == 0
        if last:
            release(self._opened)

    def _tally(self, counts: dict[str, int]) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count


def _counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = {
        "hits": outcomes.count(Status.HIT),
        "misses": outcomes.count(Status.MISS),
        "puts": outcomes.count(Status.STORED),
        "exists": outcomes.count(Status.EXISTS),
        "no_room": outcomes.count(Status.NO_ROOM),
    }
    counts["failures"] = len(outcomes) - sum(counts.values())
    return counts


def _usable(key: BlockKey) -> bool:
    return 0 < len(key) <= LONGEST_KEY


def _digest(stored: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(stored)


def _copied_bytes(opened: Opened, record: Record, buffer: Buffer) -> memoryview:
    """What the caller got; for an object in runs, what it was copied from."""
    if isinstance(buffer, memoryview):
        return buffer
    return opened.slab.view(record.slot, record.length)


def _check_pairs(keys: Sequence[BlockKey], buffers: Sequence[Buffer]) -> None:
    if len(keys) != len(buffers):
        msg = f"{len(keys)} keys but {len(buffers)} buffers"
        raise ValueError(msg)
