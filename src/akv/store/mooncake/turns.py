"""Who may use the pool at the same time as whom, within one process.

Mooncake's calls are safe side by side, but two things are not told apart by
its answers: a put of a key that another thread is just putting counts as
done, and an object that is removed by force may be overwritten while another
thread reads it. So puts of one key take turns, and a removal waits until no
transfer runs. Between processes neither can happen to a reader unnoticed:
after a read it asks again whether the object is there. Any thread.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ("Claims", "Turns")


class Turns:
    """Transfers share; a removal is alone, and comes before new transfers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._transfers = 0
        self._removals = 0
        self._alone = False

    @contextmanager
    def transfer(self, patience: float) -> Iterator[None]:
        """Run beside other transfers; a removal is waited for."""
        with self._changed:
            # A removal is short. If it hangs all the same, the check after
            # each read still finds what was removed under it.
            self._changed.wait_for(lambda: not self._removals, patience)
            self._transfers += 1
        try:
            yield
        finally:
            with self._changed:
                self._transfers -= 1
                self._changed.notify_all()

    @contextmanager
    def removal(self, patience: float) -> Iterator[bool]:
        """Run with no transfer beside it; False if some had not ended by then."""
        with self._changed:
            self._removals += 1
            alone = self._changed.wait_for(
                lambda: not self._transfers and not self._alone, patience
            )
            self._alone = self._alone or alone
        try:
            yield alone
        finally:
            with self._changed:
                self._removals -= 1
                if alone:
                    self._alone = False
                self._changed.notify_all()


class Claims:
    """Keys that a thread is just putting."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()

    @contextmanager
    def claim(self, keys: Iterable[str]) -> Iterator[set[str]]:
        """Hold those of ``keys`` that nobody else does; yields which."""
        with self._changed:
            mine = set(keys) - self._held
            self._held |= mine
        try:
            yield mine
        finally:
            with self._changed:
                self._held -= mine
                self._changed.notify_all()

    def wait(self, keys: Iterable[str], patience: float) -> None:
        """Wait until nobody holds any of ``keys``; hold none meanwhile."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._held, patience)
