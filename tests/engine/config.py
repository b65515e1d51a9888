"""vLLM's configuration for an engine without a model.

``write_model`` makes the directory that ``ModelConfig`` wants: a tiny llama config and
a weights file of a few bytes, both a function of the seed, so that what identifies a
model (a connector's fingerprint) differs exactly when the oracle's bytes differ.
``build_vllm_config`` and ``build_kv_cache_config`` go through vLLM's own classes;
nothing is downloaded and no tokenizer is read.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from engine.model import Oracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "EngineConfig",
    "EngineOptions",
    "HookOrder",
    "build_kv_cache_config",
    "build_oracle",
    "build_vllm_config",
    "layer_names",
    "model_runner_environment",
    "model_runner_version",
    "write_model",
]

HookOrder = Literal["v1", "v2"]

_DTYPE = torch.float32
_VOCAB_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine is made of; plain values, the same in both processes.

    Without ``verify`` the runner writes and does not read. Without ``compute`` it does
    neither, and leaves fresh blocks as they are: what is in the memory is then the
    business of whoever measures how it is moved.
    """

    connector: str | None = "AkvConnector"
    module_path: str | None = "akv.vllm"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    hook_order: HookOrder = "v1"
    async_scheduling: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    num_blocks: int = 128
    block_size: int = 16
    layers: int = 2
    heads: int = 2
    head_size: int = 4
    layout: str = "LBHNC"
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
    max_model_len: int = 1024
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    model_seed: int = 0
    strict_rounding: bool = True
    verify: bool = True
    compute: bool = True


class EngineOptions(TypedDict, total=False):
    """The fields of ``EngineConfig`` as keyword arguments of ``Engine``."""

    extra_config: Mapping[str, Any]
    hook_order: HookOrder
    async_scheduling: bool
    kv_load_failure_policy: Literal["recompute", "fail"]
    num_blocks: int
    block_size: int
    layers: int
    heads: int
    head_size: int
    layout: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int
    policy: Literal["fcfs", "priority"]
    prefix_caching: bool
    model_seed: int
    strict_rounding: bool
    verify: bool
    compute: bool


def write_model(directory: Path, config: EngineConfig) -> Path:
    """Write the files that identify the fake model into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": config.heads * config.head_size,
                "intermediate_size": 16,
                "num_hidden_layers": config.layers,
                "num_attention_heads": config.heads,
                "num_key_value_heads": config.heads,
                "head_dim": config.head_size,
                "vocab_size": _VOCAB_SIZE,
                "max_position_embeddings": 1 << 20,
                "torch_dtype": "float32",
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            sort_keys=True,
        )
    )
    header = json.dumps(
        {"seed": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    ).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + struct.pack("<q", config.model_seed)
    )
    return directory


def build_oracle(config: EngineConfig) -> Oracle:
    """The function from token prefixes to bytes for this model."""
    lane_bytes = 2 * config.head_size * _DTYPE.itemsize
    return Oracle(
        seed=config.model_seed + 1,
        vocab_size=_VOCAB_SIZE,
        heads=config.heads,
        lanes=lane_bytes // 8,
    )


def layer_names(config: EngineConfig) -> list[str]:
    """The layers' names as a llama model gives them."""
    return [f"model.layers.{index}.self_attn.attn" for index in range(config.layers)]


def build_vllm_config(config: EngineConfig, model: Path) -> Any:
    """A real ``VllmConfig`` with the connector under test plugged in."""
    cache_config = CacheConfig(
        block_size=config.block_size, enable_prefix_caching=config.prefix_caching
    )
    transfer_config = None
    if config.connector is not None:
        transfer_config = KVTransferConfig(
            kv_connector=config.connector,
            kv_role="kv_both",
            kv_connector_module_path=config.module_path,
            kv_connector_extra_config=dict(config.extra_config),
            kv_load_failure_policy=config.kv_load_failure_policy,
        )
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=config.max_model_len,
            seed=0,
        ),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=config.async_scheduling,
            policy=config.policy,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer_config,
    )
    vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    # vLLM's CPU platform switches asynchronous scheduling off while the config is
    # built; the scheduler itself does not care where the runner is.
    vllm_config.scheduler_config.async_scheduling = config.async_scheduling
    if vllm_config.cache_config.block_size != config.block_size:
        raise RuntimeError(
            f"vLLM set block_size to {vllm_config.cache_config.block_size}"
        )
    return vllm_config


def build_kv_cache_config(config: EngineConfig) -> Any:
    """One full-attention group over one allocation, in the layout asked for."""
    spec = FullAttentionSpec(
        block_size=config.block_size,
        num_kv_heads=config.heads,
        head_size=config.head_size,
        dtype=_DTYPE,
    )
    names = layer_names(config)
    strides = compute_layout_strides(
        spec, config.num_blocks, len(names), KVCacheLayout[config.layout]
    )
    tensor = KVCacheTensor(
        size=spec.page_size_bytes * config.num_blocks * len(names),
        layers=names,
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return KVCacheConfig(
        num_blocks=config.num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
        kv_cache_layout=config.layout,
        hash_block_size=config.block_size,
        cache_hit_alignment_tokens=config.block_size,
    )


def model_runner_environment(hook_order: HookOrder) -> dict[str, str]:
    """What makes ``VllmConfig.use_v2_model_runner`` name this hook order's runner.

    It is read each time that the property is asked. It cannot be set while the config
    itself is built: that refuses the second runner on a machine without Triton.
    """
    return {"VLLM_USE_V2_MODEL_RUNNER": "1" if hook_order == "v2" else "0"}


@contextmanager
def model_runner_version(hook_order: HookOrder) -> Iterator[None]:
    """Let what vLLM builds in this block belong to the runner of a hook order."""
    before = dict(os.environ)
    os.environ.update(model_runner_environment(hook_order))
    try:
        yield
    finally:
        for name in model_runner_environment(hook_order):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
