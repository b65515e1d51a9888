"""Seeded random traffic, and what must hold however it went.

Prompts come from a forest: each is a random walk down shared branches and a tail of
its own, cut to lengths around block borders, so that local hits, external hits, full
hits and misses all occur. While requests run, others are aborted between steps or in
the middle of one, and the prefix cache is reset. A small pool adds preemptions. At the
end every request has ended with the tokens that its prompt determines, and the engine
is clean. Arrivals depend on steps, not on time, so one seed is one schedule as far as
the connector's own threads allow.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import StallError

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["Forest", "Workload", "WorkloadReport", "run_workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the traffic looks like; rates are chances for each step."""

    requests: int = 40
    roots: int = 3
    branch_blocks: int = 3
    branching: int = 2
    depth: int = 4
    max_tokens: int = 40
    arrival_rate: float = 0.7
    abort_rate: float = 0.02
    reset_rate: float = 0.02
    forced_reset_rate: float = 0.0
    lull_rate: float = 0.03
    salted_rate: float = 0.1
    priorities: int = 1
    max_steps: int = 20_000
    timeout: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReport:
    """What happened, so that a test can say that it was not vacuous."""

    steps: int
    preemptions: int
    aborted: int
    resets: int
    resets_refused: int
    external_tokens: int
    loads: int


def run_workload(
    engine: Engine,
    seed: int,
    requests: int | None = None,
    workload: Workload | None = None,
) -> WorkloadReport:
    """Send one seed's traffic through an engine and check everything at the end.

    The engine may have served other seeds before; request ids carry the seed.

    Raises:
        HarnessError: any of them, with a note that names the seed.
    """
    traffic = _Traffic(engine, seed, workload or Workload(), requests)
    try:
        return traffic.run()
    except Exception as error:
        error.add_note(f"seed {seed}, step {engine.steps}, {engine.config}")
        raise


class Forest:
    """Prompts that share prefixes: the same seed has the same branches.

    Args:
        dice: decides which prompt comes next; shared with whoever else needs it.
    """

    def __init__(
        self, engine: Engine, seed: int, workload: Workload, dice: random.Random
    ) -> None:
        self._size = engine.config.block_size
        self._vocabulary = engine.oracle.vocab_size
        self._seed = seed
        self._workload = workload
        self._random = dice
        self._branches: dict[tuple[int, ...], list[int]] = {}

    def prompt(self) -> list[int]:
        """A walk down shared branches and a tail, cut around a block's border."""
        size, workload = self._size, self._workload
        path: tuple[int, ...] = (self._random.randrange(workload.roots),)
        tokens = list(self._branch(path))
        while len(path) < workload.depth and self._random.random() < 0.7:
            path = (*path, self._random.randrange(workload.branching))
            tokens += self._branch(path)
        match self._random.randrange(4):
            case 0:
                return tokens[: max(size, len(tokens) // size * size)]
            case 1:
                return [*tokens, self._token()]
            case 2:
                return tokens[: self._random.randint(1, len(tokens))]
        tail = self._random.randint(1, 3 * size)
        return tokens + [self._token() for _ in range(tail)]

    def longest(self) -> list[list[int]]:
        """Every walk to the end; together they hold all shared branches."""
        workload = self._workload
        turns = itertools.product(range(workload.branching), repeat=workload.depth - 1)
        return [
            [
                token
                for depth in range(workload.depth)
                for token in self._branch((root, *turn[:depth]))
            ]
            for turn in turns
            for root in range(workload.roots)
        ]

    def _branch(self, path: tuple[int, ...]) -> list[int]:
        if path not in self._branches:
            own = random.Random(f"{self._seed}/{path}")
            length = own.randint(1, self._workload.branch_blocks) * self._size
            if own.random() < 0.5:
                length += own.randrange(self._size)
            self._branches[path] = [
                own.randrange(self._vocabulary) for _ in range(length)
            ]
        return self._branches[path]

    def _token(self) -> int:
        return self._random.randrange(self._vocabulary)


class _Traffic:
    def __init__(
        self, engine: Engine, seed: int, workload: Workload, requests: int | None
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._workload = workload
        self._random = random.Random(seed)
        self._left = workload.requests if requests is None else requests
        self._forest = Forest(engine, seed, workload, self._random)
        self._names: list[str] = []
        self._lull = False
        self._resets = 0
        self._refused = 0

    def run(self) -> WorkloadReport:
        engine, workload = self._engine, self._workload
        steps, preemptions = engine.steps, engine.preemptions
        while self._left:
            self._come_and_go()
            self._disturb()
            engine.run_steps(1)
        while engine.unfinished():
            self._disturb()
            engine.run_steps(1)
            if engine.steps - steps > workload.max_steps:
                raise StallError(f"{engine.unfinished()} after {engine.steps} steps")
        engine.idle_until_quiet(timeout=workload.timeout)
        engine.assert_outputs()
        engine.assert_clean()
        return self._report(engine.steps - steps, engine.preemptions - preemptions)

    def _report(self, steps: int, preemptions: int) -> WorkloadReport:
        engine = self._engine
        loads = [engine.monitor.loads.get(name, []) for name in self._names]
        reasons = [engine.finish_reasons[name] for name in self._names]
        return WorkloadReport(
            steps=steps,
            preemptions=preemptions,
            aborted=reasons.count("abort"),
            resets=self._resets,
            resets_refused=self._refused,
            external_tokens=sum(sum(tokens) for tokens in loads),
            loads=sum(len(tokens) for tokens in loads),
        )

    def _chance(self, rate: float) -> bool:
        return self._random.random() < rate

    def _come_and_go(self) -> None:
        """Let requests arrive, but for lulls, at whose end a reset succeeds."""
        if self._lull:
            if self._engine.has_work():
                return
            self._lull = False
            self._count_reset(self._engine.reset_prefix_cache())
        arrival_rate = self._workload.arrival_rate
        if self._chance(arrival_rate) or not self._engine.has_work():
            self._arrive()
            self._lull = self._chance(self._workload.lull_rate)

    def _arrive(self) -> None:
        self._left -= 1
        workload, index = self._workload, len(self._names)
        salt = f"tenant-{index % 2}" if self._chance(workload.salted_rate) else None
        name = self._engine.add_request(
            self._forest.prompt(),
            self._random.randint(1, workload.max_tokens),
            f"s{self._seed}-{index}",
            cache_salt=salt,
            priority=self._random.randrange(workload.priorities),
        )
        self._names.append(name)

    def _disturb(self) -> None:
        workload, engine = self._workload, self._engine
        live = engine.unfinished()
        if live and self._chance(workload.abort_rate):
            victim = self._random.choice(live)
            if self._chance(0.5):
                engine.abort(victim)
            else:
                engine.abort_during_step(victim)
        if self._chance(workload.reset_rate):
            self._count_reset(engine.reset_prefix_cache())
        if self._chance(workload.forced_reset_rate):
            self._force_reset()

    def _force_reset(self) -> None:
        try:
            done = self._engine.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            done = False
        self._count_reset(done)

    def _count_reset(self, done: bool) -> None:
        self._resets += done
        self._refused += not done
