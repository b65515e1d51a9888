"""Libraries that only some commands need, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from akv.core.errors import AkvError

__all__ = ("MissingExtraError", "need")


class MissingExtraError(AkvError):
    """A library is not installed; the message has the command that brings it."""


def need(module: str, *, extra: str, what: str) -> Any:
    """Import ``module``, which the extra ``extra`` of akv brings.

    :raises MissingExtraError: it is not installed
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {package}: pip install 'akv-connector[{extra}]'"
        ) from error
