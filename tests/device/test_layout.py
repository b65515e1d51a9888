"""What akv understands of a KV cache's memory, and what it refuses.

The layouts are vLLM 0.32's own, made by its own functions; the bytes that a device
moves are compared with ``akv.core.plan.moves``, which spells every copy out.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from akv.core.errors import LayoutError
from akv.core.geometry import Geometry, Group, Region
from akv.core.plan import Window, moves
from akv.device.host import HostDevice
from akv.device.layout import build_geometry, open_device

LAYERS = 3
BLOCKS = 6
BLOCK = 16
HEADS = 2
LAYOUTS = list(KVCacheLayout)
PADDED = [layout for layout in KVCacheLayout if layout.is_block_compact]
BY_HEAD = [layout for layout in KVCacheLayout if not layout.is_block_compact]


def attention(dtype: torch.dtype = torch.float32, **options: Any) -> FullAttentionSpec:
    """Two heads of four numbers for K and for V."""
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=4, dtype=dtype, **options
    )


def caches(
    spec: Any,
    layout: KVCacheLayout,
    *,
    offset: int = 0,
    kernel_block: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Memory with numbers that all differ, and vLLM's views of each layer in it."""
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"layer {number}" for number in range(LAYERS)]
    size = LAYERS * BLOCKS * spec.page_size_bytes
    raw = torch.from_numpy(
        np.random.default_rng(7).integers(0, 256, offset + size, dtype=np.uint8)
    ).view(torch.int8)
    tensor = KVCacheTensor(
        size=size,
        layers=names,
        offset=offset,
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block)
    return raw, dict(zip(names, views, strict=True))


def built(layers: dict[str, torch.Tensor]) -> tuple[Geometry, tuple[torch.Tensor, ...]]:
    """The geometry of these layers, with this file's numbers."""
    return build_geometry(layers, num_blocks=BLOCKS, block_size=BLOCK, hash_unit=BLOCK)


def page(view: torch.Tensor, block: int) -> npt.NDArray[np.uint8]:
    """All bytes of a block of one layer, sorted: whatever order memory has them in."""
    kernel_blocks = view.shape[0] // BLOCKS
    part = view[block * kernel_blocks : (block + 1) * kernel_blocks].contiguous()
    return np.sort(part.view(torch.uint8).numpy().ravel())


def window_of(geometry: Geometry, ids: tuple[int, ...]) -> Window:
    """A window of these blocks."""
    return Window(
        first=0,
        group=0,
        hashes=tuple(b"%d" % block for block in ids),
        block_ids=ids,
        object_bytes=geometry.groups[0].object_bytes,
    )


def gathered(layers: dict[str, torch.Tensor], block: int) -> npt.NDArray[np.uint8]:
    """The object of one block, as a device makes it."""
    geometry, memory = built(layers)
    device = open_device(geometry, memory)
    size = geometry.groups[0].object_bytes
    staged = device.allocate(size).reshape(1, size)
    device.gather(window_of(geometry, (block,)), staged, device.mark())
    value: npt.NDArray[np.uint8] = staged[0]
    return value


def check_every_block(spec: Any, layers: dict[str, torch.Tensor]) -> None:
    """Each block's object is its layers' pages, run after run, and no more."""
    geometry, _ = built(layers)
    names = [region.name.split(",")[0] for region in geometry.groups[0].regions]
    assert set(names) == set(layers)
    width = geometry.groups[0].object_bytes // len(names)
    assert width * len(names) == spec.unpadded_page_size_bytes * len(layers)
    for block in range(BLOCKS):
        runs = gathered(layers, block).reshape(len(names), width)
        for name, view in layers.items():
            mine = [run for run, of in zip(runs, names, strict=True) if of == name]
            assert np.array_equal(np.sort(np.concatenate(mine)), page(view, block))


def test_the_layouts_of_this_vllm_are_those_that_were_looked_at() -> None:
    """A layout that is new here has to be thought about before it is served."""
    assert {layout.name for layout in PADDED} == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
    assert {layout.name for layout in BY_HEAD} == {"LHBNC", "BHLNC"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.name))
