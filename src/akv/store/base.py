"""What a store of blocks must do, and the words for what came of it.

A store moves bytes and nothing else: it knows keys as opaque bytes, never
looks into an object, and holds no buffer after a call has returned. All
calls block, and each comes from a thread of one of akv's own bounded pools;
several may run at once. There is no async in here on purpose: whoever waits
can be cancelled, a call into native code cannot, so the fence around its
memory is the pool's business and not the store's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from akv.core.buffers import ScatteredBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey

__all__ = (
    "BlockStore",
    "Buffer",
    "Failure",
    "MovesDirectly",
    "Outcome",
    "RegistersMemory",
    "ScatteredBuffer",
    "Status",
    "StoreStatistics",
)


Buffer: TypeAlias = memoryview | ScatteredBuffer
"""One object's bytes, owned by the caller: C-contiguous of format ``B``, or runs."""


class Status(enum.Enum):
    """What became of one key."""

    HIT = "hit"
    """``exists``: it is there. ``get_into``: the whole object is in the buffer."""
    MISS = "miss"
    """Not there, or not there any more. Never an error."""
    STORED = "stored"
    """``put_from``: readable by everybody from now on."""
    EXISTS = "exists"
    """``put_from``: the key was there already, which is as good as stored."""
    NO_ROOM = "no_room"
    """``put_from``: nothing could be evicted. Backpressure, not an error."""
    REMOVED = "removed"
    """``remove``: no longer readable."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One key failed: the bytes in its buffer mean nothing.

    :ivar code: the store's own number where it has one
    :ivar unasked: the store could not be asked, which tells nothing of the key
    """

    reason: str
    code: int | None = None
    unasked: bool = False


Outcome: TypeAlias = Status | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Plain numbers of one open store; counts since it was opened here."""

    url: str
    objects: int
    """Objects that can be read now, of all namespaces."""
    bytes_used: int
    bytes_capacity: int
    """0 where the store has no limit of its own."""
    hits: int = 0
    misses: int = 0
    puts: int = 0
    exists: int = 0
    no_room: int = 0
    evictions: int = 0
    failures: int = 0


@runtime_checkable
class BlockStore(Protocol):
    """Where blocks live.

    Every method takes keys in any number and answers for each of them, in
    order. A miss is an answer. A call that cannot be answered at all raises
    a :class:`~akv.core.errors.StoreError`, and then nothing may be assumed
    of any of its keys or buffers.
    """

    @property
    def url(self) -> str:
        """The address as a person would write it again."""
        ...

    @property
    def lease(self) -> float:
        """Seconds for which a promised key is protected from eviction."""
        ...

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Say for each key HIT or MISS, or a failure.

        With ``promise``, whatever was found is kept from eviction for
        :attr:`lease` seconds, as well as the store can.
        """
        ...

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Copy whole objects into the caller's writable buffers.

        HIT means that every byte of that buffer is the object's. An object
        of another length than its buffer is a failure, never a short read.
        """
        ...

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Store the buffers' bytes: STORED, EXISTS, NO_ROOM or a failure.

        Objects are never changed: a key that exists keeps its old bytes.
        """
        ...

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Make objects unreadable: REMOVED, MISS or a failure."""
        ...

    def clear(self, prefix: bytes) -> int:
        """Remove all objects whose key begins with ``prefix``; how many."""
        ...

    def generation(self, scope: bytes) -> int:
        """The generation of a scope (see ``KeySpace``); 0 if never raised."""
        ...

    def raise_generation(self, scope: bytes) -> int:
        """Raise the generation of a scope by one, for all; the new one."""
        ...

    def statistics(self) -> StoreStatistics:
        """Numbers as of now."""
        ...

    def close(self) -> None:
        """Let go of everything. Twice is no error; other calls then raise."""
        ...


@runtime_checkable
class RegistersMemory(Protocol):
    """A store that moves bytes faster from and to memory that it knows.

    An ability of some stores; others do not have these methods.
    """

    def register(self, memory: memoryview) -> None:
        """Make ``memory`` known, until ``unregister`` or ``close``.

        The caller owns it and keeps it that long.

        :raises StoreUnavailableError: it cannot be registered, and why
        """
        ...

    def unregister(self, memory: memoryview) -> None:
        """Forget ``memory``; no call that uses it may be under way."""
        ...


@runtime_checkable
class MovesDirectly(Protocol):
    """A store that says when the engine's own memory is best given to it.

    Every store takes scattered buffers; whoever hands them over must wait for
    the call's end before the engine may use that memory, however long the
    call takes. A store without this property is given akv's own memory.
    """

    @property
    def direct_from(self) -> int | None:
        """The shortest runs, in bytes, that are better moved without a detour.

        None where its calls are better given akv's own memory always.
        """
        ...
