"""Where a local store lies and how big it shall be, read from its URL.

``local:/PATH?capacity=4GiB&checksum=on``. Everything that can be wrong with
such an address is said here or in ``opening``, before a file is touched.
Pure but for :func:`default_url`, which looks at shared memory.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from akv.core.errors import ConfigError
from akv.core.sizes import format_size, parse_size
from akv.store.local.filesystem import available_memory, free_bytes

if TYPE_CHECKING:
    from akv.store.local.slab import SlabLayout

__all__ = ("LocalAddress", "default_capacity", "default_url")

SHARED_MEMORY = Path("/dev/shm")

_LARGEST_DEFAULT = 4 << 30
_GRAIN = 1 << 20
_OPTIONS = ("capacity", "checksum")
_SWITCH = {"on": True, "off": False}
_EXAMPLE = "local:/dev/shm/akv?capacity=4GiB&checksum=on"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """What the URL says; None where it leaves the choice to akv."""

    path: Path
    capacity: int | None = None
    checksum: bool | None = None

    @classmethod
    def parse(cls, url: str) -> LocalAddress:
        """Read ``url``, or raise a :class:`ConfigError` that shows a right one."""
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.scheme != "local" or parts.netloc or not path.startswith("/"):
            raise ConfigError("store", url, f"give an absolute path, as in {_EXAMPLE}")
        if parts.fragment:
            raise ConfigError("store", url, "write a '#' in the path as %23")
        options: dict[str, str] = {}
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS:
                near = difflib.get_close_matches(name, _OPTIONS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                known = " and ".join(_OPTIONS)
                raise ConfigError(
                    "store",
                    url,
                    f"{name!r} is unknown, a local store has {known}{hint}",
                )
            options[name] = text
        capacity = options.get("capacity")
        checksum = options.get("checksum")
        if checksum is not None and checksum not in _SWITCH:
            raise ConfigError("store checksum", checksum, "write on or off")
        return cls(
            path=Path(path),
            capacity=None
            if capacity is None
            else parse_size(capacity, field="store capacity"),
            checksum=None if checksum is None else _SWITCH[checksum],
        )

    @staticmethod
    def url_of(path: Path, layout: SlabLayout) -> str:
        """The URL that opens what ``layout`` describes."""
        switch = "on" if layout.checksum else "off"
        size = format_size(layout.capacity)
        if parse_size(size) != layout.capacity:
            size = str(layout.capacity)
        return f"local:{quote(str(path))}?capacity={size}&checksum={switch}"


def default_capacity(directory: Path) -> int:
    """Half of what is free there and in memory, 4 GiB at most."""
    free = min(free_bytes(directory), available_memory())
    return min(_LARGEST_DEFAULT, free // 2 // _GRAIN * _GRAIN)


def default_url(slot_bytes: int) -> str:
    """The store that akv uses when no other was asked for.

    In shared memory, one for each user and object size, so that models of
    different shapes do not meet in one store. One that exists is used as it
    is; a new one gets half of what is free, 4 GiB at most.
    """
    path = SHARED_MEMORY / f"akv-{os.geteuid()}-{slot_bytes}"
    return f"local:{path}"
