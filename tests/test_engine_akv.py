"""akv in the engine without a model: no wrong byte, every request ends, nothing left.

All eight shapes of the engine run the same seeds of random traffic over an embedded
store in shared memory; ``memory:`` runs where both roles live in one process. Small
pools bring preemption, small budgets bring dropped saves, a small store evicts.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_layout import KVCacheLayout

from engine.engine import Engine
from engine.shapes import INLINE_SHAPES, SHAPES, Shape
from engine.workload import Workload, run_workload

if TYPE_CHECKING:
    from collections.abc import Iterator

_BRIDGE = importlib.util.find_spec("akv.vllm")
if _BRIDGE is None or _BRIDGE.origin is None:
    pytest.skip("akv.vllm is not written yet", allow_module_level=True)

SEEDS = (1, 2, 3, 5, 8, 13)
LONG_SEEDS = (21, 34, 55)
SMALL: dict[str, Any] = {"max_load_bytes": "1MiB", "max_save_bytes": "1MiB"}


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A directory in shared memory, or a temporary one where there is none."""
    root = Path("/dev/shm")
    directory = Path(
        tempfile.mkdtemp(prefix="akv-test-", dir=root if root.is_dir() else None)
    )
    yield directory
    shutil.rmtree(directory)


def local_store(directory: Path, capacity: str = "8MiB") -> dict[str, Any]:
    return {**SMALL, "store": f"local:{directory / 'store'}?capacity={capacity}"}


def akv_engine(shape: Shape, extra: dict[str, Any], **options: Any) -> Engine:
    return Engine(
        "AkvConnector", "akv.vllm", extra_config=extra, **shape.options, **options
    )


def serve(engine: Engine, prompt: range, name: str, max_tokens: int = 3) -> int:
    """Run one request to its end and all saves too; the tokens it had loaded."""
    engine.add_request(prompt, max_tokens, name)
    engine.run()
    engine.idle_until_quiet()
    engine.assert_outputs()
    engine.assert_clean()
    return engine.external_tokens(name)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_traffic_over_a_local_store_sees_no_wrong_byte(
    shape: Shape, seed: int, shared_memory: Path
) -> None:
    with akv_engine(shape, local_store(shared_memory), num_blocks=32) as engine:
        report = run_workload(engine, seed, requests=40)
    assert report.steps > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
def test_random_traffic_over_a_memory_store_sees_no_wrong_byte(
    shape: Shape, seed: int
) -> None:
    extra = {**SMALL, "store": f"memory:{shape}-{seed}"}
    with akv_engine(shape, extra, num_blocks=32) as engine:
        run_workload(engine, seed, requests=40)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_traffic_with_forced_resets_decode_saves_and_eviction_sees_no_wrong_byte(
    shape: Shape, shared_memory: Path
) -> None:
    extra = {**local_store(shared_memory, "1MiB"), "save_decode": True}
    traffic = Workload(
        requests=60, forced_reset_rate=0.03, abort_rate=0.05, lull_rate=0.1
    )
    with akv_engine(shape, extra, num_blocks=40) as engine:
        reports = [run_workload(engine, seed, workload=traffic) for seed in LONG_SEEDS]
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.resets for report in reports) > 0
    assert sum(report.loads for report in reports) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_second_engine_loads_what_the_first_one_saved(
    shape: Shape, shared_memory: Path
) -> None:
    extra = local_store(shared_memory)
    with akv_engine(shape, extra) as engine:
        assert serve(engine, range(100), "cold") == 0
    with akv_engine(shape, extra) as engine:
        assert serve(engine, range(100), "warm") == 96
        assert engine.prefill_stats["warm"].num_external_cached_tokens == 96


@pytest.mark.parametrize("transfer", ["direct", "staged"])
@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_every_layout_of_vllm_is_saved_and_loaded(
    layout: str, transfer: str, shared_memory: Path
) -> None:
    """Each byte that an engine uses is checked against what was computed."""
    extra = {**local_store(shared_memory), "transfer": transfer}
    options: dict[str, Any] = {"layout": layout, "layers": 3}
    with akv_engine(INLINE_SHAPES[0], extra, **options) as engine:
        assert serve(engine, range(100), "cold") == 0
    with akv_engine(INLINE_SHAPES[0], extra, **options) as engine:
        assert serve(engine, range(100), "warm") == 96


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_is_asked_for_whole_blocks_where_its_backend_takes_them(
    device: str,
) -> None:
    """vLLM's own choice, for backends that take anything, some, and one layout."""
    with akv_engine(INLINE_SHAPES[0], {"store": "memory:layouts"}) as engine:
        config = engine.scheduler.vllm_config
        config.device_config.device_type = device
        chosen = []
        for supported in (["LBNHC", "LBHNC", "BLHNC"], ["LBHNC"]):
            config.cache_config.kv_cache_layout = None
            chosen.append(resolve_kv_cache_layout(config, [supported]).name)
        assert chosen == [{"cuda": "BLHNC", "cpu": "LBNHC"}[device], "LBHNC"]


@pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
def test_both_roles_share_a_memory_store_of_one_name(shape: Shape) -> None:
    extra = {**SMALL, "store": f"memory:shared-{shape}"}
    with akv_engine(shape, extra) as engine:
        assert serve(engine, range(100), "cold") == 0
        assert engine.reset_prefix_cache()
        assert serve(engine, range(100), "warm") == 96


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_models_blocks_are_a_miss(shape: Shape, shared_memory: Path) -> None:
    extra = local_store(shared_memory)
    with akv_engine(shape, extra) as engine:
        serve(engine, range(100), "cold")
    with akv_engine(shape, extra, model_seed=1) as engine:
        assert serve(engine, range(100), "other model") == 0


@pytest.mark.parametrize(
    ("length", "local", "loaded"),
    [
        (48, 0, 32),
        (48, 16, 16),
        (48, 32, 0),
        (49, 0, 48),
        (17, 0, 16),
        (16, 0, 0),
        (15, 0, 0),
    ],
)
@pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
def test_a_hit_is_rounded_to_whole_blocks_below_the_last_token(
    shape: Shape, length: int, local: int, loaded: int, shared_memory: Path
) -> None:
    extra = local_store(shared_memory)
    with akv_engine(shape, extra) as engine:
        serve(engine, range(64), "cold")
        assert engine.reset_prefix_cache()
        if local:
            serve(engine, range(local + 1), "local", max_tokens=1)
        before = engine.external_tokens("local")
        assert serve(engine, range(length), "warm") == loaded
        assert engine.external_tokens("local") == before


@pytest.mark.parametrize("shape", INLINE_SHAPES, ids=str)
def test_a_second_tenant_does_not_see_the_firsts_blocks(
    shape: Shape, shared_memory: Path
) -> None:
    with akv_engine(shape, local_store(shared_memory)) as engine:
        for name in ("one", "two", "one again"):
            engine.add_request(range(50), 3, name, cache_salt=name[:3])
            engine.run()
            engine.idle_until_quiet()
            assert engine.reset_prefix_cache()
        engine.assert_outputs()
        assert engine.external_tokens("two") == 0
        assert engine.external_tokens("one again") == 48
