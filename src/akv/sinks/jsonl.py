"""Events as JSON lines in a file, complete up to the last line after a crash.

Each line is one system call on a file opened for appending, so that several
processes may share the file and a killed one leaves no half line behind
another's. The file is bounded: when it is full it becomes ``PATH.1``, in place
of the one before, and a new one begins with what every reader has to know:
which sessions are open, on which store, in which key space.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from pathlib import Path

from akv.core.errors import ConfigError
from akv.core.events import (
    BreakerClosed,
    BreakerOpened,
    Event,
    KeySpaceUsed,
    SessionClosed,
    SessionOpened,
    StoreOpened,
    as_dict,
)

__all__ = ("MOST_BYTES", "JsonLines", "rolled")

_log = logging.getLogger("akv")

MOST_BYTES = 64 << 20
"""Bytes of a file before the next one begins: about 40,000 requests."""

_LASTING = (SessionOpened, StoreOpened, KeySpaceUsed, BreakerOpened)
"""What holds until it is said anew."""


def rolled(path: str | Path) -> Path:
    """Where the lines before those in ``path`` are."""
    return Path(f"{path}.1")


class JsonLines:
    """Appends every event to ``path``, with the process and role it comes from.

    Any thread; takes a lock for the time of one ``write``.

    :param rank: number of the process among those of its role
    :param most_bytes: the file becomes ``PATH.1`` when it has so many; together
        the two have at most twice as many and a line for each process
    :raises ConfigError: ``path`` cannot be written
    """

    def __init__(
        self, path: str, *, role: str, rank: int = 0, most_bytes: int = MOST_BYTES
    ) -> None:
        self._path = Path(path)
        self._most_bytes = most_bytes
        self._common = {"role": role, "rank": rank, "pid": os.getpid()}
        self._lasting: dict[type[Event], bytes] = {}
        self._torn = False
        self._lost = False
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = self._open()
        except OSError as error:
            raise ConfigError(
                "log_events", path, f"cannot be written: {error.strerror}"
            ) from error

    def on(self, event: Event) -> None:
        """Append one line."""
        line = _line(as_dict(event) | self._common)
        with self._lock:
            if self._file is None:
                return
            if isinstance(event, _LASTING):
                self._lasting[type(event)] = line
            elif isinstance(event, BreakerClosed):
                self._lasting.pop(BreakerOpened, None)
            elif isinstance(event, SessionClosed):
                self._lasting.clear()
            if os.fstat(self._file).st_size >= self._most_bytes:
                self._roll(self._file)
            self._write(line)

    def close(self) -> None:
        """Close the file; later events are dropped. Twice is no error."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._path, flags, 0o644)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if self._torn:
            line = b"\n" + line
        # On a full disk a part of a line may be written; the next one stands alone.
        try:
            self._torn = os.write(self._file, line) < len(line)
        except OSError as error:
            if not self._lost:
                _log.warning(
                    "%s cannot be written (%s): events are left out until it can",
                    self._path,
                    error.strerror,
                )
            self._lost = True
        else:
            self._lost = False

    def _roll(self, full: int) -> None:
        """Go on in a new file, or in the one that another process has begun."""
        try:
            # Let go of when the file is closed. Whoever has it is rolling: this
            # line goes into the full file then, and the next one comes here again.
            fcntl.flock(full, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if _is_at(full, self._path):
            self._path.replace(rolled(self._path))
        self._file, self._torn = self._open(), False
        os.close(full)
        for line in self._lasting.values():
            self._write(line)


def _line(values: dict[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
