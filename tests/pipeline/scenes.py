"""Five requests at once on one session, one of them cancelled at a chosen await.

A scene runs in one session again and again. After each run everything that is bounded
is back, and the bytes of whoever was not cancelled are right.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.lowlevel
import sniffio
from pipeline.seams import COPIES, Place, Seams, Steps

import akv
from akv.core.keys import make_keys
from akv.store import Failure, MemoryStore, Status
from akv.testing import Fault, FaultyStore, empty_buffer
from harness import (
    BLOCKS,
    OBJECT,
    SPACE,
    Memory,
    expected,
    load_spec,
    lookup_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from anyio.abc import TaskGroup

    from akv.core.keys import BlockKey
    from akv.store import BlockStore

CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    load_deadline=60,
    save_deadline=60,
    lookup_deadline=60,
)
BLOCKS_ASKED = 200
_IDLE = 50
"""Turns of the loop in which no call came: all that can go on has gone on."""

NAMES = ("leader", "joiner", "stranger", "late", "last")
OTHERS = b"the block is another request's".ljust(32, b".")
"""What is written over the blocks of a request that has ended."""

Work: TypeAlias = "Callable[[], Coroutine[Any, Any, Any]]"


class Scene:
    """What is the same for loads, saves and lookups."""

    fences: tuple[str, ...] = COPIES
    """Calls that may touch the engine's blocks."""

    slow: tuple[str, ...] = ()
    """Calls that go on one by one, each when nothing else does."""

    settings: Mapping[str, Any] = {}
    """Beside those of all scenes."""

    def __init__(self, session: akv.Session, seams: Seams, memory: Memory) -> None:
        self.session = session
        self.seams = seams
        self.memory = memory
        self.round = 0
        self.places: set[Place] = set()
        """Lines of akv at which a request was, or still was, cancelled."""
        self.begun: set[str] = set()
        self.hosts: dict[str, asyncio.Task[Any]] = {}
        self.ended: dict[str, list[Any]] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    def prepare(self) -> dict[str, Work]:
        """Set memory and store up for one round; the work of each request."""
        raise NotImplementedError

    def on_end(self, name: str, outcome: Any) -> None:
        """A request has ended; ``outcome`` is None if it was cancelled."""
        raise NotImplementedError

    def check(self, victim: str | None) -> None:
        """Everything has ended and is at rest."""
        raise NotImplementedError

    async def cancel_at(
        self, victim: str, watched: str, number: int, *, insisting: bool = False
    ) -> bool:
        """Cancel ``victim`` at the await ``number`` of ``watched``.

        Who is ``insisting`` is a host on asyncio that calls the task's own ``cancel``,
        there and at each of its awaits from there on.

        From there on calls into the store are held until the victim has ended, so
        that it can wait for none; but not where the store itself moves the bytes
        of blocks. False if there was no such await.
        """
        self.begin()
        seen = idle = 0
        reached = False

        def at(places: list[Place]) -> None:
            nonlocal seen, reached
            if seen == number:
                reached = True
                self.seams.hold = frozenset(
                    ("exists", "get_into", "put_from", "remove", *COPIES)
                )
                if not insisting:
                    self.scopes[victim].cancel()
            if reached and watched == victim:
                self.places |= set(places)
            if reached and insisting:
                self.hosts[victim].cancel()
            seen += 1

        async with anyio.create_task_group() as tasks:
            await self._start(tasks, at, watched)
            while not reached and len(self.ended) < len(NAMES):
                calls = len(self.seams.calls)
                await anyio.lowlevel.checkpoint()
                idle = 0 if len(self.seams.calls) > calls else idle + 1
                if idle > _IDLE:
                    self.seams.let_one_go()
                    idle = 0
            if reached:
                # A copy that touches the victim's blocks is waited for...
                for _ in range(10):
                    await anyio.lowlevel.checkpoint()
                self.seams.open(*self.fences)
                # ... and the store is not.
                with anyio.fail_after(10):
                    while victim not in self.ended:
                        await anyio.lowlevel.checkpoint()
            self.seams.open()
        await self.at_rest()
        self.check(victim if reached else None)
        return reached

    async def fail_at(self, number: int, error: BaseException) -> bool:
        """Let the call ``number`` of the store or device raise; False if none did."""
        self.begin()
        self.seams.open()
        self.seams.begin(fail_at=number, error=error)
        async with anyio.create_task_group() as tasks:
            await self._start(tasks, lambda _: None, "")
        reached = len(self.seams.calls) > number
        await self.at_rest()
        self.check(None)
        return reached

    def begin(self) -> None:
        """Before each round."""
        self.round += 1
        self.seams.hold = frozenset(self.slow)
        self.begun = set()
        self.hosts = {}
        self.ended = {}
        self.scopes = {name: anyio.CancelScope() for name in NAMES}
        self.seams.begin()

    async def _start(
        self, tasks: TaskGroup, at: Callable[[list[Place]], None], watched: str
    ) -> None:
        for name, work in self.prepare().items():
            tasks.start_soon(self._request, name, work, at, watched)
            while name not in self.begun:  # a loop may start tasks in any order
                await anyio.lowlevel.checkpoint()

    async def _request(
        self, name: str, work: Work, at: Callable[[list[Place]], None], watched: str
    ) -> None:
        self.begun.add(name)
        if sniffio.current_async_library() == "asyncio":
            host = asyncio.current_task()
            assert host is not None
            self.hosts[name] = host
        outcome: Any = None
        try:
            with self.scopes[name]:
                if name == watched:
                    outcome = await Steps(work(), at)
                else:
                    outcome = await work()
        except asyncio.CancelledError:
            host = self.hosts[name]
            if not host.cancelling():
                raise
            while host.uncancel():
                pass
        finally:
            self.on_end(name, outcome)
            self.ended.setdefault(name, []).append(outcome)

    async def at_rest(self) -> None:
        """Wait until everything bounded is where it was."""
        with anyio.fail_after(10):
            while True:
                numbers = await self.session.statistics()
                pools = numbers.pools.values()
                stagings = (numbers.load_staging, numbers.save_staging)
                if (
                    (numbers.loads, numbers.saves, numbers.lookups) == (0, 0, 0)
                    and not any(p.running + p.queued + p.given_up for p in pools)
                    and all(s is not None and s.free == s.buffers for s in stagings)
                    and not any(s.waiting + s.quarantined for s in stagings if s)
                ):
                    return


