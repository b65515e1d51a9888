"""When a store is left alone, and when it is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from akv.core.breaker import (
    BreakerState,
    Closed,
    HalfOpen,
    Open,
    failed,
    probe,
    succeeded,
)


def fail(state: BreakerState, now: float) -> BreakerState:
    """A failure, with small numbers."""
    return failed(state, now, threshold=3, interval=2.0)


def test_three_failures_in_a_row_open_it_and_one_success_between_does_not() -> None:
    """Single failures are everyday."""
    state: BreakerState = Closed()
    for _ in range(2):
        state = fail(state, 1.0)
    assert succeeded(state) == Closed(0)
    assert fail(state, 1.0) == Open(retry_at=3.0)


def test_it_is_probed_after_the_interval_and_not_before() -> None:
    """And only while it is open."""
    assert probe(Open(3.0), 2.9) == Open(3.0)
    assert probe(Open(3.0), 3.0) == HalfOpen()
    assert probe(Closed(2), 9.0) == Closed(2)


def test_the_probe_decides() -> None:
    """Back, or left alone for another interval."""
    assert succeeded(HalfOpen()) == Closed(0)
    assert fail(HalfOpen(), 5.0) == Open(7.0)


def test_a_late_success_from_before_does_not_close_it() -> None:
    """A call that hung for a minute says nothing of now."""
    assert succeeded(Open(3.0)) == Open(3.0)


@given(st.lists(st.sampled_from(["fail", "succeed", "probe"]), max_size=60))
def test_it_never_opens_without_three_failures_in_a_row(moves: list[str]) -> None:
    """Whatever happens in between."""
    state: BreakerState = Closed()
    row = 0
    for now, move in enumerate(moves):
        before = state
        if move == "fail":
            row += 1
            state = fail(state, now)
        elif move == "succeed":
            row = 0
            state = succeeded(state)
        else:
            state = probe(state, now)
        if isinstance(before, Closed) and isinstance(state, Open):
            assert row >= 3
