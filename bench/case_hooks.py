"""The scheduler's thread inside akv's hooks, measured by the engine without a model.

The engine of `tests/engine` runs vLLM's own scheduler around the connector, with 200
requests of 8,000 tokens waiting all the time: whoever ends is replaced. Blocks have 16
tokens, so each prompt has 500. Both roles live in one process, as with vLLM's
single-process executor, so akv's own threads compete for the interpreter. The
runner checks each byte that a step reads, and a wrong one ends the case.

What is shown is the time of one call of each hook, median and 99th percentile of all
calls and the longest one, and what all hooks of a step take, as a share of the
scheduler's own time in that step (scheduling, taking the output, adding requests).
Python's garbage collector runs between two steps: what it takes depends on the token
lists that vLLM keeps for 200 requests, and not on the hook that it happens to hit.

The machine and the interpreter's other threads interrupt this thread wherever it is.
So each step also runs a stretch of plain Python that takes about as long as a hook may,
and its times are shown beside the hooks'. `cpu` is the 99th percentile of the processor
time of a call: no hook waits for anything, so what is beyond it are interruptions.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from measure import Case, Row, Settings, Skip, Spread, Target, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("CASES",)

_WAITING = 200
_TOKENS = 8000
_BLOCK = 16
_SLOT = 4096
_NEW_TOKENS = 8
_RUNNING = 4
_POOL = 2200
_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
)
_PLAIN = "plain Python"
_SHOWN = (*_HOOKS, _PLAIN)
_TARGET = Target(100.0, at_least=False)
_BLOCKS = _TOKENS // _BLOCK


def _engine(store: str, **options: Any) -> Any:
    """The engine of the tests, which is no part of the library."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    try:
        from engine.engine import Engine
    except ImportError as error:
        raise Skip(f"the engine without a model cannot be imported: {error}") from error
    return Engine(
        extra_config={
            "store": store,
            "max_pinned_fraction": 1.0,
            "lookup_deadline": 5.0,
        },
        num_blocks=_POOL,
        max_model_len=8192,
        **options,
    )


@dataclass(slots=True)
class _Times:
    """Seconds, of all rounds."""

    hooks: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in _SHOWN}
    )
    tails: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in _SHOWN}
    )
    cpu: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in _SHOWN}
    )
    a_step: list[float] = field(default_factory=list)
    scheduler_a_step: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    loaded: int = 0
    answered: int = 0
    steps: int = 0

    def add(
        self,
        hooks: dict[str, list[float]],
        cpu: dict[str, list[float]],
        scheduler: float,
        steps: int,
    ) -> None:
        """One round."""
        inside = sum(sum(calls) for name, calls in hooks.items() if name != _PLAIN)
        self.a_step.append(inside / steps * 1e6)
        self.scheduler_a_step.append(scheduler / steps * 1e6)
        self.shares.append(inside / scheduler)
        self.steps += steps
        for name in _SHOWN:
            self.hooks[name] += hooks[name]
            self.cpu[name] += cpu[name]
            self.tails[name].append(_microseconds(hooks[name], 99))


class _Clock:
    """Adds up what the scheduler's own methods take, akv's hooks within."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds = 0.0
        for name in ("schedule", "update_from_output", "add_request"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def _processor_times(half: Any) -> dict[str, list[float]]:
    """Note what each call of a hook takes of this thread's processor time."""
    times: dict[str, list[float]] = {name: [] for name in _SHOWN}
    for name in _HOOKS:
        setattr(half, name, _on_processor(getattr(half, name), times[name]))
    return times


