"""A store that is slow, full or hung costs saves and nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import akv
from akv.core.shed import Marks
from akv.pipeline.shed import Shedder
from akv.store import BlockStore, MemoryStore, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore, WrappedStore
from harness import (
    OBJECT,
    Memory,
    Recorder,
    load_spec,
    lookup_spec,
    prompt,
    save_spec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.keys import BlockKey
    from akv.store.base import Buffer, Outcome

pytestmark = pytest.mark.anyio

CONFIG = akv.Config(
    store="memory:",
    max_load_bytes=8 * OBJECT,
    max_save_bytes=8 * OBJECT,
    lookup_deadline=5,
)
"""Windows of 2 objects, 4 of them in staging."""


@dataclass
class Clock:
    """A clock that a test, or a store, puts forward. Any thread."""

    now: float = 1000.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> float:
        """What time it is."""
        return self.now

    def forward(self, seconds: float) -> None:
        """Let time pass."""
        with self.lock:
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which saves are shed; what has no room is tried again at once."""
    clock = Clock()
    marks = Marks(retries=(0.0,) * 4)
    monkeypatch.setattr(
        "akv.pipeline.save.Shedder", partial(Shedder, clock=clock, marks=marks)
    )
    return clock


class SlowStore(WrappedStore):
    """A put takes ``seconds`` of the clock; all calls are counted."""

    def __init__(self, inner: BlockStore, clock: Clock) -> None:
        super().__init__(inner)
        self.clock = clock
        self.seconds = 0.01
        self.calls: list[str] = []

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """Counted, as a save's or as a lookup's."""
        self.calls.append("lookup" if promise else "exists")
        return self.inner.exists(keys, promise=promise)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Counted; the clock goes on."""
        self.calls.append("put")
        self.clock.forward(self.seconds)
        return self.inner.put_from(keys, buffers)


class Saver:
    """Saves one new prompt of two blocks after the other."""

    def __init__(self, session: akv.Session) -> None:
        self.session = session
        self.number = 0
        self.outcomes: list[akv.SaveOutcome] = []
        self.copied: list[int] = []

    async def save(self, blocks: int = 2) -> akv.SaveOutcome:
        """The next one, in a chain of its own."""
        self.number += 1
        number = self.number
        outcome = await self.session.save(
            save_spec(
                prompt(number, blocks), range(blocks), job_id=number, chain=number
            ),
            on_copied=lambda: self.copied.append(number),
        )
        self.outcomes.append(outcome)
        return outcome


def staging_is_back(numbers: akv.SessionStatistics) -> bool:
    """Whether all of the staging for saves is free and nobody waits."""
    staging = numbers.save_staging
    assert staging is not None
    return (staging.free, staging.waiting, staging.quarantined) == (
        staging.buffers,
        0,
        0,
    )


async def test_a_slow_store_gets_a_trickle_and_all_again_one_pause_after_it_is_well(
    clock: Clock,
) -> None:
    """1 % of its speed for a minute: shed, tried each two seconds, all back."""
    store = SlowStore(MemoryStore(slot_bytes=OBJECT), clock)
    memory, recorder = Memory(), Recorder([])
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=recorder
    ) as session:
        saver = Saver(session)
        for _ in range(10):
            assert (await saver.save()).stored == 2
        assert "akv.saves.shed" not in recorder.names()

        store.seconds = 100 * store.seconds
        while "akv.saves.shed" not in recorder.names():
            assert (await saver.save()).stored == 2
            assert saver.number <= 16
        store.calls.clear()
        ill = clock.now
        shed = 0
        while clock.now < ill + 60:
            calls = len(store.calls)
            outcome = await saver.save()
            if not outcome.stored:
                shed += 1
                assert outcome.reason.startswith("saves are shed: a put takes")
                assert len(store.calls) == calls
            clock.forward(0.1)
        assert shed > 200
        assert 10 <= store.calls.count("put") <= 31
        assert store.calls.count("exists") == store.calls.count("put")

        store.seconds = 0.01
        well = clock.now
        while not (await saver.save()).stored:
            clock.forward(0.1)
        assert clock.now - well <= Marks().pause + 0.2
        for _ in range(10):
            assert (await saver.save()).stored == 2
        # Each save's blocks came back once, whatever became of it.
        assert sorted(saver.copied) == list(range(1, saver.number + 1))
        assert staging_is_back(await session.statistics())
    names = recorder.names()
    assert names.count("akv.saves.shed") == names.count("akv.saves.resumed") == 1
    dropped = [e for e in recorder.events if e.name == "akv.save.dropped"]
    assert len(dropped) >= shed


async def test_the_rest_of_a_save_is_dropped_where_its_store_became_slow(
    clock: Clock,
) -> None:
    """Twelve windows, slow from the first on: a prefix is stored, no hole."""
    inner = MemoryStore(slot_bytes=OBJECT)
    store = SlowStore(inner, clock)
    memory = Memory()
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        saver = Saver(session)
        await saver.save()
        store.seconds = 2.0
        outcome = await saver.save(24)
        assert 0 < outcome.stored < 24
        assert outcome.stored + outcome.dropped == 24
        assert outcome.reason.startswith("saves are shed")
        found = await session.lookup(lookup_spec(prompt(2, 24)))
        assert found == outcome.stored == inner.statistics().objects - 2
        behind = save_spec(prompt(2, 24)[23:], (23,), job_id=99, chain=2)
        clock.forward(5)
        assert (await session.save(behind)).reason == "a block before it was dropped"


async def test_saves_that_wait_give_their_blocks_back_when_a_put_hangs(
    clock: Clock,
) -> None:
    """Staging is full of puts that hang; nobody's blocks wait for those."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory, recorder = Memory(), Recorder([])
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=recorder
    ) as session:
        saver = Saver(session)
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(saver.save)
            # And one that waits for its turn in the first one's chain.
            tasks.start_soon(
                partial(
                    session.save,
                    save_spec(prompt(99, 2), (0, 1), job_id=99, chain=1),
                    on_copied=lambda: saver.copied.append(99),
                )
            )
            await anyio.to_thread.run_sync(store.wait_until_held, 2)
            with anyio.fail_after(10):
                while len(saver.copied) < 4 or not staging_is_full(session):
                    await anyio.lowlevel.checkpoint()
            assert len(saver.copied) == 4
            clock.forward(3)
            assert (await saver.save()).reason.startswith("saves are shed")
            with anyio.fail_after(10):
                while len(saver.copied) < 22:
                    await anyio.lowlevel.checkpoint()
            assert store.held == 2
            store.open()
        assert sorted(saver.copied) == [*range(1, 22), 99]
        assert sum(outcome.stored for outcome in saver.outcomes) == 8
        assert sum(outcome.dropped for outcome in saver.outcomes) == 34
        # The puts that had waited for a thread were quick: all saves are back.
        assert (await saver.save()).stored == 2
        assert staging_is_back(await session.statistics())
    names = recorder.names()
    assert names.count("akv.saves.shed") == names.count("akv.saves.resumed") == 1


