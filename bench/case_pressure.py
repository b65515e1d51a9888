"""Requests that are given up, stores that hang, and what an engine still owes for it.

The engine without a model runs vLLM's own scheduler around the connector, both roles
in one process, in staged mode: the store's calls touch akv's own memory alone. Trouble
is put between akv and a store that is fine by itself, so each figure is about akv.

`pressure/abort`: a load is being fetched by a call that takes a second; its request is
given up; the time until the scheduler has the report, which gives the blocks back.

`pressure/aborts`: thousands of requests are given up at random moments over stores
whose calls take up to 500 ms, of which 1 % hang for a minute, 2 % fail and 1 % bring
half an object. Each byte that is used is checked. At the end everything that is
bounded is counted and compared with the beginning. A wait for a load is compared with
its deadline, in one run over all engines and stores.

`pressure/gets`: only gets have trouble: 1 % of them take a minute.

`pressure/hooks`: what the hooks of one step take together, with 200 requests waiting
while the store takes 200 ms to say what it has, and when 32 loads begin at once. Beside
it a stretch of plain Python that takes about 1 ms: what interrupts that interrupts the
hooks too.

`pressure/puts`: puts take a hundred times as long as before for a minute, with half of
the requests loaded and half computed and saved.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import sys
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from akv.store import MemoryStore
from akv.store.mooncake.client import MissingMooncakeError
from measure import Case, Row, Settings, Skip, Spread, Target, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ("CASES", "DEADLINES", "engine_for", "kit_of_tests")

_NONE_LEFT = Target(1, at_least=False)


def kit_of_tests() -> Any:
    """``engine.pressure`` of the tests, which is no part of the library."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    try:
        import engine.pressure as kit
    except ImportError as error:
        raise Skip(f"the engine without a model cannot be imported: {error}") from error
    return kit


def engine_for(store: str, settings: dict[str, Any], **options: Any) -> Any:
    """An engine with akv on a store, in staged mode, which loads what it finds."""
    from engine.engine import Engine

    extra = {
        "store": store,
        "max_load_bytes": "1MiB",
        "max_save_bytes": "1MiB",
        "max_pinned_fraction": 0.5,
        "transfer": "staged",
        # The engine without a model computes faster than any store brings blocks.
        "load_or_compute": False,
    }
    return Engine(extra_config=extra | settings, **options)


@contextlib.contextmanager
def _memory() -> Iterator[str]:
    name = uuid.uuid4().hex
    keeper = MemoryStore(name=name)
    try:
        yield f"memory:{name}"
    finally:
        keeper.close()


