"""The owner of everything that runs: task group, store, threads, staging.

``open_session`` is the only way in, and when it is left every task has ended
and the store is closed, within a grace time even if a native call hangs (its
memory then stays where the call can write it). A session lives on one loop;
blocking callers reach it through ``akv.portal``.
"""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import anyio.abc

from akv.core.errors import (
    ConfigError,
    SessionClosedError,
    StoreUnavailableError,
)
from akv.core.events import (
    CacheReset,
    NullObserver,
    Observer,
    SessionClosed,
    SessionOpened,
    StoreOpened,
    StoreUnavailable,
)
from akv.core.keys import EPOCH_BYTES, KeySpace, make_keys
from akv.pipeline.budget import BufferPool, BufferPoolStatistics
from akv.pipeline.load import LoadOutcome, LoadPipeline
from akv.pipeline.lookup import LookupPipeline
from akv.pipeline.native import NativePool, PoolStatistics
from akv.pipeline.save import SaveOutcome, SavePipeline
from akv.store import default_url, open_store
from akv.store.absent import AbsentStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from akv.config import Config
    from akv.core.geometry import Geometry
    from akv.core.spec import LoadSpec, LookupSpec, SaveSpec
    from akv.device.base import Device
    from akv.store.base import BlockStore, StoreStatistics

__all__ = ("Session", "SessionStatistics", "open_session")

CLOSE_GRACE = 5.0
"""Seconds that closing waits for calls that are under way."""

