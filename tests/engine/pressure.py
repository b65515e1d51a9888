"""Pressure: stores that are slow, hang and fail, and clients that hang up all the time.

``Trouble`` decides what happens to each call of a store; ``through`` puts it between
an engine's two roles and whatever store they open. ``run_pressure`` keeps a crowd of
requests alive and gives most of them up at random moments: while their lookup is
asked, while their load waits, is fetched or lands, while they prefill, decode, or are
being saved. ``holdings`` counts everything bounded that an engine holds, so that the
end can be compared with the beginning.

Nothing is waited for by sleeping: a call that is delayed waits for an event, which
``Trouble.calm`` sets when a test has seen enough.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import numpy as np

from akv.core.errors import StoreError
from akv.store import open_store
from akv.store.base import Failure, RegistersMemory, Status
from akv.testing.stores import WrappedStore
from engine.errors import LeakError, StallError
from engine.worker import InlineWorker
from engine.workload import Forest, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import BlockStore, Buffer, Outcome
    from engine.engine import Engine

__all__ = [
    "ROUGH",
    "Faults",
    "Pressure",
    "PressureReport",
    "Trouble",
    "holdings",
    "percentile",
    "process_holdings",
    "run_pressure",
    "seed_store",
    "settle",
    "through",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What may happen to a call of a store; all but ``latency`` are chances.

    Attributes:
        latency: each call takes up to so many seconds longer, evenly spread.
        hang: a call takes ``hang_seconds`` and is then carried out all the same, so
            that it writes into memory that nobody waits for any more.
        error: a call raises ``StoreError``.
        short: a get brings the first half of one object and says that it failed.
        put_rate: puts, and no others, take as long as so many bytes a second mean; 0
            for as fast as they are.
    """

    latency: float = 0.0
    hang: float = 0.0
    hang_seconds: float = 60.0
    error: float = 0.0
    short: float = 0.0
    put_rate: float = 0.0


_IDLE_SECONDS = 0.001

ROUGH = Faults(latency=0.5, hang=0.01, hang_seconds=60.0, error=0.02, short=0.01)
"""A store on a bad day."""


class Trouble:
    """What happens to the calls of all stores of one engine. Thread safe.

    Attributes:
        faults: in force for calls that come from now on; begins with none.
        verbs: the calls that faults happen to.
        happened: how often each fault happened, and how many calls there were.
    """

    def __init__(self, seed: int) -> None:
        self.faults = Faults()
        self.verbs = frozenset({"exists", "get_into", "put_from"})
        self.happened: Counter[str] = Counter()
        self.hanging = 0
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._calm = threading.Event()

    def calm(self) -> None:
        """Let all that is delayed go on, and delay nothing more."""
        self.faults = Faults()
        self._calm.set()

    def begin(self, faults: Faults) -> None:
        """From now on let these faults happen."""
        self._calm.clear()
        self.faults = faults

    def wrap(self, store: BlockStore) -> BlockStore:
        """``store``, with trouble before it."""
        if isinstance(store, RegistersMemory):
            return _TroubledPool(store, self)
        return _TroubledStore(store, self)

    def before(self, verb: str) -> Faults:
        """Delay or refuse a call, as the dice say.

        Raises:
            StoreError: the call fails.
        """
        if verb not in self.verbs:
            return Faults()
        faults = self.faults
        with self._lock:
            self.happened[verb] += 1
            hangs, fails = (
                self._dice.random() < chance for chance in (faults.hang, faults.error)
            )
            seconds = self._dice.random() * faults.latency
            self.happened["hang"] += hangs
            self.happened["error"] += fails
            self.hanging += hangs
        if hangs:
            seconds += faults.hang_seconds
        if seconds:
            self._calm.wait(seconds)
        if hangs:
            with self._lock:
                self.hanging -= 1
        if fails:
            raise StoreError("the line is bad")
        return faults

    def after_put(self, faults: Faults, outcomes: Sequence[Outcome], size: int) -> None:
        """A put of ``size`` bytes is done, but for what a slow line adds."""
        if faults.put_rate:
            self._calm.wait(size / faults.put_rate)
        with self._lock:
            self.happened["objects stored"] += outcomes.count(Status.STORED)

    def cut(self, faults: Faults, objects: int) -> int | None:
        """Which object of a get comes in half, if one does."""
        with self._lock:
            if self._dice.random() >= faults.short:
                return None
            self.happened["short"] += 1
            return self._dice.randrange(objects)


