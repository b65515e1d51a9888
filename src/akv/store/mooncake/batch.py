"""One call's keys and buffers, sorted into what is moved and what is not.

Mooncake wants each key once: a get fills one buffer of a key that comes
twice and reports both, a put stores one of them and says so twice. So every
key is moved for its first place, and the other places follow from it. Pure
but for the copy of a doubled get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from akv.store.base import Failure, Outcome, Status
from akv.store.buffers import copy_in, copy_out
from akv.store.mooncake.memory import address_of
from akv.store.mooncake.windows import Part, Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer
    from akv.store.mooncake.memory import Memory

__all__ = ("BLOCKS", "Batch", "name_of_key")

BLOCKS = "akv:"
"""What the keys of blocks begin with in the pool, and no other keys do."""


class Batch:
    """The keys and buffers of one get or put.

    :ivar parts: one for each key that can be moved
    """

    def __init__(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        memory: Memory,
        *,
        most_bytes: int,
    ) -> None:
        if len(keys) != len(buffers):
            msg = f"{len(keys)} keys but {len(buffers)} buffers"
            raise ValueError(msg)
        self._keys = keys
        self._buffers = buffers
        self._refused: dict[int, Outcome] = {}
        self._first: dict[BlockKey, int] = {}
        self.parts: list[Part] = []
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if not key or buffer.nbytes > most_bytes:
                self._refused[at] = Failure(
                    f"{buffer.nbytes} bytes under a key of {len(key)}: objects have "
                    f"at most {most_bytes} bytes, keys at least one"
                )
            elif key not in self._first:
                self._first[key] = at
                runs = _runs_of(buffer)
                known = runs and all(memory.covers(*run) for run in runs)
                place = runs if known else None
                self.parts.append(Part(at, name_of_key(key), buffer, place))

    def got(self, done: dict[int, Outcome]) -> list[Outcome]:
        """Outcomes for all places of a get; fills the buffers of doubled keys."""
        outcomes = self._spread(done)
        for at, outcome in enumerate(outcomes):
            first = self._first.get(self._keys[at], at)
            if first == at or outcome is not Status.HIT:
                continue
            size = self._buffers[first].nbytes
            if size == self._buffers[at].nbytes:
                self._copy(first, at)
            else:
                outcomes[at] = Failure(
                    f"the object has {size} bytes, "
                    f"its buffer {self._buffers[at].nbytes}"
                )
        return outcomes

    def _copy(self, first: int, at: int) -> None:
        source = self._buffers[first]
        if not isinstance(source, memoryview):
            whole = memoryview(bytearray(source.nbytes))
            copy_out(source, whole)
            source = whole
        copy_in(self._buffers[at], source)

    def stored(self, done: dict[int, Outcome]) -> list[Outcome]:
        """Outcomes for all places of a put."""
        outcomes = self._spread(done)
        for at, outcome in enumerate(outcomes):
            if outcome is Status.STORED and self._first[self._keys[at]] != at:
                outcomes[at] = Status.EXISTS
        return outcomes

    def _spread(self, done: dict[int, Outcome]) -> list[Outcome]:
        return [
            self._refused[at] if at in self._refused else done[self._first[key]]
            for at, key in enumerate(self._keys)
        ]


def _runs_of(buffer: Buffer) -> Runs:
    if not isinstance(buffer, memoryview):
        return buffer.runs
    return [(address_of(buffer), buffer.nbytes)] if buffer.nbytes else []


def name_of_key(key: BlockKey) -> str:
    """Hex, so that a prefix of a key is a prefix of its name."""
    return BLOCKS + key.hex()
