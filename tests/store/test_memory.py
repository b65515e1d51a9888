"""The store in a dict keeps the contract, and its limits."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from akv.store import Failure, MemoryStore, Status, open_store
from akv.testing import StoreContract, key_of, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from akv.store import BlockStore


class TestMemoryStore(StoreContract):
    def open_store(self, directory: Path) -> BlockStore:
        return open_store("memory:", slot_bytes=self.slot_bytes)


class TestMemoryStoreWithACapacity(StoreContract):
    def open_store(self, directory: Path) -> BlockStore:
        return open_store("memory:?capacity=16MiB", slot_bytes=self.slot_bytes)


def test_full_it_drops_what_was_used_longest_ago() -> None:
    with closing(MemoryStore(capacity=300)) as store:
        keys = [key_of(number) for number in range(4)]
        store.put_from(keys[:3], [value_of(key, 100) for key in keys[:3]])
        store.exists(keys[:1], promise=True)
        assert store.put_from(keys[3:], [value_of(keys[3], 100)]) == [Status.STORED]
        expected = [Status.HIT, Status.MISS, Status.HIT, Status.HIT]
        assert store.exists(keys) == expected
        assert store.statistics().evictions == 1


def test_what_is_promised_is_not_evicted() -> None:
    with closing(MemoryStore(capacity=200, lease=60.0)) as store:
        keys = [key_of(number) for number in range(3)]
        store.put_from(keys[:2], [value_of(key, 100) for key in keys[:2]])
        store.exists(keys[:2], promise=True)
        assert store.put_from(keys[2:], [value_of(keys[2], 100)]) == [Status.NO_ROOM]
        assert store.exists(keys[:2]) == [Status.HIT] * 2


def test_an_object_longer_than_a_slot_is_a_failure() -> None:
    with closing(MemoryStore(slot_bytes=10)) as store:
        (outcome,) = store.put_from([key_of(1)], [value_of(b"", 11)])
        assert isinstance(outcome, Failure)
