"""Sizes are read as people write them, and bad ones are explained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.errors import ConfigError
from akv.core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("10B", 10),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("512MiB", 512 << 20),
        ("512MB", 512_000_000),
        ("2kB", 2000),
        ("1.5GiB", 3 << 29),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read_as_it_is_meant(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "4G", "GiB", "-1", "4 apples", "1.5", "4GiBB", -1]
)
def test_a_bad_size_is_refused_with_an_example(text: int | str) -> None:
    with pytest.raises(ConfigError, match="4GiB") as caught:
        parse_size(text, field="capacity")
    assert caught.value.field == "capacity"
    assert caught.value.value == text


def test_a_bool_is_no_size() -> None:
    with pytest.raises(ConfigError):
        parse_size(True)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (4 << 30, "4GiB"),
        (3 << 29, "1.5GiB"),
        (5 << 40, "5TiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read_again(size: int) -> None:
    again = parse_size(format_size(size))
    assert abs(again - size) <= size * 0.06


@given(st.integers(0, 1023), st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30]))
def test_whole_units_are_written_exactly(count: int, unit: int) -> None:
    assert parse_size(format_size(count * unit)) == count * unit
