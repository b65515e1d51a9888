"""A set that forgets: what was added long ago drops out, in bounded memory.

Two generations of a plain set, so that adding and asking cost what they cost
in a set, whatever is forgotten. Pure; one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ("RecentSet",)

T = TypeVar("T", bound="Hashable")


class RecentSet(Generic[T]):
    """Holds at least the last ``most // 2`` additions, never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: set[T] = set()
        self._old: set[T] = set()

    def __contains__(self, item: object) -> bool:
        return item in self._young or item in self._old

    def __len__(self) -> int:
        return len(self._young | self._old)

    def update(self, items: Sequence[T]) -> None:
        """Add all of ``items``; of more than half of ``most``, the last."""
        items = items[-self._half :]
        if len(self._young) + len(items) > self._half:
            self._old, self._young = self._young, set()
        self._young.update(items)

    def discard(self, items: Sequence[T]) -> None:
        """Forget these at once."""
        if not self.isdisjoint(items):
            self._young.difference_update(items)
            self._old.difference_update(items)

    def isdisjoint(self, items: Sequence[T]) -> bool:
        """Whether none of ``items`` is here."""
        return self._young.isdisjoint(items) and self._old.isdisjoint(items)

    def clear(self) -> None:
        """Forget everything."""
        self._young.clear()
        self._old.clear()
