"""Memory of a CUDA device: blocks are moved on streams of akv's own.

Each copy runs in one of akv's threads, which waits for its own event, so the
interpreter's lock is free meanwhile and nothing polls. Loads and saves have
streams of their own with the lowest priority, so that neither waits for the
other and both give way to the engine's kernels. Order against the engine:

* a save's copy waits for the mark, since the blocks are written by the
  forward that the mark follows;
* a load's copy waits for it too, since the engine zeroes new blocks on its
  own stream, and a kernel may still read what they held before.

Blocks are gathered into one contiguous buffer on the device, a kernel for each
series of runs (see ``Group.series``), and cross the bus in one copy a window,
pinned memory at the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from akv.core.geometry import Geometry, Series
    from akv.core.plan import Window
    from akv.device.base import Staged

__all__ = ("CudaDevice",)

_LOWEST_PRIORITY = 0
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CudaDevice:
    """Copies between pinned staging and the memory of one CUDA device.

    The engine owns ``memory`` (flat byte tensors, in the order of the
    geometry's memory numbers) and must keep it until the session is closed.
    """

    def __init__(self, geometry: Geometry, memory: Sequence[torch.Tensor]) -> None:
        self._geometry = geometry
        self._where = memory[0].device
        self._pinned: list[torch.Tensor] = []
        self._on_gpu = self._where.type == "cuda"
        if self._on_gpu:
            self._loads = torch.cuda.Stream(self._where, priority=_LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
            self._saves = torch.cuda.Stream(self._where, priority=_LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
        self._copies = tuple(
            tuple(
                (series, self._view(memory[series.memory], series, group.object_bytes))
                for series in group.series
            )
            for group in geometry.groups
        )

    def _view(
        self, memory: torch.Tensor, series: Series, object_bytes: int
    ) -> torch.Tensor:
        """The engine's memory as ``[num_blocks, runs, size]``, in words."""
        parts = (
            memory.data_ptr(),
            series.offset,
            series.stride,
            series.distance,
            series.size,
            series.first,
            object_bytes,
        )
        for word in _WORDS:
            width = word.itemsize
            if memory.numel() % width or any(part % width for part in parts):
                continue
            return memory.view(word).as_strided(
                (self._geometry.num_blocks, series.count, series.size // width),
                (series.stride // width, series.distance // width, 1),
                series.offset // width,
            )
        raise AssertionError("a byte divides everything")

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory, registered with the device once."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._pinned.append(tensor)
        return tensor.numpy()

    def mark(self) -> Any:
        """An event behind everything that the engine has launched so far."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._where))
        return event

    def gather(self, window: Window, staged: Staged, mark: Any) -> None:
        """Copy the window's blocks into ``staged``, behind ``mark``."""
        if not self._on_gpu:
            self._gather(window, staged)
            return
        with torch.cuda.stream(self._saves):
            if mark is not None:
                self._saves.wait_event(mark)
            self._gather(window, staged)
            _wait(self._saves)

    def scatter(
        self,
        window: Window,
        staged: Staged,
        rows: npt.NDArray[np.intp] | None,
        mark: Any,
    ) -> None:
        """Copy ``staged`` into the window's blocks, behind ``mark``."""
        if not self._on_gpu:
            self._scatter(window, staged, rows)
            return
        with torch.cuda.stream(self._loads):
            if mark is not None:
                self._loads.wait_event(mark)
            self._scatter(window, staged, rows)
            _wait(self._loads)

    def _gather(self, window: Window, staged: Staged) -> None:
        ids = torch.tensor(window.block_ids, device=self._where)
        whole = torch.empty(staged.shape, dtype=torch.uint8, device=self._where)
        for part, blocks in self._pairs(window, whole):
            part.copy_(blocks.index_select(0, ids))
        torch.from_numpy(staged).copy_(whole, non_blocking=True)

    def _scatter(
        self, window: Window, staged: Staged, rows: npt.NDArray[np.intp] | None
    ) -> None:
        ids = torch.tensor(window.block_ids, device=self._where)
        whole = torch.from_numpy(staged).to(self._where, non_blocking=True)
        if rows is not None:
            chosen = torch.from_numpy(rows).to(self._where)
            ids, whole = ids[chosen], whole[chosen]
        for part, blocks in self._pairs(window, whole):
            blocks.index_copy_(0, ids, part)

    def _pairs(
        self, window: Window, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same runs of ``whole``, by object, and of the engine, by block."""
        for series, blocks in self._copies[window.group]:
            part = whole[:, series.first : series.last].view(blocks.dtype)
            yield part.view(len(whole), *blocks.shape[1:]), blocks


def _wait(stream: torch.cuda.Stream) -> None:
    """Wait for what was put on ``stream`` just now, the lock being free."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
