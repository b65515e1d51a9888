"""Rounding: how much of what was found may be loaded.

The seed of akv. What is loaded is whole blocks and ends at least one token
before the end of the prompt, because the engine must compute the last token
itself to sample the next one. There is no option that turns this off and no
correction by one anywhere else. Pure arithmetic on token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Promise", "common_block", "promise", "round_down", "usable_tokens")


def round_down(tokens: int, block: int) -> int:
    """The largest multiple of ``block`` that is at most ``tokens``."""
    return tokens // block * block


def common_block(block_sizes: Iterable[int]) -> int:
    """The smallest number of tokens that is whole blocks in every group."""
    return math.lcm(*block_sizes)


def usable_tokens(hit: int, num_tokens: int, block: int) -> int:
    """How many tokens of a hit may be used for a prompt of ``num_tokens``.

    ``min(hit, num_tokens - 1)`` rounded down to whole blocks, never negative.
    """
    return max(0, round_down(min(hit, num_tokens - 1), block))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request may load: tokens ``[local, usable)``, whole blocks.

    ``need`` is what that is beyond the tokens that the engine has; 0 means
    that nothing is promised at all.
    """

    local: int
    usable: int
    need: int


def promise(*, num_tokens: int, local: int, hit: int, block: int) -> Promise:
    """Decide what to promise the engine, in tokens.

    :param num_tokens: tokens of the request (vLLM: ``request.num_tokens``)
    :param local: tokens that the engine has already, whole blocks
    :param hit: tokens of the prefix that the store holds, before rounding
    :param block: tokens of a block, see :func:`common_block`

    Where ``local`` ends inside a block the load covers that block as a whole.
    """
    start = round_down(local, block)
    usable = max(start, usable_tokens(hit, num_tokens, block))
    return Promise(local=start, usable=usable, need=max(0, usable - local))
