"""A save: blocks of the engine into staging, and from there into the store.

The engine's blocks are needed until they have been copied, which is long
before the store has them, so the two ends are told apart. What the store has
already is not copied again. A put begins only after the one before it has
ended well, and a save only after the one before it of the same chain: when a
block was dropped, nothing behind it is saved, since a prefix with a hole
could never be found.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from akv.core.errors import AkvError, DeadlineError
from akv.core.events import Observer, SaveCopied, SaveDropped, SaveStarted, SaveStored
from akv.core.keys import BlockKey, make_keys
from akv.core.plan import Window, transfer_windows
from akv.store.base import BlockStore, Failure, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv.core.geometry import Geometry
    from akv.core.spec import SaveSpec
    from akv.device.base import Device
    from akv.pipeline.breaker import Breaker
    from akv.pipeline.budget import BufferPool, StagingBuffer
    from akv.pipeline.native import Call, NativePool

__all__ = ("SaveOutcome", "SavePipeline")

_MOST_CHAINS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """What became of a save: each object is stored, was there, or dropped."""

    spec: SaveSpec
    stored: int
    existed: int
    dropped: int
    reason: str


@dataclass(slots=True)
class _Put:
    """A window on its way into the store."""

    keys: tuple[BlockKey, ...]
    call: Call[list[Outcome]]


class _Run:
    """One save while it runs."""

    def __init__(self, spec: SaveSpec, on_copied: Callable[[], None]) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self.stored = 0
        self.existed = 0
        self.bytes = 0
        self.reason = ""
        self.hung = False
        self._on_copied: Callable[[], None] | None = on_copied

    def copied(self) -> bool:
        """Tell, the first time only, that the engine's blocks are free."""
        callback, self._on_copied = self._on_copied, None
        if callback is None:
            return False
        callback()
        return True


