"""What a new store will look like, and whether an old one is what was meant.

Both are decided before anything is made or mapped, so that a setting that
cannot work leaves no trace. Called while opening, under the place's lock or
before there is one.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from akv.core.errors import ConfigError, StoreMismatchError, StoreUnavailableError
from akv.core.sizes import format_size
from akv.store.local.address import SHARED_MEMORY, default_capacity
from akv.store.local.environment import index_bytes
from akv.store.local.filesystem import free_bytes
from akv.store.local.slab import SlabLayout, stride_of

if TYPE_CHECKING:
    from akv.store.local.address import LocalAddress
    from akv.store.local.place import Place

__all__ = ("check_match", "check_settings", "plan")

_FEWEST_SLOTS = 2
_MOST_SLOTS = (1 << 32) - 1

_log = logging.getLogger("akv.store")


def check_settings(address: LocalAddress, slot_bytes: int) -> None:
    """Raise for numbers that no store could have."""
    if slot_bytes < 1:
        raise ConfigError("slot_bytes", slot_bytes, "give a positive number")
    least = _FEWEST_SLOTS * stride_of(slot_bytes)
    if address.capacity is not None and address.capacity < least:
        fix = (
            f"at least {_FEWEST_SLOTS} objects of {slot_bytes} bytes must fit, which "
            f"takes {least} bytes"
        )
        raise ConfigError("store capacity", format_size(address.capacity), fix)


def check_match(
    place: Place, address: LocalAddress, slot_bytes: int, layout: SlabLayout
) -> None:
    """Raise if the store that is there was made for something else.

    Its capacity is kept, whatever was asked for: others may be using it.
    """
    difference = None
    if layout.slot_bytes != slot_bytes:
        difference = f"objects of {layout.slot_bytes} bytes, not {slot_bytes}"
    elif address.checksum not in (None, layout.checksum):
        was, asked = ("on", "off") if layout.checksum else ("off", "on")
        difference = f"checksum={was}, not {asked}"
    if difference:
        msg = (
            f"the store in {place} was made with {difference}; use another path, the "
            f"settings it was made with, or remove the directory {place}"
        )
        raise StoreMismatchError(msg)
    if address.capacity is None:
        return
    if address.capacity // layout.stride != layout.slots:
        _log.warning(
            "akv store %s has a capacity of %s and keeps it; %s was asked for and "
            "would need the directory to be removed first",
            place,
            format_size(layout.capacity),
            format_size(address.capacity),
        )


def plan(place: Place, address: LocalAddress, slot_bytes: int) -> SlabLayout:
    """The layout of a new store, if there is room for it."""
    free = free_bytes(place.nearest)
    capacity = address.capacity
    if capacity is None:
        capacity = default_capacity(place.nearest)
    # Without a capacity the default may be too small for this object size.
    slots = max(_FEWEST_SLOTS, min(capacity // stride_of(slot_bytes), _MOST_SLOTS))
    checksum = address.checksum
    if checksum is None:
        checksum = not place.in_memory
    layout = SlabLayout(
        slot_bytes=slot_bytes,
        slots=slots,
        checksum=checksum,
        identity=os.urandom(16),
    )
    needed = layout.file_bytes + index_bytes(slots)
    if needed > free:
        remedy = f"set a smaller capacity (store = local:{place}?capacity=...)"
        if place.root.is_relative_to(SHARED_MEMORY):
            remedy += " or start the container with --ipc=host or a larger --shm-size"
        else:
            remedy += " or make room there"
        msg = (
            f"a store of {format_size(layout.capacity)} needs {needed} bytes in "
            f"{place}, where {free} bytes ({format_size(free)}) are free; {remedy}"
        )
        raise StoreUnavailableError(msg)
    return layout
