"""The class that vLLM loads: each hook is one line of delegation by role.

vLLM makes one object in the scheduler's process and one in each worker's;
which of the two it is decides which half exists. What each hook does is
written where it does it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from akv.config import Config
from akv.sinks.fanout import Fanout
from akv.sinks.jsonl import JsonLines
from akv.sinks.logs import LogSink
from akv.sinks.otel import OtelSink
from akv.vllm.facts import check_supported
from akv.vllm.metadata import AkvHandshake, AkvMetadata
from akv.vllm.scheduler import SchedulerSide
from akv.vllm.stats import AkvPromMetrics, AkvStats, Counters
from akv.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from akv.core.events import Observer

__all__ = ("AkvConnector",)


class AkvConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for akv's stores."""

    def __init__(
        self,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_log_lines()
        config = Config.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        counters = Counters()
        name = "scheduler" if role is KVConnectorRole.SCHEDULER else "worker"
        sinks: list[Observer] = [counters, LogSink(role=name, logger="vllm.akv")]
        self._event_log: JsonLines | None = None
        if config.log_events != "off":
            self._event_log = JsonLines(
                config.log_events, role=name, rank=vllm_config.parallel_config.rank
            )
            sinks.append(self._event_log)
        self._spans: OtelSink | None = None
        if vllm_config.observability_config.otlp_traces_endpoint:
            self._spans = OtelSink()
            sinks.append(self._spans)
        observer = Fanout(sinks)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        parts = (vllm_config, kv_cache_config, config, counters, observer)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(*parts)
        else:
            self._worker = WorkerSide(*parts)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache delivers when it can: a dropped save is a later miss."""
        return False

    # The scheduler's half.

    @property
    def _s(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook in a worker"
        return self._scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """See :meth:`SchedulerSide.open`."""
        found = [one for one in metadata.values() if isinstance(one, AkvHandshake)]
        self._s.open(found[0] if found else None)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See :meth:`SchedulerSide.bind_gpu_block_pool`."""
        self._s.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See :meth:`SchedulerSide.on_new_request`."""
        if self._spans is not None:
            self._spans.carry(request.request_id, request.trace_headers)
        self._s.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`SchedulerSide.get_num_new_matched_tokens`."""
        return self._s.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """See :meth:`SchedulerSide.update_state_after_alloc`."""
        self._s.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AkvMetadata:
        """See :meth:`SchedulerSide.build_connector_meta`."""
        metadata = self._s.build_connector_meta(scheduler_output)
        if self._spans is None:
            return metadata
        names = {spec.request_id for spec in metadata.loads}
        names |= {spec.request_id for spec in metadata.saves}
        found = {name: self._spans.carried(name) for name in names}
        traces = tuple((name, headers) for name, headers in found.items() if headers)
        return replace(metadata, traces=traces)

    def update_connector_output(self, connector_output: Any) -> None:
        """See :meth:`SchedulerSide.update_connector_output`."""
        self._s.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`SchedulerSide.request_finished`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`SchedulerSide.request_finished`."""
        self._s.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """See :meth:`SchedulerSide.has_pending_push_work`."""
        return self._s.has_pending_push_work()

    def reset_cache(self) -> bool:
        """See :meth:`SchedulerSide.reset_cache`."""
        return self._s.reset_cache()

    # The worker's half.

    @property
    def _w(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook in a scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See :meth:`WorkerSide.register_kv_caches`."""
        self._w.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> AkvHandshake | None:
        """See :meth:`WorkerSide.get_handshake_metadata`."""
        return self._w.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to wait for: what akv still reads or writes is never handed out.

        Saves hold a reference on each of their blocks, and vLLM keeps the
        blocks of a load until it is reported.
        """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See :meth:`WorkerSide.start_load_kv`."""
        del forward_context, kwargs
        metadata = self._step()
        if self._spans is not None:
            for request_id, headers in metadata.traces:
                self._spans.carry(request_id, headers)
        self._w.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, never within a forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        """See :meth:`WorkerSide.wait_for_save`."""
        self._w.wait_for_save(self._step())

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> KVConnectorTransferResults:
        """See :meth:`WorkerSide.get_transfer_results`."""
        return self._w.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See :meth:`WorkerSide.get_block_ids_with_load_errors`."""
        return self._w.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See :meth:`WorkerSide.build_connector_worker_meta`."""
        return self._w.build_connector_worker_meta()

    # Both halves.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Numbers since the last call, of whichever half this is."""
        return (self._scheduler or self._w).stats()

    def debug_state(self) -> dict[str, int]:
        """Counts that are all zero when nothing is under way; may wait."""
        return (self._scheduler or self._w).debug_state()

    def shutdown(self) -> None:
        """End everything within the grace time. Twice is no error."""
        (self._scheduler or self._w).shutdown()
        if self._spans is not None:
            self._spans.close()
        if self._event_log is not None:
            self._event_log.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU the layout in which all of a block's bytes are one run.

        Asked by vLLM's core before the cache is made, unless
        ``VLLM_KV_CACHE_LAYOUT`` says what it has to be. It is a wish: where the
        attention backend does not take it, vLLM warns and goes on with another,
        which akv serves as well. Attention on a CPU never takes it.
        """
        on_gpu = vllm_config.device_config.device_type == "cuda"
        return KVCacheLayout.BLHNC.name if on_gpu else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """vLLM's way to make the statistics of a connector from plain data."""
        return AkvStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> AkvPromMetrics:
        """See :class:`AkvPromMetrics`."""
        return AkvPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def _step(self) -> AkvMetadata:
        metadata = self._get_connector_metadata()
        return metadata if isinstance(metadata, AkvMetadata) else AkvMetadata()


def _show_log_lines() -> None:
    """Let what akv says be seen where vLLM's own lines are.

    vLLM sets up the logger "vllm" and no other. Where nobody has set up akv's
    either, its lines go the same way.
    """
    logger = logging.getLogger("akv")
    if not logger.hasHandlers():
        logger.parent = logging.getLogger("vllm")
