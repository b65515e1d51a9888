"""The breaker against a model: late answers, and probes that hang, fail or succeed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from pipeline.machines import LoopMachine

from akv.core.events import BreakerClosed, BreakerOpened
from akv.pipeline.breaker import Breaker
from akv.store import Failure, Status
from harness import Recorder

if TYPE_CHECKING:
    from akv.pipeline.native import NativePool


class Probes:
    """A pool of threads whose calls end when the test says so."""

    def __init__(self) -> None:
        self.pending: deque[tuple[anyio.Event, list[Exception]]] = deque()

    async def run(self, ask: object) -> None:
        """Wait for the test's word."""
        probe: tuple[anyio.Event, list[Exception]] = (anyio.Event(), [])
        self.pending.append(probe)
        await probe[0].wait()
        if probe[1]:
            raise probe[1][0]

    def end(self, *errors: Exception) -> None:
        """The probe comes back."""
        event, raises = self.pending.popleft()
        raises.extend(errors)
        event.set()


class BreakerMachine(LoopMachine):
    """It opens after three failures in a row, and then asks once and not twice.

    A success while it asks closes it and a failure does not; a success that comes
    while it is open and does not ask changes nothing; one event for each change.
    """

    THRESHOLD = 3

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder([])
        self.on_loop(self._make)
        self.scope = self.on_loop(anyio.CancelScope)
        self.portal.start_task_soon(self._watch)
        self.failures = 0
        self.state = "closed"
        self.asking = False
        self.events: list[type] = []

    def _make(self) -> None:
        self.probes = Probes()
        self.breaker = Breaker(
            url="test:",
            observer=self.recorder,
            threshold=self.THRESHOLD,
            interval=0.0,
        )

    async def _watch(self) -> None:
        with self.scope:
            await self.breaker.watch(lambda: None, cast("NativePool", self.probes))

    def failed(self) -> None:
        """What the model makes of a failure."""
        if self.state == "closed":
            self.failures += 1
            if self.failures == self.THRESHOLD:
                self.events.append(BreakerOpened)
                self.state = "open"
        elif self.state == "asking":
            self.state = "open"
        self.ask()

    def succeeded(self) -> None:
        """What the model makes of a success."""
        if self.state == "asking":
            self.events.append(BreakerClosed)
        if self.state != "open":
            self.state, self.failures = "closed", 0
        self.ask()

    def ask(self) -> None:
        """It asks as soon as it is open, but never twice at once."""
        if self.state == "open" and not self.asking:
            self.state, self.asking = "asking", True

    @rule()
    def failure(self) -> None:
        """A call failed, or was given up."""
        self.on_loop(self.breaker.failure, "as told")
        self.failed()

    @rule()
    def success(self) -> None:
        """A call came back, perhaps one from before."""
        self.on_loop(self.breaker.success)
        self.succeeded()

    @rule(
        outcomes=st.lists(st.sampled_from([Status.HIT, Status.MISS, Failure("wire")]))
    )
    def heard(self, outcomes: list[Status | Failure]) -> None:
        """It has failed if each of its keys has."""
        self.on_loop(self.breaker.heard, outcomes)
        if outcomes and all(isinstance(outcome, Failure) for outcome in outcomes):
            self.failed()
        else:
            self.succeeded()

    @precondition(lambda self: self.asking)
    @rule(well=st.booleans())
    def probe_ends(self, well: bool) -> None:
        """It comes back, well or not."""
        self.asking = False
        if well:
            self.on_loop(self.probes.end)
            self.succeeded()
        else:
            self.on_loop(self.probes.end, OSError("wire"))
            self.failed()

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        """Whether calls are made, what was told, and what is asked."""
        assert self.breaker.closed == (self.state == "closed")
        assert [type(event) for event in self.recorder.events] == self.events
        assert len(self.probes.pending) == self.asking

    def teardown(self) -> None:
        """Cancelled, it ends though its probe hangs."""
        self.on_loop(self.scope.cancel)
        super().teardown()


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
