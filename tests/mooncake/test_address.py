"""What a URL, Mooncake's JSON file and the environment say, and which one wins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from akv.core.errors import ConfigError
from akv.store.mooncake import MooncakeAddress

if TYPE_CHECKING:
    from pathlib import Path


def parse(url: str, **environment: str) -> MooncakeAddress:
    return MooncakeAddress.parse(url, environment)


def written(directory: Path, content: object) -> str:
    path = directory / "mooncake.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_host_and_port_are_enough() -> None:
    address = parse("mooncake://master.example:50051")
    assert address.master == ("master.example", 50051)
    assert address.metadata_server == "P2PHANDSHAKE"
    assert address.protocol == "tcp"
    assert address.global_segment_size == 4 << 30
    assert address.local_buffer_size == 0
    assert address.tenant_id == "default"
    assert address.url == "mooncake://master.example:50051"


def test_a_url_says_everything_by_short_or_by_mooncakes_names() -> None:
    short = parse(
        "mooncake://h:1?protocol=RDMA&device=mlx5_0&segment=2GiB&buffer=64MiB"
        "&metadata=http://h:8080/metadata&offload=on&tenant=a&hostname=me"
    )
    long = parse(
        "mooncake://h:1?protocol=rdma&device_name=mlx5_0&global_segment_size=2GiB"
        "&local_buffer_size=64MiB&metadata_server=http://h:8080/metadata"
        "&enable_offload=on&tenant_id=a&hostname=me"
    )
    assert short == long
    assert short.global_segment_size == 2 << 30
    assert short.enable_offload
    assert parse(short.url) == short


def test_what_would_end_a_value_in_a_url_is_quoted() -> None:
    address = parse("mooncake://h:1?tenant=a%26b%3Dc+d")
    assert address.tenant_id == "a&b=c d"
    assert parse(address.url) == address


def test_the_file_of_an_existing_deployment_works_unchanged(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "10.0.0.1:50051",
            "protocol": "rdma",
            "device_name": "",
            "mode": "embedded",
            "global_segment_size": "4GB",
            "local_buffer_size": 1073741824,
            "enable_offload": False,
            "tenant_id": None,
            "local_hostname": "for other programs",
        },
    )
    address = parse("mooncake:", MOONCAKE_CONFIG_PATH=path)
    assert address.master == ("10.0.0.1", 50051)
    assert address.protocol == "rdma"
    assert address.global_segment_size == 4 << 30
    assert address.local_buffer_size == 1 << 30
    assert address.tenant_id == "default"


def test_the_url_wins_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, {"master_server_address": "file:1", "protocol": "rdma"})
    more = {
        "MOONCAKE_MASTER": "environment:1",
        "MOONCAKE_PROTOCOL": "efa",
        "MOONCAKE_TENANT_ID": "tenant",
    }
    address = parse("mooncake://url:1", MOONCAKE_CONFIG_PATH=path, **more)
    assert (address.master, address.protocol) == (("url", 1), "rdma")
    assert address.tenant_id == "tenant"
    address = parse("mooncake:", MOONCAKE_CONFIG_PATH=path, **more)
    assert address.master == ("file", 1)
    address = parse("mooncake:", **more)
    assert (address.master, address.protocol) == (("environment", 1), "efa")


def test_a_standalone_store_lends_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "master_server_address": "h:1",
            "mode": "standalone-store",
            "global_segment_size": 0,
        },
    )
    assert parse("mooncake:", MOONCAKE_CONFIG_PATH=path).global_segment_size == 0
    assert parse("mooncake://h:1?mode=standalone-store").global_segment_size == 0


@pytest.mark.parametrize(
    ("size", "bytes_meant"),
    [
        ("4GB", 4 << 30),
        ("1.5gb", 3 << 29),
        ("16MB", 16 << 20),
        ("4G", 4 << 30),
        ("20000000", 20000000),
        (20000000, 20000000),
    ],
)
def test_sizes_in_the_file_are_read_as_mooncake_reads_them(
    tmp_path: Path, size: object, bytes_meant: int
) -> None:
    path = written(
        tmp_path, {"master_server_address": "h:1", "global_segment_size": size}
    )
    address = parse("mooncake:", MOONCAKE_CONFIG_PATH=path)
    assert address.global_segment_size == bytes_meant


@pytest.mark.parametrize(
    ("url", "field", "said"),
    [
        ("mooncake:", "store", "MOONCAKE_CONFIG_PATH"),
        ("mooncake://host", "store", "HOST:PORT"),
        ("mooncake://host:port", "store", "HOST:PORT"),
        ("mooncake://h:70000", "store", "HOST:PORT"),
        ("mooncake://h:1/path", "store", "mooncake://HOST:PORT"),
        ("mooncake://h:1?segmnt=1GiB", "store", "did you mean 'segment'"),
        ("mooncake://h:1?segment=4 apples", "store segment", '"4GiB"'),
        ("mooncake://h:1?segment=1GiB&segment=2GiB", "store segment", "'1GiB' too"),
        (
            "mooncake://h:1?segment=1GiB&global_segment_size=1GiB",
            "store global_segment_size",
            "keep one",
        ),
        ("mooncake://h:1?segment=1", "store segment", "give 16MiB"),
        ("mooncake://h:1?segment=16777215", "store segment", "give 16MiB"),
        ("mooncake://h:1?segment=900TiB", "store segment", "memory of this machine"),
        ("mooncake://h:1?protocol=foo", "store protocol", "there are"),
        ("mooncake://h:1?protocol=rmda", "store protocol", "did you mean 'rdma'"),
        ("mooncake://h:1?protocol=rpc_only", "store protocol", "there are"),
        ("mooncake://h:1?metadata=nonsense", "store metadata", "P2PHANDSHAKE"),
        ("mooncake://h:1?metadata=h:2379", "store metadata", "etcd://HOST:PORT"),
        ("mooncake://h:1?metadata=k8s://a/b", "store metadata", "http://HOST:PORT"),
        ("mooncake://h:1?metadata=http://", "store metadata", "http://HOST:PORT"),
        ("mooncake://h:1?mode=standalone", "store mode", "'standalone-store'"),
        (
            "mooncake://h:1?mode=standalone-store&segment=1GiB",
            "store segment",
            "leave it out",
        ),
        ("mooncake://h:1?offload=maybe", "store offload", "on or off"),
        ("mooncake://h:1?metrics_port=http", "store metrics_port", "a port"),
        ("mooncake://h:1?rpc_timeout=0", "store rpc_timeout", "0.1 to 60"),
        ("mooncake://h:1?protocol=", "store protocol", "text"),
    ],
)
def test_a_wrong_url_names_the_field_and_says_what_to_write(
    url: str, field: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert caught.value.field == field
    assert said in caught.value.fix


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("user:password@h:1", "no users"),
        ("h h:1", "HOST:PORT"),
        ("a:1,b:2", "one master"),
        ("a..b:1", "HOST:PORT"),
        ("h:\uff15\uff10", "HOST:PORT"),
    ],
)
def test_a_master_that_nobody_could_reach_is_refused_and_no_password_is_shown(
    where: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(f"mooncake://{where}")
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("where", ["h_1.example.:1", "10.0.0.1:1", "[fe80::1%eth0]:1"])
def test_names_and_addresses_of_both_kinds_name_a_master(where: str) -> None:
    assert parse(f"mooncake://{where}").master_server_address == where


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("p2phandshake", "P2PHANDSHAKE"),
        ("HTTP://h:8080/metadata", "http://h:8080/metadata"),
        ("https://h/metadata", "https://h/metadata"),
        ("etcd://h:2379", "etcd://h:2379"),
        ("redis://h:6379", "redis://h:6379"),
    ],
)
def test_metadata_servers_of_every_kind_are_written_as_mooncake_wants_them(
    given: str, meant: str
) -> None:
    assert parse(f"mooncake://h:1?metadata={given}").metadata_server == meant


def test_a_bare_unit_in_the_url_is_mooncakes() -> None:
    assert parse("mooncake://h:1?segment=4G").global_segment_size == 4 << 30
    assert parse("mooncake://h:1?segment=512m").global_segment_size == 512 << 20
    assert parse("mooncake://h:1?segment=4GB").global_segment_size == 4 * 10**9


def test_a_size_beside_the_mode_without_lending_is_refused_where_it_was_written(
    tmp_path: Path,
) -> None:
    """As vLLM's own connector refuses such a file."""
    content = {
        "master_server_address": "h:1",
        "mode": "standalone-store",
        "global_segment_size": "4GB",
    }
    with pytest.raises(ConfigError, match="write 0") as caught:
        parse("mooncake:", MOONCAKE_CONFIG_PATH=written(tmp_path, content))
    assert caught.value.field == "global_segment_size in mooncake.json"
    assert caught.value.value == "4GB"


