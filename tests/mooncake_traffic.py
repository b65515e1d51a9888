"""Steady traffic on an engine, while the test does something to its pool.

Prompts that have been seen before and prompts that nobody has seen take turns. The
engine's own cache is smaller than all that come again, so these are loaded from the
pool as long as it has them. The runner checks every byte that a step reads.
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import Engine

__all__ = ("BLOCKS", "DEADLINES", "LONGEST", "SETTINGS", "Traffic")

SETTINGS: dict[str, Any] = {
    "max_load_bytes": "1MiB",
    "max_save_bytes": "1MiB",
    "lookup_deadline": 0.2,
    "load_deadline": 1.0,
    "save_deadline": 2.0,
    # An engine without a model computes in no time, so nothing would be loaded.
    "load_or_compute": False,
}
BLOCKS = 64
"""Of the engine: fewer than what comes again has."""
DEADLINES = 2 * SETTINGS["lookup_deadline"] + SETTINGS["load_deadline"]
LONGEST = DEADLINES + 1.5
"""Seconds that a request may take: its deadlines, with room for a busy machine."""

_AGAIN = 20
_LENGTH = 97
_HIT = 96
_AT_ONCE = 3
_BETWEEN = 0.01
_BUSY = 0.001


class Traffic:
    """Requests that come one every 10 ms, three at once at most.

    :ivar waits: seconds from the arrival of each request to its end
    """

    def __init__(self, engine: Engine, name: str = "r") -> None:
        self.engine = engine
        self.waits: dict[str, float] = {}
        self._name = name
        self._numbers = count()
        self._arrived: dict[str, float] = {}
        self._next = 0.0
        self._judged = 0

    def run_for(self, seconds: float) -> None:
        """Go on for some time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._turn()

    def run_until(self, done: Callable[[], object], seconds: float) -> float:
        """Go on until ``done()``; the seconds that it took."""
        started = time.monotonic()
        while not done():
            self._turn()
            passed = time.monotonic() - started
            assert passed < seconds, f"not so after {seconds} s"
        return time.monotonic() - started

    def run_until_loaded(self, seconds: float) -> float:
        """Go on until a load that is taken from now on has come through."""
        seen = len(self.engine.monitor.reported)
        began = time.monotonic()

        def loaded() -> bool:
            return any(
                not load.failed and time.monotonic() - load.seconds >= began
                for load in self.engine.monitor.reported[seen:]
            )

        return self.run_until(loaded, seconds)

    @property
    def landed(self) -> int:
        """Loads that have come through so far."""
        return sum(not load.failed for load in self.engine.monitor.reported)

    def end(self) -> None:
        """Let all requests end, and see that each did, in time and with its words."""
        self.engine.run()
        self._note_ended()
        self.engine.idle_until_quiet()
        self.engine.assert_outputs()
        self.engine.assert_clean(grace=10)
        assert set(self.engine.finish_reasons.values()) == {"length"}
        assert not self._arrived
        longest = max(self.waits, key=self.waits.__getitem__)
        assert self.waits[longest] < LONGEST, longest

    def _turn(self) -> None:
        now = time.monotonic()
        if len(self._arrived) < _AT_ONCE and now >= self._next:
            self._next = now + _BETWEEN
            number = next(self._numbers)
            name = f"{self._name}-{number}"
            start = number % _AGAIN if number % 2 else number + _AGAIN
            self.engine.add_request(_prompt(start), 2, name)
            self._arrived[name] = now
        if self.engine.has_work():
            self.engine.step()
        else:
            time.sleep(_BUSY)
        self._note_ended()

    def _note_ended(self) -> None:
        now = time.monotonic()
        for name in self._arrived.keys() & self.engine.finish_reasons.keys():
            self.waits[name] = now - self._arrived.pop(name)


def _prompt(number: int) -> list[int]:
    return [(number * 131 + at * (1 + number % 7)) % 1000 for at in range(_LENGTH)]
