"""The life of a load: legal moves, illegal ones, and what has failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.errors import PlanError
from akv.core.states import (
    Admit,
    Admitted,
    Answer,
    Cancel,
    Cancelled,
    Expire,
    Failed,
    Fetched,
    Fetching,
    Hit,
    Landed,
    LoadEvent,
    LoadState,
    Missed,
    Placed,
    Placing,
    Plan,
    Planned,
    Probing,
    is_final,
    step,
)

window_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


def test_a_load_lives_from_probe_to_landing() -> None:
    """Two windows, nothing fails."""
    state: LoadState = Probing()
    life: list[tuple[LoadEvent, LoadState]] = [
        (Answer(48), Hit(48)),
        (Plan((2, 1)), Planned((2, 1))),
        (Admit(), Admitted((2, 1))),
        (Admit(), Fetching((2, 1), 0, 0)),
        (Fetched(), Placing((2, 1), 0, 0, frozenset())),
        (Placed(), Fetching((2, 1), 1, 2)),
        (Fetched(), Placing((2, 1), 1, 2, frozenset())),
        (Placed(), Landed(3)),
    ]
    for event, expected in life:
        state = step(state, event)
        assert state == expected


def test_a_load_of_nothing_has_landed_at_once() -> None:
    """No keys are left after rounding: finished, no division by nothing."""
    assert step(Probing(), Plan(())) == Landed(0)


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_answer_of_nothing_is_a_miss(tokens: int) -> None:
    """No hit, no load."""
    assert step(Probing(), Answer(tokens)) == Missed()


@given(windows=window_sizes, data=st.data())
def test_what_has_not_landed_has_failed_and_nothing_else(
    windows: tuple[int, ...], data: st.DataObject
) -> None:
    """Windows land in order until one has bad objects or time is up."""
    state = step(step(step(Probing(), Plan(windows)), Admit()), Admit())
    landed: set[int] = set()
    place = 0
    for size in windows:
        mine = range(place, place + size)
        place += size
        if data.draw(st.booleans(), label="expire while fetching"):
            state = step(state, Expire("late"))
            break
        bad = frozenset(data.draw(st.sets(st.sampled_from(mine)), label="bad"))
        state = step(state, Fetched(bad, "missing"))
        if is_final(state):
            break
        landed |= set(mine) - bad
        state = step(state, Placed("missing"))
        if is_final(state):
            break
    everything = set(range(sum(windows)))
    match state:
        case Landed(objects):
            assert landed == everything
            assert objects == len(everything)
        case Failed(places, reason):
            assert set(places) == everything - landed
            assert reason
        case _:
            pytest.fail(f"ended in {state}")


@pytest.mark.parametrize(
    "state",
    [
        Probing(),
        Hit(16),
        Planned((1,)),
        Admitted((1,)),
        Fetching((1,), 0, 0),
        Placing((1,), 0, 0, frozenset()),
    ],
)
def test_every_state_that_is_not_an_end_can_be_cancelled(state: LoadState) -> None:
    """A request may be aborted at any time."""
    assert step(state, Cancel()) == Cancelled()


@pytest.mark.parametrize(
    "state", [Missed(), Landed(1), Failed(frozenset({0}), "x"), Cancelled()]
)
def test_nothing_follows_an_end(state: LoadState) -> None:
    """A second report, a late answer, an abort after the end: refused."""
    for event in (Answer(1), Plan((1,)), Admit(), Fetched(), Placed(), Cancel()):
        with pytest.raises(PlanError):
            step(state, event)


def test_bad_places_outside_of_the_window_are_refused() -> None:
    """Another window's objects cannot fail in this one."""
    with pytest.raises(PlanError, match="outside"):
        step(Fetching((1, 1), 0, 0), Fetched(frozenset({1})))
