"""The events of akv as rows of a table, read from their classes.

Sphinx draws the table of `events.md` from it, and a test compares it with the module.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

from akv.core import events


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event: its dotted name, its own fields, and what it says."""

    name: str
    fields: tuple[str, ...]
    doc: str


def event_rows() -> list[EventRow]:
    """All events, in the order in which the module has them."""
    found = [
        kind
        for kind in vars(events).values()
        if inspect.isclass(kind) and issubclass(kind, events.Event)
    ]
    return [
        EventRow(
            name=kind.name,
            fields=tuple(item.name for item in fields(kind) if item.name != "t"),
            doc=" ".join((inspect.getdoc(kind) or "").split()),
        )
        for kind in found
        if kind is not events.Event
    ]
