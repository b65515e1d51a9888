"""An engine without a model on a pool whose master fails, or has no room.

`faults/master`: the engine's thread in akv's hooks, those of the scheduler and those of
the worker (one thread here), under steady traffic, while the master answers, stands
still (SIGSTOP), is dead (SIGKILL) and has become a port that takes connections and
never answers. Half of the prompts come again and are loaded from the pool while there
is one. Shown are the 99th percentile and the longest call of each hook, beside a
stretch of plain Python of about 40 us in each step: akv's own threads and Mooncake's
live in this process too and take the interpreter and the two or more processors from
whoever is in a hook. Then, for each fault, a session's lookups once it leaves the store
alone.

`faults/full`: the time of an engine's step with a pool that has room, one that evicts,
and one full of pinned objects, where nothing can be evicted, so that every put ends
with -200. Prompts are new each time, so every block of them is saved or dropped.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from akv.store import MooncakeStore
from akv.store.mooncake.memory import address_of
from case_peer import (
    _HOOK_TARGET,
    _LOOKUP_TARGET,
    _harness,
    _percentiles,
    _without_native_logs,
    lookups_left_alone,
)
from measure import Case, Row, Settings, Spread, Target, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ("CASES",)

_MOST = 5000.0
_MOST_TARGET = Target(_MOST, at_least=False)
_FULL_TARGET = Target(1.2, at_least=False)
_GNMT = "get_num_new_matched_tokens"
_SCHEDULER_HOOKS = (
    "on_new_request",
    _GNMT,
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
_WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
_PLAIN = "plain Python"
_AGAIN = 20
_SMALL_SEGMENT = 16 << 20
_BLOCK = 32 << 10


def _faults(master: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What is done to a master that has been serving; undone when it is left."""
    from mooncake_master import BlackHole

    @contextlib.contextmanager
    def killed() -> Iterator[None]:
        master.kill()
        yield
        master.start()

    @contextlib.contextmanager
    def swallowed() -> Iterator[None]:
        master.kill()
        with BlackHole(master.port):
            yield
        master.start()

    return {
        "running": contextlib.nullcontext,
        "stopped": master.stopped,
        "killed": killed,
        "black hole": swallowed,
    }


