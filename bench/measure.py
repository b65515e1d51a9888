"""How everything here is measured: two sides in turn, and a ratio for each round.

A machine that does other things too is slower in one second than in the next, so a
figure alone says little. Each of akv's figures therefore has another side, which does
the same work in the plainest way; the two run in turn, round for round (A B A B), and
each round gives one ratio. What is shown is the median of those ratios, with the
smallest and the largest.

After each run of a side it is looked at what was moved. Where the two sides did not
move the same amount, or one of them moved something wrong, there is no ratio: the row
says that it was refused, and why.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = (
    "Case",
    "Row",
    "Settings",
    "Side",
    "Skip",
    "Spread",
    "Target",
    "Unit",
    "clock",
    "compare",
    "without_gc",
)


class Skip(Exception):  # noqa: N818 - it is no error
    """A case that cannot be measured here, and why."""


class Unit(Enum):
    """What a figure counts, and which way is better."""

    GB_PER_SECOND = "GB/s"
    MICROSECONDS = "us"
    COUNT = ""

    @property
    def more_is_better(self) -> bool:
        """Whether a larger figure is the better one."""
        return self is Unit.GB_PER_SECOND

    def figure(self, amount: float, seconds: float) -> float:
        """The figure of ``amount`` (bytes, or calls) in ``seconds``."""
        if self is Unit.COUNT:
            return amount
        if self is Unit.GB_PER_SECOND:
            return amount / seconds / 1e9
        return seconds / amount * 1e6


@dataclass(frozen=True, slots=True)
class Spread:
    """Several rounds in three numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median of ``values``, the smallest and the largest."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio, or a figure, should be."""

    limit: float
    at_least: bool

    def met(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value >= self.limit if self.at_least else value < self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<'} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two sides of a comparison.

    :ivar run: does the work and returns the seconds that it took
    :ivar moved: how many bytes (or keys) of the last run are right where they
        should be; looked at byte by byte, after the clock has stopped
    :ivar before: sets the stage, before the clock starts
    """

    name: str
    run: Callable[[], float]
    moved: Callable[[], int]
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    :ivar value: akv's own figure
    :ivar against: what the other side is
    :ivar other: the other side's figure
    :ivar ratio: akv's figure divided by the other side's, in the same round
    :ivar target: for the ratio, or for the figure where there is no ratio
    :ivar judged: what is held against the target
    :ivar refused: why there is no ratio, if there is none
    """

    case: str
    what: str
    unit: Unit
    value: Spread | None = None
    against: str = ""
    other: Spread | None = None
    ratio: Spread | None = None
    target: Target | None = None
    judged: float | None = None
    amount: int = 0
    rounds: int = 0
    refused: str = ""
    extra: dict[str, Any] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None where there is none, or no figure."""
        if self.target is None or self.judged is None:
            return None
        return self.target.met(self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all cases need to know.

    :ivar memory: a directory in shared memory, None where there is none
    :ivar disk: a directory on a disk
    """

    quick: bool
    memory: Path | None
    disk: Path

    def in_memory(self) -> Path:
        """The directory in shared memory, or the reason to go without the case."""
        if self.memory is None:
            raise Skip("there is no /dev/shm here")
        return self.memory

    def rounds(self, full: int) -> int:
        """``full`` rounds, or three."""
        return min(3, full) if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to measure: one line of progress, some rows."""

    name: str
    title: str
    run: Callable[[Settings], list[Row]]


def clock(work: Callable[[], object]) -> Callable[[], float]:
    """``work`` as the ``run`` of a side."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


@contextmanager
def without_gc() -> Iterator[None]:
    """Keep Python's garbage collector out of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(
    case: str,
    what: str,
    akv: Side,
    other: Side,
    *,
    unit: Unit,
    rounds: int,
    amount: int,
    calls: int = 1,
    before_round: Callable[[int], object] = lambda _: None,
    target: Target | None = None,
) -> Row:
    """Let both sides do their work in turn, after one round that does not count.

    :param amount: what each side has to move in a run (bytes, or keys)
    :param calls: calls in a run, for figures that are the time of one
    :param before_round: given the round's number; makes new content
    """
    figures: dict[str, list[float]] = {akv.name: [], other.name: []}
    ratios: list[float] = []
    work = amount if unit is Unit.GB_PER_SECOND else calls
    for number in range(rounds + 1):
        before_round(number)
        this_round: list[float] = []
        for side in (other, akv):
            side.before()
            with without_gc():
                seconds = side.run()
            moved = side.moved()
            if moved != amount:
                return Row(
                    case=case,
                    what=what,
                    unit=unit,
                    against=other.name,
                    rounds=number,
                    target=target,
                    refused=f"{side.name} moved {moved:,} of {amount:,}",
                )
            this_round.append(unit.figure(work, seconds))
        if number:
            figures[other.name].append(this_round[0])
            figures[akv.name].append(this_round[1])
            ratios.append(this_round[1] / this_round[0])
    ratio = Spread.of(ratios)
    return Row(
        case=case,
        what=what,
        unit=unit,
        value=Spread.of(figures[akv.name]),
        against=other.name,
        other=Spread.of(figures[other.name]),
        ratio=ratio,
        target=target,
        judged=ratio.median,
        amount=amount,
        rounds=rounds,
    )
