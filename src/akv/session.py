"""The owner of everything that runs: task group, store, threads, staging.

``open_session`` is the only way in, and when it is left every task has ended
and the store is closed, within a grace time even if a native call hangs (its
memory then stays where the call can write it). A session lives on one loop;
blocking callers reach it through ``akv.portal``.
"""

from __future__ import annotations

import math
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import anyio
import anyio.to_thread
from structlog.contextvars import bound_contextvars

from akv.core.errors import (
    ConfigError,
    SessionClosedError,
    StoreUnavailableError,
)
from akv.core.events import (
    CacheReset,
    KeySpaceUsed,
    NullObserver,
    Observer,
    SessionClosed,
    SessionOpened,
    StoreOpened,
    StoreUnavailable,
)
from akv.core.keys import (
    EPOCH_BYTES,
    BlockKey,
    Fingerprint,
    KeySpace,
    make_keys,
    short_name,
)
from akv.pipeline.breaker import Breaker
from akv.pipeline.budget import BufferPool, BufferPoolStatistics
from akv.pipeline.load import LoadOutcome, LoadPipeline
from akv.pipeline.lookup import LookupPipeline
from akv.pipeline.native import NativePool, PoolStatistics, to_the_end
from akv.pipeline.route import Route
from akv.pipeline.save import SaveOutcome, SavePipeline
from akv.store import default_url, open_store
from akv.store.base import RegistersMemory
from akv.store.late import LateStore

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

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""Seconds between two questions of whoever waits for a writer."""

_WINDOW_BYTES = 8 << 20
_THREADS = {
    "lookup": 2,
    "probe": 1,
    "get": 2,
    "ask": 2,
    "put": 2,
    "save-copy": 1,
    "load-copy": 2,
}
"""Closed from the last to the first."""

_PROBE_KEY = BlockKey(b"akv probe")


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
    store_works: bool
    """False while the store is left alone because its calls failed."""
    store: StoreStatistics | None
    """None while the store cannot be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Movers:
    """What a session needs to move blocks; one without memory has none."""

    loads: LoadPipeline
    saves: SavePipeline
    route: Route
    load_staging: BufferPool
    save_staging: BufferPool

    @property
    def staging(self) -> tuple[BufferPool, BufferPool]:
        return self.load_staging, self.save_staging


