"""When saves are shed, and when they come back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from akv.core.shed import (
    Flowing,
    Marks,
    Shedding,
    ShedState,
    admitted,
    may_begin,
    refused,
    running,
    stored,
)

MARKS = Marks()
MIB = 1 << 20
LASTING = Marks(fading=1e12)
WINDOW = 8 * MIB


def puts(
    state: ShedState, seconds: float, *, count: int = 1, at: float = 0.0
) -> ShedState:
    """Windows that took so long each, the first of them ending at ``at``."""
    for number in range(count):
        now = at + number * seconds
        state = stored(state, now, nbytes=WINDOW, seconds=seconds, marks=MARKS)
    return state


def shed() -> Shedding:
    """A store that took 20 ms for a window and now takes a second for one."""
    state = puts(puts(Flowing(), 0.02, count=5), 1.0, count=5, at=10.0)
    assert isinstance(state, Shedding)
    return state


def test_saves_are_shed_at_a_hundredth_of_the_speed_within_five_puts() -> None:
    """And the reason says how much slower."""
    state = puts(Flowing(), 0.02, count=5)
    counts = [
        isinstance(puts(state, 2.0, count=count, at=10.0), Shedding)
        for count in range(1, 6)
    ]
    assert counts == sorted(counts)
    assert counts[0] is False
    assert counts[-1] is True
    assert "times as long" in shed().reason


def test_one_slow_put_sheds_nothing_however_slow() -> None:
    """An hour for one window, between quick ones."""
    state = puts(puts(Flowing(), 0.02, count=5), 3600.0, at=10.0)
    assert isinstance(state, Flowing)
    assert isinstance(puts(state, 0.02, at=3700.0), Flowing)


def test_between_the_marks_nothing_changes() -> None:
    """Ten times the best is no reason to shed, and none to come back."""
    best = puts(Flowing(), 0.02, count=5)
    assert isinstance(puts(best, 0.2, count=100, at=10.0), Flowing)
    assert isinstance(puts(shed(), 0.2, count=100, at=20.0), Shedding)


def test_a_put_that_is_quick_is_never_slow_whatever_the_best_was() -> None:
    """Blocks of a few KiB take microseconds at best; 9 ms does no harm."""
    state: ShedState = Flowing()
    for seconds in (1e-5, *[0.009] * 100):
        state = stored(state, 1.0, nbytes=2048, seconds=seconds, marks=MARKS)
    assert isinstance(state, Flowing)


def test_small_puts_do_not_make_large_ones_look_slow() -> None:
    """2 KiB in 20 us, then 8 MiB in 16 ms, over and over."""
    state: ShedState = Flowing()
    for number in range(200):
        for nbytes, seconds in ((2048, 2e-5), (WINDOW, 0.016)):
            state = stored(
                state, number / 10, nbytes=nbytes, seconds=seconds, marks=MARKS
            )
            assert isinstance(state, Flowing)


def test_one_window_may_try_each_pause() -> None:
    """Whatever becomes of it."""
    state: ShedState = shed()
    assert isinstance(state, Shedding)
    now = state.retry_at
    assert not may_begin(state, now - 0.01)
    for _ in range(5):
        assert may_begin(state, now)
        state = admitted(state, now)
        assert not may_begin(state, now)
        assert not may_begin(state, now + MARKS.pause - 0.01)
        now += MARKS.pause


def test_the_first_quick_put_brings_them_all_back() -> None:
    """No slow climb: the store is well again within one pause."""
    state = shed()
    back = puts(state, 0.03, at=state.retry_at + 0.03)
    assert isinstance(back, Flowing)
    assert may_begin(back, state.retry_at)


def test_saves_that_must_be_shed_again_soon_are_tried_less_and_less_often() -> None:
    """A store that is quick only while it is left alone; never beyond the longest."""
    state: ShedState = shed()
    pauses = []
    for _ in range(6):
        assert isinstance(state, Shedding)
        pauses.append(state.pause)
        now = state.retry_at
        state = puts(puts(state, 0.02, at=now), 1.0, count=5, at=now + 1)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert isinstance(state, Shedding)
    well = puts(state, 0.02, at=state.retry_at)
    later = puts(well, 1.0, count=5, at=state.retry_at + 200)
    assert isinstance(later, Shedding)
    assert later.pause == 2.0


def test_a_store_that_is_slower_for_good_is_slow_no_longer() -> None:
    """A hundred times slower from now on: tried each pause, taken up in an hour."""
    state: ShedState = shed()
    now = 20.0
    while isinstance(state, Shedding):
        now += state.pause
        state = stored(state, now, nbytes=WINDOW, seconds=2.0, marks=MARKS)
        assert now < 2 * 3600
    assert now > 1800
    assert isinstance(puts(state, 2.0, count=100, at=now), Flowing)


def test_a_long_idle_time_is_no_error() -> None:
    """A year later the best is forgotten."""
    state = puts(Flowing(), 0.02, count=5)
    assert isinstance(puts(state, 500.0, count=20, at=3e7), Flowing)


def test_no_room_for_two_seconds_sheds_and_the_first_room_ends_it() -> None:
    """Any success in between begins the time anew."""
    state: ShedState = Flowing()
    for now in (0.0, 1.0, 1.9):
        state = refused(state, now, marks=MARKS)
        assert isinstance(state, Flowing)
    for again in (2.0, 3.9):
        state = refused(puts(state, 0.02, at=again), again, marks=MARKS)
        assert isinstance(state, Flowing)
    state = refused(state, 5.9, marks=MARKS)
    assert isinstance(state, Shedding)
    assert state.reason == "the store has had no room for 2 s"
    assert refused(state, 6.0, marks=MARKS) == state
    # However slow: for being full it is room that counts.
    assert isinstance(puts(state, 1.0, at=8.0), Flowing)


def test_a_put_that_does_not_end_sheds_before_its_deadline() -> None:
    """The thread hangs: after a pause, no put has to end for it to be known."""
    state = puts(Flowing(), 0.02, count=5)

    def hangs(seconds: float, now: float = 10.0, state: ShedState = state) -> ShedState:
        return running(state, now, nbytes=WINDOW, seconds=seconds, marks=MARKS)

    assert hangs(1.9) == state
    assert isinstance(hangs(2.1), Shedding)
    # Slow at its best: what is usual is no reason.
    slow = puts(Flowing(), 1.0, count=5)
    assert hangs(15.0, 20.0, slow) == slow
    # The one that hangs from before says nothing of a store that came back.
    before = hangs(2.1)
    assert isinstance(before, Shedding)
    back = puts(before, 0.02, at=12.0)
    assert hangs(5.0, 13.0, back) == back
    assert isinstance(hangs(2.1, 15.0, back), Shedding)


@pytest.mark.parametrize("nbytes", [1, 2048, MIB, 1 << 40])
def test_the_first_put_is_the_best_there_is(nbytes: int) -> None:
    """Whatever it takes; and an instant one divides by nothing."""
    for seconds in (0.0, 1e-9, 100.0):
        state = stored(Flowing(), 1.0, nbytes=nbytes, seconds=seconds, marks=MARKS)
        assert isinstance(state, Flowing)
        assert state.slowness <= 1.0


class StoreMachine(RuleBasedStateMachine):
    """A store that is well, slow, full or hung, and asked before each window.

    The model knows how the store is and nothing of the rule. Windows are let
    through as the rule says, and some of them are lost on their way.
    """

    @initialize(best=st.floats(1e-4, 0.1))
    def open(self, best: float) -> None:
        self.state: ShedState = Flowing()
        self.now = 0.0
        self.best = best
        self.health = "well"
        self.ill = False
        self.changes = 0
        self.entered: list[float] = []
        self.tries: list[float] = []
        self._to(puts(self.state, best))

    def _to(self, state: ShedState) -> None:
        if type(state) is not type(self.state):
            self.changes += 1
            if isinstance(state, Shedding):
                self.entered.append(self.now)
                self.tries = []
        self.state = state

    def _put(self, factor: float) -> None:
        """A window through the gate, as the store is now."""
        if not may_begin(self.state, self.now):
            return
        if isinstance(self.state, Shedding):
            self.tries.append(self.now)
        self._to(admitted(self.state, self.now))
        if self.health == "full":
            self._to(refused(self.state, self.now, marks=LASTING))
            return
        seconds = self.best * factor
        if self.health == "slow":
            seconds = max(100 * self.best, 1.0) * factor
        self.now += seconds
        self._to(
            stored(self.state, self.now, nbytes=WINDOW, seconds=seconds, marks=LASTING)
        )

    @rule(count=st.integers(1, 20), factor=st.floats(1.0, 4.0))
    def save(self, count: int, factor: float) -> None:
        """Several windows, one after the other."""
        for _ in range(count):
            before = self.state
            self._put(factor)
            if self.health == "well" and isinstance(before, Flowing):
                assert isinstance(self.state, Flowing), "a healthy store was shed"

    @rule()
    def lost(self) -> None:
        """A window is let through and never heard of: cancelled, or failed."""
        if may_begin(self.state, self.now):
            self._to(admitted(self.state, self.now))

    @rule(seconds=st.floats(0.0, 1.9))
    def hold(self, seconds: float) -> None:
        """A put that has been under way for less than a pause."""
        self._to(
            running(self.state, self.now, nbytes=WINDOW, seconds=seconds, marks=LASTING)
        )

    @rule(seconds=st.floats(0.001, 30.0))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule(health=st.sampled_from(["slow", "full"]))
    def fall_ill(self, health: str) -> None:
        """From now on puts are slow, or find no room."""
        self.health, self.ill = health, True

    @rule()
    def keep_trying(self) -> None:
        """Traffic over two minutes on a store that is ill is shed down to a trickle."""
        if self.health == "well":
            return
        end = self.now + 120.0
        let_through = 0
        while self.now < end:
            if may_begin(self.state, self.now):
                let_through += isinstance(self.state, Shedding)
            self._put(1.0)
            self.now += 0.05
        assert isinstance(self.state, Shedding)
        assert let_through <= 120.0 / LASTING.pause + 1

    @rule()
    def recover(self) -> None:
        """Within one pause of the store being well all saves are back, and stay."""
        self.health = "well"
        pause = self.state.pause if isinstance(self.state, Shedding) else 0.0
        since = self.now
        while isinstance(self.state, Shedding):
            self.now += 0.05
            self._put(1.0)
            assert self.now <= since + pause + self.best + 0.1
        changes = self.changes
        for _ in range(50):
            self._put(1.0)
        assert self.changes == changes

    @invariant()
    def a_store_that_was_never_ill_was_never_shed(self) -> None:
        """Not once."""
        if not self.ill:
            assert self.changes == 0

    @invariant()
    def it_does_not_flap(self) -> None:
        """Between two times of shedding at least a pause has passed."""
        for first, second in zip(self.entered, self.entered[1:], strict=False):
            assert second - first >= LASTING.pause

    @invariant()
    def only_a_trickle_passes_while_saves_are_shed(self) -> None:
        """One a pause."""
        for first, second in zip(self.tries, self.tries[1:], strict=False):
            assert second - first >= LASTING.pause - 1e-9


StoreMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase
