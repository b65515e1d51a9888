"""The rounding rule: the table of the design, and what must hold for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.align import common_block, promise, usable_tokens

TABLE = [
    # num_tokens, block, hit, local -> need, usable
    (48, 16, 48, 0, 32, 32),
    (48, 16, 48, 16, 16, 32),
    (48, 16, 48, 32, 0, 32),
    (17, 16, 16, 0, 16, 16),
    (16, 16, 16, 0, 0, 0),
    (15, 16, 0, 0, 0, 0),
    (80, 16, 64, 80, 0, 80),
]


@pytest.mark.parametrize(
    ("num_tokens", "block", "hit", "local", "need", "usable"), TABLE
)
def test_the_table_of_the_design(
    num_tokens: int, block: int, hit: int, local: int, need: int, usable: int
) -> None:
    """A full hit is rounded to whole blocks below the last token."""
    found = promise(num_tokens=num_tokens, local=local, hit=hit, block=block)
    assert (found.need, found.usable) == (need, usable)


tokens = st.integers(0, 200_000)
blocks = st.integers(1, 4096)


@given(hit=tokens, num_tokens=tokens, block=blocks)
def test_usable_never_reaches_the_last_token_and_is_whole_blocks(
    hit: int, num_tokens: int, block: int
) -> None:
    """What is usable leaves a token to compute and never splits a block."""
    usable = usable_tokens(hit, num_tokens, block)
    assert usable == 0 or usable <= num_tokens - 1
    assert usable <= hit
    assert usable % block == 0


@given(hit=tokens, num_tokens=tokens, block=blocks)
def test_rounding_twice_is_rounding_once(hit: int, num_tokens: int, block: int) -> None:
    """Rounding is idempotent."""
    usable = usable_tokens(hit, num_tokens, block)
    assert usable_tokens(usable, num_tokens, block) == usable


@given(
    hit=tokens,
    num_tokens=st.integers(1, 200_000),
    block=blocks,
    local_blocks=st.integers(0, 500),
)
def test_a_promise_is_whole_blocks_between_local_and_usable(
    hit: int, num_tokens: int, block: int, local_blocks: int
) -> None:
    """The load covers whole blocks that the engine does not have."""
    local = local_blocks * block
    found = promise(num_tokens=num_tokens, local=local, hit=hit, block=block)
    assert found.local == local
    assert found.need % block == 0
    assert found.need == 0 or local + found.need <= min(hit, num_tokens - 1)


def test_a_local_hit_inside_a_block_has_that_block_loaded_as_a_whole() -> None:
    """20 tokens are there, 48 can be: 28 more, and the load begins at 16."""
    found = promise(num_tokens=49, local=20, hit=48, block=16)
    assert (found.local, found.usable, found.need) == (16, 48, 28)
    assert promise(num_tokens=49, local=20, hit=16, block=16).need == 0


def test_the_block_of_several_groups_is_whole_in_each() -> None:
    """Groups of 32 and 48 tokens agree at 96."""
    assert common_block([32, 48]) == 96
