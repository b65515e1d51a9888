"""The oracle: which bytes and which next token a token prefix determines.

A prefix is hashed by a rolling polynomial over its tokens, one 64-bit value for each
position, seeded by the model's seed and by a salt (a stand-in for ``cache_salt``, so
that bytes which cross from one tenant to another show as wrong). A slot's bytes are
that value mixed with the layer, head and lane, a lane being eight bytes; all of it is
a few numpy operations for any number of tokens. The next token is taken from the same
value, so outputs can be predicted without running anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Oracle", "Prefix", "Words", "salt_seed"]

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_LANE = 0xD6E8FEB86659FD93


def _power_table(length: int) -> Words:
    table = np.full(length, _BASE, dtype=np.uint64)
    table[0] = 1
    return np.multiply.accumulate(table)


_POWERS = _power_table(1 << 12)


def _scramble(values: Words) -> Words:
    """A bijection on 64-bit values in which each bit depends on all (splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def salt_seed(salt: str | None) -> int:
    """The number that a cache salt contributes to a prefix's bytes."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")


class Prefix:
    """A growing token prefix and the 64-bit value of each of its positions."""

    def __init__(self, seed: int, tokens: Sequence[int] = ()) -> None:
        self._seed = seed & _MASK
        self.tokens: list[int] = []
        self._sums = np.empty(0, dtype=np.uint64)
        self._hashes = np.empty(0, dtype=np.uint64)
        self._power = 1
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hashes(self) -> Words:
        """One value for each position; position p depends on tokens 0 to p."""
        return self._hashes[: len(self.tokens)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, in pieces of the power table's length."""
        for start in range(0, len(tokens), len(_POWERS)):
            self._append(tokens[start : start + len(_POWERS)])

    def assign(self, tokens: Sequence[int]) -> None:
        """Become exactly ``tokens``, keeping the values of the common prefix."""
        if self.tokens == list(tokens[: len(self.tokens)]):
            self.extend(tokens[len(self.tokens) :])
            return
        self.truncate(0)
        self.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if length < len(self.tokens):
            del self.tokens[length:]
            self._power = pow(_BASE, length, 1 << 64)

    def _append(self, tokens: Sequence[int]) -> None:
        count, old = len(tokens), len(self.tokens)
        if not count:
            return
        if old + count > len(self._hashes):
            room = max(64, 2 * (old + count))
            self._sums = np.resize(self._sums[:old], room) if old else _zeros(room)
            self._hashes = np.resize(self._hashes[:old], room) if old else _zeros(room)
        powers = _POWERS[:count] * np.uint64(self._power)
        terms = (np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * powers
        start = int(self._sums[old - 1]) if old else self._seed
        sums = np.cumsum(terms, dtype=np.uint64) + np.uint64(start)
        positions = np.arange(old, old + count, dtype=np.uint64)
        self._sums[old : old + count] = sums
        self._hashes[old : old + count] = _scramble(sums ^ (positions << np.uint64(40)))
        self.tokens.extend(tokens)
        self._power = self._power * pow(_BASE, count, 1 << 64) & _MASK


def _zeros(length: int) -> Words:
    return np.zeros(length, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Everything that the fake model's weights and shapes determine."""

    seed: int
    vocab_size: int
    heads: int
    lanes: int

    def prefix(self, tokens: Sequence[int], salt: int = 0) -> Prefix:
        """The values of a token prefix under this model and this salt."""
        return Prefix(self.seed * 0x2545F4914F6CDD1D + salt, tokens)

    def words(self, layer: int, hashes: Words) -> Words:
        """The bytes of slots as ``[position, head, lane]`` of eight bytes each."""
        size = self.heads * self.lanes
        lanes = np.arange(layer * size + 1, (layer + 1) * size + 1, dtype=np.uint64)
        lanes *= np.uint64(_LANE)
        mixed = (hashes[:, None] ^ lanes[None, :]) * np.uint64(_BASE)
        mixed ^= mixed >> np.uint64(29)
        return mixed.reshape(len(hashes), self.heads, self.lanes)

    def next_token(self, prefix: Prefix) -> int:
        """The token that the model samples after this prefix."""
        return int(prefix.hashes[-1] >> np.uint64(17)) % self.vocab_size

    def generate(
        self, prompt: Sequence[int], max_tokens: int, salt: int = 0
    ) -> list[int]:
        """What a request must answer, with or without a connector."""
        prefix = self.prefix(prompt, salt)
        for _ in range(max_tokens):
            prefix.extend([self.next_token(prefix)])
        return prefix.tokens[len(prompt) :]