class _TroubledStore(WrappedStore):
    """Asks ``Trouble`` before each call.

    It is not one that moves directly: its calls hang, and a direct transfer's report
    waits for the call.
    """

    def __init__(self, inner: BlockStore, trouble: Trouble) -> None:
        super().__init__(inner)
        self._trouble = trouble

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        self._trouble.before("exists")
        return super().exists(keys, promise=promise)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        faults = self._trouble.before("get_into")
        outcomes = super().get_into(keys, buffers)
        place = self._trouble.cut(faults, len(keys))
        if place is not None:
            buffer = buffers[place]
            assert isinstance(buffer, memoryview), "trouble is for staged transfers"
            half = buffer.nbytes // 2
            buffer[half:] = bytes([0xEE]) * (buffer.nbytes - half)
            outcomes[place] = Failure(f"{half} of {buffer.nbytes} bytes came")
        return outcomes

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        faults = self._trouble.before("put_from")
        outcomes = super().put_from(keys, buffers)
        size = sum(buffer.nbytes for buffer in buffers)
        self._trouble.after_put(faults, outcomes, size)
        return outcomes


class _TroubledPool(_TroubledStore):
    """The same for a store that wants to know the memory."""

    def register(self, memory: memoryview) -> None:
        assert isinstance(self.inner, RegistersMemory)
        self.inner.register(memory)

    def unregister(self, memory: memoryview) -> None:
        assert isinstance(self.inner, RegistersMemory)
        self.inner.unregister(memory)


@contextmanager
def through(trouble: Trouble) -> Iterator[None]:
    """Whatever store is opened in this block has ``trouble`` before it."""

    def wrapped(*args: Any, **options: Any) -> BlockStore:
        return trouble.wrap(open_store(*args, **options))

    with patch("akv.session.open_store", wrapped):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How hard the clients press.

    Attributes:
        aborts: give up so many requests, then let the others end.
        live: at most so many requests are alive at once.
        burst: so many requests come together, as one lookup can ask for them.
        pace: seconds from one burst to the next, at least; a store that is left alone
            would let them end within milliseconds.
        doomed: the share of requests that will be given up.
        hurry: a request is given up so many seconds after its arrival or the start of
            its load, at most and mostly sooner, or after some of its tokens.
        resets: the chance of each step that the prefix cache is reset.
        on_step: called after each step.
    """

    aborts: int = 300
    live: int = 32
    burst: int = 12
    pace: float = 0.15
    doomed: float = 0.75
    hurry: float = 0.6
    resets: float = 0.02
    timeout: float = 120.0
    on_step: Callable[[], None] = lambda: None
    traffic: Workload = field(
        default_factory=lambda: Workload(roots=12, max_tokens=12, depth=4)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureReport:
    """What happened.

    Attributes:
        aborted: how many requests were given up, by what they were doing.
        finished: how many ended by themselves.
        loads, loads_landed, loads_failed, loads_aborted: what became of the loads; one
            that was given up may also have failed.
        load_seconds: from taking a load to its report, given up or not.
        abort_seconds: from an abort to the report of the load that it left open.
        lookup_seconds: how long each lookup kept its request waiting.
    """

    seconds: float
    steps: int
    aborted: Counter[str]
    finished: int
    loads: int
    loads_landed: int
    loads_failed: int
    loads_aborted: int
    load_seconds: tuple[float, ...]
    abort_seconds: tuple[float, ...]
    lookup_seconds: tuple[float, ...]


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of ``values``; 0 of none."""
    return float(np.percentile(values, percent)) if values else 0.0


