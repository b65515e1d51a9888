"""The table at the end, and the same as JSON."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from measure import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from measure import Row, Spread

__all__ = ("as_json", "machine", "table")

_HEAD = ("what", "akv", "against", "ratio (min-max)", "target", "")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_1_minute": round(os.getloadavg()[0], 2),
    }


def as_json(
    rows: Iterable[Row], skipped: Iterable[tuple[str, str]], **facts: Any
) -> dict[str, Any]:
    """Everything in the table and what it is made from, as plain values."""
    return {
        **facts,
        "rows": [_row_as_json(row) for row in rows],
        "skipped": [{"case": case, "reason": reason} for case, reason in skipped],
    }


def table(rows: Sequence[Row]) -> str:
    """One table; a line between two groups of cases."""
    lines = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(_HEAD, *lines, strict=True)]
    text = [_line(_HEAD, widths), _line(["-" * width for width in widths], widths)]
    case = rows[0].case if rows else ""
    for row, cells in zip(rows, lines, strict=True):
        if row.case != case:
            text.append("")
            case = row.case
        text.append(_line(cells, widths))
    return "\n".join(text)


def _row_as_json(row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    values["unit"] = row.unit.value
    values["better"] = "more" if row.unit.more_is_better else "less"
    values["target"] = None if row.target is None else str(row.target)
    values["met"] = row.met
    return values


def _cells(row: Row) -> tuple[str, ...]:
    if row.refused:
        return (row.what, "-", row.against, f"refused: {row.refused}", "", "")
    assert row.value is not None
    if row.ratio is None and row.unit is Unit.COUNT:
        return (row.what, _number(row.value.median), row.against, "", *_verdict(row))
    if row.ratio is None:
        numbers = row.extra or {}
        shown = f"p99 {_number(row.value.median)}"
        others = ", ".join(
            f"{shown_as} {_number(numbers[name])}"
            for name, shown_as in (("p50", "p50"), ("cpu_p99", "cpu"), ("max", "max"))
            if name in numbers
        )
        spread = f"p99 {_range(row.value)} us"
        return (row.what, f"{shown} us", others, spread, *_verdict(row))
    assert row.other is not None
    unit = row.unit.value
    return (
        row.what,
        f"{_number(row.value.median)} {unit}",
        f"{row.against} {_number(row.other.median)}",
        _ratio(row.ratio),
        *_verdict(row),
    )


def _verdict(row: Row) -> tuple[str, str]:
    if row.target is None:
        return "", ""
    unit = " us" if row.ratio is None and row.unit is Unit.MICROSECONDS else ""
    return f"{row.target}{unit}", "ok" if row.met else "MISSED"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(spread: Spread) -> str:
    digits = 2 if spread.most >= 0.1 else 4
    numbers = (spread.median, spread.least, spread.most)
    median, least, most = (f"{number:.{digits}f}" for number in numbers)
    return f"{median} ({least}-{most})"


def _range(spread: Spread) -> str:
    return f"{_number(spread.least)}-{_number(spread.most)}"


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()
