"""Small objects that say something about the pool: generations, and a token.

**Generations.** The counter of a scope is a set of objects, one a number,
under keys that no block has. A number is taken by creating its object, which
the master lets only one do, so no two raises ever get the same one. Above the
numbers stand three levels of signposts, 256 to one, so that the highest is
found in four calls however many there are. All are pinned against eviction,
kept in up to three segments, and made again by every process that has seen
them when it notices that they are gone. So a generation goes back only if all
that hold or have seen it end at the same time; what they had stored ends with
them, unless it lies in other segments, which is why a raise removes the older
objects as well.

**Token.** One object for each open store, in its own segment where it has
one. If it is gone, the master was restarted or has dropped this client: both
forget objects. It is asked for along with other keys and costs no call.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from akv.core.errors import StoreError, StoreUnavailableError
from akv.store.mooncake.codes import ALREADY_EXISTS, describe, is_unreachable

if TYPE_CHECKING:
    from akv.store.mooncake.client import Client
    from akv.store.mooncake.memory import Piece

__all__ = ("Generations", "Token", "older_than")

_LEVELS = 4
_FAN = 256
_MARK_BYTES = 8
_MOST_TRIES = 64
_PAUSES = (0.01, 0.03, 0.1, 0.2)
"""Seconds between two looks at a number that was just taken."""


class Generations:
    """The counters of all scopes, as one store sees them. Any thread."""

    def __init__(self, page: Piece) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """A client takes two sessions on one key at a time for bad parameters."""
        self._seen: dict[bytes, int] = {}
        self._names: set[str] = set()

    @property
    def marks(self) -> int:
        """How many objects it knows to be there."""
        return len(self._names)

    def read(self, client: Client, scope: bytes) -> int:
        """The generation; never less than this store has seen before."""
        found = self._highest(client, scope, _LEVELS - 1, 0) or 0
        with self._lock:
            seen = self._seen.get(scope, 0)
            self._seen[scope] = max(seen, found)
        if found < seen:
            # It counts all the same, and the next to read it tries again.
            with suppress(StoreError):
                self._write(client, scope, seen)
        return max(seen, found)

    def raise_one(self, client: Client, scope: bytes) -> int:
        """A generation above all others, which no one else has taken.

        :raises StoreError: it is not confirmed
        """
        number = self.read(client, scope)
        for _ in range(_MOST_TRIES):
            number += 1
            code = self._write(client, scope, number)
            if code == 0:
                break
            if code != ALREADY_EXISTS:
                raise _refused(code)
        else:
            msg = f"{_MOST_TRIES} others raised the generation at the same time"
            raise StoreError(msg)
        self._confirm(client, scope, number)
        with self._lock:
            self._seen[scope] = max(self._seen.get(scope, 0), number)
        return number

    def _confirm(self, client: Client, scope: bytes, number: int) -> None:
        """Find it as others do, or raise.

        Somebody may be at a signpost just now. One that was begun and never ended
        can neither be made nor found until the master forgets it.
        """
        for pause in (*_PAUSES, None):
            found = self._highest(client, scope, _LEVELS - 1, 0) or 0
            if found >= number:
                return
            if pause is not None:
                time.sleep(pause)
        msg = f"generation {number} is not confirmed: others find {found}"
        raise StoreError(msg)

    def restore(self, client: Client) -> None:
        """Make again whatever this store has seen and is gone."""
        with self._lock:
            seen = dict(self._seen)
            self._names.clear()
        for scope, number in seen.items():
            if number:
                self._write(client, scope, number)

    def _highest(
        self, client: Client, scope: bytes, level: int, above: int
    ) -> int | None:
        """The highest number below the signpost ``above``; None if there is none."""
        numbers = range(above * _FAN, (above + 1) * _FAN)
        names = [_name(scope, level, number) for number in numbers]
        codes = client.exist(names)
        failed = [code for code in codes if code < 0]
        if failed:
            raise _refused(failed[0])
        there = [at for at, code in enumerate(codes) if code == 1]
        with self._lock:
            self._names.update(names[at] for at in there)
        for at in reversed(there):
            if level == 0:
                return numbers[at] or None
            found = self._highest(client, scope, level - 1, numbers[at])
            if found is not None:
                return found
        return None

    def _write(self, client: Client, scope: bytes, number: int) -> int:
        """Create the signposts and then the number; the code of the last."""
        placement = client.placement(pinned=True)
        code = 0
        for level in reversed(range(_LEVELS)):
            name = _name(scope, level, number // _FAN**level)
            with self._writing:
                code = client.create(name, self._page.address, _MARK_BYTES, placement)
            # 8 bytes come back where the object was written but not ended.
            if code not in (0, ALREADY_EXISTS):
                raise _refused(code)
            with self._lock:
                self._names.add(name)
        return code


class Token:
    """Tells whether the pool is still the one that this store has joined."""

    def __init__(self, page: Piece) -> None:
        self._page = page
        self.key = f"akv.store:{secrets.token_hex(8)}"
        self.placed = False
        self.losses = 0
        """How often the pool has forgotten what was in it."""

    def is_lost(self, code: int) -> bool:
        """Whether it was there and, by this answer, is not any more."""
        if not self.placed or code != 0:
            return False
        self.placed = False
        self.losses += 1
        return True

    def place(self, client: Client, *, segment: str) -> None:
        """Put it into the pool; if that cannot be done now, a later call does."""
        if self.placed:
            return
        placement = client.placement(pinned=True, segment=segment)
        placement.replica_num = 1
        code = client.create(self.key, self._page.address, _MARK_BYTES, placement)
        self.placed = code in (0, ALREADY_EXISTS)


def older_than(scope: bytes, generation: int) -> str:
    """A pattern for the keys of ``scope`` with a lower generation (``KeySpace``)."""
    digits = f"{generation:08x}"
    below: list[str] = []
    for at, digit in enumerate(digits):
        if digit != "0":
            lower = "".join(f"{value:x}" for value in range(int(digit, 16)))
            below.append(f"{digits[:at]}[{lower}]")
    return f"{scope.hex()}({'|'.join(below)})"


def _name(scope: bytes, level: int, number: int) -> str:
    return f"akv.generation:{scope.hex()}:{level}:{number:x}"


def _refused(code: int) -> StoreError:
    if is_unreachable(code):
        return StoreUnavailableError(describe(code))
    return StoreError(f"the generation is not confirmed: {describe(code)}")
