"""Who is alive, decided by the kernel.

Each process that has a store open owns a numbered file and holds its lock
for as long as it lives. The kernel lets go of the lock when the process
ends, however it ends and whatever its process id means in this container, so
a lock that can be taken says that the owner is dead and that the slots it
claimed can be used again. Called while opening, closing and claiming; never
blocks.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("Owner", "is_dead", "living", "register")


class Owner:
    """This process's own file; alive until :meth:`close`."""

    __slots__ = ("_descriptor", "_path", "number")

    def __init__(self, number: int, path: Path, descriptor: int) -> None:
        self.number = number
        self._path = path
        self._descriptor = descriptor

    @property
    def visible(self) -> bool:
        """Whether the others can see this file: its directory is still there."""
        return _is_at(self._descriptor, self._path)

    def close(self) -> None:
        """Die: the file goes first, so that nobody finds it unlocked."""
        self._path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the inherited descriptor in a forked child.

        The lock is the parent's and stays with it; a child that kept the
        descriptor would keep a dead parent alive.
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def register(directory: Path, number: int) -> Owner:
    """Become owner ``number``, which nobody else ever was."""
    path = directory / str(number)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _lock(descriptor) and _is_at(descriptor, path):
            return Owner(number, path, descriptor)
        # Between open and lock somebody took it for dead and unlinked it.
        os.close(descriptor)


def is_dead(directory: Path, number: int) -> bool:
    """Whether owner ``number`` has ended; its file is then removed."""
    path = directory / str(number)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _lock(descriptor):
            return False
        if _is_at(descriptor, path):
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def living(directory: Path) -> list[int]:
    """The owners that live; the files of all others are removed."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir()]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [number for number in numbers if not is_dead(directory, number)]


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
