"""How quickly the engine computes prompts, seen from its scheduler.

A step counts from when it was scheduled, or from the end of the one before it
where that was still running, to when its output was taken. So neither idle time
counts nor a step that another one had to wait for. Called by the scheduler's
thread only.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.request import Request

    from akv.core.worth import Experience

__all__ = ("Pace",)

_MOST_STEPS = 32
"""Steps that may be under way at once; asynchronous scheduling has two."""


class Pace:
    """Tells ``experience`` what steps with work on prompts have taken.

    :ivar tokens_ahead: tokens of prompts that the engine has begun to compute and
        has left for the steps after the last one
    """

    def __init__(
        self, experience: Experience, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tokens_ahead = 0
        self._clock = clock
        self._experience = experience
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MOST_STEPS)
        self._ended = 0.0

    def step_began(self, scheduled: Iterable[tuple[Request, int]]) -> None:
        """A step was scheduled: its requests with more than one token each.

        To be called before vLLM counts these tokens as computed.
        """
        total, left = 0, 0
        for request, tokens in scheduled:
            prompt = request.num_prompt_tokens - request.num_computed_tokens
            total += max(0, min(tokens, prompt))
            left += max(0, prompt - tokens)
        self.tokens_ahead = left
        self._steps.append((self._clock(), total))

    def step_ended(self) -> None:
        """The output of the oldest step was taken."""
        if not self._steps:
            return
        now = self._clock()
        began, tokens = self._steps.popleft()
        seconds = now - max(began, self._ended)
        self._ended = now
        if tokens:
            self._experience.computed(tokens, seconds, now)
