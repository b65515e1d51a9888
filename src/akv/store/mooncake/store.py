"""Mooncake Store as a store of blocks: one pool for the engines of a cluster.

How a client behaves was measured with 0.3.13.post1 on two cores over
loopback; ``client``, ``link`` and ``windows`` say more. While the master is
stopped every call hangs until the RPC timeout (``rpc_timeout``, 3 s here, 30 s
by default) and ends with -901; when it goes on, calls that hang are answered,
and nothing is lost after 60 s. After SIGKILL the first call ends at once with
-900, later ones take up to 4.3 s each. When the master is back, lookups
answer within 1.2 s, puts 0.3 s later (-200 in between), by the client's own
doing; all objects are gone, which the token shows (``losses``). When a peer
that holds objects is stopped, a get from it ends after 5 s with -800 (30 s
by default, 60 s with no end to it), when it is killed after 1 s; the master
lists its objects for 10 more seconds. Calls run in any thread, hold no lock
and release the GIL; only the opening and the closing keep it, for 50 ms and
1.0 to 1.6 s.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from akv.core.errors import ConfigError, StoreError, StoreUnavailableError
from akv.store.base import Outcome, Status, StoreStatistics
from akv.store.mooncake.address import MooncakeAddress
from akv.store.mooncake.batch import BLOCKS, Batch, name_of_key
from akv.store.mooncake.codes import describe, is_unreachable, outcome_of
from akv.store.mooncake.link import Link
from akv.store.mooncake.marks import Generations, Token, older_than
from akv.store.mooncake.memory import Memory
from akv.store.mooncake.numbers import read_numbers
from akv.store.mooncake.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer
    from akv.store.mooncake.client import Client

__all__ = ("MooncakeStore",)

_KEYS_A_CALL = 4096
_PIECE_BYTES = 8 << 20
_BETWEEN_TRIES = 0.25
_PATIENCE = 2.0
"""Seconds that a removal waits for transfers of this process to end."""


class MooncakeStore:
    """A :class:`~akv.store.base.BlockStore`; made by :meth:`open`.

    It also registers memory: see :class:`~akv.store.RegistersMemory`.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        link: Link,
        memory: Memory,
        *,
        slot_bytes: int,
        lease: float,
        lend_memory: bool,
    ) -> None:
        self._address = address
        self._link = link
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._lease = lease
        self._lends = lend_memory and address.global_segment_size > 0
        self._transfers = Transfers(link, memory, lease=lease)
        self._token = Token(memory.page)
        self._generations = Generations(memory.page)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "exists", "no_room", "failures"), 0
        )
        self._evictions = 0
        self._restoring = False
        self._next_try = 0.0

    @classmethod
    def open(
        cls,
        url: str,
        *,
        slot_bytes: int,
        lease: float = 5.0,
        lend_memory: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> MooncakeStore:
        """Join the pool at ``url``.

        :param slot_bytes: the longest object
        :param lease: seconds within which a get must end; not more than the
            master's ``default_kv_lease_ttl`` (10 s), which it cannot be asked for
        :param lend_memory: contribute a segment; without, only look, get and put
        :raises ConfigError: a setting does not fit
        :raises StoreUnavailableError: Mooncake is missing or the master silent
        """
        if not 0 < lease <= 60:
            raise ConfigError("lease", lease, "give seconds, more than 0, at most 60")
        address = MooncakeAddress.parse(
            url, os.environ if environment is None else environment
        )
        memory = Memory(piece_bytes=max(_PIECE_BYTES, slot_bytes))
        link = Link.open(address, memory, lend_memory=lend_memory)
        store = cls(
            address,
            link,
            memory,
            slot_bytes=slot_bytes,
            lease=lease,
            lend_memory=lend_memory,
        )
        with link.use() as client:
            store._keep_house(client)
        numbers = read_numbers(address.master[0], address.metrics_port)
        store._evictions = numbers.evictions
        return store

    def __repr__(self) -> str:
        return f"<MooncakeStore {self.url} {self._link!r}>"

    @property
    def url(self) -> str:
        """The address as a person would write it again."""
        return self._address.url

    @property
    def lease(self) -> float:
        """Seconds for which a promised key is protected from eviction."""
        return self._lease

    @property
    def losses(self) -> int:
        """How often the pool has forgotten what was in it, since the opening.

        Who remembers keys of this store should forget them when this changes.
        It is noticed by ``exists``.
        """
        return self._token.losses

    def exists(
        self,
        keys: Sequence[BlockKey],
        *,
        promise: bool = False,  # noqa: ARG002
    ) -> list[Outcome]:
        """Say for each key HIT or MISS; Mooncake promises whatever it finds.

        :raises StoreUnavailableError: the master cannot be asked
        """
        outcomes: list[Outcome] = []
        with self._link.use() as client:
            for start in range(0, len(keys), _KEYS_A_CALL):
                names = [name_of_key(key) for key in keys[start : start + _KEYS_A_CALL]]
                *codes, mark = client.exist([*names, self._token.key])
                outcomes += [_found(code) for code in codes]
                if is_unreachable(mark):
                    raise StoreUnavailableError(describe(mark))
                if self._token.is_lost(mark):
                    self._restoring = True
            self._keep_house(client)
        self._tally(outcomes)
        return outcomes

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Copy whole objects into the caller's writable buffers."""
        batch = self._batch(keys, buffers)
        outcomes = batch.got(self._transfers.get(batch.parts))
        self._tally(outcomes)
        return outcomes

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Store the buffers' bytes; a key that exists keeps its old ones."""
        batch = self._batch(keys, buffers)
        outcomes = batch.stored(self._transfers.put(batch.parts))
        self._tally(outcomes)
        return outcomes

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Make objects unreadable: REMOVED or MISS, or a failure."""
        outcomes: list[Outcome] = []
        with (
            self._link.use() as client,
            self._transfers.turns.removal(_PATIENCE) as alone,
        ):
            for start in range(0, len(keys), _KEYS_A_CALL):
                names = [name_of_key(key) for key in keys[start : start + _KEYS_A_CALL]]
                codes = client.remove(names, force=alone)
                outcomes += [
                    Status.REMOVED if code == 0 else outcome_of(code) for code in codes
                ]
        return outcomes

    def clear(self, prefix: bytes) -> int:
        """Remove all objects whose key begins with ``prefix``; how many.

        The master looks at every key of the pool: 6 us each.

        :raises StoreError: it did not say that they are gone
        """
        with (
            self._link.use() as client,
            self._transfers.turns.removal(_PATIENCE) as alone,
        ):
            return self._remove_matching(client, prefix.hex(), force=alone)

    def generation(self, scope: bytes) -> int:
        """The generation of a scope; 0 if never raised."""
        with self._link.use() as client:
            return self._generations.read(client, scope)

    def raise_generation(self, scope: bytes) -> int:
        """Raise the generation of a scope by one, for all; the new one.

        When it returns, whoever reads the generation gets the new one, and
        the older objects are gone but for those that a reader has just looked
        up; these are evicted in time. ``marks`` says what could undo it.

        :raises StoreError: one of the two was not confirmed
        """
        with self._link.use() as client:
            number = self._generations.raise_one(client, scope)
            self._remove_matching(client, older_than(scope, number), force=False)
        return number

    def register(self, memory: memoryview) -> None:
        """Let Mooncake move bytes straight from and to ``memory``."""
        with self._link.use():
            self._memory.add(memory)

    def unregister(self, memory: memoryview) -> None:
        """Forget ``memory``; a closed store has forgotten it already."""
        self._memory.drop(memory)

    def statistics(self) -> StoreStatistics:
        """Numbers as of now; the pool's are 0 where the master shows none."""
        self._link.check_open()
        numbers = read_numbers(self._address.master[0], self._address.metrics_port)
        own = self._generations.marks + int(self._token.placed)
        with self._lock:
            return StoreStatistics(
                url=self.url,
                objects=max(0, numbers.objects - own),
                bytes_used=numbers.bytes_used,
                bytes_capacity=numbers.bytes_capacity,
                evictions=max(0, numbers.evictions - self._evictions),
                **self._counts,
            )

    def close(self) -> None:
        """Let go; the segment leaves the pool, and its objects with it.

        Calls still running in other threads end first, and the last one out
        closes. Keeps the GIL for 1.0 to 1.6 s; if the master is silent the
        client is left as it is, and Mooncake tries when the process ends.
        """
        self._link.close(lambda client: client.remove([self._token.key], force=True))

    def _keep_house(self, client: Client) -> None:
        """Put the token and lost generations in place, when there is room again.

        A master that was restarted has no segment for up to a second.
        """
        now = time.monotonic()
        if self._token.placed and not self._restoring:
            return
        with self._lock:
            if now < self._next_try:
                return
            self._next_try = now + _BETWEEN_TRIES
        with suppress(StoreError):
            segment = client.hostname if self._lends else ""
            self._token.place(client, segment=segment)
            if self._restoring:
                self._generations.restore(client)
                self._restoring = False

    def _remove_matching(self, client: Client, pattern: str, *, force: bool) -> int:
        removed = client.remove_matching(f"^{BLOCKS}{pattern}", force=force)
        if removed < 0:
            kind = StoreUnavailableError if is_unreachable(removed) else StoreError
            msg = f"the removal is not confirmed: {describe(removed)}"
            raise kind(msg)
        return removed

    def _batch(self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]) -> Batch:
        self._link.check_open()
        return Batch(keys, buffers, self._memory, most_bytes=self._slot_bytes)

    def _tally(self, outcomes: Sequence[Outcome]) -> None:
        counts = {
            "hits": outcomes.count(Status.HIT),
            "misses": outcomes.count(Status.MISS),
            "puts": outcomes.count(Status.STORED),
            "exists": outcomes.count(Status.EXISTS),
            "no_room": outcomes.count(Status.NO_ROOM),
        }
        counts["failures"] = len(outcomes) - sum(counts.values())
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count


def _found(code: int) -> Outcome:
    if code == 1:
        return Status.HIT
    return Status.MISS if code == 0 else outcome_of(code)
