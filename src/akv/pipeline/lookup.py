"""Asking a store for the longest prefix that it holds.

Each lookup is one task. It asks in windows that grow, and the windows that
come up in one turn of the loop share one call of the store, so that the
requests of one engine step cost one call and not one each. In that call each
key is asked for once, and who wants to know the same as somebody who has just
asked waits for that answer. A lookup holds no memory of the engine: when its
deadline passes or it is cancelled the waiting stops, and a call that is under
way ends unwatched.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from structlog.contextvars import unbind_contextvars

from akv.core.errors import AkvError, DeadlineError, SessionClosedError
from akv.core.events import (
    LookupAnswered,
    LookupCancelled,
    LookupExpired,
    LookupFailed,
    LookupSkipped,
    LookupStarted,
    Observer,
)
from akv.core.keys import BlockKey, make_keys, short_name
from akv.core.plan import probe_windows
from akv.pipeline.shed import Stopwatch
from akv.store.base import BlockStore, Failure, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from akv.core.spec import LookupSpec
    from akv.pipeline.breaker import Breaker
    from akv.pipeline.native import NativePool

__all__ = ("LookupPipeline", "Unreadable")

_MOST_KEYS = 8192
"""Keys of one call, all lookups of a turn together."""

_JOIN_SHARE = 0.25
"""Part of the deadline for which others may still join a question: who waits for
somebody else's call must have time left for an answer."""


class Unreadable:
    """Keys that were promised and could not be read: misses for some seconds.

    Bounded: beyond ``most`` keys the oldest are forgotten first. Used on the
    loop only.
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        most: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._until: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Remember that ``keys`` could not be read just now."""
        until = self._clock() + self._seconds
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = until
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def __contains__(self, key: BlockKey) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if until < self._clock():
            del self._until[key]
            return False
        return True

    def __len__(self) -> int:
        return len(self._until)


@dataclass(slots=True)
class _Question:
    """Keys that wait for the next call, and what came of them."""

    keys: tuple[BlockKey, ...]
    answered: anyio.Event
    asked: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] | None = None
    error: AkvError | None = None


