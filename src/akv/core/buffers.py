"""What a device hands out and a store takes: one object's bytes in several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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

    @staticmethod
    def fill(buffers: Sequence[Any], rows: Any, numbers: Sequence[int]) -> None:
        """Copy some rows of an array into as many buffers of this kind.

        ``rows`` is a numpy array of bytes ``[rows, row_bytes]`` whose rows are
        each in one run and at least as long as a buffer.
        """
        ...

    @staticmethod
    def drain(buffers: Sequence[Any], rows: Any, numbers: Sequence[int]) -> None:
        """Copy buffers of this kind into as many rows of an array."""
        ...