class Session:
    """Lookups, loads and saves of one process, as awaitables.

    Made by :func:`open_session`. Each call is cancelled like any other task.
    """

    def __init__(
        self,
        *,
        store: BlockStore,
        pools: dict[str, NativePool],
        breaker: Breaker,
        lookups: LookupPipeline,
        movers: _Movers | None,
        observer: Observer,
    ) -> None:
        self._store = store
        self._pools = pools
        self._breaker = breaker
        self._lookups = lookups
        self._movers = movers
        self._observer = observer
        self._open = {"lookup": 0, "load": 0, "save": 0}
        self._saving: set[anyio.Event] = set()
        self._ends = anyio.Event()

    @property
    def _closing(self) -> bool:
        return self._ends.is_set()

    @property
    def store_works(self) -> bool:
        """False while the store is left alone because its calls failed."""
        return self._breaker.closed

    @property
    def store_url(self) -> str:
        """The address of the store."""
        return self._store.url

    async def lookup(self, spec: LookupSpec) -> int:
        """Blocks from ``spec.first_block`` on that are in the store, no gap.

        Never raises for the store's sake: what is not known by the deadline
        counts as missing. Cancellation: stops the waiting, nothing stays.
        """
        with self._counted("lookup"), bound_contextvars(request_id=spec.request_id):
            return await self._lookups.lookup(spec)

    async def wait_for(self, spec: LookupSpec, *, deadline: float) -> int:
        """As :meth:`lookup`, but wait until all of ``spec`` is in the store.

        For a reader that was told of blocks before their writer has stored
        them. Asks again and again, at growing intervals of at most a quarter
        of a second, until all is there or ``deadline`` seconds have passed; the
        most that was found then. The same at once while the store is left alone
        because its calls failed, and when the session closes.

        Cancellation: stops the waiting only.

        :raises ConfigError: ``deadline`` is no finite number above 0
        """
        if not (math.isfinite(deadline) and deadline > 0):
            raise ConfigError("deadline", deadline, "give seconds above 0, as 2.5")
        wanted = min(len(spec.hashes), spec.askable_blocks) - spec.first_block
        found = 0
        pause = _FIRST_PAUSE
        with anyio.move_on_after(deadline):
            while found < wanted and self._breaker.closed and not self._closing:
                found = max(found, await self.lookup(spec))
                if found < wanted:
                    await anyio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        return found

    async def load(self, spec: LoadSpec, *, mark: Any = None) -> LoadOutcome:
        """Load whole blocks into the engine's memory, not before ``mark``.

        When it ends, however it ends, no copy touches those blocks any more.
        Keys that could not be read are misses for the next seconds.

        Cancellation: no further window begins, and what writes the blocks and
        has begun is waited for; what they hold then means nothing.

        :raises PlanError: ``spec`` does not fit the geometry
        """
        if self._movers is None:
            self._no_memory()
        with self._counted("load"), bound_contextvars(request_id=spec.request_id):
            outcome = await self._movers.loads.load(spec, mark)
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
        written again; ``mark`` is a point in the engine's order of work (see
        ``Device.mark``) that the copy waits for.

        Cancellation: what reads the blocks and has begun is waited for, a copy
        as well as a store's call that goes straight to them; a call from staging
        is left to itself.

        :raises PlanError: ``spec`` does not fit the geometry; ``on_copied``
            has been called
        """
        if self._movers is None:
            on_copied()
            self._no_memory()
        if self._closing:
            on_copied()
        ended = anyio.Event()
        with self._counted("save"), bound_contextvars(request_id=spec.request_id):
            self._saving.add(ended)
            try:
                return await self._movers.saves.save(spec, mark, on_copied)
            finally:
                self._saving.discard(ended)
                ended.set()

    async def flush(self) -> None:
        """Wait until every save that has begun has ended.

        Bounded by the save deadline. Cancellation: stops the waiting only.
        """
        for ended in tuple(self._saving):
            await ended.wait()

    def forget(self, space: bytes, group: int, hashes: Sequence[bytes]) -> None:
        """Take these blocks for missing during the next seconds."""
        self._lookups.unreadable.add(make_keys(space, group, 0, hashes))

    async def key_space(self, namespace: str, fingerprint: bytes) -> KeySpace:
        """The key space of a deployment, with the store's current generation.

        Waits for a store that is not there, since nothing may be looked up or
        saved in a generation that is not known. Cancellation: stops waiting.

        :raises StoreError: the store is there and does not answer
        """
        async with anyio.create_task_group() as tasks:

            async def until_it_ends() -> None:
                await self._ends.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_it_ends)
            await self._breaker.wait_closed()
            tasks.cancel_scope.cancel()
        if self._closing:
            raise SessionClosedError("the session is closing, its store has not come")
        space = KeySpace(namespace=namespace, fingerprint=Fingerprint(fingerprint))
        generation = await self._pools["lookup"].run(
            lambda: self._store.generation(space.scope)
        )
        return self._used(space.after_reset(generation, space.epoch))

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
        return self._used(
            space.after_reset(generation, secrets.token_bytes(EPOCH_BYTES))
        )

    async def statistics(self) -> SessionStatistics:
        """Numbers as of now; asks the store from a thread."""
        numbers: tuple[BufferPoolStatistics | None, BufferPoolStatistics | None]
        numbers = (None, None)
        if self._movers is not None:
            load, save = self._movers.staging
            numbers = (load.statistics(), save.statistics())
        store: StoreStatistics | None = None
        with anyio.move_on_after(1.0):
            store = await self._pools["lookup"].run(self._store.statistics)
        return SessionStatistics(
            loads=self._open["load"],
            saves=self._open["save"],
            lookups=self._open["lookup"],
            unreadable_keys=len(self._lookups.unreadable),
            pools={name: pool.statistics() for name, pool in self._pools.items()},
            load_staging=numbers[0],
            save_staging=numbers[1],
            store_works=self._breaker.closed,
            store=store,
        )

    def _used(self, space: KeySpace) -> KeySpace:
        self._observer.on(
            KeySpaceUsed(
                namespace=space.namespace,
                fingerprint=space.fingerprint.hex(),
                generation=space.generation,
                epoch=space.epoch.hex(),
                space=short_name(space.prefix),
            )
        )
        return space

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
    window_bytes = _window_bytes(config, geometry) if device is not None else 0
    pools = {name: NativePool(name, threads) for name, threads in _THREADS.items()}
    own = store is None
    closing = time.monotonic()
    failure: BaseException | None = None
    try:
        if store is None:
            store = await _open(config, geometry, device, pools["lookup"], observer)
        breaker = Breaker(url=store.url, observer=observer)
        if isinstance(store, LateStore):
            breaker.trip("it could not be opened")
        movers = None
        if device is not None:
            movers = _movers(
                config, geometry, device, store, pools, breaker, window_bytes, observer
            )
            await pools["lookup"].run(partial(_register, store, movers))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                breaker.watch, partial(store.exists, [_PROBE_KEY]), pools["probe"]
            )
            if movers is not None:
                tasks.start_soon(movers.saves.watch)
            session = Session(
                store=store,
                pools=pools,
                breaker=breaker,
                lookups=LookupPipeline(
                    store,
                    pools["lookup"],
                    tasks,
                    breaker=breaker,
                    deadline=config.lookup_deadline,
                    observer=observer,
                ),
                movers=movers,
                observer=observer,
            )
            staging = 0 if movers is None else sum(p.bytes for p in movers.staging)
            observer.on(
                SessionOpened(
                    role=role,
                    store=store.url,
                    staging_bytes=staging,
                    block_tokens=geometry.groups[0].block_size,
                    unix_seconds=time.time(),
                )
            )
            try:
                yield session
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # noqa: BLE001
                # The host's own error, to be raised as it is and in no group.
                failure = error
            finally:
                closing = time.monotonic()
                session._ends.set()
                for staging_pool in () if movers is None else movers.staging:
                    staging_pool.close()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:

        async def close() -> None:
            hung = await _close_all(pools)
            if own and store is not None and not hung:
                await anyio.to_thread.run_sync(store.close)
            observer.on(
                SessionClosed(
                    role=role, seconds=time.monotonic() - closing, hung_calls=hung
                )
            )

        await to_the_end(close)


def _register(store: BlockStore, movers: _Movers) -> None:
    if isinstance(store, RegistersMemory):
        for pool in movers.staging:
            store.register(pool.memory)
        for piece in movers.route.registered():
            store.register(piece)


async def _close_all(pools: dict[str, NativePool]) -> int:
    hung = 0
    for pool in reversed(pools.values()):
        hung += await pool.close(0.1 if hung else CLOSE_GRACE)
    return hung


async def _open(
    config: Config,
    geometry: Geometry,
    device: Device | None,
    pool: NativePool,
    observer: Observer,
) -> BlockStore:
    started = time.monotonic()
    url = config.store or default_url(geometry.slot_bytes)
    if config.preferred_segment and url.startswith("mooncake:"):
        sign = "&" if "?" in url else "?"
        url += f"{sign}preferred_segment={quote(config.preferred_segment)}"
    open_now = partial(
        open_store,
        url,
        slot_bytes=geometry.slot_bytes,
        lend_memory=device is not None,
    )

    def opened() -> tuple[BlockStore, StoreStatistics]:
        store = open_now()
        return store, store.statistics()

    try:
        store, numbers = await pool.run(opened)
    except StoreUnavailableError as error:
        observer.on(StoreUnavailable(url=url, reason=str(error)))
        if config.on_store_unavailable == "stop":
            raise
        return LateStore(url, open_now)
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


def _movers(
    config: Config,
    geometry: Geometry,
    device: Device,
    store: BlockStore,
    pools: dict[str, NativePool],
    breaker: Breaker,
    window_bytes: int,
    observer: Observer,
) -> _Movers:
    load_staging, save_staging = (
        BufferPool(
            device.allocate(most // window_bytes * window_bytes),
            buffer_bytes=window_bytes,
            observer=observer,
        )
        for most in (config.max_load_bytes, config.max_save_bytes)
    )
    route = Route(
        store,
        device,
        geometry,
        transfer=config.transfer,
        staged_bytes=window_bytes,
    )
    return _Movers(
        route=route,
        loads=LoadPipeline(
            store,
            device,
            load_staging,
            route,
            gets=pools["get"],
            copies=pools["load-copy"],
            breaker=breaker,
            deadline=config.load_deadline,
            observer=observer,
        ),
        saves=SavePipeline(
            store,
            device,
            geometry,
            save_staging,
            route,
            asks=pools["ask"],
            puts=pools["put"],
            copies=pools["save-copy"],
            breaker=breaker,
            ask_deadline=config.lookup_deadline,
            deadline=config.save_deadline,
            observer=observer,
        ),
        load_staging=load_staging,
        save_staging=save_staging,
    )
