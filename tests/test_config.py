"""Settings: precedence, and errors that name the field, the value, the fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import akv.config as config_module
from akv.config import Config
from akv.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_caller_has_the_last_word(tmp_path: Path) -> None:
    """Defaults, then file, then environment, then what the caller gives."""
    file = tmp_path / "akv.toml"
    file.write_text('namespace = "file"\nload_deadline = 1.5\nsave_decode = true\n')
    environ = {
        "AKV_CONFIG": str(file),
        "AKV_NAMESPACE": "env",
        "AKV_SAVE_DECODE": "off",
    }
    config = Config.load({"load_deadline": "2.5"}, environ=environ)
    assert config.namespace == "env"
    assert config.load_deadline == 2.5
    assert config.save_decode is False
    assert config.lookup_deadline == Config().lookup_deadline


def test_a_config_made_by_hand_is_parsed_like_any_other() -> None:
    """Sizes as text, and the same errors."""
    assert Config(max_load_bytes="1MiB").max_load_bytes == 1 << 20  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lookup_deadline='soon'"):
        Config(lookup_deadline="soon")  # type: ignore[arg-type]


def test_the_names_of_vllms_mooncake_connector_are_known() -> None:
    """An operator who comes from there keeps the settings."""
    config = Config.load(
        {"cache_prefix": "prod", "save_decode_cache": True, "enable_lookup": False},
        environ={},
    )
    assert (config.namespace, config.save_decode) == ("prod", True)
    assert not config.enable_lookup


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("enable_group_semantics", "True", "a block is one object"),
        ("load_async", True, "always asynchronous"),
        ("lookup_async", False, "always asynchronous"),
        ("lookup_rpc_port", 5557, "no lookup server"),
    ],
)
def test_what_that_connector_has_besides_does_nothing_and_is_told_once(
    name: str,
    value: object,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever it stands, and however often it is read."""
    config_module._tell_without_effect.cache_clear()
    file = tmp_path / "akv.json"
    file.write_text(json.dumps({name: value}))
    assert Config.load(environ={"AKV_CONFIG": str(file)}) == Config()
    assert Config.load({name: value, "namespace": "a"}, environ={}).namespace == "a"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("akv", "WARNING")
    assert name in record.getMessage()
    assert reason in record.getMessage()


def test_two_names_of_one_setting_must_not_contradict_each_other(
    tmp_path: Path,
) -> None:
    """In one place; between places the higher one has the word, as always."""
    with pytest.raises(ConfigError, match="cache_prefix says 'a'") as caught:
        Config.load({"cache_prefix": "a", "namespace": "b"}, environ={})
    assert (caught.value.field, caught.value.value) == ("namespace", "b")
    with pytest.raises(ConfigError, match="same setting"):
        Config.from_mapping({"save_decode": True, "save_decode_cache": "off"})
    both = {"save_decode": True, "save_decode_cache": "on"}
    assert Config.from_mapping(both).save_decode
    file = tmp_path / "akv.json"
    file.write_text('{"namespace": "file"}')
    config = Config.load({"cache_prefix": "a"}, environ={"AKV_CONFIG": str(file)})
    assert config.namespace == "a"


def test_a_file_may_be_json(tmp_path: Path) -> None:
    """JSON is what this field uses."""
    file = tmp_path / "akv.json"
    file.write_text('{"max_load_bytes": "1GiB", "store": "memory:"}')
    config = Config.load(environ={"AKV_CONFIG": str(file)})
    assert config.max_load_bytes == 1 << 30
    assert config.store == "memory:"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"namespce": "x"}, ["namespce", "did you mean 'namespace'"]),
        ({"zzz": 1}, ["zzz", "known settings are", "lookup_deadline"]),
        ({"lookup_deadline": "soon"}, ["lookup_deadline", "'soon'", "give a number"]),
        ({"lookup_deadline": 0}, ["lookup_deadline", "above 0"]),
        ({"load_deadline": float("nan")}, ["load_deadline", "above 0"]),
        ({"load_deadline": True}, ["load_deadline", "give a number"]),
        ({"max_load_bytes": "4 parsecs"}, ["max_load_bytes", "'4 parsecs'"]),
        ({"max_load_bytes": -1}, ["max_load_bytes", "-1"]),
        ({"max_pinned_fraction": 1.5}, ["max_pinned_fraction", "at most 1"]),
        ({"on_store_unavailable": "panic"}, ["'panic'", "degrade", "stop"]),
        ({"prefill_rate": -1}, ["prefill_rate", "tokens in a second"]),
        ({"save_decode": "maybe"}, ["save_decode", "true or false"]),
        ({"namespace": ""}, ["namespace", "letter"]),
        ({"store": 7}, ["store", "give text"]),
    ],
)
def test_bad_input_names_field_value_and_fix(
    given: dict[str, Any], words: list[str]
) -> None:
    """Before anything is touched."""
    with pytest.raises(ConfigError) as caught:
        Config.load(given, environ={})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.toml", "= 1", "is not JSON"),
        ("a.json", "[1]", "one object"),
        ("missing/a.json", None, "cannot be read"),
        ("a.json", '{"stor": "memory:"}', "did you mean 'store'?"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, name: str, text: str | None, word: str
) -> None:
    """With its path and what is wrong with it."""
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        Config.load(environ={"AKV_CONFIG": str(file)})
    assert str(file) in str(caught.value)


def test_an_unknown_variable_of_the_environment_is_left_alone() -> None:
    """Other programs may have names that begin with AKV_."""
    assert Config.load(environ={"AKV_MODEL_DIR": "x"}) == Config()


@pytest.mark.parametrize("text", ["off", "", "False", None, False])
def test_the_event_log_can_be_off_in_every_spelling(text: object) -> None:
    """No file named off is ever written."""
    assert Config.load({"log_events": text}, environ={}).log_events == "off"
