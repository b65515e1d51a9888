"""When saves are shed: a store that is slow or full is given a trickle of them.

Flowing: every save begins. Shedding: saves are dropped, but for one window
each pause, which tries whether the store is well again. A put is slow by
comparison: how many times as long it takes as this store's best, which fades
by and by, so that a store that has become slower for good is slow no longer.
What is slow now is smoothed, and the mark at which saves are shed lies far
above the one at which they come back. Pure: whoever puts tells what came of
it and when, and asks before the next window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

__all__ = (
    "Flowing",
    "Marks",
    "Pace",
    "ShedState",
    "Shedding",
    "admitted",
    "may_begin",
    "refused",
    "running",
    "stored",
)

_MIB = 1 << 20
_SMOOTHING = 0.25
_STEADY_PAUSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The numbers of the rule; times are seconds.

    :ivar quick: a put that takes no longer is never slow, whatever the best was
    :ivar high: saves are shed when puts take more than so many times the best
    :ivar low: they come back with a put that takes at most so many times it
    :ivar full: they are shed when nothing has found room for so long
    :ivar pause: between two tries of a store whose saves are shed; doubled, up
        to ``longest_pause``, when they have to be shed again soon after
    :ivar fading: in which the best that is remembered becomes half as good
    :ivar retries: before each further try of what has found no room
    """

    quick: float = 0.01
    high: float = 20.0
    low: float = 5.0
    full: float = 2.0
    pause: float = 2.0
    longest_pause: float = 16.0
    fading: float = 600.0
    retries: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Pace:
    """The best that a store has shown, in seconds per MiB, as of ``at``.

    ``best`` is None before the first put.
    """

    best: float | None = None
    at: float = 0.0

    def after(self, now: float, per_mib: float, marks: Marks) -> Pace:
        """The pace after a put that took ``per_mib`` seconds a MiB."""
        if self.best is None:
            return Pace(per_mib, now)
        faded = self.best * 2.0 ** min(64.0, (now - self.at) / marks.fading)
        return Pace(min(per_mib, faded), now)

    def expected(self, nbytes: int, marks: Marks) -> float:
        """Seconds that a put of ``nbytes`` takes at its best."""
        return max(marks.quick, (self.best or 0.0) * nbytes / _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flowing:
    """Every save begins.

    :ivar slowness: smoothed, 1 at the store's best
    :ivar since: when saves came back, minus infinity if they were never shed
    :ivar pause: the pause that they were shed with
    :ivar refused_since: when the store first had no room, if it has had none
        since
    """

    pace: Pace = field(default_factory=Pace)
    slowness: float = 1.0
    since: float = float("-inf")
    pause: float = 0.0
    refused_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shedding:
    """Saves are dropped until a try goes well.

    :ivar slow: for being slow, else for having no room
    :ivar retry_at: when the next window may try
    """

    pace: Pace
    reason: str
    slow: bool
    since: float
    pause: float
    retry_at: float


ShedState: TypeAlias = Flowing | Shedding


def may_begin(state: ShedState, now: float) -> bool:
    """Whether a window may be saved; if it is, the state is :func:`admitted`."""
    match state:
        case Flowing():
            return True
        case Shedding():
            return now >= state.retry_at


def admitted(state: ShedState, now: float) -> ShedState:
    """The state after a window was let through.

    The next one follows a pause later whatever becomes of this one: a try that
    is lost, cancelled or hung holds nothing up.
    """
    match state:
        case Flowing():
            return state
        case Shedding():
            return replace(state, retry_at=now + state.pause)


def stored(
    state: ShedState, now: float, *, nbytes: int, seconds: float, marks: Marks
) -> ShedState:
    """The state after ``nbytes`` (above 0) were stored in ``seconds``."""
    pace = state.pace.after(now, seconds * _MIB / nbytes, marks)
    slowness = seconds / pace.expected(nbytes, marks)
    match state:
        case Flowing():
            # Held down, so that it takes several slow puts and not one.
            seen = min(slowness, 2 * marks.high)
            smoothed = state.slowness + _SMOOTHING * (seen - state.slowness)
            state = replace(state, pace=pace, slowness=smoothed, refused_since=None)
            if smoothed <= marks.high:
                return state
            return _shed(state, now, _slow(smoothed), slow=True, marks=marks)
        case Shedding():
            if state.slow and slowness > marks.low:
                return replace(state, pace=pace)
            return Flowing(
                pace=pace,
                slowness=min(slowness, marks.low),
                since=now,
                pause=state.pause,
            )


def refused(state: ShedState, now: float, *, marks: Marks) -> ShedState:
    """The state after a put for which there was no room at all."""
    match state:
        case Flowing():
            first = now if state.refused_since is None else state.refused_since
            state = replace(state, refused_since=first)
            if now - first < marks.full:
                return state
            reason = f"the store has had no room for {now - first:.3g} s"
            return _shed(state, now, reason, slow=False, marks=marks)
        case Shedding():
            return state


def running(
    state: ShedState, now: float, *, nbytes: int, seconds: float, marks: Marks
) -> ShedState:
    """The state while a put of ``nbytes`` has not ended after ``seconds``.

    One from before saves came back says nothing of how the store is now.
    """
    match state:
        case Flowing() if now - seconds >= state.since:
            expected = state.pace.expected(nbytes, marks)
            if seconds <= max(marks.pause, marks.high * expected):
                return state
            return _shed(state, now, _slow(seconds / expected), slow=True, marks=marks)
        case _:
            return state


def _slow(times: float) -> str:
    return f"a put takes {times:.0f} times as long as the store's best"


def _shed(
    state: Flowing, now: float, reason: str, *, slow: bool, marks: Marks
) -> Shedding:
    pause = marks.pause
    if now - state.since < _STEADY_PAUSES * state.pause:
        pause = min(2 * state.pause, marks.longest_pause)
    return Shedding(
        pace=state.pace,
        reason=reason,
        slow=slow,
        since=now,
        pause=pause,
        retry_at=now + pause,
    )
