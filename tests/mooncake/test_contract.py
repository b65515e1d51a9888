"""The contract of every store, on a real pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from akv.store.mooncake import MooncakeStore
from akv.testing import StoreContract

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_master import Master

    from akv.store.base import BlockStore


class TestMooncakeStore(StoreContract):
    """All memory is the caller's and unknown to Mooncake: through scratch."""

    @pytest.fixture(autouse=True)
    def _pool(self, class_master: Master) -> None:
        self.url = class_master.url()

    def open_store(self, directory: Path) -> BlockStore:
        return MooncakeStore.open(self.url, slot_bytes=self.slot_bytes, environment={})
