"""The public names and how they are called; their types are in tests/typed."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import akv

NAMES = {
    "AkvError",
    "Config",
    "ConfigError",
    "DeadlineError",
    "Geometry",
    "Group",
    "HostDevice",
    "KeySpace",
    "LayoutError",
    "LoadOutcome",
    "LoadSpec",
    "LookupSpec",
    "PlanError",
    "Region",
    "SaveOutcome",
    "SaveSpec",
    "Session",
    "SessionClosedError",
    "SessionStatistics",
    "Span",
    "StoreCorruptError",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "WrongThreadError",
    "block_hashes",
    "fingerprint",
    "open_session",
    "usable_tokens",
}
CALLS = {
    "open_session": "config, geometry, device=, *, role=, observer=, store=",
    "block_hashes": "tokens, block_size, *, salt=",
    "fingerprint": "facts",
    "usable_tokens": "hit, num_tokens, block",
    "Config.load": "given=, *, environ=",
    "Config.from_mapping": "values, *, source=",
    "HostDevice": "geometry, memory",
    "Session.lookup": "self, spec",
    "Session.wait_for": "self, spec, *, deadline",
    "Session.load": "self, spec, *, mark=",
    "Session.save": "self, spec, *, mark=, on_copied=",
    "Session.flush": "self",
    "Session.statistics": "self",
    "Session.key_space": "self, namespace, fingerprint",
    "Session.reset": "self, space",
    "Session.forget": "self, space, group, hashes",
}
FIELDS = {
    "LookupSpec": "request_id, space, hashes, askable_blocks, first_block=, group=",
    "LoadSpec": "request_id, space, load_id, local, usable, spans",
    "SaveSpec": "request_id, space, job_id, chain, spans",
    "Span": "first_block, hashes, block_ids, group=",
    "Geometry": "num_blocks, hash_unit, groups",
    "Group": "block_size, regions",
    "Region": "name, memory, offset, stride, size",
}


def shape_of(call: object) -> str:
    """Names of the parameters, which by position, which with a default."""
    assert callable(call)
    parts: list[str] = []
    for item in inspect.signature(call).parameters.values():
        if item.kind is item.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(item.name + ("" if item.default is item.empty else "="))
    return ", ".join(parts)


def named(path: str) -> object:
    """A public thing by its name."""
    found: object = akv
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_the_public_names_are_these() -> None:
    """A new one is a promise, a missing one a broken promise."""
    assert set(akv.__all__) == NAMES
    for name in NAMES:
        assert inspect.getdoc(named(name)), name


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_written_as_it_always_was(name: str) -> None:
    """The names and the order of parameters, and which may be left out."""
    assert shape_of(named(name)) == CALLS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_is_frozen_and_made_by_keyword(name: str) -> None:
    """The order of fields may change, their names may not."""
    kind = named(name)
    assert isinstance(kind, type)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert shape_of(kind) == f"*, {FIELDS[name]}"


def test_every_error_is_an_akv_error_and_says_what_to_do_about_its_kind() -> None:
    """Who catches ``AkvError`` has them all."""
    errors = [getattr(akv, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, akv.AkvError) for error in errors)
    stores = [error for error in errors if error.__name__.startswith("Store")]
    assert all(issubclass(error, akv.StoreError) for error in stores)


def test_importing_akv_imports_neither_an_engine_nor_tensors() -> None:
    """A host without torch or vLLM at hand pays for neither."""
    code = (
        "import akv, sys; "
        "print([n for n in ('torch', 'vllm', 'mooncake', 'prometheus_client', "
        "'opentelemetry', 'plotly') if n in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == "[]"
