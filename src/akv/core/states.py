"""The life of a load as typed states, and the one function that moves it on.

``Probing -> Missed | Hit -> Planned -> Admitted -> Fetching -> Placing ->
Landed | Failed | Cancelled``. The scheduler side lives through the first
half, the side that holds the KV memory through the second. ``step`` is pure:
whoever waits feeds in what it has seen and acts on the state that comes
back. A move that the life does not have raises, it is never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from akv.core.errors import PlanError

__all__ = (
    "Admit",
    "Admitted",
    "Answer",
    "Cancel",
    "Cancelled",
    "Expire",
    "Failed",
    "Fetched",
    "Fetching",
    "Hit",
    "Landed",
    "LoadEvent",
    "LoadState",
    "Missed",
    "Placed",
    "Placing",
    "Plan",
    "Planned",
    "Probing",
    "is_final",
    "step",
)


@dataclass(frozen=True, slots=True)
class Probing:
    """The store has been asked."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Nothing that can be used was found. Final."""


@dataclass(frozen=True, slots=True)
class Hit:
    """``tokens`` of the prefix are in the store, before rounding."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """``objects`` are to be loaded, in windows of these sizes."""

    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The load may begin."""

    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetching:
    """Window ``window`` is on its way from the store; ``landed`` have landed."""

    windows: tuple[int, ...]
    window: int
    landed: int


@dataclass(frozen=True, slots=True)
class Placing:
    """Window ``window`` is being copied into the engine's blocks.

    ``bad`` are the places of the objects of this window that failed.
    """

    windows: tuple[int, ...]
    window: int
    landed: int
    bad: frozenset[int]


@dataclass(frozen=True, slots=True)
class Landed:
    """All ``objects`` are in the engine's blocks. Final."""

    objects: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The objects at these places did not land, all others did. Final."""

    places: frozenset[int]
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the load any longer. Final."""


LoadState: TypeAlias = (
    Probing
    | Missed
    | Hit
    | Planned
    | Admitted
    | Fetching
    | Placing
    | Landed
    | Failed
    | Cancelled
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The store holds ``tokens`` of the prefix."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine was promised a load of windows of these sizes, in objects."""

    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """Memory and threads for the load are there."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The window's objects are in staging, but for those at ``bad`` places."""

    bad: frozenset[int] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """The window's objects are in the engine's blocks."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Expire:
    """The load will not go on: what has not landed has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The request was aborted."""


LoadEvent: TypeAlias = Answer | Plan | Admit | Fetched | Placed | Expire | Cancel


def is_final(state: LoadState) -> bool:
    """Whether ``state`` is an end, after which nothing moves."""
    return isinstance(state, Missed | Landed | Failed | Cancelled)


def _rest(windows: tuple[int, ...], window: int) -> frozenset[int]:
    """The places of all objects of ``window`` and of those after it."""
    return frozenset(range(sum(windows[:window]), sum(windows)))


def step(state: LoadState, event: LoadEvent) -> LoadState:
    """The state that follows ``state`` when ``event`` was seen.

    A window with a bad object is the last one: the engine computes everything
    from the first bad block on, so fetching more would be in vain. The
    objects of that window that are good are placed all the same.

    :raises PlanError: the life of a load has no such move
    """
    match state, event:
        case ((Missed() | Landed() | Failed() | Cancelled()), _):
            pass
        case _, Cancel():
            return Cancelled()
        case ((Probing() | Hit()), Expire()):
            return Missed()
        case Probing(), Answer(tokens):
            return Hit(tokens) if tokens > 0 else Missed()
        case ((Probing() | Hit()), Plan(windows)):
            return Planned(windows) if windows else Landed(0)
        case Planned(windows), Admit():
            return Admitted(windows)
        case Admitted(windows), Admit():
            return Fetching(windows, 0, 0)
        case ((Planned(windows) | Admitted(windows)), Expire(reason)):
            return Failed(_rest(windows, 0), reason)
        case Fetching(windows, window, landed), Fetched(bad, reason):
            mine = range(sum(windows[:window]), sum(windows[: window + 1]))
            if not bad <= set(mine):
                msg = f"bad places {sorted(bad)} outside of window {mine}"
                raise PlanError(msg)
            if len(bad) == len(mine):
                return Failed(_rest(windows, window), reason)
            return Placing(windows, window, landed, bad)
        case Placing(windows, window, landed, bad), Placed(reason):
            if bad:
                return Failed(bad | _rest(windows, window + 1), reason)
            landed += windows[window]
            if window + 1 == len(windows):
                return Landed(landed)
            return Fetching(windows, window + 1, landed)
        case (
            (Fetching(windows, window, _) | Placing(windows, window, _, _)),
            Expire(reason),
        ):
            return Failed(_rest(windows, window), reason)
        case _:
            pass
    msg = f"a load in state {state} cannot see {event}"
    raise PlanError(msg)
