"""The local store keeps the contract: in shared memory, on a disk, checked or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from akv.store import open_store
from akv.testing import StoreContract

if TYPE_CHECKING:
    from pathlib import Path

    from akv.store import BlockStore


class TestInSharedMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, shared_memory: Path) -> None:
        self.directory = shared_memory

    def open_store(self, directory: Path) -> BlockStore:
        url = f"local:{self.directory}?capacity=16MiB"
        return open_store(url, slot_bytes=self.slot_bytes)


class TestInSharedMemoryWithChecksums(TestInSharedMemory):
    def open_store(self, directory: Path) -> BlockStore:
        url = f"local:{self.directory}?capacity=16MiB&checksum=on"
        return open_store(url, slot_bytes=self.slot_bytes)


class TestOnADisk(StoreContract):
    def open_store(self, directory: Path) -> BlockStore:
        url = f"local:{directory}/store?capacity=16MiB"
        return open_store(url, slot_bytes=self.slot_bytes)
