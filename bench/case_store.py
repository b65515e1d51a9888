"""The local store against memcpy: put and get, in shared memory and on a disk.

The other side copies the same values one by one with numpy, in one thread, into and
out of a file that is mapped from where the store lies, its pages there. One more row
shows the same copy into private memory, where the kernel may give huge pages.

akv's calls take 64 values, which is what the store puts into one transaction; for
values of 1 MiB there are also rows with calls of 8 MiB, the windows of a session.
"""

from __future__ import annotations

import shutil
from functools import partial

import numpy as np

from akv.core.keys import BlockKey
from akv.store import LocalStore
from measure import Case, Row, Settings, Side, Target, Unit, clock, compare
from memory import Rows, fill, mapped, need_memory, prefaulted, right_rows, stamp

__all__ = ("CASES",)

_MIB = 1 << 20
_BATCH = 64
_WINDOW = 8 * _MIB
_SIZES = {"128KiB": _MIB // 8, "1MiB": _MIB, "4MiB": 4 * _MIB}
_TARGET = Target(0.8, at_least=True)


def _measure(
    size_name: str, place: str, checksum: str, settings: Settings
) -> list[Row]:
    size = _SIZES[size_name]
    directory = settings.in_memory() if place == "shm" else settings.disk
    total = (64 if settings.quick else 192) * _MIB
    need_memory(6 * total)
    path = directory / f"store-{size_name}-{checksum}"
    url = f"local:{path}?capacity={total}&checksum={checksum}"
    store = LocalStore.open(url, slot_bytes=size)
    try:
        with mapped(directory, total // size, size) as plain:
            rows = _rows(store, size_name, place, settings, plain, _BATCH)
            if size_name == "1MiB" and not store.checksum:
                rows += _rows(store, size_name, place, settings, plain, _WINDOW // size)
            if (size_name, place, store.checksum) == ("1MiB", "shm", False):
                rows.append(_private_memory(plain, settings))
        return rows
    finally:
        store.close()
        shutil.rmtree(path)


def _rows(
    store: LocalStore,
    size_name: str,
    place: str,
    settings: Settings,
    plain: Rows,
    batch: int,
) -> list[Row]:
    total = plain.nbytes
    count, size = plain.shape
    source, target, back = (prefaulted(count, size) for _ in range(3))
    fill(source, seed=1)
    keys = [BlockKey(b"akv.bench:%062d" % number) for number in range(count)]
    calls = [slice(start, start + batch) for start in range(0, count, batch)]
    of_source = [row.data for row in source]
    of_target = [row.data for row in target]
    of_back = [row.data for row in back]
    source_rows, plain_rows, back_rows = list(source), list(plain), list(back)

    def put() -> None:
        for call in calls:
            store.put_from(keys[call], of_source[call])

    def get(buffers: list[memoryview]) -> None:
        for call in calls:
            store.get_into(keys[call], buffers[call])

    def put_back() -> int:
        get(of_back)
        return right_rows(back, source)

    def new_content(number: int) -> None:
        stamp(source, number + 1)

    def new_objects(number: int) -> None:
        stamp(source, number + 1)
        store.remove(keys)
        put()
        _copy(plain_rows, source_rows)

    where = {"shm": "shared memory", "disk": "disk"}[place]
    text = f"{size_name[:-3]} {size_name[-3:]}, {where}"
    if store.checksum:
        text += ", checksum"
    if batch != _BATCH:
        text += f", calls of {batch}"
    wanted = size_name == "1MiB" and place == "shm"
    judged = _TARGET if wanted and batch == _BATCH and not store.checksum else None
    rounds = settings.rounds(7)
    return [
        compare(
            "store",
            f"put {text}",
            Side(
                name="akv",
                before=lambda: store.remove(keys),
                run=clock(put),
                moved=put_back,
            ),
            Side(
                name="memcpy",
                run=clock(lambda: _copy(plain_rows, source_rows)),
                moved=lambda: right_rows(plain, source),
            ),
            unit=Unit.GB_PER_SECOND,
            rounds=rounds,
            amount=total,
            before_round=new_content,
            target=judged,
        ),
        compare(
            "store",
            f"get {text}",
            Side(
                name="akv",
                run=clock(lambda: get(of_target)),
                moved=lambda: right_rows(target, source),
            ),
            Side(
                name="memcpy",
                run=clock(lambda: _copy(back_rows, plain_rows)),
                moved=lambda: right_rows(back, source),
            ),
            unit=Unit.GB_PER_SECOND,
            rounds=rounds,
            amount=total,
            before_round=new_objects,
            target=judged,
        ),
    ]


def _private_memory(shared: Rows, settings: Settings) -> Row:
    source, private = (prefaulted(*shared.shape) for _ in range(2))
    fill(source, seed=6)
    source_rows, shared_rows, private_rows = list(source), list(shared), list(private)
    return compare(
        "store",
        "(memcpy 1 MiB, private memory)",
        Side(
            name="private",
            run=clock(lambda: _copy(private_rows, source_rows)),
            moved=lambda: right_rows(private, source),
        ),
        Side(
            name="memcpy",
            run=clock(lambda: _copy(shared_rows, source_rows)),
            moved=lambda: right_rows(shared, source),
        ),
        unit=Unit.GB_PER_SECOND,
        rounds=settings.rounds(7),
        amount=shared.nbytes,
        before_round=lambda number: stamp(source, number + 1),
    )


def _copy(to: list[Rows], from_: list[Rows]) -> None:
    for there, here in zip(to, from_, strict=True):
        np.copyto(there, here)


CASES = [
    Case(
        name=f"store/{place}/{size}/{kind}",
        title=f"put and get {size} {where}{checksum_text}",
        run=partial(_measure, size, place, switch),
    )
    for size in ("1MiB", "128KiB", "4MiB")
    for place, where in (("shm", "in shared memory"), ("disk", "on a disk"))
    for kind, switch, checksum_text in (
        ("plain", "off", ""),
        ("checksum", "on", ", with checksums"),
    )
]
