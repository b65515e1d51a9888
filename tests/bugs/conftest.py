"""A store and engines on it for each test; nothing of them is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bugs.rig import Rig

from akv.testing.stores import GatedStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose gates are open at the end, so that no thread stays behind."""
    rig = Rig(monkeypatch)
    yield rig
    for store in rig.opened:
        if isinstance(store, GatedStore):
            store.open()
    rig.store.close()