def seed_store(engine: Engine, seed: int, pressure: Pressure) -> None:
    """Let an undisturbed engine compute and save all branches that will be asked."""
    forest = Forest(engine, seed, pressure.traffic, random.Random(seed))
    # A request at a time, so that no save is dropped for want of room.
    for number, prompt in enumerate(forest.longest()):
        engine.add_request([*prompt, 0], 1, f"seed-{seed}-{number}")
        engine.run()
        engine.idle_until_quiet()
    engine.assert_clean(grace=30)


def run_pressure(engine: Engine, seed: int, pressure: Pressure) -> PressureReport:
    """Press until enough requests were given up, then let the others end.

    The tokens of all requests are checked here; that the engine is clean is not, since
    a call that hangs is allowed to keep its staging until it ends.

    Raises:
        HarnessError: any of them, with a note that names the seed.
    """
    crowd = _Crowd(engine, seed, pressure)
    try:
        return crowd.run()
    except Exception as error:
        error.add_note(f"seed {seed}, step {engine.steps}, {engine.config}")
        raise


@dataclass(slots=True)
class _Doom:
    """When a request will be given up: so long after something, or at a token."""

    after: Literal["arrival", "load", "token"]
    seconds: float
    token: int
    during_step: bool
    since: float | None = None


class _Crowd:
    def __init__(self, engine: Engine, seed: int, pressure: Pressure) -> None:
        self._engine = engine
        self._seed = seed
        self._pressure = pressure
        self._dice = random.Random(seed)
        self._forest = Forest(engine, seed, pressure.traffic, self._dice)
        self._dooms: dict[str, _Doom] = {}
        self._aborted: Counter[str] = Counter()
        self._names: set[str] = set()
        self._live: list[str] = []
        self._arrived = 0
        self._next_burst = 0.0

    def run(self) -> PressureReport:
        engine, pressure = self._engine, self._pressure
        started, steps = time.monotonic(), engine.steps
        waited = len(engine.monitor.lookup_seconds)
        while self._aborted.total() < pressure.aborts:
            self._arrive()
            self._hang_up()
            if self._dice.random() < pressure.resets:
                engine.reset_prefix_cache()
            self._step()
            if time.monotonic() - started > pressure.timeout:
                raise StallError(
                    f"{self._aborted.total()} of {pressure.aborts} requests given up "
                    f"in {pressure.timeout} s"
                )
        while engine.has_work():
            self._step()
        engine.assert_outputs()
        loads = [one for one in engine.monitor.reported if self._mine(one.request_id)]
        self._aborted["load landed in the same step"] += sum(
            one.same_step for one in loads
        )
        reasons = [engine.finish_reasons[name] for name in self._names]
        return PressureReport(
            seconds=time.monotonic() - started,
            steps=engine.steps - steps,
            aborted=self._aborted,
            finished=len(reasons) - reasons.count("abort"),
            loads=len(loads),
            loads_landed=sum(
                not one.failed and one.since_abort is None for one in loads
            ),
            loads_failed=sum(one.failed for one in loads),
            loads_aborted=sum(one.since_abort is not None for one in loads),
            load_seconds=tuple(one.seconds for one in loads),
            abort_seconds=tuple(
                one.since_abort for one in loads if one.since_abort is not None
            ),
            lookup_seconds=tuple(engine.monitor.lookup_seconds[waited:]),
        )

    def _mine(self, request_id: str) -> bool:
        return request_id in self._names

    def _step(self) -> None:
        if self._engine.has_work():
            self._engine.run_steps(1)
        else:
            # As an engine that is idle between two requests.
            self._engine.step_empty()
            time.sleep(_IDLE_SECONDS)
        self._live = [
            name for name in self._live if name not in self._engine.finish_reasons
        ]
        self._pressure.on_step()

    def _arrive(self) -> None:
        pressure, engine = self._pressure, self._engine
        now = time.monotonic()
        if len(self._live) + pressure.burst > pressure.live or now < self._next_burst:
            return
        self._next_burst = now + pressure.pace
        for _ in range(pressure.burst):
            name = f"p{self._seed}-{self._arrived}"
            self._arrived += 1
            doomed = self._dice.random() < pressure.doomed
            at_once = doomed and self._dice.random() < 0.01
            tokens = self._dice.randint(2, pressure.traffic.max_tokens)
            engine.add_request(
                self._forest.prompt(),
                tokens,
                name,
                cache_salt="tenant" if self._dice.random() < 0.05 else None,
                abort_immediately=at_once,
            )
            self._names.add(name)
            if at_once:
                self._aborted["just arrived"] += 1
                continue
            self._live.append(name)
            if doomed:
                self._dooms[name] = _Doom(
                    after=self._dice.choice(("arrival", "load", "token")),
                    seconds=self._dice.random() ** 3 * pressure.hurry,
                    token=self._dice.randint(1, tokens - 1),
                    during_step=self._dice.random() < 0.5,
                )

    def _hang_up(self) -> None:
        now = time.monotonic()
        for name in self._live:
            doom = self._dooms.get(name)
            if doom is None or not self._is_due(name, doom, now):
                continue
            del self._dooms[name]
            self._aborted[self._doing(name)] += 1
            if doom.during_step:
                self._engine.abort_during_step(name)
            else:
                self._engine.abort(name)
        self._live = [
            name for name in self._live if name not in self._engine.finish_reasons
        ]

    def _is_due(self, name: str, doom: _Doom, now: float) -> bool:
        if doom.after == "token":
            return len(self._engine.outputs[name]) >= doom.token
        if doom.since is None and (
            doom.after == "arrival" or name in self._engine.monitor.outstanding
        ):
            doom.since = now
        return doom.since is not None and now - doom.since >= doom.seconds

    def _doing(self, name: str) -> str:
        engine = self._engine
        if name in engine.monitor.outstanding:
            return "loading"
        if engine.outputs[name]:
            saves = engine.scheduler.get_kv_connector()._s._jobs.values()
            if any(job.request_id == name for job in saves):
                return "being saved"
            return "decoding"
        if engine.monitor.answers.get(name, [(0, False)])[-1][0] is None:
            return "being looked up"
        return "waiting or computing"


