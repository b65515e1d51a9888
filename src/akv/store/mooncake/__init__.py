"""The Mooncake backend: one pool of blocks for many engines of a cluster.

``mooncake`` is imported when a store is opened, and only in here.
"""

from __future__ import annotations

from akv.store.mooncake.address import MooncakeAddress
from akv.store.mooncake.client import MissingMooncakeError
from akv.store.mooncake.store import MooncakeStore

__all__ = ("MissingMooncakeError", "MooncakeAddress", "MooncakeStore")
