"""The bridge from threads that must not wait to the loop that may.

A portal owns one thread with one loop and one session in it. The engine's
threads post what a step brought into an inbox, wake the loop once, and later
take what has ended from an outbox; neither ever waits for the store. Whoever
owns what:

* ``_inbox`` is appended to by any thread and emptied by the loop;
* ``_outbox`` is appended to by the loop and emptied by one caller's thread;
* everything else belongs to the loop.

Every load that was posted is put into the outbox once, whatever happens to
its task, to the session or to the loop; every save is put there once when
the engine's blocks are free and once when it has ended. Every lookup and every
call is answered, also where its task never ran. An exit that is raised in a
task (SystemExit, KeyboardInterrupt) fails what the task was for, closes the
session in order and is then the reason that everything later is refused with.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio
import anyio.abc

from akv.core.errors import AkvError, SessionClosedError, WrongThreadError
from akv.pipeline.native import Bell
from akv.session import CLOSE_GRACE, Session, open_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from akv.config import Config
    from akv.core.events import Observer
    from akv.core.geometry import Geometry
    from akv.core.keys import KeySpace
    from akv.core.spec import LoadSpec, LookupSpec, SaveSpec
    from akv.device.base import Device
    from akv.store.base import BlockStore

__all__ = (
    "Answer",
    "CancelLoad",
    "Command",
    "Ended",
    "Forget",
    "KeySpaceSoon",
    "LoadEnded",
    "Portal",
    "PostKeySpace",
    "PostLoad",
    "PostLookup",
    "PostSave",
    "SaveCopiedOut",
    "SaveEnded",
)

T = TypeVar("T")


class Answer:
    """What a lookup found, once it is known. Written once, by the loop.

    Reading ``found`` from another thread needs no lock: it is one reference.
    """

    __slots__ = ("cancelled", "found")

    def __init__(self) -> None:
        self.found: int | None = None
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class PostLookup:
    """Look ``spec`` up and write the result into ``answer``."""

    spec: LookupSpec
    answer: Answer


@dataclass(frozen=True, slots=True)
class PostLoad:
    """Load ``spec``, not before ``mark``; reported by ``LoadEnded``."""

    spec: LoadSpec
    mark: Any = None


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Nobody wants this load any longer; it is reported all the same."""

    load_id: int


@dataclass(frozen=True, slots=True)
class PostSave:
    """Save ``spec``; reported by ``SaveCopiedOut`` and ``SaveEnded``."""

    spec: SaveSpec
    mark: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """Take blocks for missing during the next seconds."""

    space: bytes
    hashes: tuple[bytes, ...]


class KeySpaceSoon:
    """The key space of a deployment, once the store has told its generation.

    Written once, by the loop; ``known`` can be waited for from other threads.
    It is also set when the session has ended, and ``space`` is then None.
    """

    __slots__ = ("known", "space")

    def __init__(self) -> None:
        self.space: KeySpace | None = None
        self.known = threading.Event()


@dataclass(frozen=True, slots=True)
class PostKeySpace:
    """Ask for a key space, for as long as it takes the store to be there."""

    namespace: str
    fingerprint: bytes
    answer: KeySpaceSoon


@dataclass(frozen=True, slots=True)
class _Run:
    """A function that a blocking caller waits for."""

    function: Callable[[Session], Coroutine[Any, Any, None]]
    refused: Callable[[], None]


Command: TypeAlias = (
    PostLookup | PostLoad | CancelLoad | PostSave | Forget | PostKeySpace | _Run
)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended; nothing of akv's touches its blocks any more."""

    spec: LoadSpec
    failed_blocks: tuple[int, ...]
    failed_hashes: tuple[bytes, ...]
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveCopiedOut:
    """The engine's blocks are not needed any more for this save."""

    spec: SaveSpec


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """A save has ended; ``dropped`` of its objects were not stored."""

    spec: SaveSpec
    dropped: int
    reason: str


Ended: TypeAlias = LoadEnded | SaveCopiedOut | SaveEnded


