"""A named memory store, engines on it, and whatever the test puts between the two.

Both roles of an engine open ``memory:NAME`` through ``akv.session.open_store``; the rig
replaces that function, so that each role gets its own wrapper round the one store. The
worker's role opens first, so ``opened[-2]`` is the worker's wrapper and ``opened[-1]``
the scheduler's while an engine runs. Nothing here sleeps: gates are let go by the test.
"""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from akv.device.host import HostDevice
from akv.store import BlockStore, MemoryStore, open_store
from akv.testing.stores import GatedStore, WrappedStore
from engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from akv.core.keys import BlockKey
    from akv.core.spec import LoadSpec, SaveSpec
    from akv.store.base import Buffer, Outcome

__all__ = (
    "CountingStore",
    "CutStore",
    "Gate",
    "Rig",
    "Watch",
    "serve",
    "step_until",
    "until_answered",
)

S = TypeVar("S", bound=BlockStore)

BLOCK = 16
OBJECT = 2048
"""Bytes of a block of the engine without a model, with its defaults."""


class Rig:
    """One store that outlives engines; made by the fixture ``rig``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = uuid.uuid4().hex
        self.store = MemoryStore(name=self.name)
        self.opened: list[BlockStore] = []
        self._monkeypatch = monkeypatch

    @property
    def extra(self) -> dict[str, Any]:
        """The connector's settings: this store, little staging, patient lookups."""
        return {
            "store": f"memory:{self.name}",
            "max_load_bytes": "1MiB",
            "max_save_bytes": "1MiB",
            "lookup_deadline": 5,
        }

    def engine(self, settings: dict[str, Any] | None = None, **options: Any) -> Engine:
        """An engine with akv on this rig's store."""
        return Engine(
            "AkvConnector",
            "akv.vllm",
            extra_config={**self.extra, **(settings or {})},
            **options,
        )

    def through(self, wrap: Callable[[BlockStore], BlockStore]) -> None:
        """From now on let roles open ``wrap(store)``, in the order of opening."""

        def opening(url: str, **options: Any) -> BlockStore:
            store = wrap(open_store(url, **options))
            self.opened.append(store)
            return store

        self._monkeypatch.setattr("akv.session.open_store", opening)

    def plain(self) -> None:
        """From now on let roles open the store itself."""
        self._monkeypatch.setattr("akv.session.open_store", open_store)

    def worker(self, kind: type[S]) -> S:
        """What the worker's role of the newest engine has opened."""
        store = self.opened[-2]
        assert isinstance(store, kind)
        return store

    def scheduler(self, kind: type[S]) -> S:
        """What the scheduler's role of the newest engine has opened."""
        store = self.opened[-1]
        assert isinstance(store, kind)
        return store

    def seed(self, *prompts: Sequence[int]) -> None:
        """Save these prompts' blocks with an engine that nothing disturbs."""
        with self.engine() as engine:
            for number, prompt in enumerate(prompts):
                serve(engine, prompt, f"seed-{number}", max_tokens=1)

    def gate_copies_out(self) -> Gate:
        """Hold every copy out of the engine's blocks until the gate is open."""
        gate = Gate()
        gather = HostDevice.gather

        def held(device: HostDevice, *args: Any) -> None:
            gate.passing()
            gather(device, *args)

        self._monkeypatch.setattr(HostDevice, "gather", held)
        return gate


class Gate:
    """Holds threads until it is opened, and can be waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._held = 0

    def passing(self) -> None:
        """Called by what is to be held."""
        with self._changed:
            self._held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open, 60)

    def wait_until_held(self) -> None:
        """Block until something is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held > 0, 10)

    def open(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class Watch:
    """What crosses between an engine's scheduler and its worker."""

    def __init__(self, engine: Engine) -> None:
        self.loads: list[LoadSpec] = []
        self.cancelled: list[int] = []
        self.saves: list[SaveSpec] = []
        self.scheduled: dict[str, list[int]] = defaultdict(list)
        self.failed_blocks: list[set[int]] = []
        connector = engine.scheduler.get_kv_connector()
        build, check = connector.build_connector_meta, engine.monitor.check_report

        def building(output: Any) -> Any:
            for name, tokens in output.num_scheduled_tokens.items():
                self.scheduled[name].append(tokens)
            metadata = build(output)
            self.loads += metadata.loads
            self.cancelled += metadata.cancelled_loads
            self.saves += metadata.saves
            return metadata

        def checking(report: Any) -> None:
            if report.invalid_block_ids:
                self.failed_blocks.append(set(report.invalid_block_ids))
            check(report)

        connector.build_connector_meta = building
        engine.monitor.check_report = checking  # type: ignore[method-assign]


class CountingStore(GatedStore):
    """Holds nothing, counts everything."""

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner, gated=())

    def keys(self, verb: str) -> list[BlockKey]:
        """Every key that came with ``verb``, in order."""
        return [key for called, keys in self.calls if called == verb for key in keys]


class CutStore(WrappedStore):
    """Stores the first bytes of each object only, as a torn write would."""

    def __init__(self, inner: BlockStore, kept: int) -> None:
        super().__init__(inner)
        self._kept = kept

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """Put what is left of each buffer."""
        whole = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
        return self.inner.put_from(keys, [buffer[: self._kept] for buffer in whole])


def serve(engine: Engine, prompt: Sequence[int], name: str, max_tokens: int = 3) -> int:
    """Run one request to its end and all saves too; the tokens it had loaded."""
    engine.add_request(prompt, max_tokens, name)
    engine.run()
    engine.idle_until_quiet()
    engine.assert_outputs()
    engine.assert_clean()
    return engine.external_tokens(name)


def step_until(engine: Engine, done: Callable[[], object], steps: int = 5_000) -> None:
    """Step until ``done()``; the engine need not have work to step for."""
    for _ in range(steps):
        if done():
            return
        if engine.has_work():
            engine.step()
        else:
            engine.step_empty()
    states = {name: r.status.name for name, r in engine.scheduler.requests.items()}
    raise AssertionError(f"not so after {steps} steps; requests: {states}")


def until_answered(engine: Engine, name: str) -> None:
    """Take the step that looks a new request up, and wait for the answer.

    So that what the test is about does not depend on how many steps a lookup takes.
    """
    side = engine.scheduler.get_kv_connector()._s
    engine.run_steps(1)
    answer = side._requests[name].answer
    while answer is not None and answer.found is None:
        side._portal.call(lambda session: session.statistics(), timeout=10)
