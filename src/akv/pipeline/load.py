"""A load: windows from the store into the engine's blocks, mostly by staging.

While one window is placed the next ones are fetched. Between windows a
cancellation or the deadline acts; in the middle of one, the fetch is left to
itself with its staging memory in quarantine, and whatever touches the engine's
blocks is waited for: the copy out of staging, or the fetch itself where the
store writes the blocks (see ``route``). So when ``load`` has ended, however it
ended, nothing of akv's touches the engine's blocks any more.

Loads that want the same window share one fetch into staging, as long as one of
them still wants it; each waits for its own windows and for nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from akv.core.errors import (
    AkvError,
    SessionClosedError,
    StoreUnavailableError,
    sentence,
)
from akv.core.events import (
    LoadCancelled,
    LoadFailed,
    LoadLanded,
    LoadStarted,
    Observer,
    WindowFetched,
    WindowPlaced,
)
from akv.core.keys import BlockKey, make_keys
from akv.core.states import (
    Admit,
    Expire,
    Failed,
    Fetched,
    Landed,
    LoadState,
    Placed,
    Placing,
    Plan,
    Probing,
    is_final,
    step,
)
from akv.pipeline.budget import QuarantineFullError
from akv.pipeline.native import fence_all
from akv.store.base import BlockStore, Failure, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from akv.core.plan import Window
    from akv.core.spec import LoadSpec
    from akv.device.base import Device
    from akv.pipeline.breaker import Breaker
    from akv.pipeline.budget import BufferPool, StagingBuffer
    from akv.pipeline.native import Call, NativePool
    from akv.pipeline.route import Route

__all__ = ("LoadOutcome", "LoadPipeline")

_JOIN_SHARE = 0.25
"""Part of the deadline for which others may still join a fetch: one that hangs
takes nobody with it who comes later."""

_FETCHES_AT_ONCE = 3
"""Windows of one load that are fetched while an earlier one is placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """What became of a load: whole blocks landed or failed, nothing between.

    ``failed_blocks`` are the engine's block ids that hold no valid bytes,
    ``failed_hashes`` the names of what should have been in them, but only
    where the store itself had promised and not delivered.
    """

    spec: LoadSpec
    failed_blocks: tuple[int, ...]
    failed_hashes: tuple[bytes, ...]
    reason: str

    @property
    def landed(self) -> bool:
        """Whether every block landed."""
        return not self.failed_blocks


@dataclass(slots=True, eq=False)
class _Flight:
    """A window's keys on their way into staging, for all who want them.

    :ivar buffer: None where they go straight into one load's blocks
    :ivar blamed: that it hangs has been told the breaker, once for all loads
    """

    keys: tuple[BlockKey, ...]
    buffer: StagingBuffer | None
    call: Call[list[Outcome]]
    started: float
    holders: int = 1
    blamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """What one load has of a flight; ``shared`` if another one began it."""

    window: Window
    flight: _Flight
    shared: bool = False
    waited: float = 0.0
    started: float


class _Run:
    """One load while it runs."""

    def __init__(
        self, spec: LoadSpec, windows: tuple[Window, ...], mark: Any, *, direct: bool
    ) -> None:
        self.spec = spec
        self.direct = direct
        self.mark = mark
        self.windows = windows
        self.started = time.monotonic()
        self.state: LoadState = step(
            Probing(), Plan(tuple(len(window) for window in windows))
        )
        self.unread: set[int] = set()
        self.reason = ""
        self.hung: list[_Flight] = []


