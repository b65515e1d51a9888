"""What akv's tests and those of its users share.

:class:`StoreContract` is the suite that every store backend passes;
``key_of``, ``value_of`` and their kin make values that can be checked byte
by byte without remembering them. :class:`GatedStore` and
:class:`FaultyStore` misbehave on purpose, and :class:`HostDevice` stands for
an engine's memory. Needs no pytest to import and no event loop to run;
``akv.testing.strategies`` needs hypothesis.
"""

from __future__ import annotations

from akv.device.host import HostDevice
from akv.testing.contract import StoreContract
from akv.testing.stores import (
    Fault,
    FaultSchedule,
    FaultyStore,
    GatedStore,
    WrappedStore,
)
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of

__all__ = (
    "Fault",
    "FaultSchedule",
    "FaultyStore",
    "GatedStore",
    "HostDevice",
    "StoreContract",
    "WrappedStore",
    "empty_buffer",
    "is_value_of",
    "key_of",
    "value_of",
)