class LookupPipeline:
    """Answers lookups of one session. Lives on the loop."""

    def __init__(
        self,
        store: BlockStore,
        pool: NativePool,
        tasks: anyio.abc.TaskGroup,
        *,
        breaker: Breaker,
        deadline: float,
        observer: Observer,
    ) -> None:
        self._breaker = breaker
        self._store = store
        self._pool = pool
        self._tasks = tasks
        self._deadline = deadline
        self._observer = observer
        self._pending: deque[_Question] = deque()
        self._open: dict[tuple[BlockKey, BlockKey], _Question] = {}
        self._asking = False
        self.unreadable = Unreadable()

    async def lookup(self, spec: LookupSpec) -> int:
        """How many blocks from ``spec.first_block`` on are there, without a gap.

        Blocks that the rounding rule could never use are not asked for. A
        store that fails, or the deadline, ends the lookup with what is known
        so far: a lookup never raises for the store's sake.

        Cancellation: stops the waiting; nothing stays behind.
        """
        started = time.monotonic()
        last = min(len(spec.hashes), spec.askable_blocks)
        if last <= spec.first_block:
            return 0
        if not self._breaker.closed:
            self._observer.on(
                LookupSkipped(
                    request_id=spec.request_id,
                    reason="the store does not work and is left alone",
                )
            )
            return 0
        self._observer.on(
            LookupStarted(
                request_id=spec.request_id,
                first_block=spec.first_block,
                blocks=last - spec.first_block,
                space=short_name(spec.space),
            )
        )
        found = 0
        try:
            with anyio.fail_after(self._deadline):
                for window in probe_windows(spec.first_block, last):
                    keys = make_keys(
                        spec.space,
                        spec.group,
                        0,
                        spec.hashes[window.start : window.stop],
                    )
                    leading, failure = self._leading(keys, await self._ask(keys))
                    found += leading
                    if failure is not None:
                        raise _StoreFailedError(failure)
                    if leading < len(window):
                        break
        except (TimeoutError, DeadlineError):
            self._observer.on(
                LookupExpired(
                    request_id=spec.request_id, found=found, deadline=self._deadline
                )
            )
        except AkvError as error:
            self._observer.on(
                LookupFailed(
                    request_id=spec.request_id,
                    found=found,
                    reason=str(error),
                    seconds=time.monotonic() - started,
                )
            )
        except BaseException:
            self._observer.on(
                LookupCancelled(
                    request_id=spec.request_id, seconds=time.monotonic() - started
                )
            )
            raise
        else:
            end = spec.first_block + found
            self._observer.on(
                LookupAnswered(
                    request_id=spec.request_id,
                    first_block=spec.first_block,
                    found=found,
                    seconds=time.monotonic() - started,
                    missed=short_name(spec.hashes[end] if end < last else b""),
                )
            )
        return found

    def _leading(
        self, keys: Sequence[BlockKey], outcomes: list[Outcome]
    ) -> tuple[int, str | None]:
        if not len(self.unreadable) and outcomes.count(Status.HIT) == len(keys):
            return len(keys), None
        for count, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if isinstance(outcome, Failure):
                return count, outcome.reason
            if outcome is not Status.HIT or key in self.unreadable:
                return count, None
        return len(keys), None

    async def _ask(self, keys: tuple[BlockKey, ...]) -> list[Outcome]:
        ends = keys[0], keys[-1]
        question = self._open.get(ends)
        if (
            question is None
            or question.keys != keys
            or time.monotonic() - question.asked > _JOIN_SHARE * self._deadline
        ):
            question = self._open[ends] = _Question(keys, anyio.Event())
            self._pending.append(question)
            if not self._asking:
                try:
                    self._tasks.start_soon(self._ask_all)
                except RuntimeError as error:  # the session's tasks have ended
                    ended = SessionClosedError("the session has ended")
                    self._fail([self._pending.pop()], ended)
                    raise ended from error
                self._asking = True
        await question.answered.wait()
        if question.error is not None:
            raise question.error
        assert question.outcomes is not None
        return question.outcomes

    async def _ask_all(self) -> None:
        unbind_contextvars("request_id")  # it asks for several requests at once
        try:
            while self._pending:
                batch: list[_Question] = []
                size = 0
                while self._pending and (
                    not batch or size + len(self._pending[0].keys) <= _MOST_KEYS
                ):
                    batch.append(self._pending.popleft())
                    size += len(batch[-1].keys)
                self._tasks.start_soon(self._answer, batch)
                await anyio.lowlevel.checkpoint()
        finally:
            self._asking = False
            # Of a session that ends: nobody shall wait for his deadline.
            self._fail(self._pending, SessionClosedError("the session ends"))
            self._pending.clear()

    async def _answer(self, batch: list[_Question]) -> None:
        keys: Sequence[BlockKey] = batch[0].keys
        if len(batch) > 1:
            keys = list(dict.fromkeys(key for one in batch for key in one.keys))
        outcomes: list[Outcome] = []
        failure: AkvError | None = None
        watch = Stopwatch(0)
        only_queued = False
        try:
            with anyio.fail_after(self._deadline):
                outcomes = list(
                    await self._pool.run(
                        lambda: watch.time(
                            lambda: self._store.exists(keys, promise=True)
                        )
                    )
                )
        except TimeoutError:
            # Of a call that only queued nobody knows what the store would say.
            only_queued = watch.began is None
            failure = DeadlineError(f"no answer within {self._deadline:g} s")
        except AkvError as error:
            failure = error
        except Exception as error:  # noqa: BLE001
            failure = _StoreFailedError(f"{type(error).__name__}: {error}")
        except BaseException:
            self._fail(batch, SessionClosedError("the session ends"))
            raise
        if failure is not None:
            if not only_queued:
                self._breaker.failure(str(failure))
            self._fail(batch, failure)
            return
        if len(outcomes) != len(keys):
            outcomes = [Failure("the store answered for other keys")] * len(keys)
        self._breaker.heard(outcomes)
        if len(batch) == 1:
            batch[0].outcomes = outcomes
        else:
            by_key = dict(zip(keys, outcomes, strict=True))
            for question in batch:
                question.outcomes = [by_key[key] for key in question.keys]
        for question in batch:
            self._answered(question)

    def _fail(self, questions: Iterable[_Question], error: AkvError) -> None:
        for question in questions:
            question.error = error
            self._answered(question)

    def _answered(self, question: _Question) -> None:
        ends = question.keys[0], question.keys[-1]
        if self._open.get(ends) is question:
            del self._open[ends]
        question.answered.set()


class _StoreFailedError(AkvError):
    """The store answered a lookup with a failure."""
