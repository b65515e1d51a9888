"""The fake model runner: the worker's half of an engine, without a forward.

It keeps request state from ``SchedulerOutput`` as vLLM's runners do, writes for each
scheduled token the bytes that the oracle gives its slot, and checks that every slot
of every scheduled request up to there holds exactly what it should: first all writes
of a layer, then all reads, as an attention kernel does, because a request may adopt
blocks that another one computes in the same step. The connector's hooks run through
vLLM's own code, in the order of the first or the second model runner.

Blocks that the pool handed out in a step are filled with garbage right after
``handle_preemptions`` returned, the moment from which vLLM may overwrite them. So
right bytes left over by chance cannot hide a load that did not happen.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from engine.config import (
    EngineConfig,
    build_kv_cache_config,
    build_oracle,
    layer_names,
    model_runner_version,
)
from engine.errors import HarnessError, WrongBytesError
from engine.timing import WORKER_HOOKS, HookTimes, time_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.model import Prefix, Words

__all__ = ["FakeRunner", "StepEnvelope"]

_GARBAGE = 0xBADB10C0 << 32
_HISTORY = 512

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvelope:
    """A scheduler's step, with what the fake runner needs to know beside it."""

    scheduler_output: Any
    fresh_blocks: list[int]
    salts: dict[str, int]


@dataclass(slots=True)
class _RequestState:
    """One request as a model runner remembers it."""

    prefix: Prefix
    prompt_length: int
    blocks: list[int]
    computed: int


