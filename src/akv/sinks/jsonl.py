"""Events as JSON lines in a file, complete up to the last line after a crash.

Each line is written with one system call to a file opened for appending, so
that several processes may share the file and a killed one leaves no half
line behind another's.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from akv.core.errors import ConfigError
from akv.core.events import Event, as_dict

__all__ = ("JsonLines",)


class JsonLines:
    """Appends every event to ``path``, with the process and role it comes from."""

    def __init__(self, path: str, *, role: str) -> None:
        self._common = {"role": role, "pid": os.getpid()}
        self._lock = threading.Lock()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise ConfigError(
                "log_events", path, f"cannot be written: {error.strerror}"
            ) from error

    def on(self, event: Event) -> None:
        """Append one line."""
        line = json.dumps(as_dict(event) | self._common, separators=(",", ":"))
        with self._lock:
            if self._file is not None:
                os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; later events are dropped. Twice is no error."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)