def test_a_mode_without_lending_outweighs_the_sizes_that_stand_below(
    tmp_path: Path,
) -> None:
    content = {"master_server_address": "h:1", "global_segment_size": "4GB"}
    path = written(tmp_path, content)
    address = parse("mooncake:?mode=standalone-store", MOONCAKE_CONFIG_PATH=path)
    assert address.global_segment_size == 0
    path = written(tmp_path, {"master_server_address": "h:1", "mode": "embedded"})
    address = parse(
        "mooncake:", MOONCAKE_CONFIG_PATH=path, MOONCAKE_GLOBAL_SEGMENT_SIZE="1GB"
    )
    assert address.global_segment_size == 1 << 30


@pytest.mark.parametrize(
    ("content", "field", "said"),
    [
        ({"master_server_address": "h"}, "master_server_address", "HOST:PORT"),
        (
            {"master_server_address": "etcd://a:2379"},
            "master_server_address",
            "asks no etcd",
        ),
        ({"mode": "embeded"}, "mode", "did you mean 'embedded'"),
        ({"global_segment_size": "4 apples"}, "global_segment_size", '"4GB"'),
        ({"protocol": 7}, "protocol", "text"),
        ({"protocol": "foo"}, "protocol", "there are"),
        ({"metadata_server": "nonsense"}, "metadata_server", "P2PHANDSHAKE"),
        ({"global_segment_size": 1}, "global_segment_size", "give 16MiB"),
    ],
)
def test_a_wrong_file_names_the_field_and_the_file(
    tmp_path: Path, content: dict[str, object], field: str, said: str
) -> None:
    content = {"master_server_address": "h:1"} | content
    with pytest.raises(ConfigError) as caught:
        parse("mooncake:", MOONCAKE_CONFIG_PATH=written(tmp_path, content))
    assert caught.value.field == f"{field} in mooncake.json"
    assert said in caught.value.fix


def test_a_file_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("mooncake:", MOONCAKE_CONFIG_PATH=str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        parse("mooncake:", MOONCAKE_CONFIG_PATH=str(tmp_path / "text.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        parse("mooncake:", MOONCAKE_CONFIG_PATH=str(tmp_path / "list.json"))
