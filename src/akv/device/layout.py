"""From tensors to a geometry: what akv understands of a KV cache's layout.

A layer's cache is looked at as ``[blocks, heads, tokens, content]`` in
whatever order memory has it. akv needs the bytes of one block of one layer
to be one run, or one for each head; padding between blocks and other layers'
pages between them are fine. Anything else is refused here, with what was
seen, before a byte is moved. Called once, on the engine's thread, when the
memory is registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
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
    "kernel blocks a block, in which the bytes of one block, or of each head of it, "
    "are one run"
)


def build_geometry(
    layers: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    hash_unit: int,
) -> tuple[Geometry, tuple[torch.Tensor, ...]]:
    """The geometry of one group, and the memory that its regions lie in.

    Layers that share one cache are stored once. Where a head's bytes are a run
    of their own it is a region of its own, layer by layer; but where blocks are
    outermost and heads outside of layers (``BHLNC``), head by head, as memory has
    them. The memory is flat views of bytes: the engine owns it.

    :param layers: name and cache of each layer of the group, in order
    :raises LayoutError: a cache that akv does not understand
    """
    regions: list[tuple[int, Region]] = []
    memories: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in layers.items():
        page = _page(name, tensor, num_blocks)
        storage = tensor.untyped_storage()
        number = numbers.get(storage.data_ptr())
        if number is None:
            number = numbers[storage.data_ptr()] = len(memories)
            flat = torch.tensor([], dtype=torch.uint8, device=tensor.device)
            memories.append(flat.set_(storage))
        if (number, page.offset) in seen:
            continue
        seen.add((number, page.offset))
        regions += [
            (
                head if page.heads_in_block else 0,
                Region(
                    name=name if page.heads == 1 else f"{name}, head {head}",
                    memory=number,
                    offset=page.offset + head * page.head_stride,
                    stride=page.stride,
                    size=page.size,
                ),
            )
            for head in range(page.heads)
        ]
    regions.sort(key=itemgetter(0))
    group = Group(block_size=block_size, regions=tuple(region for _, region in regions))
    geometry = Geometry(num_blocks=num_blocks, hash_unit=hash_unit, groups=(group,))
    return geometry, tuple(memories)


def open_device(geometry: Geometry, memory: Sequence[torch.Tensor]) -> Device:
    """The device that moves blocks of this memory."""
    if memory[0].device.type == "cuda":
        return CudaDevice(geometry, memory)
    return HostDevice(geometry, [flat.numpy() for flat in memory])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """Where one layer keeps its blocks, in bytes.

    :ivar offset: of block 0
    :ivar stride: from block to block
    :ivar size: of a run
    :ivar heads: runs of a block; 1 where all heads are one run
    :ivar head_stride: from run to run of one block
    :ivar heads_in_block: whether the heads of a block are before the next block
    """

    offset: int
    stride: int
    size: int
    heads: int
    head_stride: int
    heads_in_block: bool


def _page(name: str, tensor: torch.Tensor, num_blocks: int) -> _Page:
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
    block, head = int(tensor.stride()[0]), int(tensor.stride()[1])
    blocks, heads = int(tensor.shape[0]), int(tensor.shape[1])
    kernel_blocks = blocks // num_blocks
    size = _run(tensor, (1, 2, 3))
    if size:
        heads = 1
    else:
        size = _run(tensor, (2, 3))
    # Of several runs each is either before the next block or behind the last one.
    in_block = block >= (heads - 1) * head + size
    behind = head >= (blocks - 1) * block + size
    if (
        not size
        or block < size
        or (kernel_blocks > 1 and block != size)
        or (heads > 1 and (head < size or not (in_block or behind)))
    ):
        raise LayoutError(name, seen, _KNOWN)
    return _Page(
        offset=int(tensor.storage_offset()) * width,
        stride=block * kernel_blocks * width,
        size=size * kernel_blocks * width,
        heads=heads,
        head_stride=head * width,
        heads_in_block=heads > 1 and in_block,
    )


def _run(tensor: torch.Tensor, dims: tuple[int, ...]) -> int:
    """How many elements these dimensions span, if without a gap; else 0."""
    size = 1
    for stride, length in sorted(
        (tensor.stride(dim), tensor.shape[dim]) for dim in dims
    ):
        if length != 1 and stride != size:
            return 0
        size *= int(length)
    return size
