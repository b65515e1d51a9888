"""Memory that Mooncake may touch: what the caller registered, and scratch.

A transfer needs memory that the client knows. What a caller registers is
used as it is; for any other buffer there is scratch: a few pieces, made when
first needed, through which bytes go in portions. Everything here is known to
each client of the store in turn, so that a new client can use it at once.
Any thread.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from akv.core.errors import StoreError, StoreUnavailableError
from akv.core.sizes import format_size
from akv.store.mooncake.codes import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from akv.store.mooncake.client import Client

__all__ = ("Memory", "Piece", "address_of")

_CAUSES = (
    "known causes: it overlaps memory that is registered already; with RDMA the "
    "limit on locked memory (ulimit -l), expandable segments of the CUDA "
    "allocator, or a missing nvidia_peermem module"
)
_MOST_PIECES = 8


def address_of(buffer: memoryview) -> int:
    """Where the bytes of ``buffer`` lie; 0 if it has none."""
    if not buffer.nbytes:
        return 0
    view = np.frombuffer(buffer, dtype=np.uint8)
    return int(view.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class Piece:
    """Scratch for one call at a time."""

    view: memoryview
    address: int


@dataclass(frozen=True, slots=True, order=True)
class _Region:
    start: int
    end: int


class Memory:
    """What each client of one store has to know.

    :ivar page: a page of its own for marks, whose content never matters
    """

    def __init__(self, *, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._changed = threading.Condition()
        self._regions: list[_Region] = []
        self._owners: dict[int, memoryview] = {}
        self._client: Client | None = None
        self._free: list[Piece] = []
        self._pieces = 0
        self.page = self._new_piece(mmap.PAGESIZE)

    def attach(self, client: Client) -> None:
        """Make everything known to ``client``, which takes over."""
        with self._changed:
            for region in self._regions:
                _register(client, region)
            self._client = client

    def detach(self) -> None:
        """The client is gone; what comes now is registered with the next one."""
        with self._changed:
            self._client = None

    def add(self, memory: memoryview) -> None:
        """Register ``memory``.

        :raises StoreUnavailableError: the client refuses it, and why it may
        """
        start = address_of(memory)
        region = _Region(start, start + memory.nbytes)
        with self._changed:
            if self._client is not None:
                _register(self._client, region)
            self._regions = sorted([*self._regions, region])
            self._owners[start] = memory

    def drop(self, memory: memoryview) -> None:
        """Forget ``memory``; unknown memory is no error."""
        start = address_of(memory)
        with self._changed:
            if self._owners.pop(start, None) is None:
                return
            self._regions = [one for one in self._regions if one.start != start]
            if self._client is not None:
                self._client.unregister_buffer(start)

    def covers(self, address: int, size: int) -> bool:
        """Whether these bytes lie in one registered memory."""
        regions = self._regions
        at = bisect_right(regions, address, key=lambda region: region.start) - 1
        return at >= 0 and address + size <= regions[at].end

    @contextmanager
    def piece(self, patience: float) -> Iterator[Piece]:
        """A piece of scratch; waits ``patience`` seconds while all are in use."""
        piece = self._take(patience)
        try:
            yield piece
        finally:
            with self._changed:
                self._free.append(piece)
                self._changed.notify()

    def _take(self, patience: float) -> Piece:
        with self._changed:
            if not self._free and self._pieces < _MOST_PIECES:
                self._pieces += 1
            elif self._changed.wait_for(lambda: bool(self._free), patience):
                return self._free.pop()
            else:
                msg = f"{self._pieces} calls hold all scratch for {patience:.0f} s"
                raise StoreError(msg)
        try:
            return self._new_piece(self.piece_bytes)
        except BaseException:
            with self._changed:
                self._pieces -= 1
            raise

    def _new_piece(self, size: int) -> Piece:
        view = memoryview(mmap.mmap(-1, size))
        self.add(view)
        return Piece(view, address_of(view))


def _register(client: Client, region: _Region) -> None:
    size = region.end - region.start
    code = client.register_buffer(region.start, size)
    if code != 0:
        msg = (
            f"Mooncake refuses to register {format_size(size)} at "
            f"{region.start:#x} with {code} ({name_of(code)}); {_CAUSES}"
        )
        raise StoreUnavailableError(msg)
