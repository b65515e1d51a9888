"""What an object is stored under, and where that identity comes from.

A key is ``key space || group || shard || block hash``; the key space is the
namespace, the fingerprint, the generation and the epoch, so that no two
deployments whose bytes mean different things can ever name the same object.
Pure: called from the scheduler's thread, the loop and the pool threads alike.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = (
    "EPOCH_BYTES",
    "FINGERPRINT_BYTES",
    "FORMAT_VERSION",
    "BlockHash",
    "BlockKey",
    "Fingerprint",
    "KeySpace",
    "block_hashes",
    "fingerprint",
    "make_keys",
    "short_name",
)

BlockHash = NewType("BlockHash", bytes)
"""The engine's hash of a block and of all blocks before it: a chain."""

BlockKey = NewType("BlockKey", bytes)
"""What an object is stored under; opaque to a store but for its prefix."""

Fingerprint = NewType("Fingerprint", bytes)
"""Digest of everything that gives the stored bytes their meaning."""

FORMAT_VERSION = 1
"""Changes when the bytes of an object or the parts of a key change."""

FINGERPRINT_BYTES = 16
EPOCH_BYTES = 8
_NAMESPACE_BYTES = 8
_GENERATION_BYTES = 4


def fingerprint(facts: Mapping[str, object]) -> Fingerprint:
    """Digest ``facts`` (JSON values), the format version among them.

    The order of the mapping does not matter. A value that JSON cannot carry
    raises :class:`TypeError`: a fact that has no stable text has no place in
    an identity.
    """
    text = json.dumps(
        {**facts, "akv_format": FORMAT_VERSION}, sort_keys=True, allow_nan=False
    )
    digest = hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES)
    return Fingerprint(digest.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """The part of a key that is the same for all blocks of one deployment.

    ``generation`` is the store's own counter for this namespace and
    fingerprint; a reset raises it, which makes every older object
    unreachable at once for whoever opens the store from then on. ``epoch``
    is zero until this process resets: bytes written after weights were
    changed in memory must not be found by a process that starts from the
    weights on disk, so a reset also takes an epoch that nobody else has.
    """

    namespace: str
    fingerprint: Fingerprint
    generation: int = 0
    epoch: bytes = bytes(EPOCH_BYTES)

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            msg = f"a fingerprint has {FINGERPRINT_BYTES} bytes"
            raise ValueError(msg)
        if len(self.epoch) != EPOCH_BYTES:
            msg = f"an epoch has {EPOCH_BYTES} bytes"
            raise ValueError(msg)
        if not 0 <= self.generation < 1 << 8 * _GENERATION_BYTES:
            msg = f"generation {self.generation} does not fit in 32 bits"
            raise ValueError(msg)

    @staticmethod
    def namespace_prefix(namespace: str) -> bytes:
        """The bytes that all keys of ``namespace`` begin with."""
        return hashlib.blake2b(
            namespace.encode(), digest_size=_NAMESPACE_BYTES
        ).digest()

    @property
    def scope(self) -> bytes:
        """Namespace and fingerprint: what a reset is about."""
        return self.namespace_prefix(self.namespace) + self.fingerprint

    @property
    def prefix(self) -> bytes:
        """The bytes that all keys of this key space begin with."""
        generation = self.generation.to_bytes(_GENERATION_BYTES, "big")
        return self.scope + generation + self.epoch

    def after_reset(self, generation: int, epoch: bytes) -> KeySpace:
        """The key space that follows a reset of this one."""
        return replace(self, generation=generation, epoch=epoch)


def make_keys(
    prefix: bytes, group: int, shard: int, hashes: Iterable[bytes]
) -> tuple[BlockKey, ...]:
    """The keys of a run of blocks in the key space ``prefix``, in order."""
    head = prefix + group.to_bytes(2, "big") + shard.to_bytes(2, "big")
    return tuple(BlockKey(head + block_hash) for block_hash in hashes)


def short_name(name: bytes) -> str:
    """Eight characters for a block hash or the prefix of a key space.

    For events, in which whole names would be most of the bytes: one is mistaken
    for one of 100,000 others once in 40,000 times.
    """
    return hashlib.blake2b(name, digest_size=4).hexdigest() if name else ""


def block_hashes(
    tokens: Sequence[int], block_size: int, *, salt: str = ""
) -> tuple[BlockHash, ...]:
    """Chained hashes of the full blocks of ``tokens``, for hosts without vLLM.

    Each hash covers its block and everything before it, so that equal hashes
    mean equal tokens from the start on; the tokens of the last, incomplete
    block are not hashed. The same in every process and on every machine.

    :param tokens: token ids, from 0 to 2**64 - 1
    :param block_size: tokens of a block
    :param salt: parts tenants that must not see each other's blocks
    :raises TypeError: ``salt`` or ``block_size`` is of another type
    :raises ValueError: a block of no tokens, or a token that is no such id
    """
    _check_types(block_size, salt)
    if block_size < 1:
        msg = f"block_size is {block_size}, at least 1 is needed"
        raise ValueError(msg)
    parent = hashlib.blake2b(b"akv:" + salt.encode(), digest_size=32).digest()
    hashes: list[BlockHash] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        block = tokens[end - block_size : end]
        try:
            content = struct.pack(f"<{block_size}Q", *block)
        except struct.error:
            raise _no_token(block, end - block_size) from None
        parent = hashlib.blake2b(parent + content, digest_size=32).digest()
        hashes.append(BlockHash(parent))
    return tuple(hashes)


def _check_types(block_size: object, salt: object) -> None:
    if not isinstance(block_size, int):
        msg = f"block_size is {block_size!r}: give a whole number of tokens, as 16"
        raise TypeError(msg)
    if not isinstance(salt, str):
        msg = f"salt is {salt!r}: give text, or leave it out"
        raise TypeError(msg)


def _no_token(block: Sequence[int], first: int) -> ValueError:
    """The error about the first of these that is no token id."""
    for position, token in enumerate(block, first):
        try:
            struct.pack("<Q", token)
        except struct.error:
            return ValueError(
                f"tokens[{position}] is {token!r}: "
                "give token ids, whole numbers from 0 to 2**64 - 1"
            )
    raise AssertionError("one of them could not be packed")