class SavePipeline:
    """Carries saves out for one session. Lives on the loop."""

    def __init__(
        self,
        store: BlockStore,
        device: Device,
        geometry: Geometry,
        staging: BufferPool,
        *,
        puts: NativePool,
        copies: NativePool,
        breaker: Breaker,
        ask_deadline: float,
        deadline: float,
        window_bytes: int,
        observer: Observer,
    ) -> None:
        self._store = store
        self._device = device
        self._geometry = geometry
        self._staging = staging
        self._puts = puts
        self._copies = copies
        self._breaker = breaker
        self._ask_deadline = ask_deadline
        self._deadline = deadline
        self._window_bytes = window_bytes
        self._observer = observer
        self._tails: dict[int, anyio.Event] = {}
        self._broken: OrderedDict[int, None] = OrderedDict()

    async def save(
        self, spec: SaveSpec, mark: Any, on_copied: Callable[[], None]
    ) -> SaveOutcome:
        """Save what ``spec`` names, not before ``mark``.

        ``on_copied`` is called once, on the loop, when nothing of this save
        can read the engine's blocks any more, however the save goes on. The
        store's failures are in the outcome and never raised.

        :raises PlanError: ``spec`` does not fit the geometry; ``on_copied``
            has been called

        Cancellation: a copy out of the engine's blocks that has begun is
        waited for, a put is left to itself with its memory in quarantine.
        """
        run = _Run(spec, on_copied)
        previous = self._tails.get(spec.chain)
        tail = self._tails[spec.chain] = anyio.Event()
        try:
            windows = transfer_windows(
                spec.spans,
                self._geometry,
                max_bytes=self._window_bytes,
                max_objects=1024,
            )
            self._observer.on(
                SaveStarted(
                    request_id=spec.request_id,
                    job_id=spec.job_id,
                    objects=len(spec),
                    bytes=sum(window.num_bytes for window in windows),
                )
            )
            with anyio.move_on_after(self._deadline) as scope:
                await self._transfer(run, windows, mark, previous)
            if scope.cancelled_caught and not run.reason:
                if run.hung:
                    self._breaker.failure("a put did not come back in time")
                run.reason = f"not stored within {self._deadline:g} s (save_deadline)"
        finally:
            self._copied(run)
            if run.stored + run.existed < len(spec):
                self._break(spec.chain)
            tail.set()
            if self._tails.get(spec.chain) is tail:
                del self._tails[spec.chain]
        return self._outcome(run)

    async def _transfer(
        self,
        run: _Run,
        windows: tuple[Window, ...],
        mark: Any,
        previous: anyio.Event | None,
    ) -> None:
        put: _Put | None = None
        try:
            if previous is not None:
                await previous.wait()
            for window in windows:
                if run.spec.chain in self._broken:
                    run.reason = "a block before it was dropped"
                    return
                if not self._breaker.closed:
                    run.reason = "the store does not work and is left alone"
                    return
                missing = await self._missing(run, window)
                if run.reason:
                    return
                if not missing:
                    continue
                buffer = await self._staging.acquire()
                handed_over = False
                try:
                    await self._gather(missing, buffer, mark)
                    if window is windows[-1]:
                        self._copied(run)
                    done, put = put, None
                    if done is not None and not await self._finished(run, done):
                        return
                    put = self._put(run, missing, buffer)
                    handed_over = True
                finally:
                    if not handed_over:
                        self._staging.release(buffer)
            self._copied(run)
            done, put = put, None
            if done is not None:
                await self._finished(run, done)
        except AkvError as error:
            run.reason = str(error)
            self._breaker.failure(run.reason)
        except Exception as error:  # noqa: BLE001
            run.reason = f"{type(error).__name__}: {error}"
            self._breaker.failure(run.reason)
        finally:
            if put is not None:
                self._let_go(put)
                run.hung = not put.call.ended

    async def _missing(self, run: _Run, window: Window) -> Window | None:
        keys = make_keys(run.spec.space, window.group, 0, window.hashes)
        try:
            with anyio.fail_after(self._ask_deadline):
                outcomes = await self._puts.run(lambda: self._store.exists(keys))
        except TimeoutError as error:
            msg = f"the store did not answer within {self._ask_deadline:g} s"
            raise DeadlineError(msg) from error
        self._breaker.heard(outcomes)
        if len(outcomes) != len(keys):
            run.reason = "the store answered for other keys"
            return None
        rows: list[int] = []
        for row, outcome in enumerate(outcomes):
            if outcome is Status.HIT:
                run.existed += 1
            elif isinstance(outcome, Failure):
                run.reason = outcome.reason
                return None
            else:
                rows.append(row)
        if not rows:
            return None
        return replace(
            window,
            hashes=tuple(window.hashes[row] for row in rows),
            block_ids=tuple(window.block_ids[row] for row in rows),
        )

    async def _gather(self, window: Window, buffer: StagingBuffer, mark: Any) -> None:
        staged = buffer.rows(len(window), window.object_bytes)
        call = self._copies.submit(lambda: self._device.gather(window, staged, mark))
        try:
            await call.wait()
        except anyio.get_cancelled_exc_class():
            if not self._copies.withdraw(call):
                with anyio.CancelScope(shield=True):
                    await call.wait()
            raise

    def _put(self, run: _Run, window: Window, buffer: StagingBuffer) -> _Put:
        keys = make_keys(run.spec.space, window.group, 0, window.hashes)
        rows = buffer.rows(len(window), window.object_bytes)
        call = self._puts.submit(
            lambda: self._store.put_from(keys, [row.data for row in rows])
        )
        self._staging.release_at_end(buffer, call)
        return _Put(keys, call)

    async def _finished(self, run: _Run, put: _Put) -> bool:
        try:
            outcomes = await put.call.wait()
        finally:
            self._let_go(put)
            run.hung = not put.call.ended
        self._breaker.heard(outcomes)
        hole = False
        behind: list[BlockKey] = []
        for key, outcome in zip(put.keys, outcomes, strict=True):
            if hole:
                if outcome is Status.STORED:
                    behind.append(key)
            elif outcome is Status.STORED:
                run.stored += 1
                run.bytes += self._geometry.slot_bytes
            elif outcome is Status.EXISTS:
                run.existed += 1
            else:
                hole = True
                run.reason = (
                    outcome.reason
                    if isinstance(outcome, Failure)
                    else "no room in the store"
                )
        if behind:
            await self._puts.run(lambda: self._store.remove(behind))
        return not hole

    def _let_go(self, put: _Put) -> None:
        self._puts.withdraw(put.call)
        self._staging.quarantine(put.call)

    def _copied(self, run: _Run) -> None:
        if run.copied():
            self._observer.on(
                SaveCopied(
                    request_id=run.spec.request_id,
                    job_id=run.spec.job_id,
                    seconds=time.monotonic() - run.started,
                )
            )

    def _break(self, chain: int) -> None:
        self._broken[chain] = None
        if len(self._broken) > _MOST_CHAINS:
            self._broken.popitem(last=False)

    def _outcome(self, run: _Run) -> SaveOutcome:
        spec = run.spec
        dropped = len(spec) - run.stored - run.existed
        if dropped:
            self._observer.on(
                SaveDropped(
                    request_id=spec.request_id, objects=dropped, reason=run.reason
                )
            )
        if run.stored or run.existed or not dropped:
            self._observer.on(
                SaveStored(
                    request_id=spec.request_id,
                    job_id=spec.job_id,
                    stored=run.stored,
                    existed=run.existed,
                    bytes=run.bytes,
                    seconds=time.monotonic() - run.started,
                )
            )
        return SaveOutcome(
            spec=spec,
            stored=run.stored,
            existed=run.existed,
            dropped=dropped,
            reason=run.reason,
        )
