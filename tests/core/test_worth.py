"""Load or compute: what is decided, and what is learnt from what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.worth import Experience, Measured, Verdict, weigh

MIB = 1 << 20
BLOCK = 16


def verdict(**changes: Any) -> Verdict:
    """A store of 1 GiB/s and an engine of 16,000 tokens/s, 100 blocks of 1 MiB."""
    values: dict[str, Any] = {
        "blocks": 100,
        "block_bytes": MIB,
        "block_tokens": BLOCK,
        "queued_bytes": 0,
        "queued_tokens": 0,
        "latency": 0.001,
        "seconds_per_byte": 1 / (1024 * MIB),
        "prefill_rate": 16_000.0,
        "deadline": 5.0,
    }
    return weigh(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        # A block takes 1 ms either way: a tie but for the fixed part.
        ({"latency": 0.003}, 0),
        ({"latency": 0.0}, 100),
        ({"prefill_rate": 8_000.0}, 100),
        # Two loads before it: 0.3 s to land, 0.2 s to compute.
        ({"prefill_rate": 8_000.0, "queued_bytes": 200 * MIB}, 0),
        # The engine is busy for a second; a slow store has that long.
        ({"seconds_per_byte": 1 / (100 * MIB), "queued_tokens": 16_000}, 99),
        ({"seconds_per_byte": 1 / (100 * MIB), "queued_tokens": 1_600}, 9),
        ({"seconds_per_byte": 1 / (100 * MIB)}, 0),
        # Half of it would land too late, and the engine is slower still.
        ({"seconds_per_byte": 0.1 / MIB, "prefill_rate": 100.0}, 49),
        ({"latency": 6.0, "prefill_rate": 100.0}, 0),
        # One block is never rounded away.
        ({"blocks": 1, "prefill_rate": 8_000.0}, 1),
    ],
)
def test_what_is_loaded_is_what_lands_before_it_would_be_computed(
    changes: dict[str, Any], blocks: int
) -> None:
    """Whole blocks, from the front."""
    assert verdict(**changes).blocks == blocks


def test_a_verdict_says_both_times() -> None:
    """So that a reader of the log can see why."""
    no = verdict(queued_bytes=924 * MIB, prefill_rate=32_000.0)
    assert no.land_seconds == pytest.approx(1.001)
    assert no.compute_seconds == pytest.approx(0.05)
    assert (no.blocks, no.bytes, no.queued_bytes) == (0, 100 * MIB, 924 * MIB)
    assert no.reason.startswith("not worth loading: it would land after 1 s")
    assert no.reason.endswith("computing takes 0.05 s")
    some = verdict(seconds_per_byte=0.1 / MIB, prefill_rate=100.0)
    assert some.bytes == 49 * MIB
    assert some.land_seconds == pytest.approx(4.901)
    assert "load_deadline" in some.reason


@given(
    blocks=st.integers(1, 2000),
    queued_bytes=st.integers(0, 1 << 36),
    queued_tokens=st.integers(0, 1 << 20),
    latency=st.floats(0, 10),
    seconds_per_byte=st.floats(0, 1e-6),
    prefill_rate=st.floats(1, 1e6),
)
def test_nothing_that_is_promised_lands_late_or_after_it_would_be_computed(
    **numbers: Any,
) -> None:
    """Whatever the numbers are, but for the error of floats."""
    found = verdict(**numbers)
    assert 0 <= found.blocks <= numbers["blocks"]
    assert found.land_seconds is not None
    assert found.compute_seconds is not None
    if found.blocks:
        assert found.bytes == found.blocks * MIB
        assert found.land_seconds <= 5.0 * (1 + 1e-9)
        assert found.land_seconds <= found.compute_seconds * (1 + 1e-9) + 1e-9
    else:
        assert found.reason


def line_of(*samples: tuple[float, float], now: float = 1.0) -> Measured:
    """What comes of these amounts and seconds, all at once."""
    measured = Measured()
    for amount, seconds in samples:
        measured.add(amount, seconds, now)
    return measured


def test_a_fixed_part_and_one_for_each_unit_are_told_apart() -> None:
    """Where amounts differ; beyond twice the largest one nothing is known."""
    measured = line_of(*((n, 0.5 + 0.01 * n) for n in (10, 100, 50, 20, 80)))
    assert measured.line(40) == pytest.approx((0.5, 0.01))
    assert measured.seconds(200) == pytest.approx(2.5)
    assert measured.seconds(201) is None
    assert Measured().seconds(0) is None


def test_where_amounts_are_alike_the_smaller_answer_is_given() -> None:
    """It makes a load be promised, and that one tells."""
    measured = line_of(*[(100.0, 1.0)] * 10)
    assert measured.seconds(100) == pytest.approx(1.0)
    assert measured.seconds(10) == pytest.approx(0.1)
    assert measured.seconds(200) == pytest.approx(1.0)


@given(
    samples=st.lists(
        st.tuples(st.floats(1, 1e9), st.floats(1e-6, 60)), min_size=1, max_size=40
    ),
    amount=st.floats(1, 1e9),
)
def test_what_was_measured_never_comes_to_nonsense(
    samples: list[tuple[float, float]], amount: float
) -> None:
    """Both parts are 0 or more, and the mean is between the extremes."""
    measured = line_of(*samples)
    fixed, each = measured.line(amount)
    assert fixed >= -1e-6
    assert each >= 0
    mean = measured.seconds(max(a for a, _ in samples))
    assert mean is not None
    assert mean >= 0


def test_one_hang_among_many_counts_little() -> None:
    """A load that takes a thousand times longer does not stop all that follow."""
    measured = line_of(*[(100.0, 0.01)] * 16)
    measured.add(100.0, 10.0, 1.0)
    seconds = measured.seconds(100)
    assert seconds is not None
    assert seconds < 0.015


def test_a_store_that_gets_slow_is_known_to_be_slow_soon() -> None:
    """Twenty times slower: within a dozen loads."""
    measured = line_of(*[(100.0, 0.01)] * 16)
    for _ in range(12):
        measured.add(100.0, 0.2, 1.0)
    seconds = measured.seconds(100)
    assert seconds is not None
    assert seconds > 0.05


def experience(**options: Any) -> Experience:
    """Blocks of 1 MiB and 16 tokens."""
    return Experience(block_bytes=MIB, block_tokens=BLOCK, deadline=5.0, **options)


def slow_store(known: Experience, *, now: float = 0.0, loads: int = 8) -> None:
    """100 blocks take a second."""
    for _ in range(loads):
        known.load_began(now)
        known.load_ended(
            num_bytes=100 * MIB, queued_bytes=0, seconds=1.0, failed=False, now=now
        )


def quick_engine(known: Experience, *, steps: int = 20) -> None:
    """16,000 tokens a second, so 100 blocks take 0.1 s."""
    for _ in range(steps):
        known.computed(1600, 0.1, 0.0)


def asked(known: Experience, *, now: float = 1.0, blocks: int = 100) -> Verdict:
    """What is decided with nothing queued."""
    return known.weigh(blocks=blocks, queued_bytes=0, queued_tokens=0, now=now)


def test_ignorance_never_speaks_against_a_load() -> None:
    """Neither of the store nor of the engine nor of loads as large as this one."""
    known = experience()
    assert asked(known) == Verdict(
        blocks=100,
        bytes=100 * MIB,
        queued_bytes=0,
        land_seconds=None,
        compute_seconds=None,
    )
    slow_store(known)
    assert asked(known).blocks == 100
    assert asked(known).land_seconds == pytest.approx(1.0)
    quick_engine(known, steps=7)
    assert asked(known).blocks == 100
    quick_engine(known)
    assert asked(known).blocks == 0
    assert asked(known, blocks=201).blocks == 201
    without = experience()
    quick_engine(without)
    slow_store(without, loads=7)
    assert asked(without).blocks == 100
    assert asked(without).compute_seconds == pytest.approx(0.1)


def test_small_steps_tell_nothing_of_the_engine() -> None:
    """What a step takes whatever its tokens would pass for the price of a few."""
    known = experience()
    for _ in range(1000):
        known.computed(255, 0.1, 0.0)
    assert known.prefill_rate is None


def test_a_prefill_rate_that_is_given_is_not_measured() -> None:
    """From the first load on that has evidence."""
    known = experience(prefill_rate=16_000.0)
    known.computed(10_000, 10.0, 0.0)
    assert known.prefill_rate == 16_000.0
    slow_store(known)
    assert asked(known).blocks == 0


def test_loads_that_fail_late_count_and_those_that_fail_at_once_do_not() -> None:
    """A miss is quick, and says nothing of how long a hit takes."""
    known = experience(prefill_rate=16_000.0)
    known.load_began(0.0)
    for seconds in [0.001] * 20:
        known.load_ended(
            num_bytes=100 * MIB, queued_bytes=0, seconds=seconds, failed=True, now=0.0
        )
    assert asked(known).land_seconds is None
    for seconds in [5.0] * 8:
        known.load_ended(
            num_bytes=100 * MIB, queued_bytes=0, seconds=seconds, failed=True, now=0.0
        )
    assert asked(known).blocks == 0
    assert asked(known).land_seconds == pytest.approx(5.0)


def test_a_store_that_was_slow_is_tried_again_and_believed() -> None:
    """One load in half a minute; when it was quick, so are all, whatever was."""
    known = experience(prefill_rate=16_000.0)
    slow_store(known, now=0.0)
    assert asked(known, now=29.0).blocks == 0
    trial = asked(known, now=30.0)
    assert trial.blocks == 100
    assert trial.reason == "to see how quick the store is now"
    assert trial.land_seconds == pytest.approx(1.0)
    known.load_began(30.0)
    assert asked(known, now=30.0).blocks == 0
    known.load_ended(
        num_bytes=100 * MIB, queued_bytes=0, seconds=0.03, failed=False, now=30.1
    )
    assert asked(known, now=30.2).blocks == 100
    assert asked(known, now=30.2).land_seconds == pytest.approx(0.03)


def test_queued_bytes_are_not_taken_for_a_slow_store() -> None:
    """Ten loads at once take ten times as long, each, and the store is as quick."""
    known = experience(prefill_rate=16_000.0)
    known.load_began(0.0)
    for round_ in range(3):
        for ahead in range(10):
            known.load_ended(
                num_bytes=10 * MIB,
                queued_bytes=ahead * 10 * MIB,
                seconds=0.001 + 0.002 * (ahead + 1),
                failed=False,
                now=float(round_),
            )
    alone = asked(known, blocks=10)
    assert alone.blocks == 10
    assert alone.land_seconds == pytest.approx(0.003)
    behind = known.weigh(blocks=10, queued_bytes=90 * MIB, queued_tokens=0, now=1.0)
    assert behind.land_seconds == pytest.approx(0.021)
    assert behind.blocks == 0


def test_a_verdict_does_not_change() -> None:
    """Frozen, as everything that crosses a floor."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict().blocks = 3  # type: ignore[misc]