def _on_processor(hook: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return hook(*args)
        finally:
            times.append(time.thread_time() - start)

    return timed


def _plain_python() -> None:
    """Some 40 us of plain Python."""
    total = 0
    for number in range(1000):
        total += number


def _microseconds(seconds: list[float], percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1e6


def _prompt(number: int) -> list[int]:
    prompt: list[int] = (
        np.random.default_rng(number).integers(0, 1000, _TOKENS).tolist()
    )
    return prompt


def _fill(url: str) -> None:
    """Let an engine compute all prompts, so that the store holds them."""
    with _engine(
        url, max_num_batched_tokens=8192, max_num_seqs=8, verify=False
    ) as engine:
        for number in range(_WAITING):
            engine.add_request(_prompt(number), 1, f"fill-{number}")
        engine.run()
        engine.idle_until_quiet()
        engine.assert_clean(grace=30)


def _round(
    url: str, chunk: int, prompts: Iterator[int], steps: int, times: _Times
) -> None:
    with _engine(url, max_num_batched_tokens=chunk, max_num_seqs=_RUNNING) as engine:
        clock = _Clock(engine.scheduler)
        cpu = _processor_times(engine.scheduler.get_kv_connector()._s)
        names = itertools.count()
        plain: list[float] = []

        def arrive() -> None:
            engine.add_request(_prompt(next(prompts)), _NEW_TOKENS, f"r{next(names)}")

        # What vLLM's engine process does before it takes requests.
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(_WAITING):
            arrive()
        for _ in range(steps):
            engine.step()
            start, on_processor = time.perf_counter(), time.thread_time()
            _plain_python()
            cpu[_PLAIN].append(time.thread_time() - on_processor)
            plain.append(time.perf_counter() - start)
            for _ in range(_WAITING - len(engine.unfinished())):
                arrive()
            gc.collect(0)
        recorded = engine.hook_times["scheduler"]
        hooks = {name: list(calls) for name, calls in recorded.items()}
        gc.enable()
        times.add(hooks | {_PLAIN: plain}, cpu, clock.seconds, steps)
        times.loaded += sum(len(loads) for loads in engine.monitor.loads.values())
        times.answered += len(engine.finish_reasons)
        engine.assert_outputs()
        for name in engine.unfinished():
            engine.abort(name)
        engine.idle_until_quiet()
        gc.unfreeze()


def _measure(chunk: int, settings: Settings) -> list[Row]:
    directory = settings.in_memory() / "hooks"
    directory.mkdir()
    size = _WAITING * _BLOCKS * _SLOT
    if shutil.disk_usage(directory).free < 2 * size:
        raise Skip(f"{2 * size >> 20} MiB do not fit into shared memory")
    full = f"local:{directory / 'full'}?capacity={size * 9 // 8}"
    empty = f"local:{directory / 'empty'}?capacity={size // 8}"
    held, missing = _Times(), _Times()
    unseen = itertools.count(_WAITING)
    try:
        _fill(full)
        for _ in range(1 if settings.quick else 3):
            steps = 150 if settings.quick else 250
            _round(full, chunk, itertools.cycle(range(_WAITING)), steps, held)
            _round(empty, chunk, unseen, steps, missing)
    finally:
        shutil.rmtree(directory)
    if not held.loaded or missing.loaded:
        raise RuntimeError(f"{held.loaded} and {missing.loaded} loads, not some and 0")
    return [
        *_rows(f"all hit, {chunk:,} a step", held),
        *_rows(f"none hit, {chunk:,} a step", missing),
    ]


def _rows(text: str, times: _Times) -> Iterator[Row]:
    for name in _SHOWN:
        calls = times.hooks[name]
        p99 = _microseconds(calls, 99)
        tails = Spread.of(times.tails[name])
        yield Row(
            case="hooks",
            what=f"{name}, {text}",
            unit=Unit.MICROSECONDS,
            value=Spread(p99, tails.least, tails.most),
            target=None if name == _PLAIN else _TARGET,
            judged=p99,
            rounds=len(times.a_step),
            amount=len(calls),
            extra={
                "p50": _microseconds(calls, 50),
                "p99": p99,
                "max": max(calls) * 1e6,
                "cpu_p99": _microseconds(times.cpu[name], 99),
            },
        )
    yield Row(
        case="hooks",
        what=f"all hooks of a step, {text}",
        unit=Unit.MICROSECONDS,
        value=Spread.of(times.a_step),
        against="scheduler's step",
        other=Spread.of(times.scheduler_a_step),
        ratio=Spread.of(times.shares),
        rounds=len(times.a_step),
        amount=times.steps,
        extra={"requests_ended": times.answered, "loads": times.loaded},
    )


CASES = [
    Case(
        name=f"hooks/{chunk}",
        title=f"scheduler hooks, 200 requests waiting, {chunk:,} tokens a step",
        run=partial(_measure, chunk),
    )
    for chunk in (2048, 8192)
]
