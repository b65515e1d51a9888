"""Which way a load's or a save's bytes take: straight, or by way of akv's staging.

Straight is one copy instead of two, but then the store's own call touches the
engine's blocks, and nobody may use them before it has ended. So it is for
stores whose calls cannot hang, as one in shared memory; a person may say
otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from akv.core.errors import ConfigError
from akv.core.plan import transfer_windows
from akv.device.base import ReachableMemory
from akv.store.base import MovesDirectly
from akv.store.late import LateStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from akv.core.buffers import ScatteredBuffer
    from akv.core.geometry import Geometry
    from akv.core.plan import Window
    from akv.core.spec import Span
    from akv.device.base import Device
    from akv.store.base import BlockStore

__all__ = ("Route",)

_LEAST_DIRECT, _MOST_DIRECT = 4 << 20, 32 << 20
"""Bytes of a window that goes straight: one that is under way is waited for."""


class Route:
    """The way of one session's loads and saves.

    :param transfer: ``direct``, ``staged``, or ``auto``: as the store says
    :param staged_bytes: the most bytes of a window by way of staging
    :raises ConfigError: ``direct`` with memory that only the device can reach
    """

    def __init__(
        self,
        store: BlockStore,
        device: Device,
        geometry: Geometry,
        *,
        transfer: str,
        staged_bytes: int,
    ) -> None:
        self._store = store
        self._geometry = geometry
        self._staged_bytes = staged_bytes
        self._transfer = transfer
        self._memory = device if isinstance(device, ReachableMemory) else None
        if transfer == "direct" and self._memory is None:
            raise ConfigError(
                "transfer",
                transfer,
                "the engine's memory is on a device that no store can reach: "
                'write "staged" or "auto"',
            )

    def is_direct(self) -> bool:
        """Whether it is straight; to be asked once for each load and save.

        A store that could not be opened at first may change the answer.
        """
        if self._memory is None or self._transfer == "staged":
            return False
        if self._transfer == "direct":
            return True
        store = self._store
        least = store.direct_from if isinstance(store, MovesDirectly) else None
        return least is not None and self._memory.run_bytes >= least

    def registered(self) -> Sequence[memoryview]:
        """The engine's memory, if the store has to know it from the start."""
        if self._memory is None:
            return ()
        # What a store will say that could not be opened yet is not known.
        unknown = self._transfer == "auto" and isinstance(self._store, LateStore)
        return self._memory.memory if unknown or self.is_direct() else ()

    def windows(self, spans: tuple[Span, ...], *, direct: bool) -> tuple[Window, ...]:
        """Cut a spec for its way.

        By way of staging the cuts depend on where a span begins and on nothing
        else, so that equal prefixes give equal windows.

        :raises PlanError: the spec does not fit the geometry
        """
        most = self._staged_bytes
        if direct:
            sizes = (len(span) * self._geometry.slot_bytes for span in spans)
            most = min(_MOST_DIRECT, max(_LEAST_DIRECT, sum(sizes) // 4))
        return transfer_windows(spans, self._geometry, max_bytes=most)

    def blocks(self, window: Window) -> Sequence[ScatteredBuffer]:
        """The window's blocks as buffers for the store, where it is straight."""
        assert self._memory is not None
        return self._memory.blocks(window)
