"""Where a Mooncake pool is and how to join it: the URL, the file, the environment.

``mooncake://HOST:PORT?protocol=tcp&segment=2GiB``, or ``mooncake:`` alone
where Mooncake's own settings say the rest. Rising precedence: defaults, the
``MOONCAKE_*`` variables, the JSON file named by ``MOONCAKE_CONFIG_PATH``, the
URL. Sizes in the file and the variables are read as Mooncake reads them
(``"4GB"`` is 4 x 1024**3), sizes in the URL as everywhere in akv, but for a
bare ``4G``, which is Mooncake's. What can never work is refused here: Mooncake
would fail at it again and again, keeping the GIL, or end the process. Pure but
for reading that file and the size of the memory; called once at the opening of
a store.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from akv.core.errors import ConfigError
from akv.core.sizes import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("SMALLEST_SEGMENT", "MooncakeAddress")

SMALLEST_SEGMENT = 16 << 20
"""Bytes of the smallest segment that can be lent: less is refused with -600."""

_EXAMPLE = "mooncake://HOST:PORT?protocol=tcp&segment=2GiB"
_MODES = ("embedded", "standalone-store")
_SWITCH = {
    "on": True,
    "true": True,
    "1": True,
    "off": False,
    "false": False,
    "0": False,
}
_PROTOCOLS = (
    "ascend",
    "barex",
    "cxi",
    "cxl",
    "efa",
    "hip",
    "maca",
    "musa",
    "nvlink",
    "nvlink_intra",
    "nvmeof",
    "rdma",
    "sunrise_link",
    "tcp",
    "ub",
    "ubshmem",
)
"""What Mooncake documents, whether or not the one installed was built with it.

Without ``rpc_only``: no bytes could be moved, and setting it up crashes.
"""
_NO_METADATA = "P2PHANDSHAKE"
_METADATA = re.compile(r"(http|https|etcd|redis)://[^\s/]\S*", re.IGNORECASE)
_HOST = re.compile(
    r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?"  # a name, or IPv4
    r"|\[[0-9a-f:.]+(?:%\w+)?\]|[0-9a-f]*:[0-9a-f:.]+",
    re.ASCII | re.IGNORECASE,
)
_PORT = re.compile(r"[0-9]{1,5}")
_BARE_UNIT = re.compile(r"\s*\d+(?:\.\d+)?\s*[kmgt]\s*", re.IGNORECASE)
_MOONCAKE_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)

_SIZES = ("global_segment_size", "local_buffer_size")
_SHORT = {
    "buffer": "local_buffer_size",
    "device": "device_name",
    "metadata": "metadata_server",
    "offload": "enable_offload",
    "segment": "global_segment_size",
    "tenant": "tenant_id",
}
_FROM_URL = (
    "device_name",
    "enable_offload",
    "global_segment_size",
    "hostname",
    "local_buffer_size",
    "metadata_server",
    "metrics_port",
    "mode",
    "preferred_segment",
    "protocol",
    "rpc_timeout",
    "tenant_id",
)
_FROM_FILE = (
    "device_name",
    "enable_offload",
    "global_segment_size",
    "local_buffer_size",
    "master_server_address",
    "metadata_server",
    "mode",
    "protocol",
    "tenant_id",
)
_FROM_ENVIRONMENT = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "local_buffer_size",
    "MOONCAKE_TENANT_ID": "tenant_id",
    "MOONCAKE_LOCAL_HOSTNAME": "hostname",
    "MOONCAKE_PREFERRED_SEGMENT": "preferred_segment",
}


class _Said(NamedTuple):
    """A value, and how the person gave it: under which name, and in which words."""

    shown: str
    given: object
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeAddress:
    """A pool, and what this process brings to it.

    :ivar global_segment_size: bytes lent to the pool; 0 with
        ``mode=standalone-store``, where other processes hold it all
    :ivar local_buffer_size: bytes of Mooncake's own buffer; akv's calls need none
    :ivar enable_offload: the pool has disks behind it, as upstream's connector
        is told. akv does nothing else then: its calls are far smaller than the
        buffer through which Mooncake reads from disks (1,280 MiB)
    :ivar hostname: the name under which others reach this machine; empty
        means the address from which the master is reached
    :ivar preferred_segment: where puts should go if there is room
    :ivar metrics_port: the master's HTTP port, asked for numbers only
    :ivar rpc_timeout: seconds that a call waits for the master
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    mode: str = "embedded"
    global_segment_size: int = 4 << 30
    local_buffer_size: int = 0
    enable_offload: bool = False
    tenant_id: str = "default"
    hostname: str = ""
    preferred_segment: str = ""
    metrics_port: int = 9003
    rpc_timeout: float = 3.0

    @classmethod
    def parse(cls, url: str, environment: Mapping[str, str]) -> MooncakeAddress:
        """Read ``url`` and what ``environment`` says besides.

        :raises ConfigError: a setting is unknown or unusable, with its fix
        """
        sources = [_read_environment(environment)]
        path = environment.get("MOONCAKE_CONFIG_PATH")
        if path:
            sources.append(_read_file(Path(path)))
        sources.append(_read_url(url))
        said: dict[str, _Said] = {}
        for source in sources:
            if _lends_nothing(source):
                # A size that stands below was said for another mode.
                said.pop("global_segment_size", None)
            said |= source
        if "master_server_address" not in said:
            raise ConfigError(
                "store",
                url,
                f"name the master, as in {_EXAMPLE}, or set MOONCAKE_CONFIG_PATH "
                f"to a file with master_server_address, or MOONCAKE_MASTER",
            )
        _check_segment(said)
        settings = {name: one.value for name, one in said.items()}
        if _lends_nothing(said):
            settings["global_segment_size"] = 0
        return cls(**settings)  # type: ignore[arg-type]

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, port = _split_address(self.master_server_address, "master_server_address")
        return host, port

    @property
    def url(self) -> str:
        """The URL that says the same without a file or an environment."""
        parts: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "master_server_address" or value == field.default:
                continue
            if field.name in _SIZES:
                exact = format_size(value)
                value = exact if value and parse_size(exact) == value else value
            short = {long: short for short, long in _SHORT.items()}
            text = "on" if value is True else quote(str(value), safe=":/,")
            parts.append(f"{short.get(field.name, field.name)}={text}")
        query = "?" + "&".join(sorted(parts)) if parts else ""
        return f"mooncake://{self.master_server_address}{query}"


