"""Several sinks behind one observer; a sink that fails is named once and left.

Events come from any thread, and nobody who emits one may suffer for what a
sink does with it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from akv.core.events import Event, Observer

__all__ = ("Fanout",)

_log = logging.getLogger("akv")


class Fanout:
    """Hands every event to each of its observers."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def on(self, event: Event) -> None:
        """Hand ``event`` on."""
        for observer in self._observers:
            try:
                observer.on(event)
            except Exception:  # noqa: BLE001
                left = tuple(o for o in self._observers if o is not observer)
                self._observers = left
                _log.exception("%r failed and gets no further events", observer)
