"""Keys and values for tests of stores: a value says by itself what it must be.

The bytes of a value are a function of its key and of the place in it, so
that any mix of two values, a hole, or a shift is seen without remembering
what was written. Pure; the caller owns what it gets.
"""

from __future__ import annotations

import hashlib

import numpy as np

from akv.core.keys import BlockKey

__all__ = ("empty_buffer", "is_value_of", "key_of", "value_of")

_STEP = 0x9E3779B97F4A7C15
"""Odd, so that all words of a value differ."""


def key_of(number: int, *, prefix: bytes = b"akv.testing:") -> BlockKey:
    """A key of the length that akv's own have."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32)
    return BlockKey(prefix.ljust(40, b".") + digest.digest())


def value_of(key: bytes, size: int) -> memoryview:
    """The one right value of ``size`` bytes for ``key``."""
    start = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    places = np.arange(-(-size // 8), dtype=np.uint64)
    words = places * np.uint64(_STEP) + np.uint64(start)
    return words.view(np.uint8)[:size].data


def is_value_of(key: bytes, buffer: memoryview) -> bool:
    """Whether each byte of ``buffer`` is right."""
    return buffer == value_of(key, buffer.nbytes)


def empty_buffer(size: int) -> memoryview:
    """A writable buffer that holds nothing like a value."""
    return memoryview(bytearray(b"\xa5" * size))
