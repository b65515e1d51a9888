"""Opening and closing: what is found at an address, and what is made of it.

LMDB allows one open environment a process, so all handles of a process share
one :class:`Opened`, counted here; a forked child starts without any. Called
from pool threads, one at a time; takes seconds where gigabytes have to be
put into memory.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from lmdb import verify as lmdb_verify

from akv.core.errors import (
    StoreCorruptError,
    StoreError,
    StoreUnavailableError,
)
from akv.store.local import owners
from akv.store.local.filesystem import available_memory, boot_id
from akv.store.local.index import Index
from akv.store.local.place import Place
from akv.store.local.planning import check_match, check_settings, plan
from akv.store.local.slab import Slab, SlabState, read_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from akv.store.local.address import LocalAddress

__all__ = ("Opened", "acquire", "release")

_log = logging.getLogger("akv.store")


class Opened:
    """One store, as open in this process; shared by its handles."""

    def __init__(
        self, *, place: Place, slab: Slab, index: Index, owner: owners.Owner
    ) -> None:
        self.place = place
        self.slab = slab
        self.index = index
        self.owner = owner
        self.pid = os.getpid()
        self.handles = 1
        self.file_key = slab.file_key

    def is_dead(self, number: int) -> bool:
        """Whether another owner has ended."""
        if number == self.owner.number:
            return False
        # Where somebody removed the directory, a missing file says nothing: the
        # living cannot be told from the dead, so nobody is taken for dead.
        return self.owner.visible and owners.is_dead(self.place.owners, number)


class _Process:
    """What this process has open. ``guard`` is held to look or change."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.opened: dict[tuple[int, int], Opened] = {}
        # What a forked child inherited: never used and never freed there,
        # because closing it would tear the parent's locks.
        self.inherited: dict[tuple[int, int], Opened] = {}

    def forget(self) -> None:
        """Start anew in a forked child, without what its parent has open."""
        self.guard = threading.Lock()
        for opened in self.opened.values():
            opened.owner.abandon()
        self.inherited.update(self.opened)
        self.opened.clear()


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)


def acquire(address: LocalAddress, *, slot_bytes: int) -> Opened:
    """Open the store at ``address``, making it if there is none."""
    check_settings(address, slot_bytes)
    place = Place(address.path)
    with _process.guard, place.mapping_errors():
        if not place.check():
            plan(place, address, slot_bytes)
            place.root.mkdir(mode=0o700, exist_ok=True)
        with place.locked():
            return _open(place, address, slot_bytes)


def release(opened: Opened) -> None:
    """Give one handle back; the last one of this process closes."""
    if opened.pid != os.getpid():
        return
    with _process.guard:
        opened.handles -= 1
        if opened.handles == 0:
            del _process.opened[opened.file_key]
            _close(opened)


def _open(place: Place, address: LocalAddress, slot_bytes: int) -> Opened:
    if not place.slab.exists():
        return _create(place, address, slot_bytes)
    check_match(place, address, slot_bytes, read_layout(place.root))
    facts = place.slab.stat()
    file_key = facts.st_dev, facts.st_ino
    if file_key in _process.inherited:
        msg = (
            f"this process was forked from one that has the store in {place} open "
            f"and can never open it: start it with spawn, or fork before opening"
        )
        raise StoreError(msg)
    known = _process.opened.get(file_key)
    if known is not None:
        known.handles += 1
        return known
    slab = Slab.open(place.slab)
    if not _is_doubtful(place, slab):
        return _attach(place, slab)
    if owners.living(place.owners):
        slab.close()
        msg = f"another machine has the store in {place} open; use a local path"
        raise StoreUnavailableError(msg)
    if slab.layout.checksum:
        # The index is looked through before it is used, and each get proves its
        # bytes: what a power cut tore apart is noticed, the rest can stay.
        try:
            return _attach(place, slab)
        except StoreCorruptError as error:
            _log.warning("akv: %s", error)
    else:
        slab.close()
    _log.warning(
        "akv store %s was open when the machine went down and is emptied, because "
        "what reached the disk cannot be trusted",
        place,
    )
    return _create(place, address, slot_bytes)


