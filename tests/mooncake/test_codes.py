"""Every return code has a name and a meaning; none is taken for good by mistake."""

from __future__ import annotations

import pytest

from akv.store.base import Failure, Status
from akv.store.mooncake.codes import (
    CODES,
    describe,
    is_settled,
    is_unreachable,
    outcome_of,
)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (-200, Status.NO_ROOM),
        (-703, Status.MISS),
        (-704, Status.MISS),
        (-705, Status.EXISTS),
        (-710, Status.MISS),
        (-712, Status.MISS),
        (-1700, Status.NO_ROOM),
    ],
)
def test_a_code_that_is_no_failure_has_its_outcome(number: int, status: Status) -> None:
    assert outcome_of(number) is status


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (-101, "SEGMENT_NOT_FOUND"),
        (-103, "CLIENT_NOT_FOUND"),
        (-600, "INVALID_PARAMS"),
        (-706, "OBJECT_HAS_LEASE"),
        (-707, "LEASE_EXPIRED"),
        (-800, "TRANSFER_FAIL"),
        (-801, "CHECKSUM_MISMATCH"),
        (-900, "RPC_FAIL"),
        (-901, "RPC_TIMEOUT"),
    ],
)
def test_a_failure_carries_its_name_number_and_meaning(number: int, name: str) -> None:
    outcome = outcome_of(number)
    assert isinstance(outcome, Failure)
    assert outcome.code == number
    assert outcome.reason == f"{name} ({number}): {CODES[number].meaning}"


def test_an_unknown_code_is_a_failure_with_its_number() -> None:
    outcome = outcome_of(-4711)
    assert outcome == Failure("unknown code -4711", -4711)
    assert describe(-4711) == "unknown code -4711"


def test_no_code_is_a_hit() -> None:
    for number in CODES:
        assert number < 0
        assert outcome_of(number) not in (Status.HIT, Status.STORED, Status.REMOVED)


def test_names_and_numbers_are_used_once() -> None:
    names = [code.name for code in CODES.values()]
    assert len(set(names)) == len(names)
    assert all(code.number == number for number, code in CODES.items())


@pytest.mark.parametrize("number", [-900, -901, -1010])
def test_a_master_that_cannot_be_asked_is_told_apart(number: int) -> None:
    assert is_unreachable(number)
    assert not is_unreachable(-704)
    assert not is_unreachable(-800)


def test_a_transfer_that_was_given_up_on_may_still_touch_memory() -> None:
    assert not is_settled(-800, 60.0)
    assert not is_settled(-4711, 61.0)
    assert is_settled(-800, 10.0)
    assert is_settled(4096, 61.0)
    for number in (-200, -704, -707, -900, -901):
        assert is_settled(number, 3600.0)
