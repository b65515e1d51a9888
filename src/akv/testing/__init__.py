"""What akv's tests and those of its users share.

:class:`StoreContract` is the suite that every store backend passes;
``key_of``, ``value_of`` and their kin make values that can be checked byte
by byte without remembering them. Needs no pytest to import and no event
loop to run.
"""

from __future__ import annotations

from akv.testing.contract import StoreContract
from akv.testing.values import empty_buffer, is_value_of, key_of, value_of

__all__ = (
    "StoreContract",
    "empty_buffer",
    "is_value_of",
    "key_of",
    "value_of",
)
