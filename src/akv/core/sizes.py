"""Sizes as people write them, and back.

One reading for every setting that counts bytes: whole numbers are bytes,
``KiB MiB GiB TiB`` are powers of 1024 and ``kB MB GB TB`` powers of 1000. A
bare ``G`` means both things to different people and is refused. Pure; called
wherever a setting is parsed or a message is written.
"""

from __future__ import annotations

import re

from akv.core.errors import ConfigError

__all__ = ("format_size", "parse_size")

_FIX = 'give bytes as a whole number, or text such as "4GiB", "512MiB" or "2GB"'
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b)?\s*", re.IGNORECASE)
_PREFIXES = "kmgt"


def parse_size(value: int | str, *, field: str = "size") -> int:
    """Bytes meant by ``value``; ``field`` names the setting in the error."""
    if isinstance(value, bool):
        raise ConfigError(field, value, _FIX)
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(field, value, _FIX)
        return value
    match = _TEXT.fullmatch(value)
    if match is None:
        raise ConfigError(field, value, _FIX)
    number, unit = match[1], (match[2] or "b").lower()
    factor = 1
    if unit != "b":
        base = 1024 if "i" in unit else 1000
        factor = base ** (_PREFIXES.index(unit[0]) + 1)
    if "." not in number:
        return int(number) * factor
    if factor == 1:
        raise ConfigError(field, value, _FIX)
    return int(float(number) * factor)


def format_size(size: int) -> str:
    """``size`` in the largest binary unit that leaves at least one of it.

    A whole number of units is exact and can be parsed again; anything else
    is rounded to one decimal, for reading.
    """
    for power in (4, 3, 2, 1):
        unit = 1024**power
        if size >= unit:
            name = f"{_PREFIXES[power - 1].upper()}iB"
            if size % unit == 0:
                return f"{size // unit}{name}"
            return f"{size / unit:.1f}{name}"
    return f"{size}B"