def _read_url(url: str) -> dict[str, _Said]:
    parts = urlsplit(url)
    if parts.scheme != "mooncake" or parts.path.strip("/") or parts.fragment:
        raise ConfigError("store", url, f"write it as in {_EXAMPLE}")
    said: dict[str, _Said] = {}
    if parts.netloc:
        _split_address(parts.netloc, "store")
        said["master_server_address"] = _Said("store", parts.netloc, parts.netloc)
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        field = _SHORT.get(name, name)
        shown = f"store {name}"
        if field not in _FROM_URL:
            raise _unknown("store", name, (*_SHORT, *_FROM_URL))
        if field in said:
            raise ConfigError(
                shown, text, f"given twice, as {said[field].given!r} too: keep one"
            )
        if field in _SIZES and not _BARE_UNIT.fullmatch(text):
            said[field] = _Said(shown, text, parse_size(text, field=shown))
        else:
            said[field] = _Said(shown, text, _checked(field, text, shown))
    return said


def _read_environment(environment: Mapping[str, str]) -> dict[str, _Said]:
    return {
        field: _Said(name, environment[name], _checked(field, environment[name], name))
        for name, field in _FROM_ENVIRONMENT.items()
        if environment.get(name)
    }


def _read_file(path: Path) -> dict[str, _Said]:
    name = "MOONCAKE_CONFIG_PATH"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        fix = f"the file cannot be read: {error.strerror}"
        raise ConfigError(name, str(path), fix) from error
    except ValueError as error:
        raise ConfigError(name, str(path), f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(name, str(path), "not a JSON object")
    # Fields that Mooncake has for other purposes stand in the same file.
    return {
        field: _Said(shown, content[field], _checked(field, content[field], shown))
        for field in _FROM_FILE
        if content.get(field) not in (None, "")
        for shown in (f"{field} in {path.name}",)
    }


def _checked(field: str, value: object, shown: str) -> object:
    """``value`` as the field's type; ``shown`` names it as the person knows it."""
    if field in _SIZES:
        return _mooncake_size(value, shown)
    if field == "enable_offload":
        if isinstance(value, bool):
            return value
        switch = _SWITCH.get(str(value).strip().lower())
        if switch is None:
            raise ConfigError(shown, value, "write on or off")
        return switch
    if field == "metrics_port":
        if not str(value).isdecimal() or int(str(value)) >= 1 << 16:
            raise ConfigError(shown, value, "give a port, or 0 to ask for no numbers")
        return int(str(value))
    if field == "rpc_timeout":
        try:
            seconds = float(str(value))
        except ValueError:
            seconds = 0.0
        if not 0.1 <= seconds <= 60:
            raise ConfigError(shown, value, "give seconds, 0.1 to 60")
        return seconds
    if not isinstance(value, str) or not (text := value.strip()):
        raise ConfigError(shown, value, "give text")
    if field == "mode" and text not in _MODES:
        raise _unknown(shown, text, _MODES)
    if field == "protocol" and (text := text.lower()) not in _PROTOCOLS:
        raise _unknown(shown, text, _PROTOCOLS)
    if field == "metadata_server":
        return _metadata(text, shown)
    if field == "master_server_address":
        _split_address(text, shown)
    return text


def _metadata(text: str, shown: str) -> str:
    """The metadata server as Mooncake wants it: small letters in the scheme.

    Mooncake takes what has no scheme for etcd and waits for it for 10 s, and a
    scheme that it does not know ends the process.
    """
    if text.upper() == _NO_METADATA:
        return _NO_METADATA
    if _METADATA.fullmatch(text) is None:
        raise ConfigError(
            shown,
            text,
            f"write {_NO_METADATA}, or the server's URL: http://HOST:PORT/metadata, "
            "https://..., etcd://HOST:PORT or redis://HOST:PORT",
        )
    scheme, _, rest = text.partition("://")
    return f"{scheme.lower()}://{rest}"


def _lends_nothing(said: Mapping[str, _Said]) -> bool:
    return "mode" in said and said["mode"].value == "standalone-store"


def _check_segment(said: Mapping[str, _Said]) -> None:
    """Refuse a size that contradicts the mode, or that nobody could lend."""
    if "global_segment_size" not in said:
        return
    shown, given, size = said["global_segment_size"]
    assert isinstance(size, int)
    if not size:
        return
    if _lends_nothing(said):
        raise ConfigError(
            shown,
            given,
            "with mode=standalone-store nothing is lent: write 0, or leave it out",
        )
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not SMALLEST_SEGMENT <= size <= most:
        raise ConfigError(
            shown,
            given,
            f"give {format_size(SMALLEST_SEGMENT)}, the least that Mooncake lends, to "
            f"{format_size(most)}, the memory of this machine, or 0 to lend nothing",
        )


def _mooncake_size(value: object, shown: str) -> int:
    """Bytes; a unit means powers of 1024 whether it says ``GB`` or ``GiB``."""
    match = _MOONCAKE_SIZE.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if match is None:
        raise ConfigError(
            shown, value, 'give bytes as a whole number, or text such as "4GB"'
        )
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * 1024**power)


def _split_address(text: str, shown: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if (
        _HOST.fullmatch(host) is None
        or _PORT.fullmatch(port) is None
        or not 0 < int(port) < 1 << 16
    ):
        fix = f"give HOST:PORT of one master, as in {_EXAMPLE}"
        if "://" in text:
            fix = f"akv asks no {text.partition(':')[0]} for the master: {fix}"
        elif "@" in host:
            text = f"***@{text.rpartition('@')[2]}"
            fix = f"a master knows no users: {fix}"
        raise ConfigError(shown, text, fix)
    return host.strip("[]"), int(port)


def _unknown(shown: str, name: str, known: tuple[str, ...]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    names = ", ".join(sorted(set(known)))
    return ConfigError(shown, name, f"unknown, there are {names}{hint}")
