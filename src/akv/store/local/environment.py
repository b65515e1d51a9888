"""The LMDB environment of an index: opened right, and its errors in akv's words.

Knows how LMDB must be opened and what it raises, and nothing of what is in
the tables. Transactions are given out as context managers that commit at
their end and abort on an exception; each is used by one thread. A writer
waits for all other writers, a reader for nobody.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import lmdb

from akv.core.errors import StoreCorruptError, StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("Environment", "IndexFullError", "index_bytes")

_MAP_BASE = 16 << 20
_MAP_PER_SLOT = 4096
_RESERVE_BASE = 1 << 20
_RESERVE_PER_SLOT = 512
_READERS = 512
_SPARE_READERS = 16

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class IndexFullError(StoreError):
    """The index has no room for one more change: its disk or its map is full."""


class Environment:
    """An open environment in the directory ``path``, made if there is none.

    Open it once in a process, or LMDB's locks break; whoever does sees to it.
    """

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        self._slots = slots
        with self.mapping_errors():
            self._env = lmdb.open(
                str(path),
                map_size=_MAP_BASE + slots * _MAP_PER_SLOT,
                max_dbs=8,
                max_readers=_READERS,
                max_spare_txns=_SPARE_READERS,
                mode=0o600,
                # Killed processes lose nothing without a sync; what a power
                # cut does is for the clean mark in the slab's header.
                sync=False,
                metasync=False,
            )

    def table(self, name: bytes) -> lmdb._Database:
        """A table of the environment, made if there is none."""
        with self.mapping_errors():
            return self._env.open_db(name)

    @contextmanager
    def reading(self, table: lmdb._Database) -> Iterator[lmdb.Transaction[bytes]]:
        """One consistent view."""
        with self.mapping_errors(), self._env.begin(table) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """All changes at once, or none."""
        with self.mapping_errors(), self._env.begin(write=True) as txn:
            yield txn

    def check_readers(self) -> None:
        """Let go of the old pages that readers killed in the middle still hold."""
        with self.mapping_errors():
            self._env.reader_check()

    def reserve(self) -> None:
        """Take the room that the index will need, so that it cannot run out."""
        descriptor = os.open(self.path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, index_bytes(self._slots))
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """On to the disk."""
        with self.mapping_errors():
            self._env.sync(force=True)

    def close(self) -> None:
        """No transaction may be running."""
        self._env.close()

    @contextmanager
    def mapping_errors(self) -> Iterator[None]:
        """Turn what lmdb raises into akv's errors."""
        try:
            yield
        except _DAMAGE as error:
            msg = (
                f"the index {self.path} is damaged ({error}); remove the directory "
                f"{self.path.parent} to start with an empty store"
            )
            raise StoreCorruptError(msg) from error
        except lmdb.LockError as error:
            msg = (
                f"the index {self.path} cannot be locked ({error}); if containers "
                f"share it, a process of another one has the same process id "
                f"{os.getpid()}: start them with --pid=host, or give each a store "
                f"of its own"
            )
            raise StoreUnavailableError(msg) from error
        except lmdb.Error as error:
            # A short write to a full disk is EIO to lmdb.
            if isinstance(error, lmdb.MapFullError) or error.code in _NO_SPACE:
                msg = f"the index {self.path} cannot grow ({error}); is its disk full?"
                raise IndexFullError(msg) from error
            msg = f"the index {self.path} cannot be used ({error}); open it again"
            raise StoreError(msg) from error


def index_bytes(slots: int) -> int:
    """What the index of so many slots takes on the filesystem."""
    return _RESERVE_BASE + slots * _RESERVE_PER_SLOT
