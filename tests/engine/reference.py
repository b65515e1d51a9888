"""A small connector that the harness is proved with, right or with a planted bug.

The right one keeps blocks in a dict of the worker's process, loads asynchronously,
pins what it saves, and copies in one thread of its own. The scheduler role learns
which keys are stored from the worker's metadata, so it works over a process border.
With ``store`` set, engines of one process share a dict of that name.
``load_delay`` and ``save_delay`` hold a job back for a number of steps, which makes
races happen at a chosen moment instead of by chance. ``bug`` names one fault.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

__all__ = ["BUGS", "ReferenceConnector"]

BUGS = (
    "copies_nothing",
    "double_report",
    "early_report",
    "late_failure",
    "leaked_pin",
    "lost_report",
    "lost_save",
    "missing_pin",
    "off_by_one",
    "silent_failure",
    "swapped_blocks",
    "unknown_report",
    "wrong_salt",
)

Bytes = npt.NDArray[np.uint8]

_STORES: dict[str, dict[bytes, list[Bytes]]] = {}


@dataclass(frozen=True, slots=True)
class _Job:
    """One load or save: the keys and the blocks that belong to them."""

    job_id: int
    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Metadata(KVConnectorMetadata):
    loads: list[_Job] = field(default_factory=list)
    saves: list[_Job] = field(default_factory=list)


@dataclass(slots=True)
class _WorkerMetadata(KVConnectorWorkerMetadata):
    saved: list[int] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.saved + other.saved, self.lost + other.lost)


class ReferenceConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles of the reference connector; each hook delegates to its role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.bug: str | None = extra.get("bug")
        if self.bug is not None and self.bug not in BUGS:
            raise ValueError(f"unknown bug {self.bug}")
        self._scheduler: _SchedulerRole
        self._worker: _WorkerRole
        if role is KVConnectorRole.SCHEDULER:
            size = vllm_config.cache_config.block_size
            self._scheduler = _SchedulerRole(extra, size)
        else:
            self._worker = _WorkerRole(extra)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def debug_state(self) -> dict[str, int]:
        if self.role is KVConnectorRole.SCHEDULER:
            return self._scheduler.debug_state()
        return self._worker.debug_state()

    # Scheduler role.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._scheduler.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.role is KVConnectorRole.SCHEDULER and bool(self._scheduler.pins)

    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    # Worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        self._worker.start_saves(self._get_connector_metadata().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_metadata()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()


class _SchedulerRole:
    """What to load and what to save."""

    def __init__(self, extra: dict[str, Any], block_size: int) -> None:
        self.bug = extra.get("bug")
        self.block_size = block_size
        self.lookup_answers_none = int(extra.get("lookup_answers_none", 0))
        self.pool: Any = None
        self.requests: dict[str, Any] = {}
        self.pins: dict[int, list[Any]] = {}
        self._known: set[bytes] = set(_STORES.get(extra.get("store", ""), ()))
        self._saving: dict[int, _Job] = {}
        self._hits: dict[str, tuple[int, int]] = {}
        self._asked: Counter[str] = Counter()
        self._given_up: set[str] = set()
        self._next_job = 0
        self._metadata = _Metadata()

    def debug_state(self) -> dict[str, int]:
        return {
            "requests": len(self.requests),
            "pins": len(self.pins),
            "saves": len(self._saving),
            "hits": len(self._hits),
        }

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        if self._asked[request_id] < self.lookup_answers_none:
            self._asked[request_id] += 1
            return None, False
        self._hits.pop(request_id, None)
        if request_id in self._given_up:
            return 0, False
        size, hit = self.block_size, 0
        for key in self._keys(request):
            if key not in self._known:
                break
            hit += size
        usable = min(hit, request.num_tokens - 1)
        if self.bug != "off_by_one":
            usable = usable // size * size
        if usable <= local:
            return 0, False
        self._hits[request_id] = (local, usable)
        return usable - local, True

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        hit = self._hits.pop(request.request_id, None)
        if not tokens or hit is None:
            return
        first, last = hit[0] // self.block_size, hit[1] // self.block_size
        job = self._job(
            request.request_id,
            self._keys(request)[first:last],
            blocks.get_block_ids()[0][first:last],
        )
        self._metadata.loads.append(job)

    def build(self, output: Any) -> KVConnectorMetadata:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens + scheduled
            (table,) = output.kv_connector_block_state.get_block_ids(request_id)
            self._save(request, computed // self.block_size, table)
        metadata, self._metadata = self._metadata, _Metadata()
        return metadata

    def update(self, output: Any) -> None:
        metadata = output.kv_connector_worker_meta
        if metadata is None:
            return
        for job_id in metadata.saved:
            job = self._saving.pop(job_id)
            self._known.update(job.keys)
            pinned = self.pins.pop(job_id, [])
            if self.bug != "leaked_pin":
                self.pool.free_blocks(pinned)
        self._known.difference_update(metadata.lost)
        if metadata.lost:
            self._given_up.update(output.finished_recving or ())

    def finished(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._given_up.discard(request_id)

    def reset(self) -> None:
        self._known.clear()

    def _keys(self, request: Any) -> list[bytes]:
        if self.bug == "wrong_salt":
            size = self.block_size
            tokens = list(request.all_token_ids)
            ends = range(size, len(tokens) + 1, size)
            return [repr(tokens[:end]).encode() for end in ends]
        return [bytes(key) for key in request.block_hashes]

    def _save(self, request: Any, blocks: int, table: list[int]) -> None:
        taken = self._known.union(*(job.keys for job in self._saving.values()))
        fresh = [
            (key, block)
            for key, block in zip(self._keys(request)[:blocks], table, strict=False)
            if key not in taken
        ]
        if not fresh:
            return
        job = self._job(
            request.request_id,
            [key for key, _ in fresh],
            [block for _, block in fresh],
        )
        self._saving[job.job_id] = job
        pinned = [self.pool.blocks[block] for block in job.blocks]
        if self.bug == "missing_pin":
            pinned = []
        self.pool.touch(pinned)
        self.pins[job.job_id] = pinned
        self._metadata.saves.append(job)

    def _job(self, request_id: str, keys: list[bytes], blocks: list[int]) -> _Job:
        self._next_job += 1
        return _Job(self._next_job, request_id, tuple(keys), tuple(blocks))


@dataclass(frozen=True, slots=True)
class _Landed:
    """What the copying thread has to say about one job."""

    job: _Job
    is_load: bool
    failed: tuple[int, ...] = ()


class _WorkerRole:
    """The store, the copies and what is to be reported about them."""

    def __init__(self, extra: dict[str, Any]) -> None:
        self.bug = extra.get("bug")
        self._load_delay = int(extra.get("load_delay", 0))
        self._save_delay = int(extra.get("save_delay", 0))
        self._lose_every = int(extra.get("lose_every", 0))
        self._store: dict[bytes, list[Bytes]] = {}
        if "store" in extra:
            self._store = _STORES.setdefault(extra["store"], {})
        self._caches: list[torch.Tensor] = []
        self._step = 0
        self._held: list[tuple[int, bool, _Job]] = []
        self._open = 0
        self._puts = 0
        self._results: KVConnectorTransferResults = KVConnectorTransferResults()
        self._again: set[str] = set()
        self._errors: set[int] = set()
        self._late: set[int] = set()
        self._metadata = _WorkerMetadata()
        self._inbox: queue.SimpleQueue[tuple[bool, _Job] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[_Landed] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy_all, name="reference")
        self._thread.start()

    def debug_state(self) -> dict[str, int]:
        return {"open jobs": self._open, "held jobs": len(self._held)}

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(caches.values())

    def start_loads(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if self.bug == "early_report":
                self._results.finished_recving.add(job.request_id)
            self._hold(job, True, self._load_delay)

    def start_saves(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._hold(job, False, self._save_delay)

    def results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._step += 1
        due = [held for held in self._held if held[0] <= self._step]
        self._held = [held for held in self._held if held[0] > self._step]
        for _, is_load, job in due:
            self._inbox.put((is_load, job))
        self._errors, self._late = self._late, set()
        self._results.finished_recving |= self._again
        self._again = set()
        while not self._outbox.empty():
            self._land(self._outbox.get())
        if self.bug == "unknown_report" and self._step == 3:
            self._results.finished_recving.add("nobody")
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors

    def take_metadata(self) -> KVConnectorWorkerMetadata | None:
        metadata, self._metadata = self._metadata, _WorkerMetadata()
        return metadata if metadata.saved or metadata.lost else None

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _hold(self, job: _Job, is_load: bool, delay: int) -> None:
        self._open += 1
        self._held.append((self._step + delay, is_load, job))

    def _land(self, landed: _Landed) -> None:
        self._open -= 1
        job = landed.job
        if not landed.is_load:
            if self.bug != "lost_save":
                self._metadata.saved.append(job.job_id)
            return
        if self.bug in ("lost_report", "early_report"):
            return
        self._results.finished_recving.add(job.request_id)
        if self.bug == "double_report":
            self._again.add(job.request_id)
        if landed.failed and self.bug != "silent_failure":
            self._metadata.lost.extend(job.keys[index] for index in landed.failed)
            blocks = {job.blocks[index] for index in landed.failed}
            if self.bug == "late_failure":
                self._late |= blocks
            else:
                self._errors |= blocks

    def _copy_all(self) -> None:
        while (item := self._inbox.get()) is not None:
            is_load, job = item
            self._outbox.put(self._load(job) if is_load else self._save(job))

    def _load(self, job: _Job) -> _Landed:
        failed: list[int] = []
        blocks = list(job.blocks)
        if self.bug == "swapped_blocks":
            blocks.reverse()
        for index, (key, block) in enumerate(zip(job.keys, blocks, strict=True)):
            value = self._store.get(key)
            if value is None:
                failed.append(index)
            elif self.bug != "copies_nothing":
                for cache, part in zip(self._caches, value, strict=True):
                    _block_bytes(cache, block)[...] = part
        return _Landed(job, True, tuple(failed))

    def _save(self, job: _Job) -> _Landed:
        for key, block in zip(job.keys, job.blocks, strict=True):
            self._puts += 1
            if self._lose_every and self._puts % self._lose_every == 0:
                self._store.pop(key, None)
                continue
            self._store[key] = [_block_bytes(c, block).copy() for c in self._caches]
        return _Landed(job, False)


def _block_bytes(cache: torch.Tensor, block: int) -> Bytes:
    """One block of one layer as bytes, in whatever order it lies in memory."""
    view: Bytes = cache[block].view(torch.uint8).numpy()
    return view