def test_blocks_of_every_layout_are_whole_objects(
    layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    """Layers or blocks outermost, heads or tokens inside, and each width of number."""
    spec = attention(dtype)
    _, layers = caches(spec, layout)
    check_every_block(spec, layers)


@pytest.mark.parametrize("layout", PADDED, ids=lambda layout: str(layout.name))
def test_padding_behind_a_page_is_neither_stored_nor_written(
    layout: KVCacheLayout,
) -> None:
    """C6: stride 1536, live 1024: the stride is no size."""
    spec = attention(page_size_padded=1536)
    raw, layers = caches(spec, layout)
    check_every_block(spec, layers)
    geometry, memory = built(layers)
    device = open_device(geometry, memory)
    before = raw.numpy().copy()
    size = geometry.groups[0].object_bytes
    device.scatter(
        window_of(geometry, (3,)),
        np.zeros((1, size), dtype=np.uint8),
        None,
        device.mark(),
    )
    assert not any(page(view, 3).any() for view in layers.values())
    # All that changed is what the views can see of block 3.
    after = raw.numpy()
    assert np.count_nonzero(after != before) <= size
    for view in layers.values():
        view[3] = 0
    assert np.array_equal(raw.numpy(), after)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.name))
def test_memory_that_begins_inside_of_an_allocation_is_found(
    layout: KVCacheLayout,
) -> None:
    """C6: an offset of 512 bytes, as when several groups share one allocation."""
    spec = attention()
    _, layers = caches(spec, layout, offset=512)
    geometry, _ = built(layers)
    assert min(region.offset for region in geometry.groups[0].regions) == 512
    check_every_block(spec, layers)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_a_block_of_several_kernel_blocks_is_one_object(layout: KVCacheLayout) -> None:
    """The backend's blocks are smaller than the scheduler's: 16 tokens as 4 times 4."""
    spec = attention()
    _, layers = caches(spec, layout, kernel_block=4)
    assert next(iter(layers.values())).shape[0] == 4 * BLOCKS
    check_every_block(spec, layers)


def test_one_vector_for_all_heads_is_understood() -> None:
    """MLA: one head, odd content."""
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=9, dtype=torch.bfloat16
    )
    for layout in LAYOUTS:
        _, layers = caches(spec, layout)
        check_every_block(spec, layers)


@pytest.mark.parametrize("layout", BY_HEAD, ids=lambda layout: str(layout.name))
def test_heads_outside_of_blocks_are_runs_of_their_own(layout: KVCacheLayout) -> None:
    """In the order in which memory has those of one block."""
    _, layers = caches(attention(), layout)
    geometry, _ = built(layers)
    regions = geometry.groups[0].regions
    assert len(regions) == LAYERS * HEADS
    assert len({region.name for region in regions}) == len(regions)
    assert [region.offset for region in regions] == sorted(
        region.offset for region in regions
    )


def test_where_blocks_are_outermost_a_block_is_one_run() -> None:
    """So that a store, or a copy to a device, has one piece for each block."""
    for layout in LAYOUTS:
        _, layers = caches(attention(), layout)
        geometry, memory = built(layers)
        device = open_device(geometry, memory)
        assert isinstance(device, HostDevice)
        (block,) = device.blocks(window_of(geometry, (3,)))
        assert (len(block.runs) == 1) is layout.is_block_outermost


PLAIN = torch.zeros(BLOCKS * 1024)
ODD: dict[str, torch.Tensor] = {
    "three dimensions": PLAIN.view(BLOCKS, 32, 32),
    "five dimensions": PLAIN.view(BLOCKS, 2, 4, 4, 32),
    "blocks that do not divide": PLAIN[: 5 * 1024].view(5, 2, 16, 32),
    "a gap inside of a block": PLAIN.view(BLOCKS, 2, 16, 32)[:, :, :, :16],
    "tokens with a step": PLAIN.view(BLOCKS, 2, 16, 32)[:, :, ::2],
    "tokens outside of blocks": PLAIN.view(2, 16, BLOCKS, 32).permute(2, 0, 1, 3),
    "heads that overlap": PLAIN.as_strided((BLOCKS, 2, 4, 4), (32, 8, 4, 1)),
    "heads within other blocks": PLAIN.as_strided((BLOCKS, 2, 4, 4), (16, 32, 4, 1)),
    "blocks that overlap": PLAIN.as_strided((BLOCKS, 2, 4, 4), (16, 16, 4, 1)),
    "the same bytes for every block": PLAIN[:512]
    .view(1, 2, 16, 16)
    .expand(6, 2, 16, 16),
    "kernel blocks with padding": PLAIN.as_strided((12, 2, 4, 4), (64, 16, 4, 1)),
    "no bytes at all": torch.zeros(BLOCKS, 2, 0, 8),
    "memory that is nowhere": torch.zeros(BLOCKS, 2, 16, 8, device="meta"),
}


