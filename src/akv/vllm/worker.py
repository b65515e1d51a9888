"""The worker role: carries out what the scheduler side decided.

All hooks are called by the worker's own thread, once a step, and none of
them waits: each posts to the portal or takes what has ended. The loads that
were posted are kept here until they are reported, so that each one is
reported exactly once, whatever comes out of the portal.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)

from akv.core.errors import LayoutError
from akv.device.layout import build_geometry, open_device
from akv.portal import (
    CancelLoad,
    Command,
    LoadEnded,
    Portal,
    PostLoad,
    PostSave,
    SaveCopiedOut,
    SaveEnded,
)
from akv.vllm.facts import worker_facts
from akv.vllm.metadata import (
    AkvHandshake,
    AkvMetadata,
    AkvWorkerMetadata,
    LoadReport,
    SaveReport,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from akv.config import Config
    from akv.core.events import Observer
    from akv.core.spec import LoadSpec
    from akv.device.base import Device
    from akv.vllm.stats import AkvStats, Counters

__all__ = ("WorkerSide",)

log = logging.getLogger("vllm.akv")


class WorkerSide:
    """State of the worker role. One for each engine and rank."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        config: Config,
        counters: Counters,
        observer: Observer,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._counters = counters
        self._observer = observer
        self._portal: Portal | None = None
        self._device: Device | None = None
        self._handshake: AkvHandshake | None = None
        self._open: dict[int, LoadSpec] = {}
        self._saving: dict[int, int] = {}
        self._failed_blocks: set[int] = set()
        self._reports: list[SaveReport] = []
        self._unreadable: list[bytes] = []
        self._load_reports: list[LoadReport] = []

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Understand the KV memory and open the session that moves it.

        :raises LayoutError: a cache that akv does not understand
        """
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise LayoutError(missing[0], "not among the caches", ", ".join(kv_caches))
        layers = {name: kv_caches[name] for name in names}
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        geometry, memory = build_geometry(
            layers,
            num_blocks=self._kv_cache_config.num_blocks,
            block_size=spec.block_size,
            hash_unit=spec.block_size,
        )
        self._device = open_device(geometry, memory)
        self._portal = Portal.start(
            self._config,
            geometry,
            self._device,
            role="worker",
            observer=self._observer,
        )
        self._handshake = AkvHandshake(
            object_bytes=geometry.slot_bytes,
            pid=os.getpid(),
            facts=worker_facts(self._vllm_config, layers),
        )

    def get_handshake_metadata(self) -> AkvHandshake | None:
        """What the scheduler side must know of the memory."""
        return self._handshake

    def start_load_kv(self, metadata: AkvMetadata) -> None:
        """Hand the step's loads and cancellations over.

        vLLM calls this after the forward was launched for loads that are
        asynchronous, and akv's all are.
        """
        assert self._device is not None
        mark = self._device.mark() if metadata.loads else None
        commands: list[Command] = [PostLoad(spec, mark) for spec in metadata.loads]
        commands += [CancelLoad(load_id) for load_id in metadata.cancelled_loads]
        if commands:
            self._open |= {spec.load_id: spec for spec in metadata.loads}
            self._post(commands)

    def wait_for_save(self, metadata: AkvMetadata) -> None:
        """Hand the step's saves over, to be copied after this step's forward."""
        if not metadata.saves:
            return
        assert self._device is not None
        mark = self._device.mark()
        self._saving |= {spec.job_id: len(spec) for spec in metadata.saves}
        self._post([PostSave(spec, mark) for spec in metadata.saves])

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What has ended since the last call.

        With one group vLLM takes failures by block, which keeps the part of
        the prefix that landed; ``failed_recving`` would throw all of it away.
        """
        results = KVConnectorTransferResults()
        if self._portal is None:
            return results
        for ended in self._portal.drain():
            match ended:
                case LoadEnded(spec, failed_blocks, failed_hashes, reason):
                    if self._open.pop(spec.load_id, None) is None:
                        log.error("akv: load %d ended twice", spec.load_id)
                        continue
                    results.finished_recving.add(spec.request_id)
                    self._load_reports.append(
                        LoadReport(
                            spec.request_id, ended.seconds, failed=bool(failed_blocks)
                        )
                    )
                    if failed_blocks:
                        self._failed_blocks.update(failed_blocks)
                        self._unreadable += failed_hashes
                        log.debug("akv: load of %s: %s", spec.request_id, reason)
                case SaveCopiedOut(spec):
                    self._reports.append(SaveReport(spec.job_id, ended=False))
                case SaveEnded(spec, dropped, reason):
                    self._saving.pop(spec.job_id, None)
                    self._reports.append(
                        SaveReport(
                            spec.job_id, ended=True, dropped=dropped, reason=reason
                        )
                    )
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads just reported that hold no valid bytes, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> AkvWorkerMetadata | None:
        """What the scheduler side has to know, if anything."""
        if not (self._reports or self._unreadable or self._load_reports):
            return None
        meta = AkvWorkerMetadata(
            saves=tuple(self._reports),
            unreadable=tuple(self._unreadable),
            loads=tuple(self._load_reports),
        )
        self._reports, self._unreadable, self._load_reports = [], [], []
        return meta

    def stats(self) -> AkvStats | None:
        """Numbers since the last call."""
        return self._counters.take()

    def debug_state(self) -> dict[str, int]:
        """Counts that are all zero when nothing is under way."""
        state = {"open loads": len(self._open), "open saves": len(self._saving)}
        if self._portal is not None and self._portal.alive:
            self._portal.call(lambda session: session.flush(), timeout=30)
            numbers = self._portal.call(lambda s: s.statistics(), timeout=5)
            for name, pool in (
                ("load", numbers.load_staging),
                ("save", numbers.save_staging),
            ):
                assert pool is not None
                state[f"{name} buffers in use"] = pool.buffers - pool.free
                state[f"{name} buffers in quarantine"] = pool.quarantined
            state["loads"] = numbers.loads
            state["saves"] = numbers.saves
        return state

    def shutdown(self) -> None:
        """End everything, within the grace time. Twice is no error."""
        if self._portal is not None and not self._portal.close():
            log.warning("akv: a call into the store hangs; its thread is left behind")

    def _post(self, commands: list[Command]) -> None:
        assert self._portal is not None
        self._portal.post(commands)
