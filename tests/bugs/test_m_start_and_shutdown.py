"""M of the bug log: start, settings and shutdown leave nothing and hide nothing."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bugs.rig import CountingStore, Rig, serve
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

import akv
from akv.core.errors import LayoutError, StoreUnavailableError
from akv.vllm.connector import AkvConnector
from akv.vllm.facts import engine_fingerprint
from engine.config import (
    EngineConfig,
    build_kv_cache_config,
    build_vllm_config,
    write_model,
)
from harness import descriptors

if TYPE_CHECKING:
    from pathlib import Path

    from akv.store import BlockStore


def akv_threads() -> set[threading.Thread]:
    """Those of akv's threads that live."""
    return {t for t in threading.enumerate() if t.name.startswith("akv-")}


def settled(threads: int) -> int:
    """How many threads live once those that are ending have ended."""
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.005)
    return threading.active_count()


@pytest.mark.parametrize("log", [False, True], ids=["no log", "with an event log"])
def test_fifty_starts_and_shutdowns_leave_no_thread_and_no_descriptor(
    rig: Rig, tmp_path: Path, log: bool
) -> None:
    """M3: both roles, opened and shut down again and again in one process."""
    settings: dict[str, Any] = {"max_load_bytes": "16KiB", "max_save_bytes": "16KiB"}
    if log:
        settings["log_events"] = str(tmp_path / "events.jsonl")

    def once(number: int) -> None:
        with rig.engine(settings, model_dir=tmp_path / "model") as engine:
            if number % 10 == 0:
                serve(engine, range(40), "r")

    before = akv_threads()
    once(0)
    threads, files = settled(0), descriptors()
    for number in range(1, 51):
        once(number)
    assert settled(threads) <= threads
    assert descriptors() <= files
    assert akv_threads() <= before


def test_a_shutdown_of_the_schedulers_role_ends_its_threads(rig: Rig) -> None:
    """X11: nothing that this role opened is open or alive afterwards; twice is ok."""
    with rig.engine() as engine:
        connector = engine.scheduler.get_kv_connector()
        serve(engine, range(65), "r")
        portal = connector._s._portal
        assert portal.alive
        assert portal._thread in akv_threads()
        connector.shutdown()
        assert not portal.alive
        assert portal._thread not in akv_threads()
        connector.shutdown()


def built(tmp_path: Path, **extra: Any) -> tuple[Any, Any]:
    """vLLM's configuration for an engine that is not started."""
    config = EngineConfig(extra_config={"store": "memory:", **extra})
    model = write_model(tmp_path, config)
    return build_vllm_config(config, model), build_kv_cache_config(config)


@pytest.mark.parametrize("error", [akv.ConfigError("store", "x", "no"), OSError("odd")])
def test_a_start_that_fails_shows_the_first_error_and_cleans_up_silently(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    error: Exception,
) -> None:
    """M5: store set-up raises, then shutdown: only the first error is raised."""

    def failing(url: str, **options: Any) -> BlockStore:
        raise error

    monkeypatch.setattr("akv.session.open_store", failing)
    vllm_config, kv_cache_config = built(tmp_path)
    before = threading.active_count()
    connector = AkvConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    with pytest.raises(type(error)) as caught:
        connector.set_xfer_handshake_metadata({})
    assert caught.value is error
    connector.shutdown()
    connector.shutdown()
    del connector
    assert settled(before) <= before
    assert [str(w.message) for w in recwarn if "never awaited" in str(w.message)] == []


def test_memory_that_is_not_understood_shows_that_and_shuts_down(
    tmp_path: Path,
) -> None:
    """M5, K11: the worker's role too: LayoutError, then a silent shutdown."""
    vllm_config, kv_cache_config = built(tmp_path)
    connector = AkvConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
    layers = kv_cache_config.kv_cache_groups[0].layer_names
    caches = {name: torch.zeros(128, 3, 5) for name in layers}
    with pytest.raises(LayoutError, match=r"shape \(128, 3, 5\)"):
        connector.register_kv_caches(caches)
    connector.shutdown()


def test_a_store_that_cannot_be_opened_degrades_with_one_line_for_each_role(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L3: the engine starts, serves without a cache, and says so."""

    def failing(url: str, **options: Any) -> BlockStore:
        raise StoreUnavailableError("nobody answers")

    monkeypatch.setattr("akv.session.open_store", failing)
    with caplog.at_level(logging.WARNING, logger="vllm.akv"), rig.engine() as engine:
        assert serve(engine, range(65), "first") == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "second") == 0
    lines = [r for r in caplog.records if "akv.store.unavailable" in r.getMessage()]
    assert len(lines) == 2
    assert all("nobody answers" in line.getMessage() for line in lines)


def test_a_store_that_cannot_be_opened_stops_the_start_if_so_set(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: on_store_unavailable=stop: the store's own error, and nothing left."""

    def failing(url: str, **options: Any) -> BlockStore:
        raise StoreUnavailableError("nobody answers")

    monkeypatch.setattr("akv.session.open_store", failing)
    with (
        pytest.raises(StoreUnavailableError, match="nobody answers"),
        rig.engine({"on_store_unavailable": "stop"}),
    ):
        pass


def test_two_engines_of_one_configuration_each_hear_of_their_own_work(
    rig: Rig,
) -> None:
    """M7, X10: akv has no socket and no path for its roles; they share the store."""
    rig.through(CountingStore)
    with rig.engine() as one, rig.engine() as two:
        for number in range(6):
            one.add_request(range(100 * number, 100 * number + 70), 5)
            two.add_request(range(100 * number, 100 * number + 60), 5)
        for _ in range(5000):
            one.run_steps(1)
            two.run_steps(1)
            if not (one.unfinished() or two.unfinished()):
                break
        for engine in (one, two):
            engine.idle_until_quiet()
            engine.assert_outputs()
            engine.assert_clean()
        assert one.reset_prefix_cache()
        assert serve(one, range(70), "of either") == 64


def test_a_long_host_name_and_temporary_path_do_not_matter(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M8: there is no path with either in it, so none can be too long."""
    place = tmp_path / ("t" * 120)
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    with rig.engine(model_dir=tmp_path / "model") as engine:
        serve(engine, range(65), "cold")
        assert engine.reset_prefix_cache()
        assert serve(engine, range(65), "warm") == 64
        assert list(place.iterdir()) == []


def test_an_unknown_setting_is_named_with_the_nearest_one(rig: Rig) -> None:
    """M: a typing error in the settings stops the start, not the service later."""
    with (
        pytest.raises(akv.ConfigError, match="lookup_deadline"),
        rig.engine({"lookup_dedline": 1}),
    ):
        pass


def test_a_hash_of_one_process_only_is_refused_and_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M9: without a seed nothing would ever be found, without a word."""
    vllm_config, kv_cache_config = built(tmp_path)
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for role in KVConnectorRole:
        with pytest.raises(akv.ConfigError, match=r"sha256.*PYTHONHASHSEED"):
            AkvConnector(vllm_config, role, kv_cache_config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    connector = AkvConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    connector.shutdown()


def test_a_hash_seed_is_part_of_a_blocks_identity(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M9: engines of two seeds never meet in the store by chance."""
    vllm_config, kv_cache_config = built(tmp_path)
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    seen = set()
    for seed in ("7", "8", "7"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seen.add(engine_fingerprint(vllm_config, kv_cache_config, {}))
    assert len(seen) == 2
