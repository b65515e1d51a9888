"""What a device hands out and a store takes: one object's bytes in several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("ScatteredBuffer",)


class ScatteredBuffer(Protocol):
    """One object's bytes where the engine keeps them: several runs, in order.

    The caller owns the memory. Copies come from any thread and do not hold
    the interpreter's lock for long.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together: the object's length."""
        ...

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of each run."""
        ...

    def fill(self, source: memoryview) -> None:
        """Copy ``nbytes`` bytes of ``source`` into the runs."""
        ...

    def drain(self, target: memoryview) -> None:
        """Copy the runs into ``target``, which has ``nbytes`` bytes."""
        ...
