"""The errors of akv: one tree, raised by every floor, importing nothing.

Each class builds its message from typed arguments, so that a caller can read
the fields and a person can read the sentence: what was wrong, where, and what
to do next. Nothing foreign (lmdb, OS, torch) leaves akv unmapped.
"""

from __future__ import annotations

__all__ = (
    "AkvError",
    "ConfigError",
    "DeadlineError",
    "LayoutError",
    "PlanError",
    "SessionClosedError",
    "StoreCorruptError",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "WrongThreadError",
)


class AkvError(Exception):
    """Base of every error that akv raises."""


class ConfigError(AkvError, ValueError):
    """A setting has a name or value that akv cannot use.

    :param field: the setting, as the user writes it
    :param value: what was given
    :param fix: a sentence that says what to write instead
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field = field
        self.value = value
        self.fix = fix
        super().__init__(f"{field}={value!r}: {fix}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.fix)


class LayoutError(AkvError, ValueError):
    """A KV cache has a shape, stride or type that akv does not understand.

    Raised when memory is registered, before any byte is moved.
    """

    def __init__(self, layer: str, seen: str, known: str) -> None:
        self.layer = layer
        self.seen = seen
        self.known = known
        super().__init__(f"KV cache of {layer!r} is {seen}; akv knows {known}")

    def __reduce__(self) -> tuple[type[LayoutError], tuple[str, str, str]]:
        return type(self), (self.layer, self.seen, self.known)


class PlanError(AkvError, ValueError):
    """A spec does not fit the geometry it is to be planned for."""


class StoreError(AkvError):
    """A store could not do what it was asked; no key was served wrong."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, or has no room to be opened at all."""


class StoreMismatchError(StoreError):
    """What lies at the store's address was made for other settings.

    Nothing there is touched: the person decides whether to use another
    address, the old settings, or to remove it.
    """


class StoreCorruptError(StoreError):
    """The store's own records contradict each other; nothing is served."""


class DeadlineError(AkvError, TimeoutError):
    """A wait ended at its deadline. The work may still be running, fenced."""


class SessionClosedError(AkvError):
    """The session is closing or closed and takes no further work."""


class WrongThreadError(AkvError):
    """A blocking call was made where it would stop the loop it waits for."""


def sentence(error: BaseException) -> str:
    """``error`` as a reason: akv's own say all, others need their type."""
    text = str(error)
    return text if isinstance(error, AkvError) else f"{type(error).__name__}: {text}"
