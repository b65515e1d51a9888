"""Who waits for whose load: one load for many, and nobody waits for a stranger's."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from akv.core.flight import Flight, Flights, Follower
from akv.core.keys import block_hashes
from akv.core.spec import LoadSpec, Span

PATIENCE = 5.0
SHARED = list(range(64))


def prompt(tail: int) -> tuple[bytes, ...]:
    """Eight blocks: four that all prompts have, four of this one."""
    return block_hashes([*SHARED, *([tail] * 64)], 16)


def spec_of(hashes: tuple[bytes, ...], first: int, last: int, name: str) -> LoadSpec:
    """A load of these blocks."""
    blocks = tuple(range(first, last))
    return LoadSpec(
        request_id=name,
        space=b"",
        load_id=1,
        local=first * 16,
        usable=last * 16,
        spans=(Span(first_block=first, hashes=hashes[first:last], block_ids=blocks),),
    )


class Air:
    """Flights, and a clock that stands still."""

    def __init__(self) -> None:
        self.flights = Flights()
        self.now = 100.0

    def began(self, hashes: tuple[bytes, ...], first: int, last: int) -> Flight:
        spec = spec_of(hashes, first, last, "leader")
        return self.flights.began(spec, Follower())

    def waits(
        self, follower: Follower, hashes: tuple[bytes, ...], first: int, last: int
    ) -> bool:
        return self.flights.waits(
            follower, hashes, first, last, now=self.now, patience=PATIENCE
        )


def test_only_a_load_that_is_wanted_as_a_whole_is_waited_for() -> None:
    """The same blocks or more of the same prompt, from the same block on."""
    air, one, other = Air(), prompt(1), prompt(2)
    air.began(one, 0, 4)
    for hashes, first, last, waits in [
        (one, 0, 4, True),
        (one, 0, 8, True),
        (other, 0, 8, True),
        (one, 0, 3, False),  # a block less
        (one, 1, 8, False),  # has the first one already
    ]:
        assert air.waits(Follower(), hashes, first, last) is waits
    air = Air()
    air.began(one, 0, 6)
    assert not air.waits(Follower(), other, 0, 8)


def test_the_longest_load_that_fits_is_waited_for() -> None:
    """Not the one that has more than is wanted."""
    air, one, other = Air(), prompt(1), prompt(2)
    air.began(one, 0, 2)
    best = air.began(one, 0, 4)
    air.began(one, 0, 8)
    follower = Follower()
    assert air.waits(follower, other, 0, 8)
    assert follower.flight is best


def test_what_comes_by_another_way_meanwhile_makes_nobody_load_the_rest_again() -> None:
    """The engine computes the first blocks of a load that is waited for."""
    air, one = Air(), prompt(1)
    flight, follower = air.began(one, 0, 4), Follower()
    assert air.waits(follower, one, 0, 8)
    assert air.waits(follower, one, 3, 8)
    assert follower.flight is flight
    assert not air.waits(follower, one, 4, 8)
    assert not air.waits(Follower(), one, 3, 8)


def test_nobody_waits_longer_than_its_patience_whoever_leads() -> None:
    """Counted from the first wait, over all loads that were waited for."""
    air, one = Air(), prompt(1)
    first, follower = air.began(one, 0, 4), Follower()
    assert air.waits(follower, one, 0, 4)
    air.flights.ended(first)
    air.now += PATIENCE - 1
    air.began(one, 0, 4)
    assert air.waits(follower, one, 0, 4)
    air.now += 2
    assert not air.waits(follower, one, 0, 4)
    assert follower.given_up


def test_one_failure_is_tried_again_by_one_and_two_by_nobody() -> None:
    """The second in line leads, the others wait for it, and then it is enough."""
    air, one = Air(), prompt(1)
    first, second, third = air.began(one, 0, 4), Follower(), Follower()
    assert air.waits(second, one, 0, 4)
    assert air.waits(third, one, 0, 4)
    first.failed = True
    air.flights.ended(first)
    assert not air.waits(second, one, 0, 4)
    assert not second.given_up
    again = air.flights.began(spec_of(one, 0, 4, "second"), second)
    assert air.waits(third, one, 0, 4)
    again.failed = True
    air.flights.ended(again)
    assert not air.waits(third, one, 0, 4)
    assert third.given_up


def test_a_load_that_nobody_wants_any_more_is_not_waited_for() -> None:
    """Its request was aborted, or what is stored was made unreachable."""
    air, one = Air(), prompt(1)
    flight = air.began(one, 0, 4)
    air.flights.ended(flight)
    air.flights.ended(flight)
    assert not air.waits(Follower(), one, 0, 4)
    flight = air.began(one, 0, 4)
    air.flights.clear()
    assert flight.over
    assert not air.waits(Follower(), one, 0, 4)
    assert len(air.flights) == 0


class Engine(RuleBasedStateMachine):
    """Requests come, ask, load, land, fail and leave in any order.

    The model is what the engine has: a set of hashes, and who loads what.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flights = Flights()
        self.now = 0.0
        self.cached: set[bytes] = set()
        self.waiting: dict[int, tuple[tuple[bytes, ...], int, Follower]] = {}
        self.loading: dict[int, Flight] = {}
        self.since: dict[int, float] = {}
        self.names = 0

    @rule(tail=st.integers(0, 2), last=st.integers(1, 8))
    def come(self, tail: int, last: int) -> None:
        self.names += 1
        self.waiting[self.names] = (prompt(tail), last, Follower())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        hashes, last, follower = self.waiting[name]
        first = 0
        while first < last and hashes[first] in self.cached:
            first += 1
        if first == last:
            del self.waiting[name]
            return
        wanted = set(hashes[first:last])
        waits = self.flights.waits(
            follower, hashes, first, last, now=self.now, patience=PATIENCE
        )
        if waits:
            assert follower.flight is not None
            assert follower.flight in self.loading.values()
            loaded = set(follower.flight.spec.spans[0].hashes)
            assert loaded <= set(hashes[:last])
            assert loaded & wanted
            assert self.now - self.since.setdefault(name, self.now) <= PATIENCE
            return
        if not follower.given_up:
            # Nothing that would do is under way: this is the only such load.
            for flight in self.loading.values():
                begins = flight.spec.spans[0].hashes[0] == hashes[first]
                loaded = set(flight.spec.spans[0].hashes)
                assert flight.over or not (begins and loaded <= wanted)
            spec = spec_of(hashes, first, last, str(name))
            self.loading[name] = self.flights.began(spec, follower)
        del self.waiting[name]

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), end=st.sampled_from(["landed", "failed", "aborted"]))
    def end(self, data: Any, end: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        flight = self.loading.pop(name)
        flight.failed = end == "failed"
        if end == "landed":
            self.cached.update(flight.spec.spans[0].hashes)
        self.flights.ended(flight)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        del self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def evict(self) -> None:
        self.cached.clear()

    @invariant()
    def what_is_under_way_is_what_is_loading(self) -> None:
        assert len(self.flights) == len(self.loading)


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