@dataclass(slots=True)
class _Batch:
    """The slots that one step touches, all requests after each other."""

    request_ids: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    blocks: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    offsets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    hashes: Words = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    written: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class FakeRunner:
    """KV memory, request state and the worker-role connector of one engine.

    Built before the scheduler, as vLLM's workers are. All methods are called from
    one thread; the connector may touch the memory from its own.
    """

    def __init__(self, config: EngineConfig, vllm_config: Any) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._oracle = build_oracle(config)
        self._layers = layer_names(config)
        self._requests: dict[str, _RequestState] = {}
        self._history: OrderedDict[str, Prefix] = OrderedDict()
        self._step = 0
        self._fresh: list[int] = []
        self.hook_times: HookTimes = {}
        kv_cache_config = build_kv_cache_config(config)
        self.kv_caches = self._allocate(kv_cache_config)
        self._words: list[Words] = [
            _as_words(self.kv_caches[name]) for name in self._layers
        ]
        self.connector: Any = None
        self._active: Any = None
        if vllm_config.kv_transfer_config is not None:
            with model_runner_version(config.hook_order):
                self._plug_in(kv_cache_config)

    def handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """What the worker-role connector has to tell the scheduler role."""
        if self.connector is None:
            return None
        metadata = self.connector.get_handshake_metadata()
        return None if metadata is None else {(0, 0): metadata}

    def execute(self, envelope: StepEnvelope) -> Any:
        """Run one step and return its ``ModelRunnerOutput``.

        Raises:
            WrongBytesError: a slot that the step reads holds other bytes.
        """
        self._step += 1
        self._fresh = envelope.fresh_blocks
        with self._as_transfer_group(), torch.inference_mode():
            if self.connector is None:
                self._fill_fresh_blocks()
            if self._config.hook_order == "v1":
                return self._execute_v1(envelope)
            return self._execute_v2(envelope)

    def debug_state(self) -> dict[str, int]:
        """The worker-role connector's counters that must be zero at rest."""
        state = getattr(self.connector, "debug_state", None)
        return {} if state is None else dict(state())

    def shutdown(self) -> None:
        """Shut the worker-role connector down, once."""
        connector, self.connector = self.connector, None
        if connector is not None:
            connector.shutdown()

    def _allocate(self, kv_cache_config: Any) -> dict[str, torch.Tensor]:
        (tensor,) = kv_cache_config.kv_cache_tensors
        (group,) = kv_cache_config.kv_cache_groups
        views = create_kv_cache_views(
            torch.zeros(tensor.size, dtype=torch.int8),
            group.kv_cache_spec,
            kv_cache_config.num_blocks,
            KVCacheLayout[self._config.layout],
            tensor,
        )
        return dict(zip(tensor.layers, views, strict=True))

    def _plug_in(self, kv_cache_config: Any) -> None:
        self.connector = KVConnectorFactory.create_connector(
            config=self._vllm_config,
            role=KVConnectorRole.WORKER,
            kv_cache_config=kv_cache_config,
        )
        time_hooks(self.connector, WORKER_HOOKS, self.hook_times)
        self._fill_after(self.connector)
        if self._config.hook_order == "v1":
            self.connector.register_kv_caches(self.kv_caches)
            return
        with self._as_transfer_group():
            self._active = ActiveKVConnector(self._vllm_config, self.kv_caches)

    def _fill_after(self, connector: Any) -> None:
        handle_preemptions: Callable[[Any], None] = connector.handle_preemptions

        def handle_then_fill(metadata: Any) -> None:
            handle_preemptions(metadata)
            self._fill_fresh_blocks()

        connector.handle_preemptions = handle_then_fill

    @contextmanager
    def _as_transfer_group(self) -> Iterator[None]:
        """Be vLLM's process-wide connector, which several engines here share."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    def _execute_v1(self, envelope: StepEnvelope) -> Any:
        output = envelope.scheduler_output
        if self.connector is not None:
            self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update_states(envelope)
        if not output.total_num_scheduled_tokens:
            if self.connector is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(
                output, self._vllm_config
            )
        batch = self._batch(output)
        with (
            self._forward_context(output),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                output
            ) as kv_connector_output,
        ):
            wrong = self._forward(batch)
        _raise_first(wrong, output, kv_connector_output)
        return self._model_output(output, self._sample(output), kv_connector_output)

    def _execute_v2(self, envelope: StepEnvelope) -> Any:
        output = envelope.scheduler_output
        self._update_states(envelope)
        if not output.total_num_scheduled_tokens:
            if self._active is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return self._active.no_forward(output)
        batch = self._batch(output)
        with self._forward_context(output):
            if self._active is not None:
                self._active.pre_forward(output, _input_batch(output))
            wrong = self._forward(batch)
        if self._active is not None:
            self._active.finish_forward()
        sampled = self._sample(output)
        kv_connector_output = None
        if self._active is not None:
            kv_connector_output = self._active.post_forward(output.finished_req_ids)
        _raise_first(wrong, output, kv_connector_output)
        return self._model_output(output, sampled, kv_connector_output)

    def _forward_context(self, output: Any) -> Any:
        metadata = {name: SimpleNamespace() for name in self._layers}
        return set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=output.total_num_scheduled_tokens,
        )

    def _fill_fresh_blocks(self) -> None:
        if not self._fresh or not self._config.compute:
            return
        blocks = np.asarray(self._fresh, dtype=np.int64)
        for words in self._words:
            words[blocks] = np.uint64(_GARBAGE | self._step)

    def _update_states(self, envelope: StepEnvelope) -> None:
        output = envelope.scheduler_output
        gone = set(output.finished_req_ids)
        if self._config.hook_order == "v2":
            gone |= output.preempted_req_ids or set()
        for request_id in gone:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._add_request(new, envelope.salts[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._update_request(cached, index, self._requests[request_id])

    def _add_request(self, new: Any, salt: int) -> None:
        tokens = new.prompt_token_ids
        if self._config.hook_order == "v2":
            tokens = new.prefill_token_ids
        state = _RequestState(
            prefix=self._oracle.prefix(list(tokens), salt),
            prompt_length=len(new.prompt_token_ids),
            blocks=list(new.block_ids[0]),
            computed=new.num_computed_tokens,
        )
        self._requests[new.req_id] = state
        self._history[new.req_id] = state.prefix
        self._history.move_to_end(new.req_id)
        while len(self._history) > _HISTORY:
            self._history.popitem(last=False)

    def _update_request(self, cached: Any, index: int, state: _RequestState) -> None:
        request_id = cached.req_ids[index]
        new_blocks = cached.new_block_ids[index]
        if request_id in cached.resumed_req_ids:
            state.blocks = list(new_blocks[0])
        elif new_blocks is not None:
            state.blocks.extend(new_blocks[0])
        state.computed = cached.num_computed_tokens[index]
        if request_id in cached.all_token_ids:
            state.prefix.assign(list(cached.all_token_ids[request_id]))
        elif self._config.hook_order == "v1":
            length = state.prompt_length + cached.num_output_tokens[index]
            state.prefix.truncate(length)

    def _batch(self, output: Any) -> _Batch:
        batch = _Batch()
        blocks: list[Ints] = []
        offsets: list[Ints] = []
        hashes: list[Words] = []
        written: list[Ints] = []
        total = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests[request_id]
            end = state.computed + scheduled
            size = self._config.block_size
            if end > len(state.prefix) or end > len(state.blocks) * size:
                raise HarnessError(
                    f"{request_id}: {end} tokens scheduled, {len(state.prefix)} known, "
                    f"{len(state.blocks)} blocks of {size}"
                )
            positions = np.arange(end, dtype=np.int64)
            blocks.append(np.asarray(state.blocks, dtype=np.int64)[positions // size])
            offsets.append(positions % size)
            hashes.append(state.prefix.hashes[:end])
            written.append(np.arange(total + state.computed, total + end))
            batch.request_ids.append(request_id)
            batch.starts.append(total)
            total += end
        batch.blocks = np.concatenate(blocks)
        batch.offsets = np.concatenate(offsets)
        batch.hashes = np.concatenate(hashes)
        batch.written = np.concatenate(written)
        return batch

    def _forward(self, batch: _Batch) -> list[WrongBytesError]:
        wrong: list[WrongBytesError] = []
        for layer, name in enumerate(self._layers):
            if self.connector is not None:
                self.connector.wait_for_layer_load(name)
            self._attend(layer, batch, wrong)
            if self.connector is not None:
                metadata = SimpleNamespace()
                self.connector.save_kv_layer(name, self.kv_caches[name], metadata)
        return wrong

    def _attend(self, layer: int, batch: _Batch, wrong: list[WrongBytesError]) -> None:
        if not self._config.compute:
            return
        words = self._words[layer]
        if not self._config.verify:
            batch_written = batch.written
            expected = self._oracle.words(layer, batch.hashes[batch_written])
            words[batch.blocks[batch_written], :, batch.offsets[batch_written], :] = (
                expected
            )
            return
        expected = self._oracle.words(layer, batch.hashes)
        at = batch.written
        words[batch.blocks[at], :, batch.offsets[at], :] = expected[at]
        differs = words[batch.blocks, :, batch.offsets, :] != expected
        if not differs.any():
            return
        rows = np.flatnonzero(differs.any(axis=(1, 2)))
        starts = np.asarray(batch.starts)
        owners = np.searchsorted(starts, rows, side="right") - 1
        for owner in np.unique(owners):
            row = int(rows[np.argmax(owners == owner)])
            block, offset = int(batch.blocks[row]), int(batch.offsets[row])
            wrong.append(
                WrongBytesError(
                    batch.request_ids[owner],
                    self._layers[layer],
                    block,
                    row - batch.starts[owner],
                    self._describe(words[block, :, offset, :], expected[row]),
                )
            )

    def _describe(self, slot: Words, expected: Words) -> str:
        """Say whose bytes a slot holds, as far as this runner can know."""
        if (slot == expected).all():
            return "them only now: they arrived after they had been read"
        first = int(slot.flat[0])
        if first & ~0xFFFFFFFF == _GARBAGE:
            step = first & 0xFFFFFFFF
            if (slot == slot.flat[0]).all():
                return f"the garbage it was filled with when handed out in step {step}"
            return "garbage in part"
        if not slot.any():
            return "zeros (never written)"
        for request_id, prefix in reversed(self._history.items()):
            for layer, name in enumerate(self._layers):
                known = self._oracle.words(layer, prefix.hashes)
                found = np.flatnonzero((known == slot).all(axis=(1, 2)))
                if len(found):
                    return f"those of {request_id}, {name}, position {found[0]}"
        return f"bytes of no request that this runner saw ({first:016x}...)"

    def _sample(self, output: Any) -> list[list[int]]:
        sampled: list[list[int]] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests[request_id]
            if state.computed + scheduled < len(state.prefix):
                sampled.append([])
                continue
            token = self._oracle.next_token(state.prefix)
            state.prefix.extend([token])
            sampled.append([token])
        return sampled

    def _model_output(
        self, output: Any, sampled: list[list[int]], kv_connector_output: Any
    ) -> Any:
        request_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={name: index for index, name in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_connector_output,
        )


def _as_words(cache: torch.Tensor) -> Words:
    """The same memory as ``[block, head, token, lane]`` of eight bytes each."""
    words: Words = cache.view(torch.int64).numpy().view(np.uint64)
    return words


def _input_batch(output: Any) -> Any:
    """What the second model runner's connector reads of an ``InputBatch``."""
    request_ids = list(output.num_scheduled_tokens)
    return SimpleNamespace(
        idx_mapping=torch.arange(len(request_ids), dtype=torch.int32),
        req_ids=request_ids,
        num_tokens=output.total_num_scheduled_tokens,
    )


def _raise_first(
    wrong: list[WrongBytesError], output: Any, kv_connector_output: Any
) -> None:
    """Raise what was seen, but for blocks that a synchronous load gave up.

    Such a request runs on bad blocks for one step, whose tokens vLLM drops.
    """
    if not wrong:
        return
    forgiven: set[int] = set()
    if output.has_sync_kv_loads and kv_connector_output is not None:
        forgiven = kv_connector_output.invalid_block_ids
    for error in wrong:
        if error.block not in forgiven:
            raise error