class LoadScene(Scene):
    """Two loads of one prefix and three of others, who have to wait for staging."""

    prompts = {  # noqa: RUF012
        "leader": prompt(1, 8),
        "joiner": prompt(1, 8),
        "stranger": prompt(2, 6),
        "late": prompt(3, 4),
        "last": prompt(4, 4),
    }
    blocks = {  # noqa: RUF012
        "leader": range(8),
        "joiner": range(8, 16),
        "stranger": range(16, 22),
        "late": range(22, 26),
        "last": range(26, 30),
    }

    def prepare(self) -> dict[str, Work]:
        """The store has all of it."""
        for hashes in self.prompts.values():
            fill(self.seams.inner, hashes)
        for number in range(BLOCKS):
            self.memory.write(number, OTHERS)
        return {
            name: partial(
                self.session.load,
                self.spec(name),
            )
            for name in NAMES
        }

    def spec(self, name: str) -> akv.LoadSpec:
        """What a request loads."""
        return load_spec(self.prompts[name], self.blocks[name], load_id=self.round)

    def on_end(self, name: str, outcome: Any) -> None:
        """The blocks of who was cancelled are somebody else's from now on."""
        if outcome is None:
            for number in self.blocks[name]:
                self.memory.write(number, OTHERS)

    def check(self, victim: str | None) -> None:
        """What landed is right, what is not one's own was left alone."""
        for name in NAMES:
            (outcome,) = self.ended[name]
            if victim is not None and name != victim:
                assert outcome is not None, name
                assert outcome.landed, (name, outcome.reason)
            for number, block_hash in zip(
                self.blocks[name], self.prompts[name], strict=True
            ):
                if outcome is None:
                    assert self.memory.holds(number, OTHERS), (name, number)
                elif number not in outcome.failed_blocks:
                    assert self.memory.holds(number, block_hash), (name, number)
        for number in (30, 31):
            assert self.memory.holds(number, OTHERS)