def _create(place: Place, address: LocalAddress, slot_bytes: int) -> Opened:
    place.discard()
    layout = plan(place, address, slot_bytes)
    slab = index = None
    try:
        place.owners.mkdir(mode=0o700)
        place.index.mkdir(mode=0o700)
        slab = Slab.create(place.unfinished_slab, layout)
        index = Index.open(place.index, slots=layout.slots, ticks=slab.ticks)
        index.reserve()
        index.initialise(layout.identity)
        if not place.in_memory:
            slab.write_state(SlabState(clean=False, boot=boot_id()))
        _populate(place, slab, fresh=True)
        opened = _become_owner(place, slab, index)
        place.unfinished_slab.rename(place.slab)
    except BaseException:
        _undo(slab, index)
        place.discard()
        raise
    _process.opened[opened.file_key] = opened
    return opened


def _attach(place: Place, slab: Slab) -> Opened:
    index = None
    try:
        others = owners.living(place.owners)
        _check_index_file(place, at_rest=not others)
        index = Index.open(place.index, slots=slab.layout.slots, ticks=slab.ticks)
        if index.identity != slab.layout.identity:
            raise place.damaged("the slab and the index do not belong together")
        problems = index.verify(slab.layout.slot_bytes)
        if problems:
            raise place.damaged(f"the index contradicts itself: {problems[0]}")
        if not others and not place.in_memory:
            slab.write_state(SlabState(clean=False, boot=boot_id()))
        _populate(place, slab, fresh=False)
        opened = _become_owner(place, slab, index)
    except BaseException:
        _undo(slab, index)
        raise
    _process.opened[opened.file_key] = opened
    index.reclaim(opened.is_dead)
    return opened


def _become_owner(place: Place, slab: Slab, index: Index) -> Opened:
    place.owners.mkdir(mode=0o700, exist_ok=True)
    owner = owners.register(place.owners, index.new_owner())
    return Opened(place=place, slab=slab, index=index, owner=owner)


def _undo(slab: Slab | None, index: Index | None) -> None:
    if index is not None:
        index.close()
    if slab is not None:
        slab.close()


def _close(opened: Opened) -> None:
    try:
        if not opened.place.in_memory:
            _mark_clean(opened)
    except (OSError, StoreError) as error:
        # The next boot then empties the store, which is safe.
        _log.warning("akv store %s was not synced: %s", opened.place, error)
    _undo(opened.slab, opened.index)
    opened.owner.close()


def _mark_clean(opened: Opened) -> None:
    with opened.place.locked():
        if owners.living(opened.place.owners) == [opened.owner.number]:
            opened.index.sync()
            opened.slab.write_state(SlabState(clean=True, boot=boot_id()))


def _populate(place: Place, slab: Slab, *, fresh: bool) -> None:
    if place.in_memory:
        slab.populate(write=True)
    elif slab.layout.file_bytes <= available_memory() // 2:
        # An old slab is read in; writing would make every page dirty again.
        slab.populate(write=fresh)
    else:
        _log.info(
            "akv store %s is larger than half of the free memory and is not read "
            "in ahead; its first uses come from the disk",
            place,
        )


def _is_doubtful(place: Place, slab: Slab) -> bool:
    """Whether a power cut may have torn the files apart."""
    state = slab.state
    return not (place.in_memory or state.clean or state.boot == boot_id())


def _check_index_file(place: Place, *, at_rest: bool) -> None:
    """Raise if LMDB could not live with the index.

    LMDB trusts its file: a damaged page can end the process. So it is looked
    through before LMDB sees it, while nobody else can be writing to it: half a
    second for 160,000 objects.
    """
    if not place.index_data.exists():
        raise place.damaged("there is a slab but no index")
    if not at_rest:
        return
    look_through: Callable[..., list[str]] = lmdb_verify.verify
    try:
        problems = look_through(str(place.index_data), subdir=False)
    except Exception as error:
        raise place.damaged(f"the index cannot be read: {error}") from error
    if problems:
        raise place.damaged(f"the index has bad pages: {problems[0]}")