class LoadPipeline:
    """Carries loads out for one session. Lives on the loop."""

    def __init__(
        self,
        store: BlockStore,
        device: Device,
        staging: BufferPool,
        route: Route,
        *,
        gets: NativePool,
        copies: NativePool,
        breaker: Breaker,
        deadline: float,
        observer: Observer,
    ) -> None:
        self._store = store
        self._device = device
        self._staging = staging
        self._route = route
        self._gets = gets
        self._copies = copies
        self._breaker = breaker
        self._deadline = deadline
        self._observer = observer
        self._flights: dict[tuple[BlockKey, ...], _Flight] = {}

    async def load(self, spec: LoadSpec, mark: Any = None) -> LoadOutcome:
        """Load what ``spec`` names into the engine's blocks, not before ``mark``.

        The store's failures are in the outcome and never raised.

        :raises PlanError: ``spec`` does not fit the geometry; nothing was
            touched

        Cancellation: no further window is begun, a copy into the engine's
        blocks that has begun is waited for, and ``Cancelled`` is raised; the
        blocks' bytes then mean nothing.
        """
        direct = self._route.is_direct()
        windows = self._route.windows(spec.spans, direct=direct)
        run = _Run(spec, windows, mark, direct=direct)
        self._observer.on(
            LoadStarted(
                request_id=spec.request_id,
                load_id=spec.load_id,
                objects=len(spec),
                bytes=sum(window.num_bytes for window in windows),
                deadline=self._deadline,
            )
        )
        try:
            with anyio.move_on_after(self._deadline) as scope:
                await self._transfer(run)
        except (QuarantineFullError, SessionClosedError) as error:
            # The breaker has heard of those calls, each when it was given up.
            run.reason = str(error)
            run.state = step(run.state, Expire(run.reason))
        except BaseException:
            self._observer.on(
                LoadCancelled(
                    request_id=spec.request_id,
                    load_id=spec.load_id,
                    seconds=time.monotonic() - run.started,
                )
            )
            raise
        if scope.cancelled_caught and not is_final(run.state):
            if not all(flight.blamed for flight in run.hung):
                self._breaker.failure("a get did not come back in time")
                for flight in run.hung:
                    flight.blamed = True
            run.reason = f"not landed within {self._deadline:g} s (load_deadline)"
            run.state = step(run.state, Expire(run.reason))
        return self._outcome(run)

    async def _transfer(self, run: _Run) -> None:
        if is_final(run.state):
            return
        if not self._breaker.closed:
            run.reason = "the store does not work and is left alone"
            run.state = step(run.state, Expire(run.reason))
            return
        run.state = step(run.state, Admit())
        run.state = step(run.state, Admit())
        ahead: deque[_Fetch] = deque()
        begun = 0
        try:
            for number, window in enumerate(run.windows):
                if not ahead:
                    ahead.append(await self._begin(run, window))
                    begun = number + 1
                while begun < len(run.windows) and len(ahead) < _FETCHES_AT_ONCE:
                    more = self._begin_nowait(run, run.windows[begun])
                    if more is None:
                        break
                    ahead.append(more)
                    begun += 1
                fetch = ahead.popleft()
                try:
                    bad = await self._fetched(run, number, fetch)
                    run.state = step(run.state, Fetched(bad, run.reason))
                    if isinstance(run.state, Placing):
                        await self._place(run, number, fetch, bad)
                finally:
                    await self._let_go(run, [fetch])
                if is_final(run.state):
                    return
        finally:
            await self._let_go(run, ahead)

    async def _begin(self, run: _Run, window: Window) -> _Fetch:
        asked = time.monotonic()
        fetch = self._begin_nowait(run, window)
        if fetch is not None:
            return fetch
        keys = self._keys(run.spec, window)
        buffer = await self._staging.acquire()
        fetch = self._join(window, keys, asked)
        if fetch is None:
            return self._fetch(window, keys, buffer, asked)
        # Somebody who has waited longer has begun the same.
        self._staging.release(buffer)
        return fetch

    def _begin_nowait(self, run: _Run, window: Window) -> _Fetch | None:
        now = time.monotonic()
        keys = self._keys(run.spec, window)
        if run.direct:
            blocks = self._route.blocks(window)
            call = self._gets.submit(lambda: self._store.get_into(keys, blocks))
            flight = _Flight(keys, None, call, now)
            return _Fetch(window=window, flight=flight, started=now)
        fetch = self._join(window, keys, now)
        if fetch is not None:
            return fetch
        buffer = self._staging.acquire_nowait()
        return None if buffer is None else self._fetch(window, keys, buffer, now)

    def _join(
        self, window: Window, keys: tuple[BlockKey, ...], asked: float
    ) -> _Fetch | None:
        """A part in a fetch of the same keys, if one is under way."""
        flight = self._flights.get(keys)
        now = time.monotonic()
        if flight is None or now - flight.started > _JOIN_SHARE * self._deadline:
            return None
        flight.holders += 1
        return _Fetch(
            window=window, flight=flight, shared=True, waited=now - asked, started=now
        )

    def _fetch(
        self,
        window: Window,
        keys: tuple[BlockKey, ...],
        buffer: StagingBuffer,
        asked: float,
    ) -> _Fetch:
        started = time.monotonic()
        rows = buffer.rows(len(window), window.object_bytes)
        try:
            call = self._gets.submit(
                lambda: self._store.get_into(keys, [row.data for row in rows])
            )
        except BaseException:
            self._staging.release(buffer)
            raise
        flight = self._flights[keys] = _Flight(keys, buffer, call, started)
        return _Fetch(
            window=window, flight=flight, waited=started - asked, started=started
        )

    async def _fetched(self, run: _Run, number: int, fetch: _Fetch) -> frozenset[int]:
        window = fetch.window
        places = range(window.first, window.first + len(window))
        try:
            outcomes: list[Outcome] = list(await fetch.flight.call.wait())
            if len(outcomes) != len(window):
                outcomes = [Failure("the store answered for other keys")] * len(window)
        except Exception as error:  # noqa: BLE001
            unasked = isinstance(error, StoreUnavailableError)
            outcomes = [Failure(sentence(error), unasked=unasked)] * len(window)
        if not fetch.shared:
            self._breaker.heard(outcomes)
        bad = frozenset(
            place
            for place, outcome in zip(places, outcomes, strict=True)
            if outcome is not Status.HIT
        )
        if bad:
            first = outcomes[min(bad) - window.first]
            run.reason = (
                first.reason if isinstance(first, Failure) else "lost after lookup"
            )
            run.unread |= {
                place
                for place, outcome in zip(places, outcomes, strict=True)
                if place in bad
                and not (isinstance(outcome, Failure) and outcome.unasked)
            }
        self._observer.on(
            WindowFetched(
                request_id=run.spec.request_id,
                load_id=run.spec.load_id,
                window=number,
                objects=len(window),
                bytes=0 if fetch.shared else window.num_bytes,
                failed=len(bad),
                shared=fetch.shared,
                wait_seconds=fetch.waited,
                seconds=time.monotonic() - fetch.started,
            )
        )
        return bad

    async def _place(
        self, run: _Run, number: int, fetch: _Fetch, bad: frozenset[int]
    ) -> None:
        buffer = fetch.flight.buffer
        window = fetch.window
        started = time.monotonic()
        if buffer is None:
            self._placed(run, number, len(window) - len(bad), 0.0)
            return
        rows = None
        if bad:
            good = (n for n in range(len(window)) if window.first + n not in bad)
            rows = np.fromiter(good, dtype=np.intp)
        staged = buffer.rows(len(window), window.object_bytes)
        call = self._copies.submit(
            lambda: self._device.scatter(window, staged, rows, run.mark)
        )
        try:
            try:
                await call.wait()
            except anyio.get_cancelled_exc_class():
                if self._copies.withdraw(call):
                    raise
                await call.fence()
                if call.error is None:
                    run.state = step(run.state, Placed(run.reason))
                raise
        except Exception as error:  # noqa: BLE001
            run.reason = sentence(error)
            run.state = step(run.state, Expire(run.reason))
            return
        seconds = time.monotonic() - started
        self._placed(run, number, len(window) - len(bad), seconds)

    def _placed(self, run: _Run, number: int, objects: int, seconds: float) -> None:
        run.state = step(run.state, Placed(run.reason))
        self._observer.on(
            WindowPlaced(
                request_id=run.spec.request_id,
                load_id=run.spec.load_id,
                window=number,
                objects=objects,
                bytes=objects * run.windows[number].object_bytes,
                seconds=seconds,
            )
        )

    async def _let_go(self, run: _Run, fetches: Iterable[_Fetch]) -> None:
        """End this load's part in fetches, and a fetch with the last one's part.

        The end of those that write the engine's blocks is waited for.
        """
        fences: list[Call[list[Outcome]]] = []
        for fetch in fetches:
            flight = fetch.flight
            flight.holders -= 1
            if flight.holders:
                if not flight.call.ended:
                    run.hung.append(flight)
                continue
            ended = self._gets.withdraw(flight.call)
            if not ended:
                run.hung.append(flight)
            if flight.buffer is not None:
                if self._flights.get(flight.keys) is flight:
                    del self._flights[flight.keys]
                self._staging.release_after(flight.buffer, flight.call)
            elif not ended:
                fences.append(flight.call)
        await fence_all(fences)

    def _keys(self, spec: LoadSpec, window: Window) -> tuple[BlockKey, ...]:
        return make_keys(spec.space, window.group, 0, window.hashes)

    def _outcome(self, run: _Run) -> LoadOutcome:
        spec = run.spec
        seconds = time.monotonic() - run.started
        match run.state:
            case Landed(objects):
                self._observer.on(
                    LoadLanded(
                        request_id=spec.request_id,
                        load_id=spec.load_id,
                        objects=objects,
                        bytes=sum(window.num_bytes for window in run.windows),
                        seconds=seconds,
                    )
                )
                return LoadOutcome(
                    spec=spec, failed_blocks=(), failed_hashes=(), reason=""
                )
            case Failed(places, reason):
                blocks = [b for span in spec.spans for b in span.block_ids]
                hashes = [h for span in spec.spans for h in span.hashes]
                self._observer.on(
                    LoadFailed(
                        request_id=spec.request_id,
                        load_id=spec.load_id,
                        objects=len(spec),
                        failed=len(places),
                        reason=reason,
                        seconds=seconds,
                    )
                )
                return LoadOutcome(
                    spec=spec,
                    failed_blocks=tuple(blocks[place] for place in sorted(places)),
                    failed_hashes=tuple(hashes[n] for n in sorted(run.unread)),
                    reason=reason,
                )
            case state:
                raise AkvError(f"a load ended in state {state}")