def _prompt(number: int, tokens: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(number).integers(0, 1000, tokens).tolist()
    return prompt


def _serve(engine: Any, prompt: list[int], name: str) -> None:
    engine.add_request(prompt, 1, name)
    engine.run()
    engine.idle_until_quiet()


def _times_row(
    what: str, seconds: Sequence[float], target: Target | None, rounds: int
) -> Row:
    """One line about times: the 99th percentile is held against the target."""
    p50, p99 = (float(np.percentile(seconds, p)) * 1e6 for p in (50, 99))
    return Row(
        case="pressure",
        what=what,
        unit=Unit.MICROSECONDS,
        value=Spread(p99, min(seconds) * 1e6, max(seconds) * 1e6),
        target=target,
        judged=p99,
        rounds=rounds,
        amount=len(seconds),
        extra={"p50": p50, "p99": p99, "max": max(seconds) * 1e6},
    )


def _deadline_row(what: str, seconds: Sequence[float], deadline: float) -> Row:
    """The 99th percentile of waits, as a ratio to the deadline."""
    p99 = float(np.percentile(seconds, 99))
    return Row(
        case="pressure",
        what=what,
        unit=Unit.MICROSECONDS,
        value=Spread(p99 * 1e6, min(seconds) * 1e6, max(seconds) * 1e6),
        against="load_deadline",
        other=Spread(deadline * 1e6, deadline * 1e6, deadline * 1e6),
        ratio=Spread(p99 / deadline, min(seconds) / deadline, max(seconds) / deadline),
        target=Target(1.1, at_least=False),
        judged=p99 / deadline,
        rounds=1,
        amount=len(seconds),
    )


# --- one abort ------------------------------------------------------------------------


def _abort(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    rounds = 20 if settings.quick else 100
    trouble = kit.Trouble(seed=1)
    trouble.verbs = frozenset({"get_into"})
    with (
        _memory() as url,
        kit.through(trouble),
        engine_for(url, {"load_deadline": 30, "lookup_deadline": 5}) as engine,
    ):
        prompt = _prompt(0, 200)
        _serve(engine, prompt, "seed")
        for number in range(rounds):
            engine.reset_prefix_cache()
            trouble.begin(kit.Faults(hang=1.0, hang_seconds=1.0))
            name = f"r{number}"
            engine.add_request(prompt, 1, name)
            while not trouble.hanging:
                engine.run_steps(1)
            # Some steps on, so that the abort is nothing special to the step.
            engine.run_steps(3 + number % 5)
            engine.abort(name)
            while engine.monitor.outstanding:
                engine.run_steps(1)
            if not trouble.hanging:
                raise RuntimeError("the call ended before the abort was reported")
            trouble.calm()
        engine.idle_until_quiet()
        engine.assert_clean(grace=30)
        aborted = [one.since_abort for one in engine.monitor.reported]
        if len(aborted) != rounds or None in aborted:
            raise RuntimeError(f"{len(aborted)} loads were reported, not {rounds}")
    text = "abort of a load to its report, the get takes 1 s"
    return [_times_row(text, aborted, Target(20_000, at_least=False), rounds)]


# --- thousands of aborts --------------------------------------------------------------

DEADLINES = {"lookup_deadline": 0.8, "load_deadline": 2.0, "save_deadline": 4.0}


@contextlib.contextmanager
def _store(kind: str, settings: Settings) -> Iterator[str]:
    if kind == "memory":
        with _memory() as url:
            yield url
    elif kind == "local":
        yield f"local:{settings.in_memory() / 'pressure'}?capacity=32MiB"
    else:
        from mooncake_master import Master

        with Master() as master:
            yield master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")


def _aborts(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    wanted = 600 if settings.quick else 10_000
    kinds = ["local", "memory", "mooncake"]
    aborted: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    loads: list[float] = []
    landed = 0
    left: Counter[str] = Counter()
    each = wanted // len(kinds) + 1
    for seed, kind in enumerate(kinds, 1):
        try:
            found = _some_aborts(kit, kind, seed, each, settings, happened)
        except MissingMooncakeError:
            kinds.remove(kind)
            continue
        report, over = found
        aborted += report.aborted
        loads += report.load_seconds
        landed += report.loads_landed
        left += over
    number = aborted.total() - aborted["load landed in the same step"]
    facts = {"aborted": dict(aborted), "happened": dict(happened), "landed": landed}
    leaks = Row(
        case="pressure",
        what=f"{number:,} aborts: blocks, slots, permits, tasks left",
        unit=Unit.COUNT,
        value=Spread(left.total(), left.total(), left.total()),
        against=", ".join(kinds),
        target=_NONE_LEFT,
        judged=left.total(),
        rounds=len(kinds),
        amount=number,
        extra=facts | {"left": dict(left)},
    )
    text = f"p99 of {len(loads):,} waits for a load, all troubles"
    return [leaks, _deadline_row(text, loads, DEADLINES["load_deadline"])]


def _some_aborts(
    kit: Any, kind: str, seed: int, aborts: int, settings: Settings, happened: Any
) -> tuple[Any, Counter[str]]:
    """Aborts over one store; what happened, and what is left of everything."""
    pressure = kit.Pressure(aborts=aborts, live=96, burst=48, timeout=400)
    trouble = kit.Trouble(seed)
    options = {"num_blocks": 480, "max_num_seqs": 48, "max_num_batched_tokens": 1024}
    with (
        _store(kind, settings) as url,
        kit.through(trouble),
        engine_for(url, DEADLINES, **options) as engine,
    ):
        kit.seed_store(engine, seed, pressure)
        before = kit.holdings(engine)
        trouble.begin(kit.ROUGH)
        report = kit.run_pressure(engine, seed, pressure)
        trouble.calm()
        happened.update(trouble.happened)
        left: Counter[str] = Counter()
        try:
            kit.settle(engine, before)
        except AssertionError:
            for name, value in kit.holdings(engine).items():
                left[f"{kind}: {name}"] += max(0, value - before[name])
    return report, left


# --- hung gets ------------------------------------------------------------------------


def _gets(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    deadline = 1.0
    seconds = 15 if settings.quick else 60
    trouble = kit.Trouble(seed=2)
    trouble.verbs = frozenset({"get_into"})
    prompts = [_prompt(number, 60) for number in range(64)]
    names: Iterator[int] = itertools.count()
    live: dict[str, None] = {}
    with (
        _memory() as url,
        kit.through(trouble),
        engine_for(
            url,
            {"load_deadline": deadline, "lookup_deadline": 5},
            num_blocks=200,
            prefix_caching=False,
        ) as engine,
    ):
        for number, prompt in enumerate(prompts):
            _serve(engine, prompt, f"seed-{number}")
        trouble.begin(kit.Faults(hang=0.01, hang_seconds=60.0))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while len(live) < 8:
                number = next(names)
                name = f"r{number}"
                engine.add_request(prompts[number % 64], 1, name)
                live[name] = None
            engine.run_steps(1)
            live = {name: None for name in live if name not in engine.finish_reasons}
        engine.run()
        trouble.calm()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean(grace=30)
        loads = engine.monitor.reported
        hung = trouble.happened["hang"]
    if not hung or not loads:
        raise RuntimeError(f"{len(loads)} loads and {hung} gets that took a minute")
    landed = sum(not one.failed for one in loads)
    # A breaker that is open refuses loads within milliseconds: no waits at all.
    waits = [
        one.seconds for one in loads if not one.failed or one.seconds > deadline / 10
    ]
    text = f"p99 of {len(waits):,} waits for a load, 1 % of gets take 60 s"
    facts = {
        "gets": trouble.happened["get_into"],
        "hung": hung,
        "landed": landed,
        "refused": len(loads) - len(waits),
        "requests": next(names),
    }
    return [replace(_deadline_row(text, waits, deadline), extra=facts)]


# --- hooks ----------------------------------------------------------------------------


class _Steps:
    """What all hooks of one role took, step by step."""

    def __init__(self, engine: Any, role: str) -> None:
        self._engine = engine
        self._role = role
        self._before = self._sum()
        self.seconds: list[float] = []
        self.plain: list[float] = []

    def _sum(self) -> float:
        times: dict[str, list[float]] = self._engine.hook_times[self._role]
        return sum(map(sum, times.values()))

    def end_of_step(self, *, counts: bool = True) -> None:
        """A step has ended; note what it took, if it ``counts``."""
        total = self._sum()
        if counts:
            self.seconds.append(total - self._before)
            start = time.perf_counter()
            _plain_python()
            self.plain.append(time.perf_counter() - start)
        self._before = total


def _plain_python() -> None:
    """About 1 ms of plain Python."""
    total = 0
    for number in range(25_000):
        total += number


@contextlib.contextmanager
def _without_gc() -> Iterator[Callable[[], int]]:
    """As vLLM's engine process does before it takes requests; collects when called."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda: gc.collect(0)
    finally:
        gc.enable()
        gc.unfreeze()


def _hooks(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    waiting = _slow_exists(kit, 300 if settings.quick else 1500)
    begin = _many_loads(40 if settings.quick else 200)
    return [*waiting, *begin]


def _slow_exists(kit: Any, steps: int) -> list[Row]:
    trouble = kit.Trouble(seed=3)
    trouble.verbs = frozenset({"exists"})
    numbers = itertools.count()
    with (
        _memory() as url,
        kit.through(trouble),
        engine_for(
            url,
            {"lookup_deadline": 1.0, "max_load_bytes": "8MiB"},
            num_blocks=2200,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            max_model_len=4096,
        ) as engine,
    ):
        trouble.begin(kit.Faults(hang=1.0, hang_seconds=0.2))
        with _without_gc() as collect:
            for _ in range(200):
                engine.add_request(_prompt(next(numbers), 2000), 8)
            taken = _Steps(engine, "scheduler")
            for _ in range(steps):
                engine.step()
                for _ in range(200 - len(engine.unfinished())):
                    engine.add_request(_prompt(next(numbers), 2000), 8)
                taken.end_of_step()
                collect()
        asked = trouble.happened["exists"]
        for name in engine.unfinished():
            engine.abort(name)
        trouble.calm()
        engine.idle_until_quiet()
        engine.assert_clean(grace=30)
    if asked < 5:
        raise RuntimeError(f"the store was asked {asked} times")
    text = "scheduler hooks of a step, 200 waiting, exists takes 200 ms"
    return [
        _times_row(text, taken.seconds, Target(2000, at_least=False), 1),
        _times_row("plain Python beside it", taken.plain, None, 1),
    ]


def _many_loads(rounds: int) -> list[Row]:
    prompts = [_prompt(number, 60) for number in range(32)]
    with (
        _memory() as url,
        engine_for(
            url,
            {"lookup_deadline": 5},
            num_blocks=400,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
        ) as engine,
    ):
        for number, prompt in enumerate(prompts):
            _serve(engine, prompt, f"seed-{number}")
        side = engine.scheduler.get_kv_connector()._s
        taken = _Steps(engine, "worker")
        with _without_gc() as collect:
            for number in range(rounds):
                engine.reset_prefix_cache()
                names = [f"r{number}-{n}" for n in range(32)]
                for name, prompt in zip(names, prompts, strict=True):
                    engine.add_request(prompt, 1, name)
                engine.step()
                _until_answered(side, names)
                taken.end_of_step(counts=False)
                engine.step()
                taken.end_of_step()
                begun = sum(name in engine.monitor.loads for name in names)
                if begun != 32:
                    raise RuntimeError(f"{begun} loads began in a step, not 32")
                engine.run()
                engine.idle_until_quiet()
                collect()
        engine.assert_outputs()
        engine.assert_clean(grace=30)
    text = "worker hooks of a step in which 32 loads begin"
    return [
        _times_row(text, taken.seconds, Target(1000, at_least=False), rounds),
        _times_row("plain Python beside it ", taken.plain, None, rounds),
    ]


def _until_answered(side: Any, names: list[str]) -> None:
    """Wait for the loop to have answered these lookups, so that all loads are one."""
    answers = [side._requests[name].answer for name in names]
    while any(answer is not None and answer.found is None for answer in answers):
        side._portal.call(lambda session: session.statistics(), timeout=10)


# --- slow puts ------------------------------------------------------------------------

_RATE = 200e6
_BLOCK_BYTES = 64 << 10


class _Line:
    """Half of the requests are loaded, half computed and saved; four at a time."""

    def __init__(self, engine: Any, stored: list[list[int]]) -> None:
        self.engine = engine
        self._stored = stored
        self._names = itertools.count()
        self._since: dict[str, float] = {}
        self._computed: set[str] = set()
        self.most_pinned = 0
        side = engine.scheduler.get_kv_connector()._s
        self._pinned: Callable[[], int] = lambda: side._pinned

    def run(self, seconds: float) -> dict[str, list[float]]:
        """Times to the first token, of loaded and of computed requests."""
        waits: dict[str, list[float]] = {"loaded": [], "computed": []}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while len(self._since) < 4:
                self._arrive()
            self.engine.run_steps(1)
            self.most_pinned = max(self.most_pinned, self._pinned())
            now = time.monotonic()
            for name in [name for name in self._since if self.engine.outputs[name]]:
                kind = "computed" if name in self._computed else "loaded"
                waits[kind].append(now - self._since.pop(name))
        return waits

    def _arrive(self) -> None:
        number = next(self._names)
        name = f"r{number}"
        prompt = self._stored[number % len(self._stored)]
        if number % 2:
            prompt = _prompt(10_000 + number, 130)
            self._computed.add(name)
        self._since[name] = time.monotonic()
        self.engine.add_request(prompt, 1, name)


def _puts(settings: Settings) -> list[Row]:
    kit = kit_of_tests()
    seconds = 10.0 if settings.quick else 60.0
    log = settings.disk / "pressure.jsonl"
    trouble = kit.Trouble(seed=4)
    trouble.verbs = frozenset({"put_from"})
    stored = [_prompt(number, 130) for number in range(16)]
    store = f"local:{settings.in_memory() / 'puts'}?capacity=256MiB"
    extra = {
        "max_load_bytes": "16MiB",
        "max_save_bytes": "16MiB",
        "max_pinned_fraction": 0.25,
        "lookup_deadline": 1.0,
        "log_events": str(log),
    }
    shape = {"layers": 4, "head_size": 64, "num_blocks": 256, "prefix_caching": False}
    with kit.through(trouble), engine_for(store, extra, **shape) as engine:
        for number, prompt in enumerate(stored):
            _serve(engine, prompt, f"seed-{number}")
        line = _Line(engine, stored)
        limit = int(0.25 * engine.config.num_blocks)

        def share(span: float) -> tuple[float, dict[str, list[float]]]:
            """Blocks stored for each request computed, so that a busy machine, which
            computes fewer, changes nothing; and the times to the first token."""
            before = trouble.happened["objects stored"]
            waits = line.run(span)
            stored = trouble.happened["objects stored"] - before
            return stored / max(1, len(waits["computed"])), waits

        trouble.begin(kit.Faults(put_rate=_RATE))
        line.run(2.0)
        full, normal = share(seconds / 3)
        trouble.begin(kit.Faults(put_rate=_RATE / 100))
        least, slow = share(seconds)
        trouble.calm()
        trouble.begin(kit.Faults(put_rate=_RATE))
        came_back = time.monotonic()
        back = 0.0
        while back < 0.8 * full and time.monotonic() - came_back < 60:
            back, _ = share(0.5)
        recovery = time.monotonic() - came_back
        pinned = line.most_pinned
        trouble.calm()
        engine.run()
        engine.idle_until_quiet()
        engine.assert_outputs()
        engine.assert_clean(grace=30)
    dropped = _dropped(log)
    if not dropped:
        raise RuntimeError("nothing was dropped, so puts were not slow enough")
    rows = [
        Row(
            case="pressure",
            what=f"first token, {kind}, puts at 1 % of their speed",
            unit=Unit.MICROSECONDS,
            value=_micro(slow[kind]),
            against="full speed",
            other=_micro(normal[kind]),
            ratio=_ratio(slow[kind], normal[kind]),
            target=Target(1.25, at_least=False),
            judged=_ratio(slow[kind], normal[kind]).median,
            rounds=1,
            amount=len(slow[kind]),
        )
        for kind in ("loaded", "computed")
    ]
    rows.append(
        Row(
            case="pressure",
            what="pinned blocks at most, puts at 1 % of their speed",
            unit=Unit.COUNT,
            value=Spread(pinned, pinned, pinned),
            against=f"{limit} allowed, {dropped:,} saves dropped",
            target=Target(limit + 1, at_least=False),
            judged=pinned,
            rounds=1,
            extra={"dropped": dropped},
        )
    )
    rows.append(
        Row(
            case="pressure",
            what="saves at 80 % again after slow puts (seconds)",
            unit=Unit.COUNT,
            value=Spread(recovery, recovery, recovery),
            against=f"stored a request {full:.1f}, slow {least:.1f}, then {back:.1f}",
            target=Target(4.0, at_least=False),
            judged=recovery,
            rounds=1,
        )
    )
    return rows


def _micro(seconds: Sequence[float]) -> Spread:
    spread = Spread.of(seconds)
    return Spread(spread.median * 1e6, spread.least * 1e6, spread.most * 1e6)


def _ratio(slow: Sequence[float], normal: Sequence[float]) -> Spread:
    """Of the medians, between the ratios of the quartiles."""
    ratios = [
        float(np.percentile(slow, part) / np.percentile(normal, part))
        for part in (25, 50, 75)
    ]
    return Spread(ratios[1], min(ratios), max(ratios))


def _dropped(log: Path) -> int:
    """Blocks whose save was dropped, by the event log, which goes then."""
    objects = 0
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            if '"akv.save.dropped"' in line:
                objects += int(json.loads(line)["objects"])
    log.unlink()
    return objects


CASES = [
    Case(name=f"pressure/{name}", title=title, run=run)
    for name, title, run in (
        ("abort", "the abort of a load that is being fetched", _abort),
        ("aborts", "aborts at random moments over rough stores", _aborts),
        ("gets", "loads while 1 % of gets take a minute", _gets),
        ("hooks", "hooks of a step under pressure", _hooks),
        ("puts", "puts at 1 % of their speed", _puts),
    )
]