def _prompt(number: int, length: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(number).integers(0, 1000, length).tolist()
    return prompt


def _plain_python() -> None:
    total = 0
    for number in range(1000):
        total += number


@dataclass(slots=True)
class _Traffic:
    """Keeps eight requests in an engine; every second prompt comes again."""

    engine: Any
    length: int
    again: bool = True
    numbers: Any = None
    plain: Any = None

    def __post_init__(self) -> None:
        self.numbers = itertools.count()
        self.plain = []

    def run_for(self, seconds: float) -> int:
        """Serve for some time; the steps that it had."""
        engine = self.engine
        steps = engine.steps
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(8 - len(engine.unfinished())):
                number = next(self.numbers)
                name = f"r-{number}"
                if self.again and number % 2:
                    number %= _AGAIN
                else:
                    number += _AGAIN
                engine.add_request(_prompt(number, self.length), 4, name)
            engine.step()
            start = time.perf_counter()
            _plain_python()
            self.plain.append(time.perf_counter() - start)
            self._forget()
        return int(engine.steps - steps)

    def end(self) -> None:
        self.engine.run()
        self.engine.idle_until_quiet()
        self.engine.assert_outputs()
        self.engine.assert_clean(grace=20)

    def _forget(self) -> None:
        """Or the harness would look at all that have ended in each step."""
        engine = self.engine
        if len(engine.finish_reasons) > 500:
            engine.assert_outputs()
            for name in list(engine.finish_reasons):
                del engine.finish_reasons[name], engine.prompts[name]


def _measure_faults(settings: Settings) -> list[Row]:
    engine_class, master = _harness()
    rows: list[Row] = []
    with _without_native_logs(settings.disk), master:
        url = master.url(protocol="tcp", segment="64MiB", hostname="127.0.0.1")
        seconds = 4.0 if settings.quick else 15.0
        for name, fault in _faults(master).items():
            rows += _hooks(engine_class, url, name, fault, seconds)
        for name, fault in _faults(master).items():
            if name != "running":
                times = anyio.run(lookups_left_alone, url, fault)
                rows.append(
                    _percentiles(
                        "faults/master",
                        f"session.lookup of 64 blocks, breaker open, master {name}",
                        times,
                        _LOOKUP_TARGET,
                    )
                )
    return rows


def _hooks(
    engine_class: Any,
    url: str,
    name: str,
    fault: Callable[[], AbstractContextManager[Any]],
    seconds: float,
) -> Iterator[Row]:
    """Each hook of both roles from the moment of the fault on."""
    with engine_class(extra_config=_settings(url), num_blocks=128) as engine:
        traffic = _Traffic(engine, 193)
        traffic.run_for(1.5)
        if not engine.monitor.reported:
            raise RuntimeError("nothing was loaded before the fault")
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            recorded = {
                hook: times
                for role, hooks in (
                    ("scheduler", _SCHEDULER_HOOKS),
                    ("worker", _WORKER_HOOKS),
                )
                for hook, times in engine.hook_times[role].items()
                if hook in hooks
            }
            before = {hook: len(times) for hook, times in recorded.items()}
            traffic.plain.clear()
            with fault():
                traffic.run_for(seconds)
                calls = {
                    hook: times[before[hook] :]
                    for hook, times in recorded.items()
                    if len(times) > before[hook] + 3
                }
                plain = list(traffic.plain)
        finally:
            gc.enable()
            gc.unfreeze()
        traffic.end()
    for hook, times in calls.items():
        yield _percentiles(
            "faults/master",
            f"{hook}, master {name}",
            times,
            _HOOK_TARGET if hook == _GNMT else None,
        )
    yield _percentiles("faults/master", f"{_PLAIN}, master {name}", plain, None)
    longest = max(max(times) for times in calls.values()) * 1e6
    yield Row(
        case="faults/master",
        what=f"longest call of any hook, master {name}",
        unit=Unit.MICROSECONDS,
        value=Spread(longest, longest, longest),
        target=_MOST_TARGET,
        judged=longest,
        rounds=1,
        amount=sum(map(len, calls.values())),
        extra={"max": longest},
    )


def _settings(url: str) -> dict[str, Any]:
    return {"store": url, "max_pinned_fraction": 1.0, "load_or_compute": False}


def _measure_full(settings: Settings) -> list[Row]:
    """Engines with pools of three kinds take turns; a block has 32 KiB."""
    engine_class, _ = _harness()
    make = partial(
        engine_class,
        num_blocks=256,
        layers=1,
        heads=4,
        head_size=64,
        max_num_batched_tokens=512,
        verify=False,
        compute=False,
    )
    seconds = 1.5 if settings.quick else 4.0
    rounds = 3 if settings.quick else 5
    kinds: dict[str, tuple[int, tuple[str, ...]]] = {
        "room": (2 << 30, ()),
        "evictions": (_SMALL_SEGMENT, ("--default_kv_lease_ttl=200",)),
        "pinned objects only": (_SMALL_SEGMENT, ()),
    }
    steps: dict[str, list[float]] = {name: [] for name in kinds}
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_native_logs(settings.disk))
        traffic: dict[str, _Traffic] = {}
        for name, (segment, flags) in kinds.items():
            master = stack.enter_context(_another(flags))
            url = master.url(protocol="tcp", segment=segment, hostname="127.0.0.1")
            engine = stack.enter_context(make(extra_config=_settings(url)))
            traffic[name] = _Traffic(engine, 129, again=False)
            if name == "pinned objects only":
                _pin_all(url)
            traffic[name].run_for(1.5)
        for _ in range(rounds):
            for name, one in traffic.items():
                began = time.perf_counter()
                count = one.run_for(seconds)
                steps[name].append((time.perf_counter() - began) / count * 1e6)
                one.end()
        for name, one in traffic.items():
            worker = one.engine.worker.runner.connector._w
            numbers = worker._portal.call(lambda s: s.statistics(), timeout=5).store
            rows.append(_full_row(name, steps, rounds, numbers))
    return rows


def _pin_all(url: str) -> None:
    """Fill the pool with objects that are never evicted."""
    store = MooncakeStore.open(url, slot_bytes=_BLOCK, lend_memory=False)
    memory = memoryview(mmap.mmap(-1, _BLOCK))
    store.register(memory)
    address = address_of(memory)
    with contextlib.closing(store), store._link.use() as client:
        placement = client.placement(pinned=True)
        placement.replica_num = 1
        for number in itertools.count():
            if client.create(f"pinned-{number}", address, _BLOCK, placement):
                break


def _another(flags: tuple[str, ...]) -> Any:
    from mooncake_master import Master

    return Master(*flags)


def _full_row(name: str, steps: dict[str, list[float]], rounds: int, store: Any) -> Row:
    mine, room = steps[name], steps["room"]
    ratio = Spread.of([a / b for a, b in zip(mine, room, strict=True)])
    plain = name == "room"
    full = store.no_room or store.evictions
    counts = {
        "stored": store.puts,
        "no_room": store.no_room,
        "evictions": store.evictions,
        "failures": store.failures,
    }
    if plain == bool(full):
        raise RuntimeError(f"pool with {name}: {counts}")
    shown = ", ".join(f"{key} {value}" for key, value in counts.items())
    return Row(
        case="faults/full",
        what=f"an engine's step, pool with {name} ({shown})",
        unit=Unit.MICROSECONDS,
        value=Spread.of(mine),
        against="with room",
        other=Spread.of(room),
        ratio=ratio,
        target=None if plain else _FULL_TARGET,
        judged=ratio.median,
        rounds=rounds,
        amount=len(mine),
        extra=dict(counts),
    )


CASES = [
    Case(
        name="faults/master",
        title="hooks while the master runs, stands still, is dead or silent",
        run=_measure_faults,
    ),
    Case(
        name="faults/full",
        title="an engine's steps with a pool that is full",
        run=_measure_full,
    ),
]