class DirectLoadScene(LoadScene):
    """The store writes the blocks: a get that has begun is waited for."""

    fences = (*COPIES, "get_into")
    settings = {"transfer": "direct"}  # noqa: RUF012

    def spec(self, name: str) -> akv.LoadSpec:
        """In spans of two blocks, as a window is of one span."""
        spec = super().spec(name)
        (whole,) = spec.spans
        return replace(
            spec,
            spans=tuple(
                akv.Span(
                    first_block=first,
                    hashes=whole.hashes[first : first + 2],
                    block_ids=whole.block_ids[first : first + 2],
                )
                for first in range(0, len(whole), 2)
            ),
        )


class SaveScene(Scene):
    """Two saves of one chain and three of others."""

    blocks = {  # noqa: RUF012
        "leader": range(6),
        "joiner": range(6, 10),
        "stranger": range(10, 16),
        "late": range(16, 22),
        "last": range(22, 28),
    }
    chains = dict(zip(NAMES, (0, 0, 1, 2, 3), strict=True))  # noqa: RUF012

    def prepare(self) -> dict[str, Work]:
        """New prompts, since those of the last round may be in the store."""
        self.prompts = {
            "leader": prompt(4 * self.round, 10)[:6],
            "joiner": prompt(4 * self.round, 10)[6:],
            "stranger": prompt(4 * self.round + 1, 6),
            "late": prompt(4 * self.round + 2, 6),
            "last": prompt(4 * self.round + 3, 6),
        }
        self.copied = dict.fromkeys(NAMES, 0)
        works: dict[str, Work] = {}
        for number, (name, hashes) in enumerate(self.prompts.items()):
            for block, block_hash in zip(self.blocks[name], hashes, strict=True):
                self.memory.write(block, block_hash)
            works[name] = partial(
                self.session.save,
                save_spec(
                    hashes,
                    self.blocks[name],
                    job_id=5 * self.round + number,
                    chain=5 * self.round + self.chains[name],
                ),
                on_copied=partial(self._on_copied, name),
            )
        return works

    def _on_copied(self, name: str) -> None:
        self.copied[name] += 1
        for number in self.blocks[name]:
            self.memory.write(number, OTHERS)

    def on_end(self, name: str, outcome: Any) -> None:
        """The blocks were given back before."""
        assert self.copied[name] == 1, name

    def check(self, victim: str | None) -> None:
        """What is in the store is right and has no hole; nobody else lost anything."""
        assert self.copied == dict.fromkeys(NAMES, 1)
        stored = {
            name: [self.stored(block_hash) for block_hash in hashes]
            for name, hashes in self.prompts.items()
        }
        chain = stored["leader"] + stored["joiner"]
        for name, held in (stored | {"leader": chain}).items():
            if name != "joiner" and not self.may_have_hole(name):
                assert held == sorted(held, reverse=True), (name, held)
        for name in NAMES:
            (outcome,) = self.ended[name]
            if self.must_be_stored(name, victim):
                assert all(stored[name]), (name, outcome)
            if outcome is not None:
                # More, where taking back what lies behind a hole was what failed.
                assert sum(stored[name]) >= outcome.stored + outcome.existed

    def may_have_hole(self, name: str) -> bool:
        """Whether nobody was left to take back what lies behind a hole."""
        return False

    def must_be_stored(self, name: str, victim: str | None) -> bool:
        """Whether nothing that happened is an excuse."""
        return victim is not None and self.chains[victim] != self.chains[name]

    def stored(self, block_hash: bytes) -> bool:
        """Whether a block is in the store, with its own bytes."""
        buffer = empty_buffer(OBJECT)
        (outcome,) = self.seams.inner.get_into(keys_of((block_hash,)), [buffer])
        if outcome is Status.HIT:
            assert bytes(buffer) == expected(block_hash).tobytes()
        return outcome is Status.HIT