def staging_is_full(session: akv.Session) -> bool:
    """Whether no staging is left and 16 saves wait for some."""
    assert session._movers is not None
    numbers = session._movers.save_staging.statistics()
    return numbers.free == 0 and numbers.waiting == 16


async def test_waiting_for_staging_counts_against_the_save_deadline() -> None:
    """A save that never gets staging is dropped in time, its blocks given back."""
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory = Memory()
    config = akv.Config(
        max_load_bytes=8 * OBJECT,
        max_save_bytes=8 * OBJECT,
        save_deadline=0.3,
        lookup_deadline=5,
    )
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        saver = Saver(session)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(saver.save)
        assert [outcome.dropped for outcome in saver.outcomes] == [2] * 6
        assert len(saver.copied) == 6
        assert any("save_deadline" in outcome.reason for outcome in saver.outcomes)
        store.open()
        with anyio.fail_after(10):
            while not staging_is_back(await session.statistics()):
                pass


async def test_saves_beyond_those_that_may_wait_are_dropped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue for staging is bounded in number, for one chain and for many."""
    monkeypatch.setattr("akv.pipeline.save._MOST_WAITING", 3)
    store = GatedStore(MemoryStore(slot_bytes=OBJECT), gated=("put_from",))
    memory = Memory()
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        saver = Saver(session)
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(saver.save)
            with anyio.fail_after(10):
                while len(saver.outcomes) < 3:
                    await anyio.lowlevel.checkpoint()
            assert {o.reason for o in saver.outcomes} == {"3 saves wait already"}
            store.open()
        assert sum(outcome.stored for outcome in saver.outcomes) == 14
        assert sum(outcome.dropped for outcome in saver.outcomes) == 6


async def test_a_full_store_gets_a_put_each_pause_and_no_question_from_saves(
    clock: Clock,
) -> None:
    """No room for a minute: one window each two seconds; loads go on; then all."""
    full = False

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb == "put_from" and full:
            return Fault(outcomes=dict.fromkeys(range(len(keys)), Status.NO_ROOM))
        return None

    store = SlowStore(FaultyStore(MemoryStore(slot_bytes=OBJECT), decide), clock)
    memory, recorder = Memory(), Recorder([])
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=recorder
    ) as session:
        saver = Saver(session)
        await saver.save()
        full = True
        while "akv.saves.shed" not in recorder.names():
            assert (await saver.save()).dropped == 2
            clock.forward(0.1)
        store.calls.clear()
        begin = clock.now
        reasons = set()
        while clock.now < begin + 60:
            outcome = await saver.save()
            reasons.add(outcome.reason)
            assert outcome.dropped == 2
            # What is there is found and loaded as ever.
            assert await session.lookup(lookup_spec(prompt(1, 2))) == 2
            assert (await session.load(load_spec(prompt(1, 2), (4, 5)))).landed
            clock.forward(0.05)
        assert len(reasons) == 2
        assert "no room in the store" in reasons
        assert any("saves are shed: the store has had no room" in r for r in reasons)
        assert 25 <= store.calls.count("put") <= 31
        assert store.calls.count("exists") == store.calls.count("put")
        assert store.calls.count("lookup") > 500
        full = False
        well = clock.now
        while not (await saver.save()).stored:
            clock.forward(0.05)
        assert clock.now - well <= Marks().pause + 0.1
        assert (await saver.save(8)).stored == 8
        assert staging_is_back(await session.statistics())
        assert len(saver.copied) == saver.number
    names = recorder.names()
    assert names.count("akv.saves.shed") == names.count("akv.saves.resumed") == 1
    assert "akv.breaker.opened" not in names


class RefusingStore(WrappedStore):
    """Has no room for the keys that ``refuses`` names, ``times`` times each."""

    def __init__(self, inner: BlockStore, times: int, refuses: Sequence[bytes]) -> None:
        super().__init__(inner)
        self.left = dict.fromkeys(refuses, times)
        self.puts: list[list[bytes]] = []

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """No room for those that have refusals left; the others are put."""
        hashes = [key[-32:] for key in keys]
        self.puts.append(hashes)
        outcomes: list[Outcome] = []
        for key, block, buffer in zip(keys, hashes, buffers, strict=True):
            if self.left.get(block, 0) > 0:
                self.left[block] -= 1
                outcomes.append(Status.NO_ROOM)
            else:
                outcomes += self.inner.put_from([key], [buffer])
        return outcomes


@pytest.mark.parametrize("refused", [(0,), (1,), (2, 3), (0, 3), tuple(range(6))])
@pytest.mark.usefixtures("clock")
async def test_what_found_no_room_twice_is_stored_by_the_third_try(
    refused: tuple[int, ...],
) -> None:
    """Byte for byte, only what was refused is put again, and nothing is lost."""
    hashes = prompt(1, 6)
    inner = MemoryStore(slot_bytes=OBJECT)
    store = RefusingStore(inner, 2, [hashes[n] for n in refused])
    memory, other = Memory(), Memory()
    for number, block in enumerate(hashes):
        memory.write(number, block)
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        outcome = await session.save(save_spec(hashes, range(6)))
        assert (outcome.stored, outcome.dropped, outcome.reason) == (6, 0, "")
        assert staging_is_back(await session.statistics())
    tries = [hashes.index(block) for put in store.puts for block in put]
    assert {n: tries.count(n) for n in range(6)} == {
        n: 3 if n in refused else 1 for n in range(6)
    }
    async with akv.open_session(
        CONFIG, other.geometry, other.device, store=inner
    ) as session:
        assert (await session.load(load_spec(hashes, range(6)))).landed
    assert all(other.holds(number, block) for number, block in enumerate(hashes))


@pytest.mark.usefixtures("clock")
async def test_what_never_finds_room_is_given_up_with_all_that_is_behind_it() -> None:
    """Five tries; the block stored behind the hole is taken out again."""
    hashes = prompt(1, 6)
    inner = MemoryStore(slot_bytes=OBJECT)
    store = RefusingStore(inner, 1000, [hashes[2]])
    memory = Memory()
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store
    ) as session:
        outcome = await session.save(save_spec(hashes[:4], range(4)))
        assert (outcome.stored, outcome.dropped) == (2, 2)
        assert outcome.reason == "no room in the store"
        later = await session.save(save_spec(hashes[4:], (4, 5), job_id=2))
        assert later.reason == "a block before it was dropped"
    assert [put for put in store.puts if hashes[2] in put] == [
        list(hashes[2:4]),
        *[[hashes[2]]] * 4,
    ]
    assert inner.statistics().objects == 2


async def test_no_try_begins_that_the_save_deadline_would_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds before the next try, and the deadline is five: given up now."""
    monkeypatch.setattr(
        "akv.pipeline.save.Shedder", partial(Shedder, marks=Marks(retries=(10.0,)))
    )
    hashes = prompt(1, 1)
    store = RefusingStore(MemoryStore(slot_bytes=OBJECT), 1, hashes)
    memory = Memory()
    config = akv.Config(
        max_load_bytes=8 * OBJECT, max_save_bytes=8 * OBJECT, save_deadline=5
    )
    with anyio.fail_after(4):
        async with akv.open_session(
            config, memory.geometry, memory.device, store=store
        ) as session:
            outcome = await session.save(save_spec(hashes, (0,)))
    assert outcome.reason == "no room in the store"


