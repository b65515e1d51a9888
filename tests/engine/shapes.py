"""The eight shapes of an engine: hook order, scheduling, and where the worker lives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine.config import HookOrder

__all__ = ["INLINE_SHAPES", "SCHEDULES", "SHAPES", "Shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to run an engine; ``options`` are keyword arguments of ``Engine``."""

    hook_order: HookOrder
    async_scheduling: bool
    worker: Literal["inline", "process"]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "hook_order": self.hook_order,
            "async_scheduling": self.async_scheduling,
            "worker": self.worker,
        }

    def __str__(self) -> str:
        schedule = "async" if self.async_scheduling else "sync"
        return f"{self.hook_order}-{schedule}-{self.worker}"


_ORDERS: tuple[HookOrder, ...] = ("v1", "v2")

INLINE_SHAPES = [
    Shape(hook_order=order, async_scheduling=asynchronous, worker="inline")
    for order, asynchronous in product(_ORDERS, (False, True))
]
SCHEDULES = INLINE_SHAPES
SHAPES = INLINE_SHAPES + [
    Shape(
        hook_order=shape.hook_order,
        async_scheduling=shape.async_scheduling,
        worker="process",
    )
    for shape in INLINE_SHAPES
]