class DirectSaveScene(SaveScene):
    """The store reads the blocks: a put that has begun is waited for."""

    fences = (*COPIES, "put_from")
    settings = {"transfer": "direct"}  # noqa: RUF012


class SlowSaveScene(SaveScene):
    """Five saves whose puts take so long that there is no staging for all of them."""

    slow = ("put_from",)
    chains = dict(zip(NAMES, range(5), strict=True))  # noqa: RUF012

    def may_have_hole(self, name: str) -> bool:
        """Of a prompt of two chains the first part may be missing."""
        return name == "leader"


class TroubledSaveScene(SaveScene):
    """The leader's third block fails, and the stranger has to try twice for room."""

    def prepare(self) -> dict[str, Work]:
        """What comes to which keys."""
        works = super().prepare()
        inner = self.seams.inner
        assert isinstance(inner, FaultyStore)
        (failing,) = keys_of(self.prompts["leader"][2:3])
        refused = set(keys_of(self.prompts["stranger"][:1]))

        def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
            if verb != "put_from":
                return None
            if failing in keys:
                return Fault(outcomes={keys.index(failing): Failure("wire")})
            full = refused & set(keys)
            refused.difference_update(full)
            return Fault(outcomes={keys.index(k): Status.NO_ROOM for k in full})

        inner.decide = decide
        return works

    def may_have_hole(self, name: str) -> bool:
        """The put of who was cancelled ends unheard, and so does one before a fault."""
        (outcome,) = self.ended[name]
        return outcome is None or (self.seams.faulty and outcome.dropped > 0)

    def must_be_stored(self, name: str, victim: str | None) -> bool:
        """Two of them are dropped anyway."""
        return name not in {"leader", "joiner"} and super().must_be_stored(name, victim)


class LookupScene(Scene):
    """Two lookups of one prefix and three of others, in several windows."""

    prompts = {  # noqa: RUF012
        "leader": prompt(1, BLOCKS_ASKED),
        "joiner": prompt(1, BLOCKS_ASKED),
        "stranger": prompt(2, BLOCKS_ASKED),
        "late": prompt(3, BLOCKS_ASKED),
        "last": prompt(4, BLOCKS_ASKED),
    }

    def prepare(self) -> dict[str, Work]:
        """The store has all of it."""
        for hashes in self.prompts.values():
            fill(self.seams.inner, hashes)
        return {
            name: partial(self.session.lookup, lookup_spec(hashes))
            for name, hashes in self.prompts.items()
        }

    def on_end(self, name: str, outcome: Any) -> None:
        """A lookup holds nothing."""

    def check(self, victim: str | None) -> None:
        """Who was not cancelled has an answer, and nobody a wrong one."""
        for name in NAMES:
            (outcome,) = self.ended[name]
            if name != victim:
                if victim is not None:
                    assert outcome == BLOCKS_ASKED
                else:
                    assert outcome in range(BLOCKS_ASKED + 1)


SCENES = (
    LoadScene,
    DirectLoadScene,
    SaveScene,
    DirectSaveScene,
    SlowSaveScene,
    TroubledSaveScene,
    LookupScene,
)


def keys_of(hashes: Sequence[bytes]) -> tuple[BlockKey, ...]:
    """The keys of a prompt."""
    return make_keys(SPACE, 0, 0, hashes)


def fill(store: BlockStore, hashes: Sequence[bytes]) -> None:
    """Put a prompt into a store."""
    values = [expected(block_hash).data for block_hash in hashes]
    store.put_from(keys_of(hashes), values)


@asynccontextmanager
async def scene_of(kind: type[Scene]) -> AsyncIterator[Scene]:
    """A scene in a session of its own, with nothing held at the end."""
    memory = Memory()
    store = FaultyStore(MemoryStore(slot_bytes=OBJECT), lambda *_: None)
    seams = Seams(store, memory.device)
    config = replace(CONFIG, **kind.settings)
    async with akv.open_session(
        config, memory.geometry, seams.device, store=seams
    ) as session:
        try:
            yield kind(session, seams, memory)
        finally:
            seams.open()