@pytest.mark.usefixtures("clock")
async def test_saves_that_are_refused_and_wait_for_staging_never_block_each_other() -> (
    None
):
    """Forty saves of four windows, each block refused once, staging of two windows."""
    hashes = [prompt(n, 4) for n in range(1, 41)]
    store = RefusingStore(
        MemoryStore(slot_bytes=OBJECT), 1, [block for each in hashes for block in each]
    )
    memory = Memory()
    config = akv.Config(
        max_load_bytes=8 * OBJECT, max_save_bytes=2 * OBJECT, lookup_deadline=10
    )
    async with akv.open_session(
        config, memory.geometry, memory.device, store=store
    ) as session:
        saver = Saver(session)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in hashes:
                    tasks.start_soon(saver.save, 4)
        assert [outcome.stored for outcome in saver.outcomes] == [4] * 40
        assert staging_is_back(await session.statistics())


async def test_a_save_cancelled_between_two_tries_gives_its_staging_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call runs then, so nothing goes to quarantine either."""
    monkeypatch.setattr(
        "akv.pipeline.save.Shedder", partial(Shedder, marks=Marks(retries=(20.0,)))
    )
    hashes = prompt(1, 1)
    store = RefusingStore(MemoryStore(slot_bytes=OBJECT), 1, hashes)
    memory, recorder = Memory(), Recorder([])
    async with akv.open_session(
        CONFIG, memory.geometry, memory.device, store=store, observer=recorder
    ) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.save, save_spec(hashes, (0,)))
            with anyio.fail_after(10):
                while not store.puts or session._pools["put"].statistics().running:
                    await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert staging_is_back(await session.statistics())
    assert "akv.memory.quarantined" not in recorder.names()
