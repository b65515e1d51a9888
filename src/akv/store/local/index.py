"""The index: which key is in which slot, in LMDB beside the slab.

One writer at a time over all processes and any number of readers, each with
a consistent view; a process killed anywhere leaves the last commit. Every
slot below the high-water mark is in exactly one of three tables: ``ready``
(it holds a key's object), ``claims`` (an owner is writing to it) and
``free``. A slot is claimed in one transaction and its object published in a
second, and between the two no record leads to it. Called from any thread,
each transaction begins and ends within one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import lmdb

from akv.core.errors import StoreCorruptError
from akv.store.local.audit import Tables
from akv.store.local.environment import Environment
from akv.store.local.records import (
    Claim,
    Record,
    counter,
    pack_counter,
    pack_slot,
    slot_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from akv.core.keys import BlockKey
    from akv.store.local.ticks import Ticks

__all__ = ("BATCH", "LONGEST_KEY", "Index")

BATCH: Final = 64
"""Keys in one transaction at most: others wait no longer than that."""

LONGEST_KEY: Final = 511
"""What LMDB takes."""

_CLEAR_BATCH = 1024
_EVICT_BATCH = 128


class Index:
    """The open index of one process; see :meth:`open`."""

    def __init__(self, environment: Environment, slots: int, ticks: Ticks) -> None:
        self._env = environment
        self._slots = slots
        self._ticks = ticks
        self._records = environment.table(b"index")
        self._ready = environment.table(b"ready")
        self._claims = environment.table(b"claims")
        self._free = environment.table(b"free")
        self._meta = environment.table(b"meta")

    @classmethod
    def open(cls, path: Path, *, slots: int, ticks: Ticks) -> Index:
        """Open the index in the directory ``path``, making a new one.

        Once in a process for each directory.
        """
        environment = Environment(path, slots)
        try:
            index = cls(environment, slots, ticks)
            environment.check_readers()
            return index
        except BaseException:
            environment.close()
            raise

    @property
    def identity(self) -> bytes:
        """The slab's identity, as it was when the index was made."""
        with self._env.reading(self._meta) as txn:
            return txn.get(b"identity") or b""

    def initialise(self, identity: bytes) -> None:
        """Write the first row of a new index."""
        with self._env.writing() as txn:
            txn.put(b"identity", identity, db=self._meta)

    def new_owner(self) -> int:
        """A number that no owner had before."""
        with self._env.writing() as txn:
            return self._count(txn, b"owners", 1)

    def find(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The packed records of ``keys`` in one view; None for a miss."""
        with self._env.reading(self._records) as txn:
            get = txn.get
            try:
                return [get(key) for key in keys]
            except lmdb.BadValsizeError:
                return [get(key) if key else None for key in keys]

    def claim(
        self, keys: Sequence[BlockKey], owner: int, dead: Callable[[int], bool]
    ) -> tuple[list[Claim | bytes | None], int]:
        """Claim a slot for each key, before a byte of it is written.

        In place of a claim: the packed record of a key that exists, or None
        where there is no room. Also, how many objects were evicted. Keys are
        distinct and at most :data:`BATCH`.
        """
        with self._env.writing() as txn:
            found: list[Claim | bytes | None] = [
                txn.get(key, db=self._records) for key in keys
            ]
            wanted = [at for at, packed in enumerate(found) if packed is None]
            slots, evicted = self._take(txn, len(wanted), dead)
            last = self._count(txn, b"generation", len(slots))
            first = last - len(slots) + 1
            for at, slot, generation in zip(
                wanted, slots, range(first, last + 1), strict=False
            ):
                claim = Claim(slot, generation, keys[at])
                txn.put(pack_slot(slot), claim.pack(owner), db=self._claims)
                found[at] = claim
        return found, evicted

    def publish(
        self, owner: int, written: Sequence[tuple[Claim, int, int]]
    ) -> list[bool]:
        """Make written slots readable; (claim, length, checksum) each.

        False where somebody else published the key first: that slot is free
        again.
        """
        with self._env.writing() as txn:
            published = []
            for claim, length, checksum in written:
                slot = pack_slot(claim.slot)
                if not claim.is_row(txn.pop(slot, db=self._claims), owner):
                    msg = f"the claim on slot {claim.slot} of {self._env.path} is gone"
                    raise StoreCorruptError(msg)
                record = Record(claim.slot, claim.generation, length, checksum)
                first = txn.put(
                    claim.key, record.pack(), overwrite=False, db=self._records
                )
                if first:
                    txn.put(slot, claim.key, db=self._ready)
                else:
                    txn.put(slot, b"", db=self._free)
                published.append(first)
            # Before the commit, so that no slot is ready with an old tick.
            self._ticks.start([claim.slot for claim, _, _ in written])
        return published

    def give_back(self, owner: int, claims: Sequence[Claim]) -> None:
        """Free claimed slots that nothing was published from."""
        with self._env.writing() as txn:
            for claim in claims:
                slot = pack_slot(claim.slot)
                if claim.is_row(txn.get(slot, db=self._claims), owner):
                    txn.delete(slot, db=self._claims)
                    txn.put(slot, b"", db=self._free)

    def remove(
        self, keys: Sequence[BlockKey], only: Sequence[bytes] | None = None
    ) -> list[bool]:
        """Free the slots of ``keys``; whether each was there.

        With ``only``, a key goes only while its packed record is still that.
        """
        with self._env.writing() as txn:
            removed = []
            for at, key in enumerate(keys):
                packed = txn.get(key, db=self._records)
                gone = packed is None or (only is not None and packed != only[at])
                if packed is not None and not gone:
                    self._drop(txn, key, packed)
                removed.append(not gone)
        return removed

    def clear(self, prefix: bytes) -> int:
        """Free the slots of all keys that begin with ``prefix``; how many."""
        count = 0
        start = prefix
        while True:
            with self._env.writing() as txn:
                doomed = self._under(txn, prefix, start)
                for key, packed in doomed:
                    self._drop(txn, key, packed)
            count += len(doomed)
            if len(doomed) < _CLEAR_BATCH:
                return count
            # Onwards only, so that busy writers cannot keep this going.
            start = doomed[-1][0]

    def reclaim(self, dead: Callable[[int], bool]) -> None:
        """Free the slots that owners now dead had claimed."""
        with self._env.writing() as txn:
            for slot in self._orphans(txn, dead):
                txn.put(pack_slot(slot), b"", db=self._free)

    def generation(self, scope: bytes) -> int:
        """The counter of a scope."""
        with self._env.reading(self._meta) as txn:
            return counter(txn.get(b"gen:" + scope))

    def raise_generation(self, scope: bytes) -> int:
        """Count a scope up, for everybody."""
        with self._env.writing() as txn:
            return self._count(txn, b"gen:" + scope, 1)

    def objects(self) -> int:
        """How many keys can be read."""
        with self._env.reading(self._records) as txn:
            return int(txn.stat(self._records)["entries"])

    def verify(self, slot_bytes: int) -> list[str]:
        """Whatever contradicts itself, in one consistent view."""
        with self._env.reading(self._meta) as txn:
            tables = Tables(
                high=counter(txn.get(b"high")),
                slots=self._slots,
                slot_bytes=slot_bytes,
                records=dict(txn.cursor(self._records)),
                ready=dict(txn.cursor(self._ready)),
                claims=dict(txn.cursor(self._claims)),
                free=dict(txn.cursor(self._free)),
            )
        return tables.problems()

    def check_readers(self) -> None:
        """Let go of the old pages that readers killed in the middle still hold."""
        self._env.check_readers()

    def reserve(self) -> None:
        """Take the room that the index will need, so that it cannot run out."""
        self._env.reserve()

    def sync(self) -> None:
        """On to the disk."""
        self._env.sync()

    def close(self) -> None:
        """Close the environment. No transaction may be running."""
        self._env.close()

    def _take(
        self, txn: lmdb.Transaction[bytes], wanted: int, dead: Callable[[int], bool]
    ) -> tuple[list[int], int]:
        """Up to ``wanted`` slots out of all tables, the cheapest ones first."""
        taken: list[int] = []
        with txn.cursor(self._free) as cursor:
            while len(taken) < wanted and cursor.first():
                taken.append(slot_number(cursor.key()))
                cursor.delete()
        handed_out = counter(txn.get(b"high", db=self._meta))
        fresh = min(wanted - len(taken), self._slots - handed_out)
        if fresh > 0:
            self._count(txn, b"high", fresh)
            taken += range(handed_out, handed_out + fresh)
        evicted = 0
        if len(taken) < wanted:
            taken += self._orphans(txn, dead)
        if len(taken) < wanted:
            victims = self._evict(txn, wanted - len(taken), taken)
            evicted = len(victims)
            taken += victims
        for slot in taken[wanted:]:
            txn.put(pack_slot(slot), b"", db=self._free)
        return taken[:wanted], evicted

    def _orphans(
        self, txn: lmdb.Transaction[bytes], dead: Callable[[int], bool]
    ) -> list[int]:
        """Take the slots that dead owners had claimed out of ``claims``."""
        verdicts: dict[int, bool] = {}
        orphans: list[bytes] = []
        for slot, row in txn.cursor(self._claims):
            owner = Claim.owner_of(row)
            if owner not in verdicts:
                verdicts[owner] = dead(owner)
            if verdicts[owner]:
                orphans.append(slot)
        for slot in orphans:
            txn.delete(slot, db=self._claims)
        return [slot_number(slot) for slot in orphans]

    def _evict(
        self, txn: lmdb.Transaction[bytes], wanted: int, taken: list[int]
    ) -> list[int]:
        """Take the oldest slots out of ``ready``, some more than are wanted."""
        batch = max(wanted, min(_EVICT_BATCH, self._slots // 16))
        claimed = txn.cursor(self._claims).iternext(keys=True, values=False)
        # All slots were handed out and none is free, else this is not asked: what
        # is neither claimed nor just taken is ready.
        busy = taken + [slot_number(slot) for slot in claimed]
        victims: list[int] = []
        for slot in self._ticks.oldest(busy, batch):
            key = txn.pop(pack_slot(slot), db=self._ready)
            if key is not None:
                txn.delete(key, db=self._records)
                victims.append(slot)
        return victims

    def _under(
        self, txn: lmdb.Transaction[bytes], prefix: bytes, start: bytes
    ) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        with txn.cursor(self._records) as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            while found and len(rows) < _CLEAR_BATCH:
                if not cursor.key().startswith(prefix):
                    break
                rows.append(cursor.item())
                found = cursor.next()
        return rows

    def _drop(self, txn: lmdb.Transaction[bytes], key: bytes, packed: bytes) -> None:
        slot = pack_slot(Record.unpack(packed).slot)
        txn.delete(key, db=self._records)
        txn.delete(slot, db=self._ready)
        txn.put(slot, b"", db=self._free)

    def _count(self, txn: lmdb.Transaction[bytes], name: bytes, by: int) -> int:
        value = counter(txn.get(name, db=self._meta)) + by
        if by:
            txn.put(name, pack_counter(value), db=self._meta)
        return value