class Portal:
    """A session on a thread of its own. Made by :meth:`start`.

    ``post`` and ``drain`` never wait. ``call`` waits, and is refused where
    that would stop a loop. ``start`` and ``close`` wait for the session to
    open and to close; on a running loop use :func:`akv.open_session`.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._pid = os.getpid()
        self._inbox: deque[Command] = deque()
        self._outbox: deque[Ended] = deque()
        self._woken = False
        self._bell = Bell()
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._begun: dict[int, Command] = {}
        self._session: Session | None = None
        self._opened: Future[None] = Future()
        self._failure: str | None = None
        self._stop = False
        self._exit: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        config: Config,
        geometry: Geometry,
        device: Device | None = None,
        *,
        role: str = "portal",
        observer: Observer | None = None,
        store: BlockStore | None = None,
    ) -> Portal:
        """Start the thread and wait until its session is open.

        :raises AkvError: what :func:`akv.open_session` raises; then nothing runs
        """
        portal = cls(role)

        async def serve() -> None:
            async with open_session(
                config, geometry, device, role=role, observer=observer, store=store
            ) as session:
                await portal._serve(session)

        def work() -> None:
            try:
                anyio.run(serve)
            except BaseException as error:  # noqa: BLE001
                portal._failed(error)
            else:
                closed = SessionClosedError(f"the {role} session is closed")
                portal._failed(portal._exit or closed)

        portal._thread = threading.Thread(
            target=work, name=f"akv-{role}-loop", daemon=True
        )
        portal._thread.start()
        portal._opened.result()
        return portal

    @property
    def store_url(self) -> str:
        """The address of the session's store."""
        return self._session.store_url if self._session is not None else ""

    @property
    def store_works(self) -> bool:
        """Whether the session's store is not being left alone."""
        return self._session is not None and self._session.store_works

    @property
    def alive(self) -> bool:
        """Whether the session takes work."""
        return self._failure is None

    def post(self, commands: Iterable[Command]) -> None:
        """Hand a step over; wakes the loop at most once. Never waits.

        After the session has ended commands are answered at once: loads as
        failed, saves as dropped, lookups with nothing found.

        :raises WrongThreadError: used in a forked child
        """
        self._check_process()
        self._inbox.extend(commands)
        if self._failure is not None:
            self._refuse()
        elif self._inbox and not self._woken:
            self._woken = True
            self._bell.ring()

    def drain(self) -> list[Ended]:
        """What has ended since the last call. Never waits.

        :raises WrongThreadError: used in a forked child
        """
        self._check_process()
        ended: list[Ended] = []
        while self._outbox:
            ended.append(self._outbox.popleft())
        return ended

    def call(self, function: Callable[[Session], Awaitable[T]], *, timeout: float) -> T:
        """Run ``function(session)`` on the loop and wait for it; for rare calls.

        :raises WrongThreadError: called from the loop's own thread or from a
            thread that runs a loop: await the session there instead
        :raises TimeoutError: it took longer than ``timeout`` seconds; it has
            been cancelled
        :raises SessionClosedError: the session ended before the function did
        """
        self._check_process()
        if threading.current_thread() is self._thread:
            raise WrongThreadError(
                "portal.call() on the portal's own loop; await the session instead"
            )
        if _runs_a_loop():
            raise WrongThreadError(
                "portal.call() on a running event loop would stop it; "
                "use akv.open_session() there"
            )
        result: Future[T] = Future()

        async def run(session: Session) -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                with anyio.fail_after(timeout):
                    value = await function(session)
            except Exception as error:  # noqa: BLE001
                result.set_exception(error)
            except BaseException:
                refused()
                raise
            else:
                result.set_result(value)

        def refused() -> None:
            if not result.done():
                result.set_exception(SessionClosedError(self._failure or "closing"))

        self.post([_Run(run, refused)])
        try:
            return result.result(timeout + 1.0)
        except TimeoutError:
            result.cancel()
            raise

    def close(self, grace: float = CLOSE_GRACE + 1.0) -> bool:
        """End all tasks and the thread; False if it did not end in time.

        Loads that are open are reported failed when nothing touches their
        blocks. Twice is no error.
        """
        if self._pid != os.getpid():
            return True
        self._stop = True
        if self._thread is None or self._thread is threading.current_thread():
            self._bell.ring()
            return False
        if self._thread.is_alive():
            self._bell.ring()
            self._thread.join(grace)
        if self._thread.is_alive():
            return False
        self._bell.close()
        return True

    # On the loop.

    async def _serve(self, session: Session) -> None:
        self._session = session
        async with anyio.create_task_group() as tasks:
            self._opened.set_result(None)
            while not self._stop:
                await self._bell.wait()
                self._woken = False
                self._take(session, tasks)
            tasks.cancel_scope.cancel()

    def _take(self, session: Session, tasks: anyio.abc.TaskGroup) -> None:
        while self._inbox:
            match command := self._inbox.popleft():
                case CancelLoad(load_id):
                    found = self._scopes.get(load_id)
                    if found is not None:
                        found.cancel()
                case Forget(space, hashes):
                    session.forget(space, 0, hashes)
                case _:
                    if isinstance(command, PostLoad):
                        self._scopes[command.spec.load_id] = anyio.CancelScope()
                    self._begun[id(command)] = command
                    tasks.start_soon(self._carry_out, session, command)

    async def _carry_out(self, session: Session, command: Command) -> None:
        # From here on the command answers for itself, however it ends.
        del self._begun[id(command)]
        try:
            match command:
                case PostLookup(spec, answer):
                    await self._lookup(session, spec, answer)
                case PostLoad(spec, mark):
                    await self._load(session, spec, mark)
                case PostSave(spec, mark):
                    await self._save(session, spec, mark)
                case PostKeySpace(namespace, fingerprint, soon):
                    await self._key_space(session, namespace, fingerprint, soon)
                case _Run(function, _):
                    await function(session)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:  # noqa: BLE001
            # Raised on, it would tear the loop down around the other tasks.
            self._exit = error
            self._stop = True
            self._bell.ring()

    async def _key_space(
        self,
        session: Session,
        namespace: str,
        fingerprint: bytes,
        soon: KeySpaceSoon,
    ) -> None:
        while soon.space is None:
            try:
                soon.space = await session.key_space(namespace, fingerprint)
            except AkvError:
                await anyio.sleep(1.0)
        soon.known.set()

    async def _lookup(self, session: Session, spec: LookupSpec, answer: Answer) -> None:
        found = 0
        try:
            if not answer.cancelled:
                found = await session.lookup(spec)
        except Exception:  # noqa: BLE001
            found = 0  # whatever it was, the engine computes and the loop lives
        finally:
            answer.found = found

    async def _load(self, session: Session, spec: LoadSpec, mark: Any) -> None:
        blocks = tuple(block for span in spec.spans for block in span.block_ids)
        ended = LoadEnded(spec, blocks, (), "cancelled")
        started = time.monotonic()
        try:
            with self._scopes[spec.load_id]:
                outcome = await session.load(spec, mark=mark)
                ended = LoadEnded(
                    spec, outcome.failed_blocks, outcome.failed_hashes, outcome.reason
                )
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            ended = LoadEnded(spec, blocks, (), _sentence(error))
            if not isinstance(error, Exception):
                raise
        finally:
            del self._scopes[spec.load_id]
            self._outbox.append(replace(ended, seconds=time.monotonic() - started))

    async def _save(self, session: Session, spec: SaveSpec, mark: Any) -> None:
        copied = False

        def on_copied() -> None:
            nonlocal copied
            if not copied:
                copied = True
                self._outbox.append(SaveCopiedOut(spec))

        ended = SaveEnded(spec, len(spec), "cancelled")
        try:
            outcome = await session.save(spec, mark=mark, on_copied=on_copied)
            ended = SaveEnded(spec, outcome.dropped, outcome.reason)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            ended = SaveEnded(spec, len(spec), _sentence(error))
            if not isinstance(error, Exception):
                raise
        finally:
            on_copied()
            self._outbox.append(ended)

    # When it is over, and for whoever comes later.

    def _failed(self, error: BaseException) -> None:
        self._failure = _sentence(error)
        if not self._opened.done():
            self._opened.set_exception(error)
        # A task that never ran has reported nothing: put it where it is refused.
        self._inbox.extendleft(reversed(self._begun.values()))
        self._begun.clear()
        self._refuse()

    def _refuse(self) -> None:
        reason = self._failure or "the session is closed"
        while True:
            try:
                command = self._inbox.popleft()
            except IndexError:
                return
            match command:
                case PostLookup(_, answer):
                    answer.found = 0
                case PostLoad(spec, _):
                    blocks = tuple(b for span in spec.spans for b in span.block_ids)
                    self._outbox.append(LoadEnded(spec, blocks, (), reason))
                case PostSave(spec, _):
                    self._outbox.append(SaveCopiedOut(spec))
                    self._outbox.append(SaveEnded(spec, len(spec), reason))
                case _Run(_, refused):
                    refused()
                case PostKeySpace(_, _, soon):
                    soon.known.set()
                case _:
                    pass

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise WrongThreadError(
                f"this {self._role} was opened by process {self._pid} and is used "
                f"in its forked child {os.getpid()}: open another one in the child"
            )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _runs_a_loop() -> bool:
    try:
        anyio.get_current_task()
    except (RuntimeError, anyio.NoEventLoopError):
        return False
    return True
