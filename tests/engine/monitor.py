"""What the connector promised against what it reports, rule by rule.

vLLM asserts on some broken promises and absorbs others: a load reported twice before
the next ``schedule`` is one entry in a set, an id that is still waiting for another
load passes as that one's. So the harness keeps its own account of each load that the
scheduler took, and checks every report before vLLM sees it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from engine.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig

__all__ = ["Monitor"]


class Monitor:
    """The account of one scheduler-role connector's promises.

    Attributes:
        answers: every answer of ``get_num_new_matched_tokens``, by request.
        loads: the tokens of each load that the scheduler took, by request.
        outstanding: the requests whose load has not been reported, with its blocks.
        reports: how often each id was reported.
    """

    def __init__(self, config: EngineConfig, connector: Any) -> None:
        self._config = config
        self._connector = connector
        self.answers: dict[str, list[tuple[int | None, bool]]] = {}
        self.loads: dict[str, list[int]] = {}
        self.outstanding: dict[str, frozenset[int]] = {}
        self.reports: Counter[str] = Counter()
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
            del self.outstanding[request_id]
            self.reports[request_id] += 1
        for request_id in report.finished_sending or ():
            if request_id not in self._delayed:
                raise ProtocolError(
                    f"{request_id} reported as sent, but request_finished did not "
                    "keep its blocks"
                )
            self._delayed.discard(request_id)

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
        else:
            self._synchronous_blocks |= held

    def _watch_finished(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def request_finished_all_groups(request: Any, block_ids: Any) -> Any:
            delay, parameters = hook(request, block_ids)
            if delay:
                self._delayed.add(request.request_id)
            return delay, parameters

        return request_finished_all_groups
