"""Stops at every await and at every call of a store or a device, without a clock.

``Steps`` drives a coroutine and tells each time it suspends, so that a test can do
something at the n-th await of a pipeline without knowing what awaits there are.
``Seams`` announces each call of the store and of the device to the loop, which lets it
go on, holds it, or makes it raise; so what has happened at an await is always the same.
"""

from __future__ import annotations

import ast
import inspect
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import akv
from akv.pipeline.native import LoopHandle
from akv.testing import HostDevice, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from types import ModuleType

    import numpy as np
    import numpy.typing as npt

    from akv.core.buffers import ScatteredBuffer
    from akv.core.keys import BlockKey
    from akv.core.plan import Window
    from akv.device.base import Staged
    from akv.store import BlockStore
    from akv.store.base import Buffer, Outcome

T = TypeVar("T")
Place = tuple[str, int]
"""File and line."""

SOURCES = str(Path(akv.__file__).parent)


class Steps(Generic[T]):
    """Awaits ``coroutine``; calls ``at(places)`` at each of its suspensions.

    ``places`` are the lines of akv that wait there, the outermost first. It is called
    before the task hands over to the loop, so what it cancels is cancelled there.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], at: Callable[[list[Place]], None]
    ) -> None:
        self._coroutine = coroutine
        self._at = at

    def __await__(self) -> Generator[Any, Any, T]:
        """See above."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is not None:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self._at(places_of(self._coroutine))
            value = error = None
            try:
                value = yield waits_for
            except BaseException as caught:  # noqa: BLE001
                error = caught


def places_of(coroutine: Any) -> list[Place]:
    """Where in akv a suspended coroutine is."""
    places = []
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
        if coroutine.cr_code.co_filename.startswith(SOURCES):
            places.append((coroutine.cr_code.co_filename, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return places


def awaits_of(module: ModuleType) -> dict[Place, range]:
    """Every ``await`` of a module, and the lines that it covers."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        (module.__file__, node.lineno): range(
            node.lineno, (node.end_lineno or node.lineno) + 1
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor)
    }


@dataclass(eq=False)
class Call:
    """A call that waits for the loop's word."""

    verb: str
    goes_on: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


COPIES = ("gather", "scatter")


class Seams(WrappedStore):
    """A store; ``device`` is one too. Made on the loop that it asks.

    ``hold`` names the verbs whose calls are held from now on. The call of number
    ``fail_at``, counted over all verbs since ``begin``, raises ``error``.
    """

    def __init__(self, inner: BlockStore, device: HostDevice) -> None:
        super().__init__(inner)
        self.device = GatedDevice(device, self)
        self._loop = LoopHandle()
        self._held: list[Call] = []
        self.hold: frozenset[str] = frozenset()
        self.begin()

    def begin(
        self, *, fail_at: int | None = None, error: BaseException | None = None
    ) -> None:
        """Count calls from 0 on again, and fail that one."""
        self.calls: list[str] = []
        self._fail_at = fail_at
        self._error = error

    @property
    def faulty(self) -> bool:
        """Whether a call is to raise."""
        return self._error is not None

    def open(self, *verbs: str) -> None:
        """Let calls of these verbs go on, or all calls, and hold them no more."""
        self.hold = self.hold - frozenset(verbs) if verbs else frozenset()
        for call in self._held:
            if call.verb not in self.hold:
                call.goes_on.set()
        self._held = [call for call in self._held if call.verb in self.hold]

    def let_one_go(self) -> None:
        """Let the call go on that is held longest, if any."""
        if self._held:
            self._held.pop(0).goes_on.set()

    def passes(self, verb: str) -> None:
        """In the thread of a call: wait for the loop's word."""
        call = Call(verb)
        if not self._loop.post(self._arrived, call):
            return
        if not call.goes_on.wait(30):
            raise TimeoutError(verb)
        if call.error is not None:
            raise call.error

    def _arrived(self, call: Call) -> None:
        if len(self.calls) == self._fail_at:
            call.error = self._error
        self.calls.append(call.verb)
        if call.verb in self.hold:
            self._held.append(call)
        else:
            call.goes_on.set()

    def exists(
        self, keys: Sequence[BlockKey], *, promise: bool = False
    ) -> list[Outcome]:
        """When the loop says so."""
        self.passes("exists")
        return self.inner.exists(keys, promise=promise)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """When the loop says so."""
        self.passes("get_into")
        return self.inner.get_into(keys, buffers)

    def put_from(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[Outcome]:
        """When the loop says so."""
        self.passes("put_from")
        return self.inner.put_from(keys, buffers)

    def remove(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """When the loop says so."""
        self.passes("remove")
        return self.inner.remove(keys)


class GatedDevice:
    """Copies when the loop says so."""

    def __init__(self, inner: HostDevice, seams: Seams) -> None:
        self._inner = inner
        self._seams = seams

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """At once."""
        return self._inner.allocate(num_bytes)

    def mark(self) -> Any:
        """At once."""
        return self._inner.mark()

    @property
    def memory(self) -> Sequence[memoryview]:
        """The engine's memory."""
        return self._inner.memory

    @property
    def run_bytes(self) -> int:
        """The length of a run of a block's bytes."""
        return self._inner.run_bytes

    def blocks(self, window: Window) -> Sequence[ScatteredBuffer]:
        """Blocks that a store copies by itself, when its call goes on."""
        return self._inner.blocks(window)

    def gather(self, window: Window, staged: Staged, mark: Any) -> None:
        """When the loop says so."""
        self._seams.passes("gather")
        self._inner.gather(window, staged, mark)

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,
    ) -> None:
        """When the loop says so."""
        self._seams.passes("scatter")
        self._inner.scatter(window, staged, rows, mark)
