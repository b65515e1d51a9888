"""Load or compute: whether a load is worth it, from what both have taken so far.

A load is worth it when it lands before the engine would have computed the same
tokens. ``weigh`` decides that from frozen numbers; ``Measured`` smooths what was
measured into those numbers; ``Experience`` keeps both kinds of them for one
engine. What is not known never speaks against a load: it is promised, and so
becomes known. Pure; the caller tells the time (seconds, monotonic); one thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ("Experience", "Measured", "Verdict", "weigh")

_MEMORY = 16.0
"""Samples after which an old one counts a third."""

_SILENCE = 30.0
"""Seconds without a load after which one is let through whatever the numbers say,
and after which what it tells replaces all that was known."""

_SURPRISE = 4.0
"""A sample counts as at most this many times what was expected: one load that
hangs must not outweigh all that did not."""

_SPREAD = 0.05
"""Variance of the amounts, as a share of their squared mean, from which on a
fixed part can be told from a part for each unit."""

_REACH = 2.0
"""What is more than this many times the largest amount measured is not known."""

_LEAST_SAMPLES = 8
_LEAST_STEP_TOKENS = 256
_LEAST_STEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many blocks to load, and the numbers that say so.

    :ivar blocks: leading blocks that are worth loading; 0 for none
    :ivar bytes: of those, or of all that were found if it is 0
    :ivar queued_bytes: bytes of loads that were promised before and have not ended
    :ivar land_seconds: when ``bytes`` would have landed; None for not known
    :ivar compute_seconds: when the engine would have computed as many tokens;
        None for not known
    :ivar reason: why it is not all that was found, or why in spite of the numbers
    """

    blocks: int
    bytes: int
    queued_bytes: int
    land_seconds: float | None
    compute_seconds: float | None
    reason: str = ""


def weigh(
    *,
    blocks: int,
    block_bytes: int,
    block_tokens: int,
    queued_bytes: int,
    queued_tokens: int,
    latency: float,
    seconds_per_byte: float,
    prefill_rate: float,
    deadline: float,
) -> Verdict:
    """Decide how many of ``blocks`` to load; the engine computes the rest.

    :param block_bytes: what one block adds to a load
    :param block_tokens: tokens of one block
    :param queued_bytes: bytes that move before these
    :param queued_tokens: tokens that the engine computes before these
    :param latency: seconds of a load that do not depend on its bytes
    :param prefill_rate: tokens that the engine computes in a second
    :param deadline: seconds after which what has not landed has failed

    What cannot land by the deadline is not loaded. Where a block is quicker to
    load than to compute that leaves all or nothing. Else a load pays only while
    the engine is busy with others, for as many blocks as land by then.
    """

    def land(count: int) -> float:
        return latency + (queued_bytes + count * block_bytes) * seconds_per_byte

    def compute(count: int) -> float:
        return (queued_tokens + count * block_tokens) / prefill_rate

    def by(seconds: float) -> int:
        left = seconds - land(0)
        each = block_bytes * seconds_per_byte
        if left < 0:
            return 0
        return blocks if left >= each * blocks else math.floor(left / each)

    count = by(deadline)
    reason = ""
    if count < blocks:
        reason = f"the rest would not land within {deadline:g} s (load_deadline)"
    if block_bytes * seconds_per_byte > block_tokens / prefill_rate:
        busy = by(compute(0))
        if busy < count:
            count, reason = busy, "a block is quicker to compute than to load"
    elif land(count) > compute(count):
        count = 0
    shown = count or blocks
    if not count:
        reason = (
            f"not worth loading: it would land after {land(shown):.3g} s "
            f"(load_deadline {deadline:g} s), computing takes {compute(shown):.3g} s"
        )
    return Verdict(
        blocks=count,
        bytes=shown * block_bytes,
        queued_bytes=queued_bytes,
        land_seconds=land(shown),
        compute_seconds=compute(shown),
        reason=reason,
    )


