"""Event logs as records, from one file or several, in the order of time.

A log may end in half a line (its process was killed, its disk was full), may
have gone on in a second file, may come from another version of akv, and several
processes may share it or have one each. What cannot be read is counted and never
stops the reading.
"""

from __future__ import annotations

import difflib
import json
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akv.core.errors import AkvError
from akv.core.events import Event, SessionOpened, from_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import BinaryIO

__all__ = ("Log", "LogError", "Record", "Tail", "read_logs")

_SAME_CLOCK = 1.0
"""Seconds by which the time of day may have been corrected while a machine ran."""

_MARK = b'{"event":'


class LogError(AkvError):
    """A log that cannot be read, or that does not have what was asked for."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event and where it comes from; ``at`` is its time, in seconds.

    ``at`` is the time of day where the log tells it (``akv.session.opened``), else
    the machine's monotonic clock: records of one log can be compared.
    """

    at: float
    event: Event
    role: str
    pid: int
    rank: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Records in the order of time, and what could not be read."""

    records: tuple[Record, ...]
    unreadable: int = 0
    """Lines that are no JSON object: at most the last one of a killed process."""
    unknown: int = 0
    """Events that this version of akv does not know."""
    time_of_day: bool = True
    """Whether ``at`` is the time of day in every record."""


class Tail:
    """A file that grows: each :meth:`read` gives the records that are new.

    Goes on when the file becomes ``PATH.1`` and another one begins. Half a line
    waits for its other half. Used by one thread.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._half = b""
        self.unreadable = 0
        self.unknown = 0

    def read(self) -> list[Record]:
        """What was appended since the last call; nothing if there is no file.

        :raises LogError: the file cannot be opened
        """
        records: list[Record] = []
        if self._file is None:
            self._file = self._open()
        while self._file is not None:
            self._take(self._file.read(), records)
            if not self._has_rolled(self._file):
                break
            # Whatever came between the two looks.
            self._take(self._file.read(), records)
            self._file.close()
            self.end()
            self._file = self._open()
        return records

    def end(self) -> None:
        """Take half a line that is left for lost."""
        self.unreadable += bool(self._half.strip())
        self._half = b""

    def close(self) -> None:
        """Close the file. Twice is no error."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LogError(f"{self._path} cannot be read: {error.strerror}") from error

    def _has_rolled(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _take(self, data: bytes, records: list[Record]) -> None:
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            if not line.strip():
                continue
            values = _values(line)
            if values is None:
                self.unreadable += 1
                continue
            record = _record(values, str(self._path))
            if record is None:
                self.unknown += 1
            else:
                records.append(record)


def read_logs(paths: Sequence[str | Path]) -> Log:
    """Read these files, and what each of them was before it was full.

    :raises LogError: a file is not there (with the nearest names), cannot be read,
        or has no line of an event log
    """
    records: list[Record] = []
    unreadable = unknown = 0
    wanted = {Path(path).resolve(): Path(path) for path in paths}
    for path in wanted.values():
        if not path.is_file():
            raise LogError(_no_file(path))
        count = len(records)
        for part in (Path(f"{path}.1"), path):
            if part != path and (part.resolve() in wanted or not part.is_file()):
                continue
            tail = Tail(part)
            records += tail.read()
            tail.end()
            tail.close()
            unreadable += tail.unreadable
            unknown += tail.unknown
        if len(records) == count and (unreadable or unknown):
            raise LogError(
                f"{path} is no event log: none of its lines is an event of akv. "
                "Give the file that the setting log_events names"
            )
    records, known = _on_one_clock(records)
    return Log(
        records=tuple(sorted(records, key=lambda record: record.at)),
        unreadable=unreadable,
        unknown=unknown,
        time_of_day=known,
    )


def _values(line: bytes) -> dict[str, Any] | None:
    """The object of a line, which another process's half line may precede."""
    start = line.rfind(_MARK)
    for text in (line, line[start:] if start > 0 else b""):
        try:
            values = json.loads(text)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("event"), str):
            return values
    return None


def _record(values: dict[str, Any], source: str) -> Record | None:
    event = from_dict(values)
    if event is None:
        return None
    try:
        return Record(
            at=float(event.t),
            event=event,
            role=str(values.get("role", "")),
            pid=int(values.get("pid", 0)),
            rank=int(values.get("rank", 0)),
            source=source,
        )
    except (TypeError, ValueError):
        return None


def _on_one_clock(records: Iterable[Record]) -> tuple[list[Record], bool]:
    """Turn monotonic times into times of day, by what each process once told.

    Processes of one boot of one machine share the monotonic clock, and are kept
    on it to the microsecond: they get one offset.
    """
    records = list(records)
    told: dict[tuple[str, int], list[float]] = {}
    for record in records:
        event = record.event
        if isinstance(event, SessionOpened) and event.unix_seconds:
            place = (record.source.removesuffix(".1"), record.pid)
            told.setdefault(place, []).append(event.unix_seconds - event.t)
    clocks: list[float] = []
    offsets: dict[tuple[str, int], float] = {}
    for place, differences in told.items():
        difference = statistics.median(differences)
        near = [one for one in clocks if abs(one - difference) < _SAME_CLOCK]
        if not near:
            clocks.append(difference)
        offsets[place] = near[0] if near else difference
    if not offsets:
        return records, False
    moved = []
    known = True
    for record in records:
        place = (record.source.removesuffix(".1"), record.pid)
        offset = offsets.get(place)
        if offset is None:
            if len(clocks) > 1:
                known = False
            offset = clocks[0]
        moved.append(replace(record, at=record.event.t + offset))
    return moved, known


def _no_file(path: Path) -> str:
    folder = path.parent
    names = []
    if folder.is_dir():
        files = [one.name for one in folder.iterdir() if one.is_file()]
        names = difflib.get_close_matches(path.name, files, n=3, cutoff=0.4)
        names = names or sorted(name for name in files if name.endswith(".jsonl"))[:3]
    if names:
        hint = f"near it are {', '.join(str(folder / name) for name in names)}"
    else:
        hint = "give the file that the setting log_events names"
    return f"there is no file {path}; {hint}"
