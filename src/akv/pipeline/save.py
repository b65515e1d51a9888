"""A save: blocks of the engine into staging, and from there into the store.

The engine's blocks are needed until they have been copied, which is long
before the store has them, so the two ends are told apart. Where the store
reads the blocks itself (see ``route``) both are one, and a put that has begun
is waited for, whatever happens. What the store has
already is not copied again. A put begins only after the one before it has
ended well, and a save only after the one before it of the same chain: when a
block was dropped, nothing behind it is saved, since a prefix with a hole
could never be found.

A save that cannot begin ends at once and gives its blocks back: when the store
is left alone, when it is slow or full and saves are shed, and when too many
wait. What finds no room is tried again a few times. Whoever waits for staging
holds none, so no two saves can each hold what the other needs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from akv.core.errors import DeadlineError, SessionClosedError, sentence
from akv.core.events import (
    Observer,
    SaveCancelled,
    SaveCopied,
    SaveDropped,
    SaveStarted,
    SaveStored,
)
from akv.core.keys import BlockKey, make_keys, short_name
from akv.pipeline.budget import QuarantineFullError
from akv.pipeline.shed import Shedder, Stopwatch
from akv.store.base import BlockStore, Buffer, Failure, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from akv.core.geometry import Geometry
    from akv.core.plan import Window
    from akv.core.spec import SaveSpec
    from akv.device.base import Device
    from akv.pipeline.breaker import Breaker
    from akv.pipeline.budget import BufferPool, StagingBuffer
    from akv.pipeline.native import Call, NativePool
    from akv.pipeline.route import Route

__all__ = ("SaveOutcome", "SavePipeline")

_MOST_CHAINS = 4096
_MOST_WAITING = 512
"""Saves that may wait for staging, or for the one before them, at once."""

_IN_THE_STORE = (Status.STORED, Status.EXISTS)

T = TypeVar("T")


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
    """A window on its way into the store; it owns its buffer until let go.

    :ivar buffer: None where the store reads the engine's blocks
    """

    keys: tuple[BlockKey, ...]
    rows: Sequence[Buffer]
    buffer: StagingBuffer | None
    call: Call[list[Outcome]]
    watch: Stopwatch


class _Run:
    """One save while it runs."""

    def __init__(
        self,
        spec: SaveSpec,
        on_copied: Callable[[], None],
        deadline: float,
        *,
        direct: bool,
    ) -> None:
        self.spec = spec
        self.direct = direct
        self.started = time.monotonic()
        self.expires = self.started + deadline
        self.tail = anyio.Event()
        """Set when the next save of the chain can know whether to begin."""
        self.stored = 0
        self.existed = 0
        self.bytes = 0
        self.reason = ""
        self.put: _Put | None = None
        self.hung = False
        self.first = next((h for span in spec.spans for h in span.hashes), b"")
        """The first block of which it is not known that it is stored."""
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
        route: Route,
        *,
        asks: NativePool,
        puts: NativePool,
        copies: NativePool,
        breaker: Breaker,
        ask_deadline: float,
        deadline: float,
        observer: Observer,
    ) -> None:
        self._store = store
        self._device = device
        self._geometry = geometry
        self._staging = staging
        self._route = route
        self._asks = asks
        self._puts = puts
        self._copies = copies
        self._breaker = breaker
        self._ask_deadline = ask_deadline
        self._deadline = deadline
        self._observer = observer
        self._tails: dict[int, anyio.Event] = {}
        self._broken: OrderedDict[int, None] = OrderedDict()
        self._waiting: set[anyio.CancelScope] = set()
        self._somebody_waits = anyio.Event()
        self._shedder = Shedder(
            url=store.url, observer=observer, on_shed=self._wait_no_longer
        )

    async def watch(self) -> None:
        """Notice puts that do not end, for the saves that wait for them, for ever.

        Without it nobody would: saves that wait hold pins, and an engine that
        has no pins left sends no further save that could look.
        """
        while True:
            await self._somebody_waits.wait()
            self._somebody_waits = anyio.Event()
            while self._waiting:
                await anyio.sleep(self._shedder.marks.pause / 4)
                self._shedder.refusal()

    async def save(
        self, spec: SaveSpec, mark: Any, on_copied: Callable[[], None]
    ) -> SaveOutcome:
        """Save what ``spec`` names, not before ``mark``.

        ``on_copied`` is called once, on the loop, when nothing of this save
        can read the engine's blocks any more, however the save goes on. The
        store's failures are in the outcome and never raised.

        :raises PlanError: ``spec`` does not fit the geometry; ``on_copied``
            has been called

        Cancellation: whatever reads the engine's blocks and has begun is
        waited for; a put from staging is left to itself with its memory in
        quarantine.
        """
        direct = self._route.is_direct()
        run = _Run(spec, on_copied, self._deadline, direct=direct)
        previous = self._tails.get(spec.chain)
        self._tails[spec.chain] = run.tail
        try:
            windows = self._route.windows(spec.spans, direct=direct)
            self._observer.on(
                SaveStarted(
                    request_id=spec.request_id,
                    job_id=spec.job_id,
                    objects=len(spec),
                    bytes=sum(window.num_bytes for window in windows),
                    space=short_name(spec.space),
                    block=short_name(run.first),
                )
            )
            try:
                with anyio.move_on_after(self._deadline) as scope:
                    await self._transfer(run, windows, mark, previous)
            except BaseException:
                self._copied(run)
                self._observer.on(
                    SaveCancelled(
                        request_id=spec.request_id,
                        job_id=spec.job_id,
                        seconds=time.monotonic() - run.started,
                    )
                )
                raise
            if scope.cancelled_caught:
                if run.hung:
                    self._breaker.failure("a put did not come back in time")
                run.reason = run.reason or (
                    f"not stored within {self._deadline:g} s (save_deadline)"
                )
        finally:
            self._copied(run)
            if run.stored + run.existed < len(spec):
                self._break(spec.chain)
            run.tail.set()
            if self._tails.get(spec.chain) is run.tail:
                del self._tails[spec.chain]
        return self._outcome(run)

    async def _transfer(
        self,
        run: _Run,
        windows: tuple[Window, ...],
        mark: Any,
        previous: anyio.Event | None,
    ) -> None:
        try:
            if await self._in_turn(run, previous):
                for window in windows:
                    last = window is windows[-1]
                    if not await self._save_window(run, window, mark, last=last):
                        break
            if not run.direct:
                self._copied(run)
            if run.reason:
                # The next save of the chain need not wait for this one's last put.
                self._break(run.spec.chain)
                run.tail.set()
            await self._finish(run)
        except (QuarantineFullError, SessionClosedError) as error:
            # The breaker has heard of those calls, each when it was given up.
            run.reason = str(error)
        except Exception as error:  # noqa: BLE001
            run.reason = sentence(error)
            self._breaker.failure(run.reason)
        finally:
            if run.put is not None:
                await self._let_go(run, run.put)

    async def _save_window(
        self, run: _Run, window: Window, mark: Any, *, last: bool
    ) -> bool:
        """Put what is missing of ``window`` under way; False to go no further."""
        if run.put is None:
            run.first = window.hashes[0]
        missing = await self._missing(run, window)
        if missing is None:
            return not run.reason
        if run.put is None:
            run.first = missing.hashes[0]
        if run.direct:
            flowing = await self._finish_flowing(run)
            if flowing:
                run.first = missing.hashes[0]
                run.put = self._put(run, missing, None)
            return flowing
        buffer = self._staging.acquire_nowait()
        if buffer is None and await self._finish_flowing(run):
            buffer = await self._while_flowing(run, self._staging.acquire)
        if buffer is None:
            return False
        try:
            await self._gather(missing, buffer, mark)
            if last:
                self._copied(run)
                flowing = await self._finish(run)
            else:
                flowing = await self._finish_flowing(run)
            if not flowing:
                return False
            run.first = missing.hashes[0]
            run.put, buffer = self._put(run, missing, buffer), None
        finally:
            if buffer is not None:
                self._staging.release(buffer)
        return True

    async def _in_turn(self, run: _Run, previous: anyio.Event | None) -> bool:
        """Wait for the save before this one; False if this one is dropped."""
        run.reason = self._shedder.refusal()
        if not run.reason and previous is not None and not previous.is_set():
            await self._while_flowing(run, previous.wait)
        return not run.reason

    async def _while_flowing(
        self, run: _Run, wait: Callable[[], Awaitable[T]]
    ) -> T | None:
        """What ``wait`` gives; None, and a reason, when saves begin to be shed."""
        run.reason = self._shedder.shedding()
        if run.put is None and len(self._waiting) >= _MOST_WAITING:
            run.reason = f"{_MOST_WAITING} saves wait already"
        if run.reason:
            return None
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            self._somebody_waits.set()
            try:
                return await wait()
            finally:
                self._waiting.discard(scope)
        run.reason = self._shedder.shedding() or "saves were shed while it waited"
        return None

    def _wait_no_longer(self) -> None:
        for scope in self._waiting:
            scope.cancel()

    def _refusal(self, run: _Run) -> str:
        """Why no further window of ``run`` may be saved."""
        if run.spec.chain in self._broken:
            return "a block before it was dropped"
        if not self._breaker.closed:
            return "the store does not work and is left alone"
        return self._shedder.admit()

    async def _missing(self, run: _Run, window: Window) -> Window | None:
        run.reason = self._refusal(run)
        if run.reason:
            return None
        keys = make_keys(run.spec.space, window.group, 0, window.hashes)
        outcomes = await self._ask(keys)
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

    async def _ask(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Which of ``keys`` are there; the deadline is the store's alone.

        It begins when the question does: many saves at once, or slow puts, are
        no reason to take the store for dead.
        """
        watch = Stopwatch(0)
        call = self._asks.submit(lambda: watch.time(lambda: self._store.exists(keys)))
        try:
            while not call.ended:
                begun = watch.began is not None
                with anyio.move_on_after(self._ask_deadline):
                    await call.ended_event.wait()
                if begun and not call.ended:
                    raise DeadlineError(
                        f"the store did not answer within {self._ask_deadline:g} s"
                    )
            return await call.wait()
        finally:
            if not self._asks.withdraw(call):
                call.give_up()

    async def _gather(self, window: Window, buffer: StagingBuffer, mark: Any) -> None:
        staged = buffer.rows(len(window), window.object_bytes)
        call = self._copies.submit(lambda: self._device.gather(window, staged, mark))
        try:
            await call.wait()
        except anyio.get_cancelled_exc_class():
            if not self._copies.withdraw(call):
                await call.fence()
            raise

    def _put(self, run: _Run, window: Window, buffer: StagingBuffer | None) -> _Put:
        keys = make_keys(run.spec.space, window.group, 0, window.hashes)
        rows: Sequence[Buffer]
        if buffer is None:
            rows = self._route.blocks(window)
        else:
            rows = [row.data for row in buffer.rows(len(window), window.object_bytes)]
        call, watch = self._submit(keys, rows)
        return _Put(keys, rows, buffer, call, watch)

    def _submit(
        self, keys: Sequence[BlockKey], rows: Sequence[Buffer]
    ) -> tuple[Call[list[Outcome]], Stopwatch]:
        watch = self._shedder.stopwatch(sum(row.nbytes for row in rows))
        call = self._puts.submit(
            lambda: watch.time(lambda: self._store.put_from(keys, rows))
        )
        self._shedder.watch(watch, call)
        return call, watch

    async def _heard(self, put: _Put) -> list[Outcome]:
        outcomes = await put.call.wait()
        self._breaker.heard(outcomes)
        self._shedder.heard(put.watch, outcomes)
        return outcomes

    async def _settled(self, run: _Run, put: _Put) -> list[Outcome]:
        """What became of each key; those without room were tried again."""
        outcomes = await self._heard(put)
        for delay in self._shedder.marks.retries:
            hole = next((o for o in outcomes if o not in _IN_THE_STORE), None)
            late = time.monotonic() + delay > run.expires
            if hole is not Status.NO_ROOM or late or self._shedder.shedding():
                break
            refused = [n for n, o in enumerate(outcomes) if o is Status.NO_ROOM]
            await anyio.sleep(delay)
            if self._shedder.shedding():
                break
            put.call, put.watch = self._submit(
                [put.keys[n] for n in refused], [put.rows[n] for n in refused]
            )
            for n, outcome in zip(refused, await self._heard(put), strict=True):
                outcomes[n] = outcome
        return outcomes

    async def _finish_flowing(self, run: _Run) -> bool:
        """As :meth:`_finish`; when saves begin to be shed, False at once.

        The put is under way still then, and the blocks behind it are free.
        """
        if run.put is not None:
            await self._while_flowing(run, run.put.call.ended_event.wait)
        return not run.reason and await self._finish(run)

    async def _finish(self, run: _Run) -> bool:
        """Wait for the put under way, if any; False if it has left a hole."""
        put, run.put = run.put, None
        if put is None:
            return True
        try:
            outcomes = await self._settled(run, put)
        finally:
            await self._let_go(run, put)
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
                run.first = key[-len(run.first) :]
                run.reason = run.reason or (
                    outcome.reason
                    if isinstance(outcome, Failure)
                    else "no room in the store"
                )
        if behind:
            await self._puts.run(lambda: self._store.remove(behind))
        return not hole

    async def _let_go(self, run: _Run, put: _Put) -> None:
        self._puts.withdraw(put.call)
        run.hung = not put.call.ended
        if put.buffer is None:
            await put.call.fence()
        else:
            self._staging.release_after(put.buffer, put.call)

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
                    request_id=spec.request_id,
                    objects=dropped,
                    reason=run.reason,
                    job_id=spec.job_id,
                    block=short_name(run.first),
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