_WINDOW_BYTES = 8 << 20
_THREADS = {"lookup": 2, "get": 2, "put": 2, "load-copy": 2, "save-copy": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """Plain numbers of a session, as of now."""

    loads: int
    saves: int
    lookups: int
    unreadable_keys: int
    pools: dict[str, PoolStatistics]
    load_staging: BufferPoolStatistics | None
    save_staging: BufferPoolStatistics | None
    store: StoreStatistics | None
    """None while the store cannot be asked."""


class Session:
    """Lookups, loads and saves of one process, as awaitables.

    Made by :func:`open_session`. Each call is cancelled like any other task.
    """

    def __init__(
        self,
        *,
        store: BlockStore,
        pools: dict[str, NativePool],
        lookups: LookupPipeline,
        loads: LoadPipeline | None,
        saves: SavePipeline | None,
        load_staging: BufferPool | None,
        save_staging: BufferPool | None,
        observer: Observer,
    ) -> None:
        self._store = store
        self._pools = pools
        self._lookups = lookups
        self._loads = loads
        self._saves = saves
        self._load_staging = load_staging
        self._save_staging = save_staging
        self._observer = observer
        self._closing = False
        self._open = {"lookup": 0, "load": 0, "save": 0}
        self._idle = anyio.Event()

    @property
    def store_url(self) -> str:
        """The address of the store."""
        return self._store.url

    async def lookup(self, spec: LookupSpec) -> int:
        """Blocks from ``spec.first_block`` on that are in the store, no gap.

        Never raises for the store's sake: what is not known by the deadline
        counts as missing. Cancellation: stops the waiting, nothing stays.
        """
        with self._counted("lookup"):
            return await self._lookups.lookup(spec)

    async def load(self, spec: LoadSpec, *, mark: Any = None) -> LoadOutcome:
        """Load whole blocks into the engine's memory, not before ``mark``.

        When it ends, however it ends, no copy touches those blocks any more.
        Keys that could not be read are misses for the next seconds.

        :raises PlanError: ``spec`` does not fit the geometry
        Cancellation: see :meth:`akv.pipeline.load.LoadPipeline.load`.
        """
        if self._loads is None:
            self._no_memory()
        with self._counted("load"):
            outcome = await self._loads.load(spec, mark)
        self.forget(spec.space, 0, outcome.failed_hashes)
        return outcome

    async def save(
        self,
        spec: SaveSpec,
        *,
        mark: Any = None,
        on_copied: Callable[[], None] = lambda: None,
    ) -> SaveOutcome:
        """Save computed blocks; best effort, the outcome says what was dropped.

        ``on_copied`` is called once, on the loop, when the blocks may be
        written again. Cancellation: see
        :meth:`akv.pipeline.save.SavePipeline.save`.
        """
        if self._saves is None:
            on_copied()
            self._no_memory()
        try:
            with self._counted("save"):
                return await self._saves.save(spec, mark, on_copied)
        finally:
            if not self._open["save"]:
                self._idle.set()

    async def flush(self) -> None:
        """Wait until every save that has begun has ended.

        Bounded by the save deadline. Cancellation: stops the waiting only.
        """
        while self._open["save"]:
            self._idle = anyio.Event()
            await self._idle.wait()

    def forget(self, space: bytes, group: int, hashes: Sequence[bytes]) -> None:
        """Take these blocks for missing during the next seconds."""
        self._lookups.unreadable.add(make_keys(space, group, 0, hashes))

    async def key_space(self, namespace: str, fingerprint: bytes) -> KeySpace:
        """The key space of a deployment, with the store's current generation."""
        space = KeySpace(namespace=namespace, fingerprint=fingerprint)  # type: ignore[arg-type]
        generation = await self._pools["lookup"].run(
            lambda: self._store.generation(space.scope)
        )
        return space.after_reset(generation, space.epoch)

    async def reset(self, space: KeySpace) -> KeySpace:
        """Make everything saved in ``space`` unreachable; the next key space.

        The old objects cannot be found any more when this returns; their
        bytes are removed by and by, as the store needs room.

        :raises StoreError: the store did not confirm; ``space`` is still in use
        """
        generation = await self._pools["lookup"].run(
            lambda: self._store.raise_generation(space.scope)
        )
        self._observer.on(CacheReset(namespace=space.namespace, generation=generation))
        return space.after_reset(generation, secrets.token_bytes(EPOCH_BYTES))

    async def statistics(self) -> SessionStatistics:
        """Numbers as of now; asks the store from a thread."""
        store: StoreStatistics | None = None
        with anyio.move_on_after(1.0):
            store = await self._pools["lookup"].run(self._store.statistics)
        return SessionStatistics(
            loads=self._open["load"],
            saves=self._open["save"],
            lookups=self._open["lookup"],
            unreadable_keys=len(self._lookups.unreadable),
            pools={name: pool.statistics() for name, pool in self._pools.items()},
            load_staging=_numbers(self._load_staging),
            save_staging=_numbers(self._save_staging),
            store=store,
        )

    def _counted(self, kind: str) -> _Counted:
        if self._closing:
            raise SessionClosedError(f"the session is closing, no {kind} begins")
        return _Counted(self._open, kind)

    def _no_memory(self) -> NoReturn:
        raise ConfigError(
            "device", None, "this session was opened without memory to load into"
        )


class _Counted:
    """Counts what is open while it is open."""

    def __init__(self, counts: dict[str, int], kind: str) -> None:
        self._counts = counts
        self._kind = kind

    def __enter__(self) -> None:
        self._counts[self._kind] += 1

    def __exit__(self, *_: object) -> None:
        self._counts[self._kind] -= 1


@asynccontextmanager
async def open_session(
    config: Config,
    geometry: Geometry,
    device: Device | None = None,
    *,
    role: str = "session",
    observer: Observer | None = None,
    store: BlockStore | None = None,
) -> AsyncIterator[Session]:
    """Open a session; leaving it ends its tasks and closes the store.

    :param geometry: what the blocks look like; without ``device`` only their
        size matters and the session can look up but not move
    :param device: the memory that blocks are loaded into and saved from
    :param store: an open store to use in place of ``config.store``; it stays
        the caller's and is not closed here
    :raises ConfigError: a setting does not fit, named with its fix
    :raises StoreUnavailableError: the store cannot be opened and
        ``on_store_unavailable`` is ``stop``
    :raises StoreMismatchError: the store was made for other objects

    Cancellation, or an error in the body: tasks are cancelled, copies that
    touch the engine's memory are waited for, then everything is closed.
    """
    observer = observer or NullObserver()
    pools = {name: NativePool(name, threads) for name, threads in _THREADS.items()}
    window_bytes = _window_bytes(config, geometry) if device is not None else 0
    opened = store is None
    started = time.monotonic()
    if store is None:
        try:
            store = await _open(config, geometry, pools["lookup"], observer)
        except BaseException:
            await _close_all(pools)
            raise
    hung = 0
    try:
        async with anyio.create_task_group() as tasks:
            session = _build(
                config, geometry, device, store, pools, tasks, window_bytes, observer
            )
            staging = sum(
                pool.statistics().buffers * pool.statistics().buffer_bytes
                for pool in (session._load_staging, session._save_staging)
                if pool is not None
            )
            observer.on(
                SessionOpened(role=role, store=store.url, staging_bytes=staging)
            )
            try:
                yield session
            finally:
                started = time.monotonic()
                session._closing = True
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            hung = await _close_all(pools)
            if opened and not hung:
                await anyio.to_thread.run_sync(store.close)
            observer.on(
                SessionClosed(
                    role=role, seconds=time.monotonic() - started, hung_calls=hung
                )
            )


def _numbers(pool: BufferPool | None) -> BufferPoolStatistics | None:
    return None if pool is None else pool.statistics()


async def _close_all(pools: dict[str, NativePool]) -> int:
    hung = 0
    for name in ("load-copy", "save-copy", "get", "put", "lookup"):
        hung += await pools[name].close(0.1 if hung else CLOSE_GRACE)
    return hung


async def _open(
    config: Config, geometry: Geometry, pool: NativePool, observer: Observer
) -> BlockStore:
    started = time.monotonic()
    url = config.store

    def open_now() -> tuple[BlockStore, StoreStatistics]:
        nonlocal url
        url = url or default_url(geometry.slot_bytes)
        store = open_store(url, slot_bytes=geometry.slot_bytes)
        return store, store.statistics()

    try:
        store, numbers = await pool.run(open_now)
    except StoreUnavailableError as error:
        observer.on(StoreUnavailable(url=url, reason=str(error)))
        if config.on_store_unavailable == "stop":
            raise
        return AbsentStore(url)
    observer.on(
        StoreOpened(
            url=store.url,
            objects=numbers.objects,
            bytes_capacity=numbers.bytes_capacity,
            seconds=time.monotonic() - started,
        )
    )
    return store


def _window_bytes(config: Config, geometry: Geometry) -> int:
    for name in ("max_load_bytes", "max_save_bytes"):
        least = 2 * geometry.slot_bytes
        if getattr(config, name) < least:
            raise ConfigError(
                name,
                getattr(config, name),
                f"one block is {geometry.slot_bytes} bytes and two must fit: "
                f"give at least {least}",
            )
    least = min(config.max_load_bytes, config.max_save_bytes)
    return max(geometry.slot_bytes, min(_WINDOW_BYTES, least // 4))


def _build(
    config: Config,
    geometry: Geometry,
    device: Device | None,
    store: BlockStore,
    pools: dict[str, NativePool],
    tasks: anyio.abc.TaskGroup,
    window_bytes: int,
    observer: Observer,
) -> Session:
    lookups = LookupPipeline(
        store,
        pools["lookup"],
        tasks,
        deadline=config.lookup_deadline,
        observer=observer,
    )
    if device is None:
        return Session(
            store=store,
            pools=pools,
            lookups=lookups,
            loads=None,
            saves=None,
            load_staging=None,
            save_staging=None,
            observer=observer,
        )
    load_staging, save_staging = (
        BufferPool(
            device.allocate(most // window_bytes * window_bytes),
            buffer_bytes=window_bytes,
            observer=observer,
        )
        for most in (config.max_load_bytes, config.max_save_bytes)
    )
    return Session(
        store=store,
        pools=pools,
        lookups=lookups,
        loads=LoadPipeline(
            store,
            device,
            geometry,
            load_staging,
            gets=pools["get"],
            copies=pools["load-copy"],
            deadline=config.load_deadline,
            window_bytes=window_bytes,
            observer=observer,
        ),
        saves=SavePipeline(
            store,
            device,
            geometry,
            save_staging,
            puts=pools["put"],
            copies=pools["save-copy"],
            deadline=config.save_deadline,
            window_bytes=window_bytes,
            observer=observer,
        ),
        load_staging=load_staging,
        save_staging=save_staging,
        observer=observer,
    )
