"""Where the worker's half lives: in this process, or in a second one.

``InlineWorker`` mirrors vLLM's single-process executor: a step runs when it is
submitted and the scheduler's objects are handed over as they are. ``ProcessWorker``
mirrors its multi-process executor: what crosses is pickled over a pipe, a step runs
beside the scheduler's thread, and results pass the ``KVOutputAggregator``.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from engine.config import EngineConfig, model_runner_environment
from engine.errors import WorkerDiedError
from engine.runner import FakeRunner, StepEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from engine.timing import HookTimes

__all__ = [
    "InlineWorker",
    "Pending",
    "ProcessWorker",
    "Worker",
    "end_idle_processes",
]

_ANSWER_SECONDS = 60.0


class Pending(Protocol):
    """A step that was handed over; ``result`` waits for its output."""

    def result(self) -> Any: ...


class Worker(Protocol):
    """What the engine asks of the place where the runner lives."""

    def handshake_metadata(self) -> dict[tuple[int, int], Any] | None: ...

    def use_aggregator_of(self, connector: Any) -> None: ...

    def execute(self, envelope: StepEnvelope) -> Pending: ...

    def hook_times(self) -> HookTimes: ...

    def debug_state(self) -> dict[str, int]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any

    def result(self) -> Any:
        return self.value


class InlineWorker:
    """The runner in the scheduler's own process."""

    def __init__(self, config: EngineConfig, vllm_config: Any) -> None:
        self.runner = FakeRunner(config, vllm_config)

    def handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        return self.runner.handshake_metadata()

    def use_aggregator_of(self, connector: Any) -> None:
        """Nothing: vLLM's single-process executor aggregates nothing either."""

    def execute(self, envelope: StepEnvelope) -> Pending:
        return _Done(self.runner.execute(envelope))

    def hook_times(self) -> HookTimes:
        return self.runner.hook_times

    def debug_state(self) -> dict[str, int]:
        return self.runner.debug_state()

    def shutdown(self) -> None:
        self.runner.shutdown()


class _Answer:
    """One answer of the worker process; answers come in the order of the questions."""

    def __init__(self, receive: Callable[[], None]) -> None:
        self._receive = receive
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error, self._done = value, error, True

    def result(self) -> Any:
        while not self._done:
            self._receive()
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True, slots=True)
class _Aggregated:
    answer: _Answer
    aggregator: Any

    def result(self) -> Any:
        output = self.answer.result()
        return self.aggregator.aggregate([output]) if self.aggregator else output


class ProcessWorker:
    """The runner in a spawned process.

    Importing vLLM takes seconds, so a process whose runner was shut down cleanly
    serves the next engine, unless ``fresh`` asks for a new one.
    """

    def __init__(
        self, config: EngineConfig, vllm_config: Any, *, fresh: bool = False
    ) -> None:
        self._host = _Host() if fresh or not _idle else _idle.pop()
        self._aggregator: Any = None
        try:
            self._host.ask("open", (config, vllm_config))
        except BaseException:
            self._host.kill()
            raise

    @property
    def pid(self) -> int:
        """The worker process's id, for tests that kill it."""
        return self._host.pid

    def handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        metadata: dict[tuple[int, int], Any] | None = self._host.ask(
            "handshake_metadata"
        )
        return metadata

    def use_aggregator_of(self, connector: Any) -> None:
        if connector is not None:
            self._aggregator = KVOutputAggregator.from_connector(connector, 1)

    def execute(self, envelope: StepEnvelope) -> Pending:
        return _Aggregated(self._host.post("execute", envelope), self._aggregator)

    def hook_times(self) -> HookTimes:
        times: HookTimes = self._host.ask("hook_times")
        return times

    def debug_state(self) -> dict[str, int]:
        state: dict[str, int] = self._host.ask("debug_state")
        return state

    def shutdown(self) -> None:
        """Close the connector over there; a process that cannot is killed."""
        try:
            self._host.ask("shutdown")
        except BaseException:
            self._host.kill()
            raise
        _idle.append(self._host)


class _Host:
    """A worker process and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._waiting: deque[_Answer] = deque()
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def ask(self, question: str, argument: Any = None) -> Any:
        return self.post(question, argument).result()

    def post(self, question: str, argument: Any) -> _Answer:
        try:
            self._connection.send((question, argument))
        except OSError as error:
            raise WorkerDiedError(self._obituary()) from error
        answer = _Answer(self._receive)
        self._waiting.append(answer)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self) -> None:
        try:
            if not self._connection.poll(_ANSWER_SECONDS):
                raise WorkerDiedError(f"no answer within {_ANSWER_SECONDS} s")
            value, error, trace = self._connection.recv()
        except (EOFError, OSError) as broken:
            raise WorkerDiedError(self._obituary()) from broken
        if error is not None:
            error.add_note(f"in the worker process:\n{trace}")
        self._waiting.popleft().settle(value, error)

    def _obituary(self) -> str:
        self._process.join(5)
        return f"the worker process ended with exit code {self._process.exitcode}"


_idle: list[_Host] = []


def end_idle_processes() -> None:
    """End the worker processes that wait for another engine."""
    while _idle:
        _idle.pop().kill()


def _serve(connection: Connection) -> None:
    """The worker process: one runner after the other, until the pipe closes."""
    runner: FakeRunner | None = None
    while True:
        try:
            question, argument = connection.recv()
        except EOFError:
            break
        try:
            if question == "open":
                config, vllm_config = argument
                os.environ.update(model_runner_environment(config.hook_order))
                runner = FakeRunner(config, vllm_config)
                value = None
            else:
                assert runner is not None, "no engine is open"
                value = _reply(runner, question, argument)
        except Exception as error:  # noqa: BLE001 - the engine's side raises it
            _answer(connection, None, error)
        else:
            _answer(connection, value, None)
    if runner is not None:
        runner.shutdown()


def _reply(runner: FakeRunner, question: str, argument: Any) -> Any:
    match question:
        case "execute":
            return runner.execute(argument)
        case "handshake_metadata":
            return runner.handshake_metadata()
        case "hook_times":
            return runner.hook_times
        case "debug_state":
            return runner.debug_state()
        case "shutdown":
            runner.shutdown()
    return None


def _answer(connection: Connection, value: Any, error: BaseException | None) -> None:
    trace = "" if error is None else "".join(traceback.format_exception(error))
    try:
        connection.send((value, error, trace))
    except Exception as unsendable:  # noqa: BLE001 - whatever pickle cannot take
        shown = RuntimeError(f"{type(error).__name__}: {error} ({unsendable!r})")
        connection.send((None, shown, trace))