class Measured:
    """Seconds of something as a line: a fixed part, and one for each unit.

    Least squares in which old samples fade, and are forgotten at the first one
    after a long silence. Where the amounts were all about the same the two parts
    cannot be told apart; then the smaller of the possible answers is given, which
    the next sample corrects.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.total_seconds = 0.0
        self._last = 0.0
        self._most = 0.0
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        """Something of ``amount`` units took ``seconds``."""
        fade = 1 - 1 / _MEMORY if now - self._last < _SILENCE else 0.0
        self._last = now
        if not fade:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        expected = self.seconds(amount) if self.samples >= _LEAST_SAMPLES else None
        if expected:
            seconds = min(seconds, _SURPRISE * expected)
        self.samples += 1
        self.total_seconds += seconds
        self._most = max(self._most, amount)
        self._weight = self._weight * fade + 1
        self._x = self._x * fade + amount
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + amount * amount
        self._xy = self._xy * fade + amount * seconds

    @property
    def rate(self) -> float:
        """Units in a second, all samples together; 0 where there is none."""
        return self._x / self._y if self._y > 0 else 0.0

    def line(self, amount: float) -> tuple[float, float]:
        """The fixed part and the part of a unit, for amounts like ``amount``."""
        if not self._weight or not self._x:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance < _SPREAD * x * x:
            return (0.0, y / x) if amount < x else (y, 0.0)
        slope = (self._xy / self._weight - x * y) / variance
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope

    def seconds(self, amount: float) -> float | None:
        """What ``amount`` units would take; None where that is not known."""
        if not self.samples or amount > _REACH * self._most:
            return None
        fixed, each = self.line(amount)
        return fixed + each * amount


class Experience:
    """What loads and prefills have taken in one engine, and what follows.

    :param block_bytes: bytes of a block
    :param block_tokens: tokens of a block
    :param deadline: seconds after which a load has failed
    :param prefill_rate: tokens in a second, if that is not to be measured
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        block_tokens: int,
        deadline: float,
        prefill_rate: float = 0.0,
    ) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._deadline = deadline
        self._given_rate = prefill_rate
        self._loads = Measured()
        self._prefills = Measured()
        self._begun = -math.inf

    def load_began(self, now: float) -> None:
        """A load was promised, and will tell how quick the store is now."""
        self._begun = now

    def load_ended(
        self,
        *,
        num_bytes: int,
        queued_bytes: int,
        seconds: float,
        failed: bool,
        now: float,
    ) -> None:
        """A load has ended, ``queued_bytes`` of others having been before it.

        One that failed would have taken longer, nobody knows how long; it counts
        where it took longer already than was expected.
        """
        amount = queued_bytes + num_bytes
        expected = self._loads.seconds(amount)
        if failed and seconds < (self._deadline / 2 if expected is None else expected):
            return
        self._loads.add(amount, seconds, now)

    def computed(self, tokens: int, seconds: float, now: float) -> None:
        """A step with ``tokens`` of prompts took ``seconds``; small ones tell little.

        What a step takes whatever its tokens would pass for the price of few.
        """
        if tokens >= _LEAST_STEP_TOKENS and seconds > 0:
            self._prefills.add(tokens, seconds, now)

    @property
    def prefill_rate(self) -> float | None:
        """Tokens in a second, or None while it is not known."""
        if self._given_rate:
            return self._given_rate
        measured = self._prefills
        if (
            measured.samples < _LEAST_SAMPLES
            or measured.total_seconds < _LEAST_STEP_SECONDS
        ):
            return None
        return measured.rate

    def weigh(
        self, *, blocks: int, queued_bytes: int, queued_tokens: int, now: float
    ) -> Verdict:
        """Decide how many of ``blocks`` to load; all of them on ignorance.

        When no load was begun for long, one is let through, as the store may have
        become quicker since.
        """
        wanted = blocks * self._block_bytes
        rate = self.prefill_rate
        known = (
            self._loads.samples >= _LEAST_SAMPLES
            and self._loads.seconds(queued_bytes + wanted) is not None
        )
        if rate is None or not known:
            tokens = queued_tokens + blocks * self._block_tokens
            return Verdict(
                blocks=blocks,
                bytes=wanted,
                queued_bytes=queued_bytes,
                land_seconds=(
                    self._loads.seconds(queued_bytes + wanted) if known else None
                ),
                compute_seconds=None if rate is None else tokens / rate,
            )
        latency, seconds_per_byte = self._loads.line(queued_bytes + wanted)
        verdict = weigh(
            blocks=blocks,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            queued_bytes=queued_bytes,
            queued_tokens=queued_tokens,
            latency=latency,
            seconds_per_byte=seconds_per_byte,
            prefill_rate=rate,
            deadline=self._deadline,
        )
        if verdict.blocks or now - self._begun < _SILENCE:
            return verdict
        return replace(
            verdict, blocks=blocks, reason="to see how quick the store is now"
        )
