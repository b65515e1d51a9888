"""The rows of the index, and how they are packed.

Pure values: what a key's record, a claim, a slot's number and a counter look
like in the tables of the index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from akv.core.keys import BlockKey

__all__ = (
    "Claim",
    "Record",
    "counter",
    "pack_counter",
    "pack_slot",
    "slot_number",
)

_RECORD = struct.Struct("<QQQQ")
_SLOT = struct.Struct(">I")
_CLAIM = struct.Struct("<QQ")
_COUNTER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that its owner alone may write to, for one key."""

    slot: int
    generation: int
    key: BlockKey

    def pack(self, owner: int) -> bytes:
        """The row of the slot in the table of claims."""
        return _CLAIM.pack(owner, self.generation) + self.key

    def is_row(self, packed: bytes | None, owner: int) -> bool:
        """Whether the slot's row is still this claim."""
        return packed == self.pack(owner)

    @staticmethod
    def owner_of(packed: bytes) -> int:
        """Whose claim a row is."""
        return int(_CLAIM.unpack_from(packed)[0])


@dataclass(frozen=True, slots=True)
class Record:
    """What the index says about a key."""

    slot: int
    generation: int
    """Of the slot's claim; another one means that other bytes are there."""
    length: int
    checksum: int

    def pack(self) -> bytes:
        """The row of the key."""
        return _RECORD.pack(self.slot, self.generation, self.length, self.checksum)

    @classmethod
    def unpack(cls, packed: bytes) -> Record:
        """Back from :meth:`pack`; ValueError for anything else."""
        if len(packed) != _RECORD.size:
            msg = f"a record has {_RECORD.size} bytes, not {len(packed)}"
            raise ValueError(msg)
        return cls(*_RECORD.unpack(packed))

    @staticmethod
    def slots(packed: Iterable[bytes]) -> npt.NDArray[np.int64]:
        """The slots of many rows at once."""
        columns = np.frombuffer(b"".join(packed), dtype="<i8").reshape(-1, 4)
        return columns[:, 0]


def pack_slot(slot: int) -> bytes:
    """The key of a slot, in the order of the numbers."""
    return _SLOT.pack(slot)


def slot_number(packed: bytes) -> int:
    """Back from :func:`pack_slot`."""
    return int(_SLOT.unpack(packed)[0])


def pack_counter(value: int) -> bytes:
    """The row of a counter."""
    return _COUNTER.pack(value)


def counter(packed: bytes | None) -> int:
    """Back from :func:`pack_counter`; 0 where there is no row."""
    return 0 if packed is None else int(_COUNTER.unpack(packed)[0])
