"""What akv's users may rely on, as types: mypy fails when a signature changes.

Nothing here runs. Each Protocol is what a caller may write; akv's own function must fit
it. Parameters may be added with a default, nothing may go or change its type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, assert_type

import akv
import akv.testing
from akv.device.layout import build_geometry, open_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    import numpy.typing as npt
    import torch

    from akv.core.events import Observer
    from akv.core.keys import BlockHash, BlockKey, Fingerprint
    from akv.device.base import Device
    from akv.store import BlockStore


class OpenSession(Protocol):
    def __call__(
        self,
        config: akv.Config,
        geometry: akv.Geometry,
        device: Device | None = None,
        *,
        role: str = "session",
        observer: Observer | None = None,
        store: BlockStore | None = None,
    ) -> AbstractAsyncContextManager[akv.Session]: ...


class BlockHashes(Protocol):
    def __call__(
        self, tokens: Sequence[int], block_size: int, *, salt: str = ""
    ) -> tuple[BlockHash, ...]: ...


class BuildGeometry(Protocol):
    def __call__(
        self,
        layers: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        block_size: int,
        hash_unit: int,
    ) -> tuple[akv.Geometry, tuple[torch.Tensor, ...]]: ...


class SessionCalls(Protocol):
    """A session, as its users see it."""

    @property
    def store_works(self) -> bool: ...
    @property
    def store_url(self) -> str: ...
    async def lookup(self, spec: akv.LookupSpec) -> int: ...
    async def wait_for(self, spec: akv.LookupSpec, *, deadline: float) -> int: ...
    async def load(
        self, spec: akv.LoadSpec, *, mark: Any = None
    ) -> akv.LoadOutcome: ...
    async def save(
        self,
        spec: akv.SaveSpec,
        *,
        mark: Any = None,
        on_copied: Callable[[], None] = ...,
    ) -> akv.SaveOutcome: ...
    async def flush(self) -> None: ...
    async def statistics(self) -> akv.SessionStatistics: ...
    async def key_space(self, namespace: str, fingerprint: bytes) -> akv.KeySpace: ...
    async def reset(self, space: akv.KeySpace) -> akv.KeySpace: ...
    def forget(self, space: bytes, group: int, hashes: Sequence[bytes]) -> None: ...


class ConfigLoad(Protocol):
    def __call__(
        self,
        given: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> akv.Config: ...


open_session: OpenSession = akv.open_session
block_hashes: BlockHashes = akv.block_hashes
fingerprint: Callable[[Mapping[str, object]], Fingerprint] = akv.fingerprint
usable_tokens: Callable[[int, int, int], int] = akv.usable_tokens
geometry_of: BuildGeometry = build_geometry
device_of: Callable[[akv.Geometry, Sequence[torch.Tensor]], Device] = open_device
config_load: ConfigLoad = akv.Config.load
config_of: Callable[[Mapping[str, Any]], akv.Config] = akv.Config.from_mapping
host_device: Callable[[akv.Geometry, Sequence[npt.NDArray[np.uint8]]], Device]
host_device = akv.HostDevice
contract: type[akv.testing.StoreContract] = akv.testing.StoreContract
gated: Callable[[BlockStore], BlockStore] = akv.testing.WrappedStore
key_of: Callable[[int], BlockKey] = akv.testing.key_of


def sessions(session: akv.Session) -> SessionCalls:
    """A session has all of that."""
    return session


def values() -> None:
    """Every field by its name, and of its type."""
    region = akv.Region(name="layer", memory=0, offset=0, stride=8, size=8)
    group = akv.Group(block_size=16, regions=(region,))
    geometry = akv.Geometry(num_blocks=2, hash_unit=16, groups=(group,))
    assert_type(geometry.block, int)
    assert_type(geometry.slot_bytes, int)
    span = akv.Span(first_block=0, hashes=(b"hash",), block_ids=(1,))
    akv.LookupSpec(
        request_id="r",
        space=b"space",
        hashes=(b"hash",),
        askable_blocks=1,
        first_block=0,
        group=0,
    )
    akv.LoadSpec(
        request_id="r", space=b"space", load_id=1, local=0, usable=16, spans=(span,)
    )
    akv.SaveSpec(request_id="r", space=b"space", job_id=1, chain=1, spans=(span,))
    akv.Config(
        store="memory:",
        namespace="n",
        lookup_deadline=0.1,
        load_deadline=1.0,
        save_deadline=1.0,
        max_load_bytes=1,
        max_save_bytes=1,
        on_store_unavailable="stop",
    )
    space = akv.KeySpace(namespace="n", fingerprint=akv.fingerprint({"model": "m"}))
    assert_type(space.prefix, bytes)


async def outcomes(
    session: akv.Session, load: akv.LoadSpec, save: akv.SaveSpec
) -> None:
    """What calls give."""
    loaded = await session.load(load)
    assert_type(loaded.landed, bool)
    assert_type(loaded.failed_blocks, tuple[int, ...])
    assert_type(loaded.failed_hashes, tuple[bytes, ...])
    assert_type(loaded.reason, str)
    saved = await session.save(save)
    assert_type(saved.stored, int)
    assert_type(saved.dropped, int)
    numbers = await session.statistics()
    assert_type(numbers.loads, int)
    assert_type(numbers.saves, int)
    assert_type(numbers.lookups, int)
    assert_type(numbers.store_works, bool)


def errors(setting: akv.ConfigError, layout: akv.LayoutError) -> None:
    """One tree; the fields that a program may read."""
    assert_type(setting.field, str)
    assert_type(setting.value, object)
    assert_type(setting.fix, str)
    assert_type(layout.layer, str)
    tree: tuple[type[akv.AkvError], ...] = (
        akv.ConfigError,
        akv.DeadlineError,
        akv.LayoutError,
        akv.PlanError,
        akv.SessionClosedError,
        akv.StoreError,
        akv.WrongThreadError,
    )
    stores: tuple[type[akv.StoreError], ...] = (
        akv.StoreCorruptError,
        akv.StoreMismatchError,
        akv.StoreUnavailableError,
    )
    standard: tuple[type[ValueError], type[TimeoutError]]
    standard = (akv.ConfigError, akv.DeadlineError)
    del tree, stores, standard
