"""The settings of akv: read once at the rim, frozen afterwards.

Rising precedence: defaults, the file named by ``AKV_CONFIG`` (JSON or TOML),
``AKV_<FIELD>`` in the environment, what the caller gives (in vLLM:
``kv_connector_extra_config``). A name that akv does not have is an error that
names the nearest one it has; a value it cannot use is an error that says what
to write. What vLLM's MooncakeStoreConnector has and akv has no use for is taken,
and the log says once why it does nothing. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akv.core.errors import ConfigError
from akv.core.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ("Config",)

_log = logging.getLogger("akv")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a person may set. Times are seconds, sizes bytes or ``"4GiB"``.

    :ivar store: ``local:PATH?capacity=4GiB&checksum=on``,
        ``mooncake://HOST:PORT``, ``memory:NAME``, or empty for a local store
        in shared memory
    :ivar namespace: parts deployments that must not see each other's blocks
    :ivar enable_lookup: off makes an engine save and never load; with
        ``kv_role`` ``kv_consumer`` it then only lends memory to a pool
    :ivar preferred_segment: where Mooncake should put what is saved here
    :ivar lookup_deadline: after this the engine goes on with what is known
    :ivar load_deadline: a load that has not landed by then has failed for the
        blocks that are missing, and the engine computes those
    :ivar save_deadline: a save that has not been stored by then is dropped
    :ivar max_load_bytes: staging memory for loads: bytes in flight
    :ivar max_save_bytes: staging memory for saves: bytes in flight
    :ivar transfer: ``staged``: the store sees akv's own memory only; ``direct``:
        in a load it writes the engine's blocks; ``auto``: direct where the
        store's calls cannot hang
    :ivar max_pinned_fraction: share of the engine's blocks that saves may hold
    :ivar save_decode: also save blocks that the model generated
    :ivar load_or_compute: promise only what is quicker to load than to compute,
        as far as that has been measured; off promises everything that is found
    :ivar prefill_rate: tokens that the engine computes in a second; 0 for measured
    :ivar on_store_unavailable: ``degrade`` (serve without a cache) or ``stop``
    :ivar log_events: path of a JSON-lines file with every event, or ``off``
    """

    store: str = ""
    namespace: str = "default"
    enable_lookup: bool = True
    preferred_segment: str = ""
    lookup_deadline: float = 0.25
    load_deadline: float = 5.0
    save_deadline: float = 30.0
    max_load_bytes: int = 128 * _MIB
    max_save_bytes: int = 128 * _MIB
    transfer: str = "auto"
    max_pinned_fraction: float = 0.25
    save_decode: bool = False
    load_or_compute: bool = True
    prefill_rate: float = 0.0
    on_store_unavailable: str = "degrade"
    log_events: str = "off"

    def __post_init__(self) -> None:
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in _parsed(given, "").items():
            object.__setattr__(self, name, value)
        if not self.namespace:
            raise ConfigError(
                "namespace", self.namespace, "give it at least one letter"
            )
        for name in ("lookup_deadline", "load_deadline", "save_deadline"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(name, seconds, "give seconds above 0, as 0.25")
        for name in ("max_load_bytes", "max_save_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), 'give a size, as "128MiB"')
        if not 0 < self.max_pinned_fraction <= 1:
            raise ConfigError(
                "max_pinned_fraction",
                self.max_pinned_fraction,
                "give a share of the engine's blocks above 0 and at most 1",
            )
        if not (math.isfinite(self.prefill_rate) and self.prefill_rate >= 0):
            raise ConfigError(
                "prefill_rate",
                self.prefill_rate,
                "give tokens in a second, as 20000, or 0 to have it measured",
            )
        if self.transfer not in {"auto", "direct", "staged"}:
            raise ConfigError(
                "transfer", self.transfer, 'write "auto", "direct" or "staged"'
            )
        if self.on_store_unavailable not in {"degrade", "stop"}:
            raise ConfigError(
                "on_store_unavailable",
                self.on_store_unavailable,
                'write "degrade" (serve without a cache) or "stop"',
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "") -> Config:
        """Build from plain values; see :meth:`load` for where they come from."""
        return cls(**_parsed(values, source))

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Read all sources, ``given`` having the last word.

        :raises ConfigError: a name or a value that akv cannot use
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        path = environ.get("AKV_CONFIG")
        if path:
            values |= _parsed(_read(path), f" (in {path})")
        for name in _PARSERS:
            variable = f"AKV_{name.upper()}"
            if variable in environ:
                values |= _parsed({name: environ[variable]}, f" (from {variable})")
        return cls(**(values | _parsed(given or {}, "")))


def _read(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise ConfigError("AKV_CONFIG", path, f"cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(
            "AKV_CONFIG", path, f"is not JSON (or TOML, if named so): {error}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError("AKV_CONFIG", path, "must hold one object with settings")
    return values


def _parsed(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    names: dict[str, str] = {}
    for given, value in values.items():
        if given in _WITHOUT_EFFECT:
            _tell_without_effect(given)
            continue
        name = _ALIASES.get(given, given)
        parser = _PARSERS.get(name)
        if parser is None:
            near = difflib.get_close_matches(str(name), _PARSERS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "known settings are "
            if not near:
                hint += ", ".join(sorted(_PARSERS))
            raise ConfigError(str(name), value, f"no such setting{source}; {hint}")
        try:
            one = parser(value)
        except ConfigError as error:
            raise ConfigError(name, value, error.fix + source) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(name, value, f"{error}{source}") from error
        if name in parsed and parsed[name] != one:
            raise ConfigError(
                given,
                value,
                f"{names[name]} says {parsed[name]!r} and is the same setting{source}; "
                "keep one of the two",
            )
        parsed[name], names[name] = one, given
    return parsed


@cache
def _tell_without_effect(name: str) -> None:
    """Say it in the log, once in a process."""
    _log.warning("akv: %s has no effect: %s", name, _WITHOUT_EFFECT[name])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("give text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("give a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("give a number") from None


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        match value.strip().lower():
            case "1" | "true" | "yes" | "on":
                return True
            case "0" | "false" | "no" | "off":
                return False
            case _:
                pass
    raise ValueError("write true or false")


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError('give bytes, as 134217728 or "128MiB"')
    return parse_size(value)


def _path_or_off(value: object) -> str:
    if value is None or value is False:
        return "off"
    text = _text(value)
    return text if text.strip().lower() not in {"", "off", "false", "none"} else "off"


_BY_TYPE: dict[str, Callable[[object], Any]] = {
    "str": _text,
    "float": _number,
    "int": _size,
    "bool": _flag,
}
_ALIASES = {"cache_prefix": "namespace", "save_decode_cache": "save_decode"}
"""Names that vLLM's MooncakeStoreConnector has for the same thing."""

_WITHOUT_EFFECT = {
    "enable_group_semantics": "a block is one object, its parts go together",
    "load_async": "loads are always asynchronous",
    "lookup_async": "lookups are always asynchronous",
    "lookup_rpc_port": "there is no lookup server",
}
"""What that connector has besides, and why akv has no use for it."""

_PARSERS: dict[str, Callable[[object], Any]] = {
    item.name: _BY_TYPE[str(item.type)] for item in fields(Config)
} | {"log_events": _path_or_off}
