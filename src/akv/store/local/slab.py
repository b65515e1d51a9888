"""The slab: one mapped file of fixed slots, and the header that describes it.

Header page, then one tick for each slot, then the slots, each a whole number
of pages. The slab moves bytes between a slot and a caller's buffer and knows
nothing of keys; which slot may be read or written is the index's business.
Copies run without the GIL, from any thread. The caller owns the buffers, the
slab owns the mapping, and no view of it leaves this package. A slab that is
truncated while it is mapped is a SIGBUS, as with every mapped file: nothing
but akv may write to it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from akv.core.errors import StoreCorruptError, StoreMismatchError
from akv.store.buffers import copy_rows_in, copy_rows_out
from akv.store.local.filesystem import PAGE, populate, reserve
from akv.store.local.ticks import Ticks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from akv.store.base import Buffer

__all__ = (
    "FORMAT_VERSION",
    "Slab",
    "SlabLayout",
    "SlabState",
    "read_layout",
    "stride_of",
)

FORMAT_VERSION = 1
"""Of the slab and the index beside it; other versions are not touched."""

_MAGIC = b"AKVSLAB\n"
_HEAD = struct.Struct("<8sI")
_FIELDS = struct.Struct("<8sIIQQ16s")
_DIGEST = struct.Struct("<Q")
_STATE = struct.Struct("<Q36s")
_STATE_AT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """What the header says, once and for all."""

    slot_bytes: int
    """The longest object a slot takes."""
    slots: int
    checksum: bool
    identity: bytes
    """Random; the index has it too, so that the two cannot be mixed up."""

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: whole pages."""
        return stride_of(self.slot_bytes)

    @property
    def slots_offset(self) -> int:
        """Where the first slot begins."""
        ticks = self.slots * 8
        return PAGE + -(-ticks // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.slots_offset + self.slots * self.stride

    @property
    def capacity(self) -> int:
        """The bytes of all slots."""
        return self.slots * self.stride

    def pack(self) -> bytes:
        """The header's fields and a digest over them."""
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            int(self.checksum),
            self.slot_bytes,
            self.slots,
            self.identity,
        )
        return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, header: bytes, path: Path) -> SlabLayout:
        """Read the header of the slab at ``path``, or raise what is wrong."""
        remedy = f"remove the directory {path.parent} to start with an empty store"
        if len(header) < PAGE or not header.startswith(_MAGIC):
            msg = f"{path} does not begin like a slab of akv; {remedy}"
            raise StoreCorruptError(msg)
        _, version = _HEAD.unpack_from(header)
        if version != FORMAT_VERSION:
            msg = (
                f"{path} has format version {version}, this akv reads and writes "
                f"version {FORMAT_VERSION}; use the akv that made it, another "
                f"path, or {remedy}"
            )
            raise StoreMismatchError(msg)
        fields = header[: _FIELDS.size]
        (digest,) = _DIGEST.unpack_from(header, _FIELDS.size)
        if digest != xxhash.xxh3_64_intdigest(fields):
            msg = f"the header of {path} is damaged; {remedy}"
            raise StoreCorruptError(msg)
        _, _, checksum, slot_bytes, slots, identity = _FIELDS.unpack(fields)
        return cls(
            slot_bytes=slot_bytes,
            slots=slots,
            checksum=bool(checksum),
            identity=identity,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabState:
    """What the header says about the last use; only a disk store needs it."""

    clean: bool
    boot: bytes


class Slab:
    """An open slab. Made by :meth:`create` or :meth:`open`, never half."""

    def __init__(self, layout: SlabLayout, descriptor: int) -> None:
        self.layout = layout
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, layout.file_bytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        end_of_ticks = PAGE + layout.slots * 8
        self.ticks = Ticks(self._bytes[PAGE:end_of_ticks].view(np.uint64))
        body = self._bytes[layout.slots_offset :]
        self._slots = body.reshape(layout.slots, layout.stride)

    @classmethod
    def create(cls, path: Path, layout: SlabLayout) -> Slab:
        """Write a new slab to ``path``, with all its room really taken."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            reserve(descriptor, layout.file_bytes)
            os.pwrite(descriptor, layout.pack().ljust(PAGE, b"\0"), 0)
            return cls(layout, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: Path) -> Slab:
        """Map the slab at ``path``; raises if it is not what it says."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = os.pread(descriptor, PAGE, 0)
            layout = SlabLayout.unpack(header, path)
            size = os.fstat(descriptor).st_size
            if size != layout.file_bytes:
                msg = (
                    f"{path} has {size} bytes where its header says "
                    f"{layout.file_bytes}; remove the directory {path.parent} to "
                    f"start with an empty store"
                )
                raise StoreCorruptError(msg)
            return cls(layout, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def file_key(self) -> tuple[int, int]:
        """Names the file itself, whatever path leads to it."""
        facts = os.fstat(self._descriptor)
        return facts.st_dev, facts.st_ino

    @property
    def state(self) -> SlabState:
        """Read from the file."""
        clean, boot = _STATE.unpack(os.pread(self._descriptor, _STATE.size, _STATE_AT))
        return SlabState(clean=bool(clean), boot=boot)

    def write_state(self, state: SlabState) -> None:
        """Write to the file and on to the disk, after all before it."""
        packed = _STATE.pack(int(state.clean), state.boot)
        os.fsync(self._descriptor)
        os.pwrite(self._descriptor, packed, _STATE_AT)
        os.fsync(self._descriptor)

    def populate(self, *, write: bool) -> None:
        """Have all pages mapped before the first copy needs them."""
        address = int(self._bytes.__array_interface__["data"][0])
        if not populate(address, self.layout.file_bytes, write=write):
            # Reading is safe beside writers; it still maps existing pages.
            int(self._bytes[::PAGE].sum(dtype=np.uint64))

    def write(self, slots: Sequence[int], sources: Sequence[Buffer]) -> None:
        """Copy objects into slots that the caller has claimed."""
        copy_rows_out(sources, self._slots, slots)

    def read(self, slots: Sequence[int], targets: Sequence[Buffer]) -> None:
        """Copy slots' first bytes out, as many as each target has."""
        copy_rows_in(targets, self._slots, slots)

    def view(self, slot: int, length: int) -> memoryview:
        """The first ``length`` bytes of a slot; not to be kept."""
        return self._slots[slot, :length].data

    def close(self) -> None:
        """Unmap. No copy may be running."""
        del self.ticks, self._slots, self._bytes
        # A traceback somewhere may still hold a view; the map goes with that.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)


def stride_of(slot_bytes: int) -> int:
    """The bytes that a slot for objects of ``slot_bytes`` takes."""
    return -(-slot_bytes // PAGE) * PAGE


def read_layout(directory: Path) -> SlabLayout:
    """What the slab in ``directory`` says of itself, without mapping it."""
    path = directory / "slab"
    with path.open("rb") as file:
        return SlabLayout.unpack(file.read(PAGE), path)
