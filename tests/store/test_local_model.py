"""The local store answers as the dict does, whatever the order of calls."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from akv.core.keys import BlockKey
from akv.store import LocalStore, MemoryStore
from akv.testing import empty_buffer, value_of

if TYPE_CHECKING:
    from akv.store import BlockStore, Outcome

SLOT = 256
KEYS = [
    BlockKey(tenant + bytes([number]))
    for tenant in (b"a", b"ab", b"b")
    for number in range(6)
]
SIZES = (0, 1, 100, SLOT, SLOT + 1)

some_keys = st.lists(st.sampled_from(KEYS), max_size=6)
sizes = st.sampled_from(SIZES)


class LocalAgainstMemory(RuleBasedStateMachine):
    """Room for all keys, so that both answer without evicting."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path("/dev/shm") / f"akv-test-{uuid.uuid4().hex}"
        self.model = MemoryStore(slot_bytes=SLOT)
        self.handles = [self._open(), self._open()]

    def _open(self) -> LocalStore:
        url = f"local:{self.directory}?capacity={4096 * 4 * len(KEYS)}&checksum=on"
        return LocalStore.open(url, slot_bytes=SLOT)

    @rule(
        keys=some_keys, size=sizes, salt=st.sampled_from([b"x", b"y"]), at=st.booleans()
    )
    def put(self, keys: list[BlockKey], size: int, salt: bytes, at: bool) -> None:
        def put(store: BlockStore) -> list[object]:
            values = [value_of(key + salt, size) for key in keys]
            return [_kind(each) for each in store.put_from(keys, values)]

        assert put(self.handles[at]) == put(self.model)

    @rule(keys=some_keys, size=sizes, at=st.booleans())
    def get(self, keys: list[BlockKey], size: int, at: bool) -> None:
        def get(store: BlockStore) -> list[object]:
            buffers = [empty_buffer(size) for _ in keys]
            outcomes = store.get_into(keys, buffers)
            return [
                (_kind(outcome), bytes(buffer))
                for outcome, buffer in zip(outcomes, buffers, strict=True)
            ]

        assert get(self.handles[at]) == get(self.model)

    @rule(keys=some_keys, promise=st.booleans(), at=st.booleans())
    def exists(self, keys: list[BlockKey], promise: bool, at: bool) -> None:
        expected = self.model.exists(keys, promise=promise)
        assert self.handles[at].exists(keys, promise=promise) == expected

    @rule(keys=some_keys, at=st.booleans())
    def remove(self, keys: list[BlockKey], at: bool) -> None:
        assert self.handles[at].remove(keys) == self.model.remove(keys)

    @rule(prefix=st.sampled_from([b"a", b"ab", b"b", b"c", b""]), at=st.booleans())
    def clear(self, prefix: bytes, at: bool) -> None:
        assert self.handles[at].clear(prefix) == self.model.clear(prefix)

    @rule(scope=st.sampled_from([b"s", b"t"]), at=st.booleans())
    def raise_generation(self, scope: bytes, at: bool) -> None:
        expected = self.model.raise_generation(scope)
        assert self.handles[at].raise_generation(scope) == expected

    @rule(at=st.booleans())
    def open_again(self, at: bool) -> None:
        self.handles[at].close()
        self.handles[at] = self._open()

    @rule()
    def open_all_again(self) -> None:
        for handle in self.handles:
            handle.close()
        self.handles = [self._open(), self._open()]

    @invariant()
    def the_index_is_whole(self) -> None:
        for handle in self.handles:
            assert handle.verify() == []
            assert handle.statistics().objects == self.model.statistics().objects
            for scope in (b"s", b"t"):
                assert handle.generation(scope) == self.model.generation(scope)

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self.model.close()
        shutil.rmtree(self.directory)


def _kind(outcome: Outcome) -> object:
    """Failures are worded differently; that they are failures is what counts."""
    return outcome if hasattr(outcome, "value") else "failure"


TestLocalAgainstMemory = LocalAgainstMemory.TestCase
TestLocalAgainstMemory.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
