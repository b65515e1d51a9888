"""What the connector promised against what it reports, rule by rule.

vLLM asserts on some broken promises and absorbs others: a load reported twice before
the next ``schedule`` is one entry in a set, an id that is still waiting for another
load passes as that one's. So the harness keeps its own account of each load that the
scheduler took, and checks every report before vLLM sees it.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig

__all__ = ["Monitor", "ReportedLoad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """One load that was reported, and the seconds that it took to get there.

    Attributes:
        seconds: from the scheduler's taking it to the report.
        since_abort: from the request's abort to the report; None if it lived on.
        same_step: the request was aborted in the step that brought the report.
        blocks: how many blocks it was to fill.
        failed: whether some of them were reported as failed.
    """

    request_id: str
    seconds: float
    since_abort: float | None
    same_step: bool
    blocks: int
    failed: bool


class Monitor:
    """The account of one scheduler-role connector's promises.

    Attributes:
        answers: every answer of ``get_num_new_matched_tokens``, by request.
        loads: the tokens of each load that the scheduler took, by request.
        outstanding: the requests whose load has not been reported, with its blocks.
        reports: how often each id was reported.
        reported: every load that was reported, in order.
        lookup_seconds: for each lookup that had to be waited for, the time from the
            first "ask again" to the first answer.
    """

    def __init__(self, config: EngineConfig, connector: Any) -> None:
        self._config = config
        self._connector = connector
        self.answers: dict[str, list[tuple[int | None, bool]]] = {}
        self.loads: dict[str, list[int]] = {}
        self.outstanding: dict[str, frozenset[int]] = {}
        self.reports: Counter[str] = Counter()
        self.reported: list[ReportedLoad] = []
        self.lookup_seconds: list[float] = []
        self._taken: dict[str, float] = {}
        self._aborted: dict[str, float] = {}
        self._aborted_now: set[str] = set()
        self._asking: dict[str, float] = {}
        self._delayed: set[str] = set()
        self._asynchronous: dict[str, bool] = {}
        self._synchronous_blocks: set[int] = set()

    def attach(self) -> None:
        """Look over the shoulder of the hooks that promise something."""
        connector = self._connector
        connector.get_num_new_matched_tokens = self._watch_match(
            connector.get_num_new_matched_tokens
        )
        connector.update_state_after_alloc = self._watch_alloc(
            connector.update_state_after_alloc
        )
        connector.request_finished_all_groups = self._watch_finished(
            connector.request_finished_all_groups
        )

    def begin_step(self) -> None:
        """A step was handed to the runner; aborts from here on are during it."""
        self._aborted_now.clear()

    def note_abort(self, request_id: str) -> None:
        """A request was aborted; its load, if one is open, is still to be reported."""
        self._asking.pop(request_id, None)
        if request_id in self.outstanding:
            self._aborted[request_id] = time.monotonic()
            self._aborted_now.add(request_id)

    def check_report(self, report: Any) -> None:
        """Judge one step's ``KVConnectorOutput``.

        Raises:
            ProtocolError: naming the rule and the request.
        """
        finished = set(report.finished_recving or ())
        late = set(report.invalid_block_ids) - self._promised_blocks()
        if late:
            raise ProtocolError(
                f"blocks {sorted(late)} reported as failed, but no load that is "
                "still open was to fill them"
            )
        alone = set(report.failed_recving) - finished
        if alone:
            raise ProtocolError(
                f"{sorted(alone)} failed, but not in finished_recving of the same step"
            )
        for request_id in finished:
            if request_id not in self.outstanding:
                times = self.reports[request_id]
                raise ProtocolError(
                    f"{request_id} reported as received "
                    + (
                        f"again, {times} loads were asked and reported before"
                        if times
                        else "though no load was asked"
                    )
                )
            blocks = self.outstanding.pop(request_id)
            self.reports[request_id] += 1
            self._note_reported(
                request_id, blocks, failed=bool(blocks & set(report.invalid_block_ids))
            )
        for request_id in report.finished_sending or ():
            if request_id not in self._delayed:
                raise ProtocolError(
                    f"{request_id} reported as sent, but request_finished did not "
                    "keep its blocks"
                )
            self._delayed.discard(request_id)

    def _note_reported(
        self, request_id: str, blocks: frozenset[int], *, failed: bool
    ) -> None:
        now = time.monotonic()
        aborted = self._aborted.pop(request_id, None)
        self.reported.append(
            ReportedLoad(
                request_id=request_id,
                seconds=now - self._taken.pop(request_id),
                since_abort=None if aborted is None else now - aborted,
                same_step=request_id in self._aborted_now,
                blocks=len(blocks),
                failed=failed,
            )
        )

    def _promised_blocks(self) -> set[int]:
        return self._synchronous_blocks.union(*self.outstanding.values())

    def _watch_match(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def get_num_new_matched_tokens(
            request: Any, num_computed_tokens: int
        ) -> tuple[int | None, bool]:
            tokens, asynchronous = hook(request, num_computed_tokens)
            answer: tuple[int | None, bool] = (tokens, asynchronous)
            self.answers.setdefault(request.request_id, []).append(answer)
            self._asynchronous[request.request_id] = asynchronous
            self._note_asked(request.request_id, waiting=tokens is None)
            if not tokens:
                if asynchronous:
                    raise ProtocolError(
                        f"{request.request_id}: {answer}, but nothing cannot be "
                        "loaded asynchronously"
                    )
                return answer
            self._check_rounding(request, num_computed_tokens, tokens)
            return answer

        return get_num_new_matched_tokens

    def _note_asked(self, request_id: str, *, waiting: bool) -> None:
        now = time.monotonic()
        if waiting:
            self._asking.setdefault(request_id, now)
        elif request_id in self._asking:
            self.lookup_seconds.append(now - self._asking.pop(request_id))

    def _check_rounding(self, request: Any, local: int, tokens: int) -> None:
        if not self._config.strict_rounding:
            return
        size, length = self._config.block_size, request.num_tokens
        if tokens < 0 or tokens % size or local + tokens > length - 1:
            raise ProtocolError(
                f"{request.request_id}: promised {tokens} tokens beyond {local} local "
                f"ones of {length}; whole blocks of {size} up to {length - 1} are "
                "allowed"
            )

    def _watch_alloc(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def update_state_after_alloc(
            request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            if num_external_tokens > 0:
                self._note_load(request, blocks, num_external_tokens)
            hook(request, blocks, num_external_tokens)

        return update_state_after_alloc

    def _note_load(self, request: Any, blocks: Any, tokens: int) -> None:
        request_id = request.request_id
        self.loads.setdefault(request_id, []).append(tokens)
        held = frozenset(blocks.get_block_ids()[0])
        if self._asynchronous[request_id]:
            self.outstanding[request_id] = held
            self._taken[request_id] = time.monotonic()
        else:
            self._synchronous_blocks |= held

    def _watch_finished(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def request_finished_all_groups(request: Any, block_ids: Any) -> Any:
            delay, parameters = hook(request, block_ids)
            if delay:
                self._delayed.add(request.request_id)
            return delay, parameters

        return request_finished_all_groups