def holdings(engine: Engine) -> dict[str, int]:
    """Everything bounded that an engine with an inline worker holds just now.

    Tasks of both loops, calls that run or wait in each pool of threads, staging that
    is not free, blocks that are not free, and what the two roles count themselves.

    Raises:
        LeakError: never; it only counts.
    """
    worker = engine.worker
    assert isinstance(worker, InlineWorker)
    held = {
        "blocks not free": engine.num_free_blocks_at_start - engine.num_free_blocks()
    }
    sides = (
        ("scheduler", engine.scheduler.get_kv_connector()._s),
        ("worker", worker.runner.connector._w),
    )
    for role, side in sides:
        for counter, value in side.debug_state().items():
            held[f"{role} {counter}"] = value
        numbers, tasks = side._portal.call(_numbers, timeout=10)
        held[f"{role} tasks"] = tasks
        for name, pool in numbers.pools.items():
            held[f"{role} {name} calls"] = pool.running + pool.queued
        for name in ("load_staging", "save_staging"):
            staging = getattr(numbers, name)
            if staging is not None:
                held[f"{role} {name} not free"] = staging.buffers - staging.free
                held[f"{role} {name} quarantined"] = staging.quarantined
                held[f"{role} {name} waiting"] = staging.waiting
    return held


async def _numbers(session: Any) -> tuple[Any, int]:
    return await session.statistics(), len(asyncio.all_tasks())


def process_holdings() -> dict[str, int]:
    """Threads (native ones too) and open descriptors of this process.

    A map keeps a descriptor of its own until the last view of it is collected.
    """
    gc.collect()
    return {
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
    }


def settle(
    engine: Engine, before: dict[str, int], patience: float = 20.0
) -> dict[str, int]:
    """Step until everything that ``holdings`` counts is as it was; what it came to.

    Raises:
        LeakError: naming what is more than before.
    """
    until = time.monotonic() + patience
    while True:
        held = holdings(engine)
        more = {
            name: f"{before.get(name, 0)} before, {value} now"
            for name, value in held.items()
            if value > before.get(name, 0)
        }
        if not more:
            return held
        if time.monotonic() > until:
            raise LeakError("; ".join(f"{name}: {text}" for name, text in more.items()))
        engine.step_empty()
