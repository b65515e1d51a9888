"""The real ``mooncake_master`` for tests: on free ports, and ended by its pid.

The ELF file inside the package is started, not its Python wrapper, so that
signals reach it. :class:`BlackHole` is a port that takes connections and never
answers. Neither needs a network besides the loopback.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from akv.store.mooncake.client import (
    MissingMooncakeError,
    import_mooncake,
    master_answers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ("BlackHole", "Master", "free_port", "make_master")

HOST = "127.0.0.1"
_PATIENCE = 20.0


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Master:
    """A master that runs while the ``with`` block does.

    :param flags: of ``mooncake_master``, besides the ports
    """

    def __init__(self, *flags: str) -> None:
        import_mooncake()
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        folders = [Path(folder) for folder in spec.submodule_search_locations]
        self._program = next(
            folder / "mooncake_master"
            for folder in folders
            if (folder / "mooncake_master").exists()
        )
        self._flags = flags
        self.port = free_port()
        self.metrics_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def url(self, **settings: object) -> str:
        """The address of its pool, with a small segment if nothing else is said."""
        settings = {
            "segment": "64MiB",
            "metrics_port": self.metrics_port,
            "rpc_timeout": 1,
        } | settings
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        return f"mooncake://{HOST}:{self.port}?{query}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self._process is None
        self._process = subprocess.Popen(
            [
                self._program,
                f"--rpc_port={self.port}",
                f"--metrics_port={self.metrics_port}",
                f"--rpc_address={HOST}",
                f"--metrics_host={HOST}",
                *self._flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + _PATIENCE
        while not master_answers(HOST, self.port, 0.5):
            assert self._process.poll() is None, "mooncake_master ended at once"
            assert time.monotonic() < until, "mooncake_master does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGSTOP: it stays, and answers nobody from now on.

        The signal reaches its threads by and by; the last of them is waited for.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def cont(self) -> None:
        """SIGCONT: it goes on as if nothing had been."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still in the ``with`` block."""
        self.stop()
        try:
            yield
        finally:
            self.cont()

    def kill(self) -> None:
        """SIGKILL: it is gone, and all it knew."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Kill it and start it at once, on the same ports."""
        self.kill()
        self.start()


def make_master(*flags: str) -> Master:
    """A master, not yet started; skips the test where Mooncake cannot run."""
    try:
        return Master(*flags)
    except MissingMooncakeError as error:
        import pytest

        pytest.skip(str(error))


class BlackHole:
    """Takes connections and never says a word.

    :param port: where; 0 for a free one
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.socket()
        # A master that has just been killed leaves connections behind.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, port))
        self._socket.listen(16)
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the port, and hang up on whoever waits."""
        self._socket.close()
