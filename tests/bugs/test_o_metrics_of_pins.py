"""O of the bug log: a save that may not pin is counted under a reason of its own."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from akv.core.events import SaveDropped, from_dict
from akv.sinks.metrics import Meter

if TYPE_CHECKING:
    from pathlib import Path

    from bugs.rig import Rig


def test_blocks_beyond_the_share_that_may_be_pinned_are_dropped_as_pins(
    rig: Rig, tmp_path: Path
) -> None:
    """The sentence is the scheduler's, the label is the table's."""
    log = tmp_path / "events.jsonl"
    gate = rig.gate_copies_out()
    settings = {"max_pinned_fraction": 0.1, "log_events": str(log)}
    with rig.engine(settings, num_blocks=64) as engine:
        for number in range(4):
            engine.add_request(range(1000 * number, 1000 * number + 65), 1)
        engine.run()
        gate.open()
        engine.idle_until_quiet()
    dropped: Counter[str] = Counter()

    def add(name: str, label: str, by: float) -> None:
        if name == "stores_dropped":
            dropped[label] += int(by)

    meter = Meter(add)
    told = [from_dict(json.loads(line)) for line in log.read_text().splitlines()]
    drops = [event for event in told if isinstance(event, SaveDropped)]
    for event in drops:
        meter.on(event)
    assert dropped["pins"] > 0
    assert dropped["other"] == 0
    assert sum(dropped.values()) == sum(event.objects for event in drops)
