"""What the harness can say about a connector, one class for each kind of fault.

The self-test asserts on these classes, so that a planted bug counts as seen only when
it was seen for the right reason. They cross a process border: each is built from plain
values, which pickle keeps.
"""

from __future__ import annotations

__all__ = [
    "HarnessError",
    "LeakError",
    "ProtocolError",
    "StallError",
    "WorkerDiedError",
    "WrongBytesError",
    "WrongOutputError",
]


class HarnessError(AssertionError):
    """Something that a correct connector never brings about."""


class WrongBytesError(HarnessError):
    """A slot that the engine believes computed holds other bytes."""

    def __init__(
        self, request_id: str, layer: str, block: int, position: int, found: str
    ) -> None:
        super().__init__(request_id, layer, block, position, found)
        self.request_id = request_id
        self.layer = layer
        self.block = block
        self.position = position
        self.found = found

    def __str__(self) -> str:
        return (
            f"request {self.request_id}: {self.layer}, block {self.block}, position "
            f"{self.position} should hold the bytes of its token prefix, but holds "
            f"{self.found}"
        )


class WrongOutputError(HarnessError):
    """A request's tokens differ from what its prompt determines."""


class ProtocolError(HarnessError):
    """The connector broke a rule of vLLM's hooks (or of akv's rounding)."""


class StallError(HarnessError):
    """The engine steps on and nothing moves, or it never becomes quiet."""


class LeakError(HarnessError):
    """Blocks, references, requests or the connector's own counters are left over."""


class WorkerDiedError(HarnessError):
    """The worker process ended or hung while a step was with it."""
