"""The directory of a store: its parts, its lock, and whether it can be one.

``slab`` and ``index/`` are the store, ``owners/`` says who is alive, ``lock``
is held by whoever opens or closes. The slab gets its name last, so a
directory without one holds a store that was never finished. Nothing that akv
did not make is ever removed. Called while opening and closing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from akv.core.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from akv.store.local.filesystem import is_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("OPEN_TIMEOUT", "Place")

OPEN_TIMEOUT: Final = 120.0
"""Seconds to wait for another process that is opening the same store."""

# The last one is in each root of an ext filesystem.
_PARTS = {"slab", "slab.new", "index", "owners", "lock", "lost+found"}
_POLL = 0.01


@dataclass(frozen=True, slots=True)
class Place:
    """Where one store lies."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def slab(self) -> Path:
        """The slab, once the store is complete."""
        return self.root / "slab"

    @property
    def unfinished_slab(self) -> Path:
        """The slab while the store is being made."""
        return self.root / "slab.new"

    @property
    def index(self) -> Path:
        """The directory of the LMDB environment."""
        return self.root / "index"

    @property
    def index_data(self) -> Path:
        """LMDB's own file of pages."""
        return self.index / "data.mdb"

    @property
    def owners(self) -> Path:
        """The directory of the living."""
        return self.root / "owners"

    @property
    def in_memory(self) -> bool:
        """Whether a boot empties it."""
        return is_memory(self.nearest)

    @property
    def nearest(self) -> Path:
        """The directory itself, or the one that it would be made in."""
        return self.root if self.root.exists() else self.root.parent

    def check(self) -> bool:
        """Whether the directory exists; raises if it cannot be a store's."""
        try:
            facts = self.root.stat()
        except FileNotFoundError:
            self._check_parent()
            return False
        except OSError as error:
            msg = f"{self} cannot be used as a store: {error.strerror}"
            raise StoreUnavailableError(msg) from error
        if not stat.S_ISDIR(facts.st_mode):
            fix = "a file is there; a store is a directory"
            raise ConfigError("store", f"local:{self}", fix)
        if not os.access(self.root, os.W_OK | os.X_OK):
            msg = f"{self} cannot be written, so it cannot be used as a store"
            raise StoreUnavailableError(msg)
        if os.geteuid() != 0 and facts.st_uid not in (0, os.geteuid()):
            # Whoever owns the directory can plant blocks for others in it.
            msg = f"{self} belongs to another user ({facts.st_uid}); use another path"
            raise StoreUnavailableError(msg)
        names = {path.name for path in self.root.iterdir()}
        strange = sorted(names - _PARTS)
        if strange and "slab" not in names:
            fix = (
                f"this directory holds other things ({strange[0]}); name one that "
                f"is empty or does not exist"
            )
            raise ConfigError("store", f"local:{self}", fix)
        return True

    def discard(self) -> None:
        """Remove what a creation left behind that never came to its end."""
        for path in (self.slab, self.unfinished_slab):
            path.unlink(missing_ok=True)
        for directory in (self.index, self.owners):
            if directory.exists():
                for path in directory.iterdir():
                    path.unlink(missing_ok=True)
                directory.rmdir()

    def damaged(self, what: str) -> StoreCorruptError:
        """The error to raise for damage, with what a person can do."""
        return StoreCorruptError(
            f"the store in {self} is damaged: {what}; remove the directory {self} "
            f"to start with an empty store"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for opening and closing, or raise when it is too late."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.root / "lock", flags, 0o600)
        try:
            deadline = time.monotonic() + OPEN_TIMEOUT
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    msg = (
                        f"another process has been opening the store in {self} for "
                        f"{OPEN_TIMEOUT:.0f} seconds"
                    )
                    raise StoreUnavailableError(msg)
                time.sleep(_POLL)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def mapping_errors(self) -> Iterator[None]:
        """Turn what the operating system says into akv's errors."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = "ran out of room while the store was made"
            else:
                what = f"cannot be used as a store: {error.strerror or error}"
            msg = f"{self} {what}; the setting `store` names it"
            raise StoreUnavailableError(msg) from error

    def _check_parent(self) -> None:
        parent = self.root.parent
        if not parent.is_dir():
            msg = f"{parent} is no directory, so no store can be made in {self}"
            raise StoreUnavailableError(msg)
        if not os.access(parent, os.W_OK | os.X_OK):
            msg = f"{parent} cannot be written, so no store can be made in {self}"
            raise StoreUnavailableError(msg)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
