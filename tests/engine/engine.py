"""The engine's loop: vLLM's real scheduler driven as ``EngineCore`` drives it.

``Engine`` builds the worker's half first, then the scheduler, then passes the
handshake on, steps synchronously or with a batch queue of two, processes aborts where
``EngineCore`` does, and sleeps 1 ms after a step without work. Around the
scheduler-role connector it keeps a ``Monitor`` of what was promised and what has been
reported, because vLLM itself absorbs some double reports without a word.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.config import (
    EngineConfig,
    EngineOptions,
    build_kv_cache_config,
    build_oracle,
    build_vllm_config,
    model_runner_version,
    write_model,
)
from engine.errors import LeakError, StallError, WrongOutputError
from engine.model import salt_seed
from engine.monitor import Monitor
from engine.runner import StepEnvelope
from engine.timing import SCHEDULER_HOOKS, HookTimes, time_hooks
from engine.worker import InlineWorker, Pending, ProcessWorker, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

__all__ = ["Engine"]

_IDLE_SECONDS = 0.001
_BATCH_QUEUE_SIZE = 2


class Engine:
    """An engine without a model, as a context manager.

    All methods are called from the thread that entered it, which plays the part of
    the engine's main thread.

    Args:
        worker: whether the worker role lives in this process or in a second one.
        fresh_process: start a new worker process instead of taking over one whose
            engine was closed cleanly.
        model_dir: where the fake model's files are; by default a new temporary
            directory. Engines of one model may share it, or not.
        stall_seconds: without a scheduled token, a finished request or a report of
            the connector for so long, the engine counts as stuck.
        options: the fields of ``EngineConfig``.
    """

    def __init__(
        self,
        connector: str | None = "AkvConnector",
        module_path: str | None = "akv.vllm",
        *,
        worker: Literal["inline", "process"] = "inline",
        fresh_process: bool = False,
        model_dir: Path | None = None,
        stall_seconds: float = 10.0,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = EngineConfig(
            connector=connector, module_path=module_path, **options
        )
        self.oracle = build_oracle(self.config)
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.prefill_stats: dict[str, Any] = {}
        self.prompts: dict[str, list[int]] = {}
        self.steps = 0
        self.preemptions = 0
        self.num_free_blocks_at_start = self.config.num_blocks - 1
        self._where = worker
        self._fresh_process = fresh_process
        self._model_dir = model_dir
        self._owned_dir: Path | None = None
        self._stall_seconds = stall_seconds
        self._max_tokens: dict[str, int] = {}
        self._salts: dict[str, int] = {}
        self._fresh: list[int] = []
        self._batch_queue: deque[tuple[Pending, Any]] = deque()
        self._abort_queue: list[str] = []
        self._last_progress = time.monotonic()
        self._scheduler_hook_times: HookTimes = {}
        self._worker_hook_times: HookTimes = {}
        self._worker: Worker | None = None
        self.monitor: Monitor
        self.scheduler: Any = None
        self.vllm_config: Any = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close(quietly=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(quietly=error is not None)

    # What a client of the engine does.

    def add_request(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        skip_reading_prefix_cache: bool | None = None,
        abort_immediately: bool = False,
    ) -> str:
        """Hand a request to the scheduler, as ``EngineCore.add_request`` does."""
        if request_id is None:
            request_id = f"request-{len(self.prompts)}"
        prompt = [int(token) for token in prompt_tokens]
        self.prompts[request_id] = prompt
        self.outputs[request_id] = []
        self.finish_reasons.pop(request_id, None)
        self._max_tokens[request_id] = max_tokens
        self._salts[request_id] = salt_seed(cache_salt)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0.0,
                skip_reading_prefix_cache=skip_reading_prefix_cache,
            ),
            pooling_params=None,
            cache_salt=cache_salt,
            priority=priority,
            block_hasher=self._block_hasher,
        )
        self.scheduler.add_request(request)
        self._progressed()
        if abort_immediately:
            self.abort(request_id)
        return request_id

    def abort(self, request_id: str) -> None:
        """Abort between two steps, as when the client's message is handled there."""
        self._finish_aborted([request_id])

    def abort_during_step(self, request_id: str) -> None:
        """Abort while a step runs: processed before its output is looked at."""
        self._abort_queue.append(request_id)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False (or a RuntimeError) when blocks are in use."""
        done: bool = self.scheduler.reset_prefix_cache(
            reset_running_requests, reset_connector
        )
        return done

    # The loop.

    def step(self) -> bool:
        """One turn of the engine's loop; True if a forward was scheduled."""
        self.steps += 1
        if self.config.async_scheduling:
            executed = self._step_with_batch_queue()
        else:
            executed = self._step()
        if executed:
            self._progressed()
        elif self.scheduler.has_requests():
            time.sleep(_IDLE_SECONDS)
        return executed

    def run(self, max_steps: int = 1_000_000, timeout: float = 120.0) -> None:
        """Step until every request has ended.

        Raises:
            StallError: nothing moves, or the steps or the time are used up.
        """
        self._step_while(self.unfinished, "unfinished requests", max_steps, timeout)

    def run_steps(self, steps: int) -> None:
        """Take some steps, fewer if vLLM itself would stop stepping before.

        Raises:
            StallError: nothing has moved for too long, counted over calls.
        """
        for _ in range(steps):
            if not self.has_work():
                return
            self.step()
            self._check_moving("work")

    def idle_until_quiet(
        self, max_steps: int = 1_000_000, timeout: float = 60.0
    ) -> None:
        """Step on until vLLM itself would stop stepping.

        Raises:
            StallError: ``has_requests`` stays true.
        """
        self._step_while(self.has_work, "work without an end", max_steps, timeout)

    def has_work(self) -> bool:
        """Whether ``EngineCore`` would step: requests, pending pushes, a batch."""
        return bool(self.scheduler.has_requests() or self._batch_queue)

    def unfinished(self) -> list[str]:
        """The requests that have not ended, in the order of their arrival."""
        return [name for name in self.prompts if name not in self.finish_reasons]

    # What tests ask.

    def expected_output(self, request_id: str) -> list[int]:
        """What the prompt determines, with or without a connector."""
        return self.oracle.generate(
            self.prompts[request_id],
            self._max_tokens[request_id],
            self._salts[request_id],
        )

    def assert_outputs(self) -> None:
        """Each ended request has the expected tokens; an aborted one a prefix.

        Raises:
            WrongOutputError: naming the request.
        """
        for request_id, reason in self.finish_reasons.items():
            expected, got = self.expected_output(request_id), self.outputs[request_id]
            if reason == "abort":
                expected = expected[: len(got)]
            elif reason == "error":
                continue
            if got != expected:
                raise WrongOutputError(f"{request_id}: got {got}, expected {expected}")

    def external_tokens(self, request_id: str) -> int:
        """Tokens that the connector promised and the scheduler took, all loads."""
        return sum(self.monitor.loads.get(request_id, ()))

    @property
    def hook_times(self) -> dict[str, HookTimes]:
        """Seconds of each call, by role and hook; readable after the end too."""
        if self._worker is not None:
            self._worker_hook_times = self._worker.hook_times()
        return {
            "scheduler": self._scheduler_hook_times,
            "worker": self._worker_hook_times,
        }

    @property
    def worker(self) -> Worker:
        """Where the runner lives, while the engine is open."""
        assert self._worker is not None, "the engine is closed"
        return self._worker

    def num_free_blocks(self) -> int:
        """How many blocks the pool could hand out now."""
        free: int = self._block_pool.get_num_free_blocks()
        return free

    def assert_clean(self, grace: float = 5.0) -> None:
        """Everything is back at its starting number.

        What vLLM holds must be free now: the engine would not step again by itself.
        A connector may still be putting what it has copied out, and hears of the end
        in the next step, whatever that is for; so its own counters get empty steps
        until they are zero, for ``grace`` seconds.

        Raises:
            LeakError: naming what is left over.
        """
        left = self._left_in_vllm()
        if not left:
            deadline = time.monotonic() + grace
            while (left := self._left_in_connector()) and time.monotonic() < deadline:
                self.step_empty()
                time.sleep(_IDLE_SECONDS)
        if left:
            raise LeakError("; ".join(left))

    def step_empty(self) -> None:
        """One step with nothing to do, which vLLM would not take by itself."""
        output = self._schedule()
        self._update(output, self._execute(output).result())

    def _left_in_vllm(self) -> list[str]:
        left: list[str] = []
        scheduler = self.scheduler
        free = self.num_free_blocks()
        if free != self.num_free_blocks_at_start:
            left.append(f"{self.num_free_blocks_at_start - free} blocks not free")
        held = {
            block.block_id: block.ref_cnt
            for block in self._block_pool.blocks
            if block.ref_cnt and not block.is_null
        }
        if held:
            left.append(f"references on blocks {held}")
        if scheduler.requests:
            left.append(f"requests {sorted(scheduler.requests)}")
        left.extend(
            f"{queue} not empty"
            for queue in ("running", "waiting", "kv_holding_waiting", "deferred_frees")
            if len(getattr(scheduler, queue))
        )
        if self._batch_queue:
            left.append("a batch in flight")
        if self.monitor.outstanding:
            left.append(f"loads never reported {sorted(self.monitor.outstanding)}")
        return left

    def _left_in_connector(self) -> list[str]:
        return [
            f"{role} {counter} = {value}"
            for role, state in self._debug_states()
            for counter, value in state.items()
            if value
        ]

    # Construction and the way down.

    def _start(self) -> None:
        config = self.config
        if self._model_dir is None:
            self._owned_dir = Path(tempfile.mkdtemp(prefix="akv-engine-"))
            self._model_dir = self._owned_dir
        model = write_model(self._model_dir, config)
        self.vllm_config = build_vllm_config(config, model)
        if self._where == "inline":
            self._worker = InlineWorker(config, self.vllm_config)
        else:
            self._worker = ProcessWorker(
                config, self.vllm_config, fresh=self._fresh_process
            )
        handshake = self._worker.handshake_metadata()
        self.scheduler = self._build_scheduler()
        connector = self.scheduler.get_kv_connector()
        self._worker.use_aggregator_of(connector)
        self.monitor = Monitor(config, connector)
        if connector is not None:
            if handshake:
                connector.set_xfer_handshake_metadata_pp_aware(handshake)
            time_hooks(connector, SCHEDULER_HOOKS, self._scheduler_hook_times)
            self.monitor.attach()
        self._block_pool = self.scheduler.kv_cache_manager.block_pool
        self._record_fresh_blocks()

    def _build_scheduler(self) -> Any:
        kv_cache_config = build_kv_cache_config(self.config)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, self.vllm_config
        )
        hash_function = get_hash_fn_by_name(
            self.vllm_config.cache_config.prefix_caching_hash_algo
        )
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(hash_block_size, hash_function)
        scheduler_class = self.vllm_config.scheduler_config.get_scheduler_cls()
        with model_runner_version(self.config.hook_order):
            return scheduler_class(
                vllm_config=self.vllm_config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )

    def _record_fresh_blocks(self) -> None:
        """Note every block that the pool hands out, loads' blocks among them.

        A request that waits for its load is in no ``SchedulerOutput``, so the pool is
        the only place where all new blocks can be seen; adopted ones do not pass it.
        """
        get_new_blocks: Callable[[int], list[Any]] = self._block_pool.get_new_blocks

        def get_and_note(count: int) -> list[Any]:
            blocks = get_new_blocks(count)
            self._fresh.extend(block.block_id for block in blocks)
            return blocks

        self._block_pool.get_new_blocks = get_and_note

    def _close(self, *, quietly: bool) -> None:
        """Shut down in vLLM's order: the worker's half, then the scheduler."""
        worker, scheduler = self._worker, self.scheduler
        try:
            if worker is not None and not quietly:
                self._worker_hook_times = worker.hook_times()
        finally:
            self._worker = None
            try:
                if worker is not None:
                    worker.shutdown()
            except Exception:
                if not quietly:
                    raise
            finally:
                if scheduler is not None:
                    scheduler.shutdown()
                if self._owned_dir is not None:
                    shutil.rmtree(self._owned_dir, ignore_errors=True)

    # One step.

    def _step(self) -> bool:
        if not self.scheduler.has_requests():
            return False
        output = self._schedule()
        self._update(output, self._execute(output).result())
        return bool(output.total_num_scheduled_tokens > 0)

    def _step_with_batch_queue(self) -> bool:
        executed = False
        if self.scheduler.has_requests():
            output = self._schedule()
            pending = self._execute(output)
            executed = bool(output.total_num_scheduled_tokens > 0)
            self._batch_queue.appendleft((pending, output))
            if len(self._batch_queue) < _BATCH_QUEUE_SIZE and (
                executed or self.scheduler.has_requests()
            ):
                return executed
        elif not self._batch_queue:
            return False
        pending, output = self._batch_queue.pop()
        self._update(output, pending.result())
        return executed

    def _schedule(self) -> Any:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        return output

    def _execute(self, output: Any) -> Pending:
        fresh, self._fresh = self._fresh, []
        salts = {
            new.req_id: self._salts[new.req_id] for new in output.scheduled_new_reqs
        }
        envelope = StepEnvelope(
            scheduler_output=output, fresh_blocks=fresh, salts=salts
        )
        self.monitor.begin_step()
        return self.worker.execute(envelope)

    def _update(self, output: Any, model_output: Any) -> None:
        aborted, self._abort_queue = self._abort_queue, []
        self._finish_aborted(aborted)
        reported = model_output.kv_connector_output
        if reported is not None:
            self.monitor.check_report(reported)
            if reported.finished_recving or reported.kv_connector_worker_meta:
                self._progressed()
        results = self.scheduler.update_from_output(output, model_output)
        for client_results in results.values():
            for result in client_results.outputs:
                self._take_result(result)

    def _take_result(self, result: Any) -> None:
        self.outputs[result.request_id].extend(result.new_token_ids)
        if result.prefill_stats is not None:
            self.prefill_stats[result.request_id] = result.prefill_stats
        if result.finish_reason is not None:
            self.finish_reasons[result.request_id] = str(result.finish_reason)
            self._progressed()

    def _finish_aborted(self, request_ids: Iterable[str]) -> None:
        ended = self.scheduler.finish_requests(
            list(request_ids), RequestStatus.FINISHED_ABORTED
        )
        for request in ended:
            self.finish_reasons[request.request_id] = "abort"
            self.monitor.note_abort(request.request_id)
            self._progressed()

    # Stalls.

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()

    def _step_while(
        self, busy: Callable[[], object], what: str, max_steps: int, timeout: float
    ) -> None:
        self._progressed()
        deadline = time.monotonic() + timeout
        for _ in range(max_steps):
            if not busy():
                return
            self.step()
            self._check_moving(what)
            if time.monotonic() > deadline:
                raise StallError(f"{what} after {timeout} s; {self._situation()}")
        raise StallError(f"{what} after {max_steps} steps; {self._situation()}")

    def _check_moving(self, what: str) -> None:
        if time.monotonic() - self._last_progress > self._stall_seconds:
            raise StallError(
                f"{what}: nothing moved for {self._stall_seconds} s; "
                f"{self._situation()}"
            )

    def _situation(self) -> str:
        scheduler = self.scheduler
        requests = {
            name: request.status.name for name, request in scheduler.requests.items()
        }
        connector = scheduler.get_kv_connector()
        push = connector is not None and connector.has_pending_push_work()
        return (
            f"requests {requests}, loads not reported "
            f"{sorted(self.monitor.outstanding)}, pending push work {push}, "
            f"{self.num_free_blocks()} of {self.num_free_blocks_at_start} blocks free, "
            f"connector {dict(self._debug_states())}"
        )

    def _debug_states(self) -> list[tuple[str, dict[str, int]]]:
        state = getattr(self.scheduler.get_kv_connector(), "debug_state", None)
        return [
            ("scheduler role", {} if state is None else dict(state())),
            ("worker role", self.worker.debug_state()),
        ]
