"""The scheduler role: what to look up, to load and to save, and for whom.

Called by the engine's scheduler thread and by no other, so there are no
locks; what the loop thread finds out comes back as one reference in an
``Answer`` or through the worker's reports. No hook waits: a lookup that has
not come back yet is answered with "ask again".
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from akv.core.align import Promise, promise
from akv.core.errors import AkvError, ConfigError
from akv.core.events import (
    READING_OFF,
    LoadDeclined,
    LoadJoined,
    LoadPromised,
    Observer,
    SaveDropped,
)
from akv.core.flight import Flight, Flights, Follower
from akv.core.keys import EPOCH_BYTES, KeySpace, short_name
from akv.core.recent import RecentSet
from akv.core.spec import LoadSpec, LookupSpec, SaveSpec, Span
from akv.core.worth import Experience, Verdict
from akv.portal import (
    Answer,
    Command,
    Forget,
    KeySpaceSoon,
    Portal,
    PostKeySpace,
    PostLookup,
)
from akv.vllm.facts import engine_fingerprint, object_geometry
from akv.vllm.metadata import AkvHandshake, AkvMetadata, AkvWorkerMetadata
from akv.vllm.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from akv.config import Config
    from akv.vllm.stats import AkvStats, Counters

__all__ = ("SchedulerSide",)

log = logging.getLogger("vllm.akv")

_MOST_KNOWN = 1 << 17
_MOST_ASKED = 3
_START_SECONDS = 10.0


@dataclass(slots=True)
class _Load:
    """A load that was promised, until the worker has reported it."""

    flight: Flight
    bytes: int
    queued_bytes: int
    seconds: float = 0.0


@dataclass(slots=True)
class _Tracked:
    """What akv knows of one request of the engine."""

    request: Request
    chain: int
    preemptions: int = 0
    answer: Answer | None = None
    first_block: int = 0
    asked: int = 0
    give_up: float = 0.0
    promised: Promise | None = None
    verdict: Verdict | None = None
    follower: Follower = field(default_factory=Follower)
    hit: int = 0
    loaded: bool = False
    given_up: bool = False
    declined: bool = False
    stored: range = range(0)
    forgot: Answer | None = None
    saved: int = 0
    save: bool = True


@dataclass(frozen=True, slots=True)
class _Job:
    """A save that holds pins, or waits to hear how it ended."""

    chain: int
    space: bytes
    request_id: str
    blocks: list[KVCacheBlock]
    hashes: list[bytes]


@dataclass(slots=True)
class _Step:
    """What the next metadata will carry, and what the loop will be told then."""

    loads: list[LoadSpec] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


class SchedulerSide:
    """State of the scheduler role. One for each engine."""

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
        transfer = vllm_config.kv_transfer_config
        self._loads_wanted = transfer.is_kv_consumer and config.enable_lookup
        self._saves_wanted = bool(transfer.is_kv_producer)
        group = kv_cache_config.kv_cache_groups[0]
        self._block = int(group.kv_cache_spec.block_size)
        self._ids = itertools.count(1)
        self._portal: Portal | None = None
        self._space: KeySpace | None = None
        self._space_soon = KeySpaceSoon()
        self._reset_unseen = False
        self._prefix = b""
        self._pool: BlockPool | None = None
        self._most_pinned = 0
        self._pinned = 0
        self._requests: dict[str, _Tracked] = {}
        self._loads: dict[str, _Load] = {}
        self._flights = Flights()
        self._loading_bytes = 0
        self._block_bytes = 0
        self._experience: Experience | None = None
        self._pace: Pace | None = None
        self._jobs: dict[int, _Job] = {}
        self._ending: dict[int, _Job] = {}
        self._known: RecentSet[bytes] = RecentSet(_MOST_KNOWN)
        self._next = _Step()

    # Opening and closing.

    def open(self, handshake: AkvHandshake | None) -> None:
        """Open the session that answers lookups.

        With the worker's handshake where vLLM passes it on (it does after
        both roles exist and before any request), else from the configuration.
        """
        if self._portal is not None:
            return
        facts: dict[str, Any] = {}
        object_bytes: int | None = None
        if handshake is not None:
            if self._config.store.startswith("memory:") and (
                handshake.pid != os.getpid()
            ):
                raise ConfigError(
                    "store",
                    self._config.store,
                    "lives in one process, but this engine's worker is another one, "
                    "so nothing would ever be found: use local:",
                )
            facts = handshake.facts
            object_bytes = handshake.object_bytes
        else:
            log.warning(
                "akv: no word from the worker about its memory; blocks are told "
                "apart by the configuration alone"
            )
        fingerprint = engine_fingerprint(
            self._vllm_config, self._kv_cache_config, facts
        )
        geometry = object_geometry(self._kv_cache_config, self._block, object_bytes)
        self._block_bytes = geometry.slot_bytes
        if self._config.load_or_compute:
            self._experience = Experience(
                block_bytes=geometry.slot_bytes,
                block_tokens=self._block,
                deadline=self._config.load_deadline,
                prefill_rate=self._config.prefill_rate,
            )
            self._pace = Pace(self._experience)
        portal = self._portal = Portal.start(
            self._config, geometry, role="scheduler", observer=self._observer
        )
        portal.post(
            [PostKeySpace(self._config.namespace, fingerprint, self._space_soon)]
        )
        if portal.store_works:
            self._space_soon.known.wait(_START_SECONDS)
        log.info(
            "akv: keeps KV blocks in %s, namespace %r (kv_connector_extra_config: "
            '"store", "namespace")',
            portal.store_url,
            self._config.namespace,
        )

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Take the pool whose blocks saves pin."""
        self._pool = pool
        share = self._config.max_pinned_fraction
        self._most_pinned = int(pool.num_gpu_blocks * share)

    def shutdown(self) -> None:
        """End everything, within the grace time. Twice is no error."""
        if self._portal is not None and not self._portal.close():
            log.warning("akv: a call into the store hangs; its thread is left behind")

    # Lookups and loads.

    def on_new_request(self, request: Request) -> None:
        """Have the store asked, at the end of the step that comes next."""
        if self._portal is None:
            self.open(None)
        self._learn_space()
        tracked = _Tracked(request, chain=next(self._ids))
        self._requests[request.request_id] = tracked
        if self._loads_wanted and not request.skip_reading_prefix_cache:
            self._ask(tracked, self._local_blocks(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What may be loaded beyond ``num_computed_tokens``.

        May be called any number of times for a request, with other local hits
        each time; the store is asked once in each life of the request. While
        another request's load brings the beginning of what this one would load,
        the answer is "ask again": then it is a local hit, and nothing is fetched
        twice.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        if request.num_preemptions != tracked.preemptions:
            tracked.preemptions = request.num_preemptions
            tracked.loaded = False
            tracked.declined = False
            tracked.follower = Follower(failures=tracked.follower.failures)
            if self._loads_wanted:
                tracked.asked = 0
                self._ask(tracked, num_computed_tokens // self._block)
        if tracked.loaded or tracked.given_up:
            return 0, False
        local_blocks = num_computed_tokens // self._block
        if local_blocks < tracked.first_block and tracked.asked < _MOST_ASKED:
            # The engine has less than it seemed to have when the request came,
            # or loses it bit by bit while the request waits: the last question
            # is about all of it.
            last = tracked.asked == _MOST_ASKED - 1
            self._ask(tracked, 0 if last else local_blocks)
        answer = tracked.answer
        if answer is None:
            return 0, False
        found = answer.found
        if found is None:
            if time.monotonic() < tracked.give_up:
                return None, False
            answer.cancelled = True
            found = 0
        tracked.stored = range(tracked.first_block, tracked.first_block + found)
        self._forget_lost(tracked)
        hit = 0
        if local_blocks >= tracked.first_block:
            hit_blocks = tracked.first_block + found
            hit = hit_blocks * self._block
        tracked.hit = hit
        promised = promise(
            num_tokens=request.num_tokens,
            local=num_computed_tokens,
            hit=hit,
            block=self._block,
        )
        tracked.promised = tracked.verdict = None
        if promised.need <= 0:
            return 0, False
        if self._waits(tracked, promised):
            return None, False
        if tracked.follower.given_up:
            tracked.given_up = True
            return 0, False
        promised = self._worth(tracked, promised)
        if promised.need <= 0:
            return 0, False
        tracked.promised = promised
        return promised.need, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Make a LoadSpec if the engine took the promise, else drop it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        promised, tracked.promised = tracked.promised, None
        if num_external_tokens == 0 or promised is None:
            self._declined(tracked)
            return
        usable = promised.usable - promised.need + num_external_tokens
        first, last = promised.local // self._block, usable // self._block
        spec = LoadSpec(
            request_id=request.request_id,
            space=self._prefix,
            load_id=next(self._ids),
            local=promised.local,
            usable=usable,
            spans=(
                Span(
                    first_block=first,
                    hashes=tuple(request.block_hashes[first:last]),
                    block_ids=tuple(blocks.get_block_ids()[0][first:last]),
                ),
            ),
        )
        tracked.loaded = True
        num_bytes = len(spec) * self._block_bytes
        verdict = tracked.verdict
        load = self._loads[request.request_id] = _Load(
            self._flights.began(spec, tracked.follower), num_bytes, self._loading_bytes
        )
        self._loading_bytes += num_bytes
        if self._experience is not None:
            self._experience.load_began(time.monotonic())
        self._next.loads.append(spec)
        self._observer.on(
            LoadPromised(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                local=promised.local,
                hit=tracked.hit,
                usable=usable,
                load_id=spec.load_id,
                bytes=num_bytes,
                queued_bytes=load.queued_bytes,
                land_seconds=None if verdict is None else verdict.land_seconds,
                compute_seconds=None if verdict is None else verdict.compute_seconds,
                reason="" if verdict is None else verdict.reason,
            )
        )

    def request_finished(self, request: Request) -> None:
        """Forget the request; a load that is under way is cancelled.

        vLLM keeps the blocks of such a load until the worker reports it, and
        saves hold pins of their own, so nothing is asked to be delayed.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None and tracked.answer is not None:
            tracked.answer.cancelled = True
        load = self._loads.get(request.request_id)
        if load is not None:
            self._flights.ended(load.flight)
            self._next.cancelled.append(load.flight.spec.load_id)

    # Saves.

    def build_connector_meta(self, output: SchedulerOutput) -> AkvMetadata:
        """This step's loads, cancellations and saves.

        Called once a step, also for an empty one; the only hook that wakes
        the loop, as a thread that wakes another one may have to wait for the
        interpreter's lock afterwards.
        """
        step, self._next = self._next, _Step()
        if step.commands and self._portal is not None:
            self._portal.post(step.commands)
        if self._pace is not None:
            self._pace.step_began(self._with_prompts(output))
        saves: list[SaveSpec] = []
        if self._saves_wanted and output.total_num_scheduled_tokens:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is not None and tracked.save:
                    spec = self._save(tracked, scheduled, output)
                    if spec is not None:
                        saves.append(spec)
        return AkvMetadata(
            loads=tuple(step.loads),
            cancelled_loads=tuple(step.cancelled),
            saves=tuple(saves),
        )

    def has_pending_push_work(self) -> bool:
        """Whether pins are held, of which only a step can tell that they end."""
        return bool(self._jobs)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take the worker's reports: give pins back, remember what failed."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, AkvWorkerMetadata):
            self._take(meta)
        for request_id in output.finished_recving or ():
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._flights.ended(load.flight)
                self._loading_bytes -= load.bytes
                if self._experience is not None:
                    self._experience.load_ended(
                        num_bytes=load.bytes,
                        queued_bytes=load.queued_bytes,
                        seconds=load.seconds,
                        failed=load.flight.failed,
                        now=time.monotonic(),
                    )

    def _take(self, meta: AkvWorkerMetadata) -> None:
        for report in meta.saves:
            job = self._jobs.pop(report.job_id, None)
            if job is not None:
                self._unpin(job)
                self._ending[report.job_id] = job
            if report.ended:
                self._ended(self._ending.pop(report.job_id, None), report.dropped)
        for loaded in meta.loads:
            load = self._loads.get(loaded.request_id)
            if load is not None:
                # Of several workers the slowest one.
                load.seconds = max(load.seconds, loaded.seconds)
                load.flight.failed |= loaded.failed
            tracked = self._requests.get(loaded.request_id)
            if loaded.failed and tracked is not None:
                # Nothing more is promised to it, and what the engine has to
                # compute after all may be saved again.
                tracked.given_up = True
                tracked.stored = range(0)
        if meta.unreadable:
            self._known.discard(meta.unreadable)
            self._next.commands.append(Forget(self._prefix, meta.unreadable))

    def reset_cache(self) -> bool:
        """Make everything saved so far unreachable; True when confirmed.

        The one hook that asks the store and waits, for at most a second.
        This process finds nothing of the old even if the store does not
        confirm.
        """
        self._learn_space()
        if self._portal is None or self._space is None:
            # What the store will turn out to hold is of before.
            self._reset_unseen = True
            return False
        space = self._space
        self._known.clear()
        confirmed = True
        try:
            self._use(self._portal.call(lambda s: s.reset(space), timeout=1.0))
        except (AkvError, TimeoutError) as error:
            confirmed = False
            log.warning("akv: the store did not confirm the reset: %s", error)
            self._use(space.after_reset(space.generation, os.urandom(EPOCH_BYTES)))
        for tracked in self._requests.values():
            if tracked.answer is not None:
                tracked.answer.cancelled = True
                tracked.answer = None
            tracked.promised = None
            tracked.save = False
        # What these load is of before, and nobody wants it any more.
        self._flights.clear()
        return confirmed

    def stats(self) -> AkvStats | None:
        """Numbers since the last call; vLLM takes them when a step has ended."""
        if self._pace is not None:
            self._pace.step_ended()
        self._counters.set("pinned_blocks", self._pinned)
        return self._counters.take()

    def debug_state(self) -> dict[str, int]:
        """Counts that are all zero when nothing is under way."""
        state = {
            "requests": len(self._requests),
            "loads": len(self._loads),
            "save jobs": len(self._jobs),
            "pinned blocks": self._pinned,
            "unsent loads": len(self._next.loads) + len(self._next.cancelled),
            "flights": len(self._flights),
            "loading bytes": self._loading_bytes,
        }
        if self._portal is not None and self._portal.alive:
            numbers = self._portal.call(lambda s: s.statistics(), timeout=5)
            state["lookups"] = numbers.lookups
        return state

    # Within.

    def _learn_space(self) -> None:
        """Take the key space over once the store has told its generation."""
        soon = self._space_soon.space
        if self._space is not None or soon is None:
            return
        if self._reset_unseen:
            soon = soon.after_reset(soon.generation, os.urandom(EPOCH_BYTES))
        self._use(soon)

    def _use(self, space: KeySpace) -> None:
        self._space = space
        self._prefix = space.prefix

    def _ask(self, tracked: _Tracked, first_block: int) -> None:
        """Post a lookup of what could be used beyond ``first_block``."""
        request = tracked.request
        if tracked.answer is not None:
            tracked.answer.cancelled = True
        askable = (request.num_tokens - 1) // self._block
        hashes = request.block_hashes
        tracked.first_block = first_block
        if self._space is None or min(askable, len(hashes)) <= first_block:
            tracked.answer = None
            return
        tracked.asked += 1
        tracked.give_up = time.monotonic() + 2 * self._config.lookup_deadline
        tracked.answer = Answer()
        spec = LookupSpec(
            request_id=request.request_id,
            space=self._prefix,
            hashes=tuple(hashes),
            askable_blocks=askable,
            first_block=first_block,
        )
        self._next.commands.append(PostLookup(spec, tracked.answer))

    def _waits(self, tracked: _Tracked, promised: Promise) -> bool:
        """Whether another request's load brings the beginning of this one.

        Only where the engine's prefix cache passes blocks on: when a load has been
        reported, vLLM caches what landed before it asks about any other request.
        """
        if self._pool is None or not self._pool.enable_caching:
            return False
        follower = tracked.follower
        before = follower.flight
        waits = self._flights.waits(
            follower,
            tracked.request.block_hashes,
            promised.local // self._block,
            promised.usable // self._block,
            now=time.monotonic(),
            patience=self._config.load_deadline,
        )
        flight = follower.flight
        if waits and flight is not None and flight is not before:
            self._observer.on(
                LoadJoined(
                    request_id=tracked.request.request_id,
                    leader=flight.spec.request_id,
                    load_id=flight.spec.load_id,
                    local=flight.spec.local,
                    usable=flight.spec.usable,
                )
            )
        return waits

    def _worth(self, tracked: _Tracked, promised: Promise) -> Promise:
        """What of ``promised`` is quicker to load than to compute."""
        if self._experience is None or self._pace is None:
            return promised
        block = self._block
        verdict = tracked.verdict = self._experience.weigh(
            blocks=(promised.usable - promised.local) // block,
            queued_bytes=self._loading_bytes,
            queued_tokens=self._pace.tokens_ahead,
            now=time.monotonic(),
        )
        usable = promised.local + verdict.blocks * block
        cut = promised.usable - usable
        return replace(promised, usable=usable, need=max(0, promised.need - cut))

    def _with_prompts(self, output: SchedulerOutput) -> Iterator[tuple[Request, int]]:
        """The requests of a step that may have work on prompts, with their tokens."""
        if output.total_num_scheduled_tokens > len(output.num_scheduled_tokens):
            for request_id, tokens in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tokens > 1 and tracked is not None:
                    yield tracked.request, tokens

    def _forget_lost(self, tracked: _Tracked) -> None:
        """A block that was stored once and was not found has to be saved again."""
        if tracked.forgot is tracked.answer:
            return
        tracked.forgot = tracked.answer
        hashes, first = tracked.request.block_hashes, tracked.stored.stop
        # Blocks are saved in order, so the first one that is missing tells.
        if first < len(hashes) and hashes[first] in self._known:
            self._known.discard(hashes[first:])

    def _local_blocks(self, request: Request) -> int:
        """About how many leading blocks the engine has itself.

        By bisection, as what the engine has of a prefix is nearly always
        without a gap; a wrong guess only costs a second lookup.
        """
        pool, hashes = self._pool, request.block_hashes
        if pool is None or not hashes or not pool.enable_caching:
            return 0
        low, high = 0, len(hashes)
        if pool.get_cached_block(hashes[0], [0]) is None:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if pool.get_cached_block(hashes[middle - 1], [0]) is not None:
                low = middle
            else:
                high = middle - 1
        return low

    def _declined(self, tracked: _Tracked) -> None:
        if tracked.declined or tracked.loaded:
            return
        tracked.declined = True
        request, verdict = tracked.request, tracked.verdict
        flight = tracked.follower.flight
        if not self._loads_wanted or request.skip_reading_prefix_cache:
            reason = READING_OFF
        elif tracked.answer is None and self._space is None:
            reason = "the store has not been there yet"
        elif tracked.answer is None:
            reason = "no whole block beyond what the engine has"
        elif tracked.answer.found is None:
            reason = "the lookup was not answered in time"
        elif tracked.hit == 0:
            reason = "nothing found"
        elif verdict is not None and not verdict.blocks:
            reason = verdict.reason
        elif tracked.follower.given_up:
            reason = "loads of these blocks by other requests failed or take too long"
        elif flight is not None and not flight.failed:
            reason = f"the load of {flight.spec.request_id} brought it"
        else:
            reason = "nothing found beyond what the engine has"
        self._observer.on(
            LoadDeclined(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                local=tracked.first_block * self._block,
                hit=tracked.hit,
                reason=reason,
                bytes=0 if verdict is None else verdict.bytes,
                queued_bytes=0 if verdict is None else verdict.queued_bytes,
                land_seconds=None if verdict is None else verdict.land_seconds,
                compute_seconds=None if verdict is None else verdict.compute_seconds,
            )
        )

    def _save(
        self, tracked: _Tracked, scheduled: int, output: SchedulerOutput
    ) -> SaveSpec | None:
        """Full, hashed blocks that this step completes and nobody has stored.

        Hashes exist for committed tokens only, so draft tokens never count.
        """
        request = tracked.request
        tokens = request.num_computed_tokens + scheduled
        if not self._config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        last = min(tokens // self._block, len(request.block_hashes))
        first = tracked.saved
        if last <= first or self._space is None:
            return None
        tracked.saved = last
        state = output.kv_connector_block_state
        tables = state.get_block_ids(request.request_id) if state is not None else None
        if tables is None:
            tracked.save = False
            return None
        hashes = request.block_hashes
        wanted = self._unsaved(tracked, first, last)
        room = self._most_pinned - self._pinned
        if len(wanted) > room:
            self._observer.on(
                SaveDropped(
                    request_id=request.request_id,
                    objects=len(wanted) - max(0, room),
                    reason="as many blocks pinned as max_pinned_fraction allows",
                    block=short_name(hashes[wanted[max(0, room)]]),
                )
            )
            tracked.save = False
            wanted = wanted[: max(0, room)]
        if not wanted or self._pool is None:
            return None
        spans = _spans(wanted, hashes, tables[0])
        ids = list(itertools.chain.from_iterable(span.block_ids for span in spans))
        if self._pool.null_block.block_id in ids:
            tracked.save = False
            return None
        blocks = list(map(self._pool.blocks.__getitem__, ids))
        spec = SaveSpec(
            request_id=request.request_id,
            space=self._prefix,
            job_id=next(self._ids),
            chain=tracked.chain,
            spans=spans,
        )
        self._pool.touch(blocks)
        self._pinned += len(blocks)
        self._jobs[spec.job_id] = _Job(
            tracked.chain,
            spec.space,
            request.request_id,
            blocks,
            list(itertools.chain.from_iterable(span.hashes for span in spans)),
        )
        return spec

    def _unsaved(self, tracked: _Tracked, first: int, last: int) -> Sequence[int]:
        """Which of these blocks nobody is known to have stored; mostly all."""
        hashes, known = tracked.request.block_hashes, self._known
        stored = range(max(first, tracked.stored.start), min(last, tracked.stored.stop))
        if not stored:
            if known.isdisjoint(hashes[first:last]):
                return range(first, last)
            stored = range(first, first)
        numbers = itertools.chain(range(first, stored.start), range(stored.stop, last))
        return [number for number in numbers if hashes[number] not in known]

    def _unpin(self, job: _Job) -> None:
        assert self._pool is not None
        self._pinned -= len(job.blocks)
        self._pool.free_blocks(reversed(job.blocks))

    def _ended(self, job: _Job | None, dropped: int) -> None:
        if job is None:
            return
        if dropped:
            tracked = self._requests.get(job.request_id)
            if tracked is not None and tracked.chain == job.chain:
                tracked.save = False
            return
        if job.space != self._prefix:
            return  # Stored, but before a reset: nothing is known of after it.
        self._known.update(job.hashes)


def _spans(
    numbers: Sequence[int], hashes: Sequence[bytes], table: Sequence[int]
) -> tuple[Span, ...]:
    """Runs of consecutive blocks of ``numbers``, which ascend."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        runs = [(numbers[0], numbers[-1] + 1)]
    else:
        pairs = itertools.groupby(
            enumerate(numbers), key=lambda pair: pair[1] - pair[0]
        )
        each = [[number for _, number in run] for _, run in pairs]
        runs = [(run[0], run[-1] + 1) for run in each]
    return tuple(
        Span(
            first_block=first,
            hashes=tuple(hashes[first:last]),
            block_ids=tuple(table[first:last]),
        )
        for first, last in runs
    )