@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_memory_in_which_a_block_is_no_run_of_bytes_is_refused(
    tensor: torch.Tensor,
) -> None:
    """K11: before a byte is moved, naming the layer, what was seen and what works."""
    with pytest.raises(LayoutError, match="'odd' is Tensor of shape") as caught:
        built({"odd": tensor})
    for word in (
        f"shape {tuple(tensor.shape)}",
        f"stride {tuple(tensor.stride())}",
        "torch.float32",
        f"for {BLOCKS} blocks",
    ):
        assert word in str(caught.value)


def test_layers_that_share_a_cache_are_stored_once() -> None:
    """Cross-layer sharing: the second name adds no bytes."""
    _, layers = caches(attention(), KVCacheLayout.LBHNC)
    shared = dict(layers) | {"layer 9": layers["layer 1"]}
    alone, with_shared = built(layers)[0], built(shared)[0]
    assert alone == with_shared


def test_layers_with_an_allocation_each_are_parts_of_one_object() -> None:
    """As vLLM allocates them when no group packs its layers."""
    spec = attention()
    layers: dict[str, torch.Tensor] = {}
    for number in range(LAYERS):
        _, own = caches(spec, KVCacheLayout.LBHNC)
        layers[f"layer {number}"] = own[f"layer {number}"].clone()
    geometry, memory = built(layers)
    assert len(memory) == LAYERS
    assert [region.memory for region in geometry.groups[0].regions] == [0, 1, 2]
    check_every_block(spec, layers)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, list[int]]:
    """Regions that do not overlap, of odd and even sizes; how large memories are."""
    num_blocks = draw(st.integers(1, 9))
    ends = [0] * draw(st.integers(1, 3))
    regions = []
    for number in range(draw(st.integers(1, 5))):
        memory = draw(st.integers(0, len(ends) - 1))
        unit = draw(st.sampled_from((1, 2, 4, 8)))
        size = unit * draw(st.integers(1, 12))
        stride = size + unit * draw(st.integers(0, 4))
        offset = ends[memory] + unit * draw(st.integers(0, 4))
        ends[memory] = offset + (num_blocks - 1) * stride + size
        regions.append(
            Region(
                name=f"region {number}",
                memory=memory,
                offset=offset,
                stride=stride,
                size=size,
            )
        )
    group = Group(block_size=BLOCK, regions=tuple(regions))
    geometry = Geometry(num_blocks=num_blocks, hash_unit=BLOCK, groups=(group,))
    return geometry, [end + draw(st.integers(0, 9)) for end in ends]


@given(drawn=geometries(), data=st.data())
@settings(deadline=None)
def test_the_host_moves_exactly_what_the_plan_spells_out(
    drawn: tuple[Geometry, list[int]], data: st.DataObject
) -> None:
    """Gather and scatter against ``moves``, for all rows and for some of them."""
    geometry, sizes = drawn
    random = np.random.default_rng(prod(sizes))
    memory = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    places = st.integers(0, geometry.num_blocks - 1)
    ids = tuple(data.draw(st.lists(places, unique=True, min_size=1), label="ids"))
    window = window_of(geometry, ids)
    rows = data.draw(
        st.none() | st.lists(st.sampled_from(range(len(ids))), unique=True), "rows"
    )
    device = HostDevice(geometry, memory)
    staged = device.allocate(window.num_bytes).reshape(len(ids), window.object_bytes)
    before = [flat.copy() for flat in memory]

    device.gather(window, staged, device.mark())
    expected = np.zeros_like(staged)
    for move in moves(window, geometry):
        end = move.object_offset + move.size
        source = memory[move.memory][move.address : move.address + move.size]
        expected[move.object, move.object_offset : end] = source
    assert np.array_equal(staged, expected)
    assert all(np.array_equal(a, b) for a, b in zip(memory, before, strict=True))

    incoming = random.integers(0, 256, staged.shape, dtype=np.uint8)
    chosen = None if rows is None else np.array(rows, dtype=np.intp)
    staged[...] = incoming
    device.scatter(window, staged, chosen, device.mark())
    for move in moves(window, geometry):
        if rows is None or move.object in rows:
            end = move.object_offset + move.size
            value = incoming[move.object, move.object_offset : end]
            before[move.memory][move.address : move.address + move.size] = value
    assert all(np.array_equal(a, b) for a, b in zip(memory, before, strict=True))
    assert np.array_equal(staged, incoming)
