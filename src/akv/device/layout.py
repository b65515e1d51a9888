"""From tensors to a geometry: what akv understands of a KV cache's layout.

A layer's cache is looked at as ``[blocks, heads, tokens, content]`` in
whatever order memory has it. akv needs the bytes of one block of one layer
to be one run; padding between blocks and other layers' pages between them
are fine. Anything else is refused here, with what was seen, before a byte is
moved. Called once, on the engine's thread, when the memory is registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from akv.core.errors import LayoutError
from akv.core.geometry import Geometry, Group, Region
from akv.device.cuda import CudaDevice
from akv.device.host import HostDevice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from akv.device.base import Device

__all__ = ("build_geometry", "open_device")

_KNOWN = (
    "4-dimensional caches [blocks, heads, tokens, content] of a whole number of "
    "kernel blocks a block, in which the bytes of one block are one run"
)


def build_geometry(
    layers: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    hash_unit: int,
) -> tuple[Geometry, tuple[torch.Tensor, ...]]:
    """The geometry of one group, and the memory that its regions lie in.

    Layers that share one cache are stored once. The memory is flat views of
    bytes: the engine owns it.

    :param layers: name and cache of each layer of the group, in order
    :raises LayoutError: a cache that akv does not understand
    """
    regions: list[Region] = []
    memories: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in layers.items():
        offset, stride, size = _page(name, tensor, num_blocks)
        storage = tensor.untyped_storage()
        number = numbers.get(storage.data_ptr())
        if number is None:
            number = numbers[storage.data_ptr()] = len(memories)
            flat = torch.tensor([], dtype=torch.uint8, device=tensor.device)
            memories.append(flat.set_(storage))
        if (number, offset) in seen:
            continue
        seen.add((number, offset))
        regions.append(
            Region(name=name, memory=number, offset=offset, stride=stride, size=size)
        )
    group = Group(block_size=block_size, regions=tuple(regions))
    geometry = Geometry(num_blocks=num_blocks, hash_unit=hash_unit, groups=(group,))
    return geometry, tuple(memories)


def open_device(geometry: Geometry, memory: Sequence[torch.Tensor]) -> Device:
    """The device that moves blocks of this memory."""
    if memory[0].device.type == "cuda":
        return CudaDevice(geometry, memory)
    return HostDevice(geometry, [flat.numpy() for flat in memory])


def _page(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[int, int, int]:
    """Offset of block 0, stride between blocks, size of a block; in bytes."""
    seen = (
        f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, stride "
        f"{tuple(tensor.stride())}, {tensor.dtype}, on {tensor.device}, "
        f"for {num_blocks} blocks"
    )
    if tensor.device.type not in {"cpu", "cuda"}:
        raise LayoutError(name, seen, "memory of the CPU and of CUDA devices")
    if tensor.dim() != 4 or tensor.shape[0] % num_blocks or not tensor.numel():
        raise LayoutError(name, seen, _KNOWN)
    width = tensor.element_size()
    strides = [int(stride) for stride in tensor.stride()]
    kernel_blocks = tensor.shape[0] // num_blocks
    page = 1
    inner = sorted(zip(strides[1:], tensor.shape[1:], strict=True))
    for stride, length in inner:
        if length != 1 and stride != page:
            raise LayoutError(name, seen, _KNOWN)
        page *= length
    if strides[0] < page or (kernel_blocks > 1 and strides[0] != page):
        raise LayoutError(name, seen, _KNOWN)
    return (
        int(tensor.storage_offset()) * width,
        strides[0] * kernel_blocks * width,
        page * kernel_blocks * width,
    )
