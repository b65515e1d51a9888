"""Stores that misbehave on purpose, for tests of whoever uses a store.

``GatedStore`` holds calls until the test lets them go, so that a test decides
what happens while a call is under way, without a sleep. ``FaultyStore`` asks
a function of the test what each call should come to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from akv.store.base import BlockStore, Buffer, Outcome, Status, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from akv.core.keys import BlockKey

__all__ = ("Fault", "FaultyStore", "GatedStore", "WrappedStore")


class WrappedStore:
    """Hands every call on to ``inner``; the base of wrappers."""

    def __init__(self, inner: BlockStore) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The address of the inner store."""
        return self.inner.url

    @property
    def lease(self) -> float:
        """The lease of the inner store, in seconds."""
        return self.inner.lease

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.exists(keys, promise=promise)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.get_into(keys, buffers)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.put_from(keys, buffers)

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.remove(keys)

    def clear(self, prefix: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.clear(prefix)

    def generation(self, scope: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.generation(scope)

    def raise_generation(self, scope: bytes) -> int:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.raise_generation(scope)

    def statistics(self) -> StoreStatistics:
        """See :class:`~akv.store.base.BlockStore`."""
        return self.inner.statistics()

    def close(self) -> None:
        """See :class:`~akv.store.base.BlockStore`."""
        self.inner.close()


class GatedStore(WrappedStore):
    """Holds the calls named in ``gated`` until the test lets them go.

    Thread safe. ``calls`` lists the verbs in the order in which they came.
    """

    def __init__(self, inner: BlockStore, *, gated: Sequence[str]) -> None:
        super().__init__(inner)
        self._gated = frozenset(gated)
        self._changed = threading.Condition()
        self._permits = 0
        self._open = False
        self.held = 0
        self.calls: list[tuple[str, tuple[BlockKey, ...]]] = []

    def let_go(self, calls: int = 1) -> None:
        """Let the next ``calls`` held calls go on, now or when they come."""
        with self._changed:
            self._permits += calls
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_until_held(self, calls: int = 1, timeout: float = 10.0) -> None:
        """Block until ``calls`` calls are held at once."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.held >= calls, timeout):
                msg = f"{self.held} calls are held, not {calls}"
                raise TimeoutError(msg)

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Held if ``exists`` is gated."""
        self._pass("exists", keys)
        return self.inner.exists(keys, promise=promise)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Held if ``get_into`` is gated; the buffers are written afterwards."""
        self._pass("get_into", keys)
        return self.inner.get_into(keys, buffers)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Held if ``put_from`` is gated; the buffers are read afterwards."""
        self._pass("put_from", keys)
        return self.inner.put_from(keys, buffers)

    def _pass(self, verb: str, keys: Sequence[BlockKey]) -> None:
        with self._changed:
            self.calls.append((verb, tuple(keys)))
            if verb not in self._gated:
                return
            self.held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or self._permits > 0)
            self._permits = max(0, self._permits - 1)
            self.held -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a call comes to: an error, or other outcomes for some keys.

    ``outcomes`` maps the place of a key in the call to its outcome; the
    store is not asked for those, and their buffers are filled with ``junk``.
    """

    error: Exception | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    junk: int = 0xEE


class FaultyStore(WrappedStore):
    """Asks ``decide(verb, keys)`` what each call should come to."""

    def __init__(
        self,
        inner: BlockStore,
        decide: Callable[[str, Sequence[BlockKey]], Fault | None],
    ) -> None:
        super().__init__(inner)
        self._decide = decide

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """As decided, else as the inner store says."""
        fault = self._fault("exists", keys)
        return self._merge(fault, self.inner.exists(keys, promise=promise))

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """As decided; a buffer whose outcome was decided holds junk."""
        fault = self._fault("get_into", keys)
        outcomes = self._merge(fault, self.inner.get_into(keys, buffers))
        for place in fault.outcomes:
            buffers[place][:] = bytes([fault.junk]) * len(buffers[place])
        return outcomes

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """As decided; a key whose outcome was decided is not put."""
        fault = self._fault("put_from", keys)
        asked = [n for n in range(len(keys)) if n not in fault.outcomes]
        put = self.inner.put_from([keys[n] for n in asked], [buffers[n] for n in asked])
        outcomes: list[Outcome] = [Status.NO_ROOM] * len(keys)
        for place, outcome in zip(asked, put, strict=True):
            outcomes[place] = outcome
        return self._merge(fault, outcomes)

    def _fault(self, verb: str, keys: Sequence[BlockKey]) -> Fault:
        fault = self._decide(verb, keys) or Fault()
        if fault.error is not None:
            raise fault.error
        return fault

    @staticmethod
    def _merge(fault: Fault, outcomes: Sequence[Outcome]) -> list[Outcome]:
        return [
            fault.outcomes.get(place, outcome) for place, outcome in enumerate(outcomes)
        ]
