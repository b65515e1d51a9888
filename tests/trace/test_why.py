"""From one log and with one command: why a request was not served from the store.

Each test serves requests for real, through vLLM's scheduler and akv's connector,
while something goes wrong, and then reads what `akv trace` says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from bugs.rig import CountingStore, serve, step_until, until_answered

import akv
from akv.store import Failure, MemoryStore, Status
from akv.testing.stores import Fault, FaultyStore, GatedStore
from serving import HASHES, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bugs.rig import Rig

    from akv.core.keys import BlockKey
    from engine.engine import Engine

    Engines = Callable[..., Engine]
    Why = Callable[[str], str]

PROMPT = range(65)
"""Four whole blocks of 16 tokens below the last token."""


def finish(engine: Engine, name: str) -> None:
    """Run a request that was added to its end, and all saves."""
    engine.run()
    engine.idle_until_quiet()
    assert name in engine.outputs
    engine.assert_clean()


def test_what_went_well_has_no_reason(rig: Rig, logging: Engines, why: Why) -> None:
    """The numbers of a request that was served: asked, hit, promised, loaded."""
    rig.seed(PROMPT)
    with logging() as engine:
        assert serve(engine, PROMPT, "served") == 64
    told = why("served")
    assert "All that could be used was loaded." in told
    for line in (
        "asked       65 tokens",
        "hit         64 tokens",
        "promised    64 tokens",
        "looked up   4 of 4 blocks found",
        "loaded      4 blocks, 64 tokens",
        "failed      0 blocks",
        f"store       memory:{rig.name}",
        "namespace 'default'",
        "load 5 s",
    ):
        assert line in told
    assert "akv.load.landed" in told.partition("what happened")[2]


def test_a_prompt_that_nobody_has_saved_is_a_miss(logging: Engines, why: Why) -> None:
    """The first request of all."""
    with logging() as engine:
        assert serve(engine, PROMPT, "first") == 0
    told = why("first")
    assert "miss: Block 0 (tokens 0 to 15) was not in the store" in told
    assert "no save in this log says it ever was" in told


def test_a_prompt_that_goes_on_differently_is_a_miss_from_there(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """Two blocks in common, then others."""
    rig.seed(PROMPT)
    with logging() as engine:
        assert serve(engine, [*range(32), *range(900, 933)], "other") == 32
    told = why("other")
    assert "miss: Block 2 (tokens 32 to 47) was not in the store" in told
    assert "loaded      2 blocks, 32 tokens" in told


def test_what_was_saved_and_is_gone_was_evicted(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """Saved by a request of this log, then not there any more."""
    with logging(prefix_caching=False) as engine:
        serve(engine, PROMPT, "writer")
        rig.store.clear(b"")
        assert serve(engine, PROMPT, "reader") == 0
    told = why("reader")
    assert "evicted before the lookup: Block 0" in told
    assert "request writer had saved it" in told


def test_what_is_lost_between_lookup_and_load_was_evicted(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """The store has it when it is asked, and not when it is fetched."""
    rig.seed(PROMPT)
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with logging() as engine:
        engine.add_request(PROMPT, 3, "unlucky")
        until_answered(engine, "unlucky")
        step_until(engine, lambda: rig.worker(GatedStore).held)
        rig.store.clear(b"")
        rig.worker(GatedStore).open()
        finish(engine, "unlucky")
    told = why("unlucky")
    assert "evicted before the load: 4 of 4 blocks were promised" in told
    assert "failed      4 blocks" in told
    assert "loaded      0 blocks" in told


def test_a_lookup_that_is_late_is_told_with_its_deadline(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """The store hangs; the engine computes."""
    rig.seed(PROMPT)
    rig.through(lambda inner: GatedStore(inner, gated=("exists",)))
    with logging({"lookup_deadline": 0.05}) as engine:
        engine.add_request(PROMPT, 3, "late")
        step_until(engine, lambda: "late" in engine.outputs and not engine.has_work())
        rig.scheduler(GatedStore).open()
        rig.worker(GatedStore).open()
        finish(engine, "late")
    told = why("late")
    assert "lookup deadline: The store had not answered after 0.05 s" in told
    assert "lookup 0.05 s" in told


def test_a_load_that_is_late_is_told_with_its_deadline(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """The get hangs; what did not land is computed."""
    rig.seed(PROMPT)
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with logging({"load_deadline": 0.1}) as engine:
        engine.add_request(PROMPT, 3, "slow")
        step_until(engine, lambda: "slow" in engine.monitor.reports)
        rig.worker(GatedStore).open()
        finish(engine, "slow")
    told = why("slow")
    assert "load deadline: 4 of 4 blocks were promised and did not land" in told
    assert "0.1 s (load_deadline)" in told


def test_a_store_that_is_left_alone_is_told_with_its_reason(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """Three failures open the breaker; the next request is not even looked up."""
    rig.seed(PROMPT)

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        return Fault(error=akv.StoreError("wire cut")) if verb == "exists" else None

    rig.through(lambda inner: FaultyStore(inner, decide))
    with logging() as engine:
        for number in range(3):
            before = range(1000 * number, 1000 * number + 65)
            engine.add_request([5, *before], 1, f"before-{number}")
            until_answered(engine, f"before-{number}")
            finish(engine, f"before-{number}")
        engine.add_request(PROMPT, 1, "alone")
        finish(engine, "alone")
    told = why("alone")
    assert "store left alone: The store was being left alone (breaker open)" in told
    assert "wire cut" in told
    assert "lookup failed: The store could not answer" in why("before-0")


def test_blocks_under_another_fingerprint_are_named_with_both(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """An engine with other weights saved the same tokens into the same store."""
    with logging(model_seed=1) as engine:
        serve(engine, PROMPT, "theirs")
    with logging(model_seed=2) as engine:
        assert serve(engine, PROMPT, "mine") == 0
    told = why("mine")
    assert "other key space: Block 0" in told
    assert "request theirs saved the same tokens under another fingerprint" in told
    assert "Another fingerprint means" in told
    mine = told.partition("fingerprint ")[2][:32]
    assert f"here {mine})" in told


@pytest.mark.anyio
async def test_blocks_under_another_namespace_are_named_with_both(
    log: Path, why: Why
) -> None:
    """The same model, parted on purpose."""
    store = MemoryStore()
    async with serving(log, store, namespace="blue") as server:
        await server.save("theirs", HASHES)
    async with serving(log, store, namespace="green") as server:
        assert await server.lookup("mine", HASHES) == 0
    told = why("mine")
    assert "under another namespace (blue, here green)" in told


@pytest.mark.anyio
async def test_blocks_of_before_a_reset_are_named_by_their_generation(
    log: Path, why: Why
) -> None:
    """A reset makes everything before unreachable."""
    store = MemoryStore()
    async with serving(log, store) as server:
        await server.save("theirs", HASHES)
    store.raise_generation(
        akv.KeySpace(namespace="n", fingerprint=akv.fingerprint({"model": "m"})).scope
    )
    async with serving(log, store) as server:
        assert await server.lookup("mine", HASHES) == 0
    assert "under another generation (0, here 1)" in why("mine")


def test_a_dropped_save_is_told_to_whom_it_is_missing(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """Block 2 found no room when it was saved, so nothing behind it is there."""
    unlucky: list[BlockKey] = []

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        if verb != "put_from":
            return None
        unlucky.extend(keys[2:3] if not unlucky else ())
        places = [at for at, key in enumerate(keys) if key in unlucky]
        return Fault(outcomes=dict.fromkeys(places, Status.NO_ROOM))

    rig.through(lambda inner: FaultyStore(inner, decide))
    with logging(prefix_caching=False) as engine:
        engine.add_request(PROMPT, 1, "writer")
        finish(engine, "writer")
        engine.add_request(PROMPT, 1, "reader")
        finish(engine, "reader")
    told = why("reader")
    assert "dropped save: Block 2 (tokens 32 to 47) was not in the store" in told
    assert "request writer computed it" in told
    assert "no room in the store" in told


def test_a_save_dropped_for_want_of_pins_is_told_to_whom_it_is_missing(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """The scheduler drops it before there is a job."""
    with logging({"max_pinned_fraction": 0.02}, num_blocks=101) as engine:
        serve(engine, PROMPT, "writer")
    with logging() as engine:
        assert serve(engine, PROMPT, "reader") == 32
    told = why("reader")
    assert "dropped save: Block 2" in told
    assert "max_pinned_fraction" in told


def test_a_load_that_is_not_worth_it_is_told_with_the_numbers(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """An engine that computes a token in a picosecond has no use for a store."""
    prompts = [range(n, n + 65) for n in range(0, 2000, 100)]
    rig.seed(*prompts)
    with logging({"prefill_rate": 1e12}) as engine:
        loaded = [serve(engine, one, f"r-{n}") for n, one in enumerate(prompts)]
    assert loaded[0] == 64
    assert loaded[-1] == 0
    told = why(f"r-{len(prompts) - 1}")
    assert "not worth loading: 64 tokens were found and left" in told
    assert "load_or_compute=false" in told


def test_a_prompt_without_a_whole_block_is_told(logging: Engines, why: Why) -> None:
    """16 tokens: the engine computes the last one itself, and so all of them."""
    with logging() as engine:
        serve(engine, range(16), "short")
    assert "no whole block beyond what the engine has" in why("short")


def test_reading_that_is_off_is_told(logging: Engines, why: Why) -> None:
    """The request asked for it."""
    with logging() as engine:
        engine.add_request(PROMPT, 1, "blind", skip_reading_prefix_cache=True)
        finish(engine, "blind")
    assert "reading is off for this request" in why("blind")


def test_tokens_that_were_rounded_off_are_told(
    rig: Rig, logging: Engines, why: Why
) -> None:
    """All 64 tokens of a prompt are there; the last block is computed all the same."""
    rig.seed(range(65))
    with logging() as engine:
        assert serve(engine, range(64), "even") == 48
    told = why("even")
    # Only what could be used was asked for.
    assert "looked up   3 of 3 blocks found" in told
    assert "promised    48 tokens" in told


def test_a_worker_in_another_process_writes_to_the_same_log(
    rig: Rig, log: Path, why: Why, tmp_path: Path, logging: Engines
) -> None:
    """Promise and landing come from two processes and are one story."""
    store = {"store": f"local:{tmp_path}/store?capacity=4MiB"}
    with logging(store, worker="process", fresh_process=True) as engine:
        serve(engine, PROMPT, "writer")
    with logging(store, worker="process", fresh_process=True) as engine:
        assert serve(engine, PROMPT, "reader") == 64
    told = why("reader")
    assert "loaded      4 blocks, 64 tokens" in told
    happened = told.partition("what happened")[2]
    assert "scheduler akv.load.promised" in happened
    assert "worker    akv.load.landed" in happened


@pytest.mark.parametrize("verb", ["exists", "get_into"])
def test_the_store_is_not_asked_by_the_trace(
    rig: Rig, logging: Engines, why: Why, verb: str
) -> None:
    """The log alone tells."""
    rig.through(CountingStore)
    with logging() as engine:
        serve(engine, PROMPT, "r")
    calls = len(rig.scheduler(CountingStore).keys(verb))
    why("r")
    assert len(rig.scheduler(CountingStore).keys(verb)) == calls


@pytest.mark.anyio
async def test_a_save_that_is_under_way_is_told_to_who_came_too_early(
    log: Path, why: Why
) -> None:
    """The put hangs while another request asks for its blocks."""
    store = GatedStore(MemoryStore(), gated=("put_from",))
    async with serving(log, store) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.save, "writer", HASHES)
        await anyio.to_thread.run_sync(store.wait_until_held)
        assert await server.lookup("early", HASHES) == 0
        store.open()
    told = why("early")
    assert "still being saved: Block 0" in told
    assert "the save of request writer" in told


@pytest.mark.anyio
async def test_a_load_that_the_store_fails_is_told_with_its_words(
    log: Path, why: Why
) -> None:
    """An error code of the store."""

    def decide(verb: str, keys: Sequence[BlockKey]) -> Fault | None:
        wrong = verb == "get_into"
        return Fault(outcomes={0: Failure("transfer failed", -800)}) if wrong else None

    async with serving(log, FaultyStore(MemoryStore(), decide)) as server:
        await server.save("writer", HASHES)
        await server.load("unlucky", HASHES)
    told = why("unlucky")
    assert "load failed: 9 of 10 blocks were promised and did not land" in told
    assert "loaded      1 blocks\n" in told
    assert "transfer failed" in told


@pytest.mark.anyio
async def test_a_load_whose_request_ended_is_told(log: Path, why: Why) -> None:
    """The client hung up while the store was being asked."""
    store = GatedStore(MemoryStore(), gated=("get_into",))
    async with serving(log, store) as server:
        await server.save("writer", HASHES)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.load, "gone", HASHES)
            await anyio.to_thread.run_sync(store.wait_until_held)
            tasks.cancel_scope.cancel()
        store.open()
    assert "cancelled: The load ended because its request did." in why("gone")


def test_a_request_that_waited_for_another_ones_load_is_told(
    rig: Rig, log: Path, logging: Engines, why: Why
) -> None:
    """Both have the same prompt; the blocks are fetched once."""
    rig.seed(PROMPT)
    rig.through(lambda inner: GatedStore(inner, gated=("get_into",)))
    with logging() as engine:
        engine.add_request(PROMPT, 1, "leader")
        step_until(engine, lambda: rig.worker(GatedStore).held)
        engine.add_request(PROMPT, 1, "follower")
        step_until(engine, lambda: "akv.load.joined" in log.read_text())
        rig.worker(GatedStore).open()
        finish(engine, "follower")
    told = why("follower")
    assert (
        "waited for another request: It waited for the load of request leader" in told
    )
    assert "waited for  leader" in told


def test_every_reason_is_on_the_page() -> None:
    """The table of docs/tracing.md has the names that scripts get, and no others."""
    root = Path(__file__).resolve().parents[2]
    source = (root / "src" / "akv" / "trace" / "why.py").read_text()
    given = set(re.findall(r'Finding\(\s*"([a-z ]+)"', source))
    page = (root / "docs" / "tracing.md").read_text()
    table = page.partition("| reason |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall("`([a-z ]+)`", row)} == given
    assert len(given) > 10
