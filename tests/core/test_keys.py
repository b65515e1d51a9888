"""Identity: two objects whose bytes could differ never share a key."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.core.keys import KeySpace, block_hashes, fingerprint, make_keys

PRINT = fingerprint({"weights": "a", "dtype": "bfloat16"})


def test_a_fingerprint_depends_on_every_fact_and_not_on_their_order() -> None:
    """Another dtype, another fingerprint: a writer in bf16, a reader in fp8."""
    assert fingerprint({"dtype": "bfloat16", "weights": "a"}) == PRINT
    assert fingerprint({"weights": "a", "dtype": "fp8"}) != PRINT
    assert fingerprint({"weights": "b", "dtype": "bfloat16"}) != PRINT


def test_a_fact_without_stable_text_is_refused() -> None:
    """An object's repr has an address in it, and no place in an identity."""
    with pytest.raises(TypeError):
        fingerprint({"weights": object()})


@pytest.mark.parametrize(
    "other",
    [
        KeySpace(namespace="b", fingerprint=PRINT),
        KeySpace(namespace="a", fingerprint=fingerprint({"weights": "b"})),
        KeySpace(namespace="a", fingerprint=PRINT, generation=1),
        KeySpace(namespace="a", fingerprint=PRINT, epoch=b"12345678"),
    ],
)
def test_every_part_of_a_key_space_parts_its_keys(other: KeySpace) -> None:
    """Namespace, fingerprint, generation and epoch: each alone is enough."""
    space = KeySpace(namespace="a", fingerprint=PRINT)
    assert make_keys(space.prefix, 0, 0, (b"h",)) != make_keys(
        other.prefix, 0, 0, (b"h",)
    )


def test_group_and_shard_part_keys() -> None:
    """One block's shards and groups are objects of their own."""
    prefix = KeySpace(namespace="a", fingerprint=PRINT).prefix
    keys = {make_keys(prefix, g, s, (b"h",)) for g in range(3) for s in range(3)}
    assert len(keys) == 9


def test_a_scope_begins_every_key_of_its_generations() -> None:
    """A clear by namespace finds all, and nothing of others."""
    space = KeySpace(namespace="a", fingerprint=PRINT, generation=7)
    (key,) = make_keys(space.prefix, 0, 0, (b"h",))
    assert key.startswith(space.scope)
    assert key.startswith(KeySpace.namespace_prefix("a"))
    assert not key.startswith(KeySpace.namespace_prefix("b"))


tokens = st.lists(st.integers(0, 2**40), max_size=60)


@given(tokens=tokens, block=st.integers(1, 8))
def test_hashes_cover_full_blocks_and_everything_before(
    tokens: list[int], block: int
) -> None:
    """One hash a full block; a longer prompt keeps the hashes of its prefix."""
    hashes = block_hashes(tokens, block)
    assert len(hashes) == len(tokens) // block
    assert block_hashes([*tokens, 1, 2, 3], block)[: len(hashes)] == hashes
    if hashes:
        changed = [tokens[0] + 1, *tokens[1:]]
        assert set(block_hashes(changed, block)).isdisjoint(hashes)


def test_a_salt_parts_tenants() -> None:
    """Equal tokens of two tenants are not equal blocks."""
    assert block_hashes([1, 2], 2, salt="a") != block_hashes([1, 2], 2, salt="b")


def test_hashes_are_the_same_in_every_version() -> None:
    """What one version has saved the next one finds."""
    first, second = block_hashes([1, 2, 3, 2**64 - 1], 2, salt="tenant")
    assert first.hex() == (
        "fc12a3a408952778f3fbdc0a25a3ed48072c8299e91e68ec711ea42fd6b79edf"
    )
    assert second.hex() == (
        "788c6c24949b99b1f8eef1f514ba1f7b09a8eba982e39a40e4deaaeb84c3c1e9"
    )


def test_an_array_of_tokens_is_as_good_as_a_list() -> None:
    """Tokenizers give either."""
    array: Any = np.arange(8, dtype=np.int32)
    assert block_hashes(array, 4) == block_hashes(range(8), 4)


def test_a_block_of_no_tokens_is_refused() -> None:
    """The message names what is needed."""
    with pytest.raises(ValueError, match="at least 1"):
        block_hashes([1], 0)


@pytest.mark.parametrize("token", [-1, 2**64, 1.5, "7", None])
def test_what_is_no_token_id_is_refused_with_its_place(token: Any) -> None:
    """Rounding it or hashing its text would make blocks equal that are not."""
    with pytest.raises(ValueError, match=re.escape(f"tokens[2] is {token!r}: give")):
        block_hashes([1, 2, token, 4], 2)


def test_a_block_size_or_salt_of_another_type_is_refused() -> None:
    """The message names the field, what it was and what to give."""
    size: Any = 2.0
    with pytest.raises(TypeError, match=r"block_size is 2\.0: give a whole number"):
        block_hashes([1, 2], size)
    salt: Any = b"tenant"
    with pytest.raises(TypeError, match="salt is b'tenant': give text"):
        block_hashes([1, 2], 2, salt=salt)
