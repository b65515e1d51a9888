"""Stores that misbehave on purpose, for tests of whoever uses a store.

``GatedStore`` holds calls until the test lets them go, so that a test decides
what happens while a call is under way, without a sleep. ``FaultyStore`` asks
a function of the test, or a ``FaultSchedule``, what each call should come to.
All of them are stores themselves, wrap any store, and are thread safe.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from akv.core.errors import ConfigError, StoreError
from akv.store.base import (
    BlockStore,
    Buffer,
    Failure,
    Outcome,
    Status,
    StoreStatistics,
)
from akv.store.buffers import copy_in, copy_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from akv.core.keys import BlockKey

__all__ = ("Fault", "FaultSchedule", "FaultyStore", "GatedStore", "WrappedStore")

_RATES = ("hangs", "errors", "failures", "lost", "short", "swapped", "late")


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

    ``calls`` lists the verbs and keys in the order in which they came, and
    ``held`` is how many calls wait now.

    :param gated: verbs to hold: ``exists``, ``get_into``, ``put_from``
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
    """What one call comes to; with nothing given it is an ordinary call.

    Places are those of the keys in the call; two of a swap must be as long.

    :ivar delay: seconds before the inner store is asked
    :ivar hang: do not ask before ``FaultyStore.end_hangs`` or ``close``
    :ivar error: raised after the delay; the inner store is not asked
    :ivar outcomes: what to answer for these places. The inner store is not
        asked to put them, and buffers of a get are filled with ``junk``
    :ivar short: only so many bytes of a read are the value's; the rest is
        ``junk``, and the answer is a failure that says so
    :ivar swapped: two values of a read change places, and both are hits: what
        a store that serves wrong bytes would do
    :ivar late: seconds between the inner store's answer and the caller's
    """

    delay: float = 0.0
    hang: bool = False
    error: Exception | None = None
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    short: Mapping[int, int] = field(default_factory=dict)
    swapped: tuple[int, int] | None = None
    late: float = 0.0
    junk: int = 0xEE


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSchedule:
    """Faults drawn at random, the same for the same seed.

    What a call comes to depends on the seed, the verb, its first key and how
    often that key has been asked for, not on which thread came first. Rates
    are parts of all calls, from 0 to 1; of one call at most one of them comes
    true, the delay aside.

    :ivar delay: least and most seconds that a call takes longer
    :ivar hangs: calls that hang until ``FaultyStore.end_hangs``
    :ivar errors: calls that raise :class:`~akv.StoreError`
    :ivar failures: calls of which one key comes to the failure ``code``
    :ivar lost: calls of which one key is a miss, or finds no room
    :ivar short: gets of which one value is short
    :ivar swapped: gets that serve two values in each other's place
    :ivar late: calls that are answered ``late_seconds`` after they were done
    """

    seed: int
    verbs: tuple[str, ...] = ("exists", "get_into", "put_from")
    delay: tuple[float, float] = (0.0, 0.0)
    hangs: float = 0.0
    errors: float = 0.0
    failures: float = 0.0
    code: int = -800
    lost: float = 0.0
    short: float = 0.0
    swapped: float = 0.0
    late: float = 0.0
    late_seconds: float = 0.0
    _asked: Counter[tuple[str, bytes]] = field(
        default_factory=Counter, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in _RATES}
        for name, rate in rates.items():
            if not 0 <= rate <= 1:
                raise ConfigError(name, rate, "a rate is a number from 0 to 1")
        if sum(rates.values()) > 1 + 1e-9:
            raise ConfigError("rates", rates, "together they must be at most 1")
        least, most = self.delay
        if not 0 <= least <= most:
            raise ConfigError("delay", self.delay, "give least and most seconds")

    def __call__(self, verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        """What the call should come to."""
        if verb not in self.verbs or not keys:
            return None
        first = (verb, bytes(keys[0]))
        self._asked[first] += 1
        drawn = random.Random(f"{self.seed}:{self._asked[first]}:{first}")
        delay = drawn.uniform(*self.delay)
        chance = drawn.random()
        place = drawn.randrange(len(keys))
        for name in _RATES:
            rate: float = getattr(self, name)
            if chance < rate:
                return self._fault(name, verb, place, len(keys), delay)
            chance -= rate
        return Fault(delay=delay)

    def _fault(
        self, name: str, verb: str, place: int, count: int, delay: float
    ) -> Fault:
        match name:
            case "hangs":
                return Fault(delay=delay, hang=True)
            case "errors":
                return Fault(delay=delay, error=StoreError(f"{verb} failed"))
            case "failures":
                failure = Failure("as scheduled", self.code)
                return Fault(delay=delay, outcomes={place: failure})
            case "lost":
                lost = Status.NO_ROOM if verb == "put_from" else Status.MISS
                return Fault(delay=delay, outcomes={place: lost})
            case "late":
                return Fault(delay=delay, late=self.late_seconds)
            case "short" if verb == "get_into":
                return Fault(delay=delay, short={place: 1})
            case "swapped" if verb == "get_into" and count > 1:
                return Fault(delay=delay, swapped=(place, (place + 1) % count))
            case _:
                return Fault(delay=delay)


class FaultyStore(WrappedStore):
    """Asks ``decide(verb, keys)`` what each call should come to.

    ``decide`` is a function of the test or a :class:`FaultSchedule`, and may be
    set to another one; it is called by one thread at a time, in the thread of
    the call.
    """

    def __init__(
        self,
        inner: BlockStore,
        decide: Callable[[str, Sequence[BlockKey]], Fault | None],
    ) -> None:
        super().__init__(inner)
        self.decide = decide
        self._deciding = threading.Lock()
        self._over = threading.Event()

    def end_hangs(self) -> None:
        """Let calls that hang or are delayed go on, now and from now on."""
        self._over.set()

    def close(self) -> None:
        """End what hangs and close the inner store."""
        self.end_hangs()
        super().close()

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """As decided, else as the inner store says."""
        fault = self._fault("exists", keys)
        outcomes = self.inner.exists(keys, promise=promise)
        return self._answer(fault, outcomes)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """As decided; a buffer whose outcome was decided holds junk."""
        fault = self._fault("get_into", keys)
        if fault.swapped is not None:
            one, two = fault.swapped
            keys = list(keys)
            keys[one], keys[two] = keys[two], keys[one]
        outcomes = self.inner.get_into(keys, buffers)
        for place in fault.outcomes:
            _spoil(buffers[place], 0, fault.junk)
        for place, kept in fault.short.items():
            if outcomes[place] is Status.HIT:
                size = buffers[place].nbytes
                outcomes[place] = Failure(
                    f"{min(kept, size)} of {size} bytes were read"
                )
                _spoil(buffers[place], kept, fault.junk)
        return self._answer(fault, outcomes)

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
        return self._answer(fault, outcomes)

    def _fault(self, verb: str, keys: Sequence[BlockKey]) -> Fault:
        with self._deciding:
            fault = self.decide(verb, keys) or Fault()
        if fault.hang:
            self._over.wait()
        elif fault.delay:
            self._over.wait(fault.delay)
        if fault.error is not None:
            raise fault.error
        return fault

    def _answer(self, fault: Fault, outcomes: Sequence[Outcome]) -> list[Outcome]:
        if fault.late:
            self._over.wait(fault.late)
        return [
            fault.outcomes.get(place, outcome) for place, outcome in enumerate(outcomes)
        ]


def _spoil(buffer: Buffer, kept: int, junk: int) -> None:
    value = bytearray(buffer.nbytes)
    copy_out(buffer, memoryview(value))
    value[kept:] = bytes([junk]) * max(0, len(value) - kept)
    copy_in(buffer, memoryview(value))
