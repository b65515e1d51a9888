"""Hypothesis strategies for what akv is given and what it moves.

Importable where hypothesis is installed. Sizes are small on purpose, so that
a test can hold all of the memory and compare every byte of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from akv.core.geometry import Geometry, Group, Region
from akv.core.keys import KeySpace, block_hashes, fingerprint
from akv.core.spec import LoadSpec, LookupSpec, SaveSpec, Span

try:
    from hypothesis import strategies as st
except ImportError as error:
    msg = "akv.testing.strategies needs hypothesis: pip install hypothesis"
    raise ImportError(msg) from error

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = (
    "geometries",
    "key_spaces",
    "load_specs",
    "lookup_specs",
    "memory_sizes",
    "prompts",
    "save_specs",
)

_LAST_ID = (1 << 31) - 1


def memory_sizes(geometry: Geometry) -> list[int]:
    """Bytes that each piece of the engine's memory must have, in their order."""
    last = geometry.num_blocks - 1
    ends: dict[int, int] = {}
    for group in geometry.groups:
        for region in group.regions:
            end = region.offset + last * region.stride + region.size
            ends[region.memory] = max(end, ends.get(region.memory, 0))
    return [ends.get(number, 0) for number in range(max(ends) + 1)]


@st.composite
def geometries(
    draw: DrawFn,
    *,
    max_blocks: int = 16,
    max_groups: int = 2,
    max_regions: int = 3,
    max_region_bytes: int = 96,
) -> Geometry:
    """Geometries whose regions never overlap.

    Each group has memory of its own: one piece for each region, or one in
    which the regions of a block lie one behind the other. Strides may be
    padded, and the first block need not be at the start.
    """
    num_blocks = draw(st.integers(1, max_blocks))
    hash_unit = draw(st.sampled_from((1, 4, 16)))
    groups: list[Group] = []
    memory = 0
    for number in range(draw(st.integers(1, max_groups))):
        sizes = draw(
            st.lists(st.integers(1, max_region_bytes), min_size=1, max_size=max_regions)
        )
        start, padding = draw(st.integers(0, 16)), draw(st.integers(0, 16))
        packed = draw(st.booleans())
        regions: list[Region] = []
        for place, size in enumerate(sizes):
            regions.append(
                Region(
                    name=f"group {number} region {place}",
                    memory=memory if packed else memory + place,
                    offset=start + (sum(sizes[:place]) if packed else 0),
                    stride=(sum(sizes) if packed else size) + padding,
                    size=size,
                )
            )
        memory += 1 if packed else len(sizes)
        block_size = hash_unit * draw(st.integers(1, 3))
        groups.append(Group(block_size=block_size, regions=tuple(regions)))
    return Geometry(num_blocks=num_blocks, hash_unit=hash_unit, groups=tuple(groups))


def key_spaces() -> SearchStrategy[KeySpace]:
    """Key spaces of any namespace, generation and epoch."""
    return st.builds(
        KeySpace,
        namespace=st.text(max_size=12),
        fingerprint=st.integers(0, _LAST_ID).map(lambda n: fingerprint({"model": n})),
        generation=st.integers(0, _LAST_ID),
        epoch=st.binary(min_size=8, max_size=8),
    )


def prompts(*, max_tokens: int = 64) -> SearchStrategy[tuple[int, ...]]:
    """Token ids out of two, so that prompts often begin alike."""
    return st.lists(st.integers(0, 1), max_size=max_tokens).map(tuple)


@st.composite
def lookup_specs(draw: DrawFn, *, hash_unit: int = 16) -> LookupSpec:
    """Lookups of any part of a prompt."""
    hashes = block_hashes(draw(prompts(max_tokens=8 * hash_unit)), hash_unit)
    askable = draw(st.integers(0, len(hashes)))
    return LookupSpec(
        request_id=f"r-{draw(st.integers(0, 9))}",
        space=draw(key_spaces()).prefix,
        hashes=tuple(hashes),
        askable_blocks=askable,
        first_block=draw(st.integers(0, askable)),
    )


@st.composite
def load_specs(draw: DrawFn, geometry: Geometry) -> LoadSpec:
    """Loads that fit ``geometry``, each into blocks of its own; some are empty."""
    local, usable, spans = _blocks(draw, geometry)
    return LoadSpec(
        request_id=f"r-{draw(st.integers(0, 9))}",
        space=draw(key_spaces()).prefix,
        load_id=draw(st.integers(0, _LAST_ID)),
        local=local,
        usable=usable,
        spans=spans,
    )


@st.composite
def save_specs(draw: DrawFn, geometry: Geometry) -> SaveSpec:
    """Saves that fit ``geometry``; some are empty."""
    _, _, spans = _blocks(draw, geometry)
    return SaveSpec(
        request_id=f"r-{draw(st.integers(0, 9))}",
        space=draw(key_spaces()).prefix,
        job_id=draw(st.integers(0, _LAST_ID)),
        chain=draw(st.integers(0, _LAST_ID)),
        spans=spans,
    )


def _blocks(draw: DrawFn, geometry: Geometry) -> tuple[int, int, tuple[Span, ...]]:
    smallest = min(group.block_size for group in geometry.groups)
    most = geometry.num_blocks * smallest // geometry.block
    local = draw(st.integers(0, 2)) * geometry.block
    usable = local + draw(st.integers(0, most)) * geometry.block
    tokens = draw(st.lists(st.integers(0, 1), min_size=usable, max_size=usable))
    ids = st.permutations(range(geometry.num_blocks))
    spans: list[Span] = []
    for number, group in enumerate(geometry.groups):
        first = local // group.block_size
        hashes = tuple(block_hashes(tokens, group.block_size))[first:]
        spans.append(
            Span(
                first_block=first,
                hashes=hashes,
                block_ids=tuple(draw(ids)[: len(hashes)]),
                group=number,
            )
        )
    return local, usable, tuple(spans)
