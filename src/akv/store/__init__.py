"""Where blocks live: the Protocol, its words, and one factory for all stores.

:func:`open_store` picks the backend by the scheme of its URL. Opening blocks,
for seconds where memory has to be made ready, so it is called from a pool
thread like every other call into a store.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from akv.core.errors import ConfigError
from akv.core.sizes import parse_size
from akv.store.base import (
    BlockStore,
    Buffer,
    Failure,
    Outcome,
    RegistersMemory,
    Status,
    StoreStatistics,
)
from akv.store.local import LocalStore, default_url
from akv.store.memory import MemoryStore
from akv.store.mooncake import MooncakeStore

__all__ = (
    "BlockStore",
    "Buffer",
    "Failure",
    "LocalStore",
    "MemoryStore",
    "MooncakeStore",
    "Outcome",
    "RegistersMemory",
    "Status",
    "StoreStatistics",
    "default_url",
    "open_store",
)

_KNOWN = "local:/PATH?capacity=SIZE, mooncake://HOST:PORT and memory:NAME"


def open_store(
    url: str, *, slot_bytes: int, lease: float = 5.0, lend_memory: bool = True
) -> BlockStore:
    """Open the store that ``url`` names.

    :param slot_bytes: the longest object that will be stored
    :param lease: seconds for which a promised key is protected from eviction
    :param lend_memory: whether this process adds memory to a pool of many
    """
    match urlsplit(url).scheme:
        case "local":
            return LocalStore.open(url, slot_bytes=slot_bytes, lease=lease)
        case "memory":
            return _open_memory(url, slot_bytes=slot_bytes, lease=lease)
        case "mooncake":
            return MooncakeStore.open(
                url, slot_bytes=slot_bytes, lease=lease, lend_memory=lend_memory
            )
        case _:
            raise ConfigError("store", url, f"akv knows {_KNOWN}")


def _open_memory(url: str, *, slot_bytes: int, lease: float) -> MemoryStore:
    name, _, query = url.partition(":")[2].partition("?")
    setting, _, size = query.partition("=")
    if query and setting != "capacity":
        raise ConfigError(
            "store", url, "write memory:NAME or memory:NAME?capacity=SIZE"
        )
    capacity = parse_size(size, field="store capacity") if query else 0
    return MemoryStore(capacity=capacity, slot_bytes=slot_bytes, lease=lease, name=name)
