"""State machines of hypothesis whose steps run on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.from_thread
from hypothesis.stateful import RuleBasedStateMachine

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LoopMachine(RuleBasedStateMachine):
    """A machine whose every step runs on one asyncio loop, to its quiet end."""

    def __init__(self) -> None:
        super().__init__()
        self._portal = anyio.from_thread.start_blocking_portal()
        self.portal = self._portal.__enter__()

    def on_loop(self, function: Callable[..., T], *args: object) -> T:
        """Run on the loop, and then let it become quiet."""

        async def run() -> T:
            result = function(*args)
            await anyio.wait_all_tasks_blocked()
            return result

        return self.portal.call(run)

    def teardown(self) -> None:
        """End the loop."""
        self._portal.__exit__(None, None, None)
