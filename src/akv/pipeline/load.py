"""A load: windows from the store into staging, from there into the blocks.

While one window is placed the next one is fetched. Between windows a
cancellation or the deadline acts; in the middle of one, the fetch is left to
itself with its staging memory in quarantine, and the copy into the engine's
blocks is waited for, since it alone touches memory that the engine will use
again. So when ``load`` has ended, however it ended, nothing of akv's touches
the engine's blocks any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from akv.core.errors import AkvError
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
from akv.core.plan import Window, transfer_windows
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
from akv.store.base import BlockStore, Failure, Outcome, Status

if TYPE_CHECKING:
    from akv.core.geometry import Geometry
    from akv.core.spec import LoadSpec
    from akv.device.base import Device
    from akv.pipeline.breaker import Breaker
    from akv.pipeline.budget import BufferPool, StagingBuffer
    from akv.pipeline.native import Call, NativePool

__all__ = ("LoadOutcome", "LoadPipeline")


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


@dataclass(slots=True)
class _Fetch:
    """A window on its way into a buffer."""

    window: Window
    buffer: StagingBuffer
    call: Call[list[Outcome]]
    waited: float
    started: float


class _Run:
    """One load while it runs."""

    def __init__(self, spec: LoadSpec, windows: tuple[Window, ...], mark: Any) -> None:
        self.spec = spec
        self.mark = mark
        self.windows = windows
        self.started = time.monotonic()
        self.state: LoadState = step(
            Probing(), Plan(tuple(len(window) for window in windows))
        )
        self.unread: set[int] = set()
        self.reason = ""
        self.hung = False


class LoadPipeline:
    """Carries loads out for one session. Lives on the loop."""

    def __init__(
        self,
        store: BlockStore,
        device: Device,
        geometry: Geometry,
        staging: BufferPool,
        *,
        gets: NativePool,
        copies: NativePool,
        breaker: Breaker,
        deadline: float,
        window_bytes: int,
        observer: Observer,
    ) -> None:
        self._store = store
        self._device = device
        self._geometry = geometry
        self._staging = staging
        self._gets = gets
        self._copies = copies
        self._breaker = breaker
        self._deadline = deadline
        self._window_bytes = window_bytes
        self._observer = observer

    async def load(self, spec: LoadSpec, mark: Any = None) -> LoadOutcome:
        """Load what ``spec`` names into the engine's blocks, not before ``mark``.

        The store's failures are in the outcome and never raised.

        :raises PlanError: ``spec`` does not fit the geometry; nothing was
            touched

        Cancellation: no further window is begun, a copy into the engine's
        blocks that has begun is waited for, and ``Cancelled`` is raised; the
        blocks' bytes then mean nothing.
        """
        windows = transfer_windows(
            spec.spans,
            self._geometry,
            max_bytes=self._window_bytes,
            max_objects=1024,
        )
        run = _Run(spec, windows, mark)
        self._observer.on(
            LoadStarted(
                request_id=spec.request_id,
                load_id=spec.load_id,
                objects=len(spec),
                bytes=sum(window.num_bytes for window in windows),
            )
        )
        try:
            with anyio.move_on_after(self._deadline) as scope:
                await self._transfer(run)
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
            if run.hung:
                self._breaker.failure("a get did not come back in time")
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
        ahead: _Fetch | None = None
        try:
            for number, window in enumerate(run.windows):
                fetch, ahead = ahead or await self._begin(run, window), None
                try:
                    bad = await self._fetched(run, number, fetch)
                    run.state = step(run.state, Fetched(bad, run.reason))
                    if not bad and number + 1 < len(run.windows):
                        ahead = self._begin_nowait(run, run.windows[number + 1])
                    if isinstance(run.state, Placing):
                        await self._place(run, number, fetch, bad)
                finally:
                    self._let_go(run, fetch)
                if is_final(run.state):
                    return
        finally:
            if ahead is not None:
                self._let_go(run, ahead)

    async def _begin(self, run: _Run, window: Window) -> _Fetch:
        asked = time.monotonic()
        return self._fetch(run, window, await self._staging.acquire(), asked)

    def _begin_nowait(self, run: _Run, window: Window) -> _Fetch | None:
        buffer = self._staging.acquire_nowait()
        if buffer is None:
            return None
        return self._fetch(run, window, buffer, time.monotonic())

    def _fetch(
        self, run: _Run, window: Window, buffer: StagingBuffer, asked: float
    ) -> _Fetch:
        started = time.monotonic()
        keys = self._keys(run.spec, window)
        rows = buffer.rows(len(window), window.object_bytes)
        try:
            call = self._gets.submit(
                lambda: self._store.get_into(keys, [row.data for row in rows])
            )
        except BaseException:
            self._staging.release(buffer)
            raise
        return _Fetch(window, buffer, call, started - asked, started)

    async def _fetched(self, run: _Run, number: int, fetch: _Fetch) -> frozenset[int]:
        window = fetch.window
        places = range(window.first, window.first + len(window))
        try:
            outcomes: list[Outcome] = await fetch.call.wait()
            if len(outcomes) != len(window):
                outcomes = [Failure("the store answered for other keys")] * len(window)
        except Exception as error:  # noqa: BLE001
            outcomes = [Failure(_sentence(error))] * len(window)
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
            run.unread |= bad
        self._observer.on(
            WindowFetched(
                request_id=run.spec.request_id,
                load_id=run.spec.load_id,
                window=number,
                objects=len(window),
                bytes=window.num_bytes,
                failed=len(bad),
                wait_seconds=fetch.waited,
                seconds=time.monotonic() - fetch.started,
            )
        )
        return bad

    async def _place(
        self, run: _Run, number: int, fetch: _Fetch, bad: frozenset[int]
    ) -> None:
        window = fetch.window
        started = time.monotonic()
        rows = None
        if bad:
            good = (n for n in range(len(window)) if window.first + n not in bad)
            rows = np.fromiter(good, dtype=np.intp)
        staged = fetch.buffer.rows(len(window), window.object_bytes)
        call = self._copies.submit(
            lambda: self._device.scatter(window, staged, rows, run.mark)
        )
        try:
            try:
                await call.wait()
            except anyio.get_cancelled_exc_class():
                if self._copies.withdraw(call):
                    raise
                with anyio.CancelScope(shield=True):
                    await call.wait()
                run.state = step(run.state, Placed(run.reason))
                raise
        except Exception as error:  # noqa: BLE001
            run.reason = _sentence(error)
            run.state = step(run.state, Expire(run.reason))
            return
        run.state = step(run.state, Placed(run.reason))
        self._observer.on(
            WindowPlaced(
                request_id=run.spec.request_id,
                load_id=run.spec.load_id,
                window=number,
                objects=len(window) - len(bad),
                bytes=(len(window) - len(bad)) * window.object_bytes,
                seconds=time.monotonic() - started,
            )
        )

    def _let_go(self, run: _Run, fetch: _Fetch) -> None:
        run.hung |= not self._gets.withdraw(fetch.call)
        self._staging.release_after(fetch.buffer, fetch.call)

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


def _sentence(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, AkvError) else f"{type(error).__name__}: {text}"
