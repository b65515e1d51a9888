"""Events as structured log lines, in a host that logs however it likes.

The host configures, akv only emits: structlog renders into the standard
library's loggers, so that levels, handlers and formats are the host's, and
nothing is printed unless the host wants it. What a person must know without
asking (which store, why there is none, a load that failed) is above debug.

While a session works for a request, ``request_id`` is bound as one of
structlog's context variables. So a line about what has no request of its own,
as memory in quarantine, still says whose work brought it about; and what a
host has bound itself is in akv's lines too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog

from akv.core.events import (
    BreakerClosed,
    BreakerOpened,
    CacheReset,
    Event,
    LoadFailed,
    LookupFailed,
    MemoryQuarantined,
    QuarantineFull,
    SaveDropped,
    SavesResumed,
    SavesShed,
    SessionClosed,
    StoreOpened,
    StoreUnavailable,
    as_dict,
)

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ("LogSink",)

_LEVELS: dict[type[Event], int] = {
    StoreOpened: logging.INFO,
    BreakerOpened: logging.WARNING,
    BreakerClosed: logging.INFO,
    CacheReset: logging.INFO,
    StoreUnavailable: logging.WARNING,
    LoadFailed: logging.WARNING,
    LookupFailed: logging.WARNING,
    MemoryQuarantined: logging.WARNING,
    QuarantineFull: logging.WARNING,
    SavesShed: logging.WARNING,
    SavesResumed: logging.INFO,
    SaveDropped: logging.INFO,
}


_TAKEN = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", (), None)) | {"message": 0, "asctime": 0}
)
"""Names of a log record's own; the standard library refuses them as extras."""


class LogSink:
    """Writes events to a standard logger through structlog.

    Nothing is configured, neither structlog nor the standard library; a
    logger without handlers gets one that does nothing, as libraries do.

    :param role: bound to every line
    :param logger: name of the standard logger, whose level decides
    """

    def __init__(self, *, role: str, logger: str = "akv") -> None:
        self._stdlib = logging.getLogger(logger)
        if not self._stdlib.handlers:
            self._stdlib.addHandler(logging.NullHandler())
        self._log: Any = structlog.wrap_logger(
            self._stdlib,
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                _render,
            ],
        ).bind(role=role)

    def on(self, event: Event) -> None:
        """Log ``event`` if its level is wanted."""
        level = _LEVELS.get(type(event), logging.DEBUG)
        if isinstance(event, SessionClosed) and event.hung_calls:
            level = logging.WARNING
        if self._stdlib.isEnabledFor(level):
            fields = as_dict(event)
            name = fields.pop("event")
            fields.pop("t")
            self._log.log(level, name, **fields)


def _render(
    logger: object,  # noqa: ARG001
    method: str,  # noqa: ARG001
    fields: MutableMapping[str, Any],
) -> tuple[tuple[str], dict[str, Any]]:
    """Fields for hosts that format them, and in the text for those that do not."""
    name = str(fields.pop("event"))
    text = " ".join(f"{key}={value}" for key, value in fields.items())
    extra = {f"{k}_" if k in _TAKEN else k: value for k, value in fields.items()}
    return (f"{name} {text}",), {"extra": extra}
