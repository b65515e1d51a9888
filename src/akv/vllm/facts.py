"""What vLLM's configuration says about the KV cache, in akv's words.

Read at start, once for each role: whether akv can serve this engine at all,
what its blocks look like, and what gives their bytes a meaning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
)

from akv.core.errors import ConfigError
from akv.core.geometry import Geometry, Group, Region
from akv.core.keys import Fingerprint, fingerprint
from akv.identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("check_supported", "engine_fingerprint", "object_geometry", "worker_facts")

log = logging.getLogger("vllm.akv")

_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_supported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what akv would get wrong; warn of what it can live with.

    :raises ConfigError: with the setting of vLLM and what to do
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(
            "kv_cache_groups",
            len(groups),
            f"akv serves models with one full-attention group so far; this one has "
            f"{kinds or 'no KV cache'}",
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in {FullAttentionSpec, MLAAttentionSpec} or spec.non_causal:
        raise ConfigError(
            "kv_cache_spec",
            type(spec).__name__,
            "akv serves models with causal full attention so far",
        )
    parallel = vllm_config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(
                name, size, "akv serves engines of one rank so far: set it to 1"
            )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        raise ConfigError(
            "speculative_config.method",
            speculative.method,
            "akv does not yet store the cache of a draft model: use ngram or none",
        )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _CRYPTOGRAPHIC and not os.environ.get("PYTHONHASHSEED"):
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "its hashes differ from process to process, so nothing would ever be "
            "found: use sha256, or set PYTHONHASHSEED to one number everywhere",
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        log.warning(
            "akv: kv_load_failure_policy is %r, so a load that fails would fail the "
            "user's request: set it to 'recompute'",
            vllm_config.kv_transfer_config.kv_load_failure_policy,
        )


def object_geometry(
    kv_cache_config: KVCacheConfig, hash_unit: int, object_bytes: int | None = None
) -> Geometry:
    """How large blocks are, without saying where: for the scheduler's role.

    :param object_bytes: what the worker saw; else it follows from the specs
    """
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    size = object_bytes or spec.unpadded_page_size_bytes * len(group.layer_names)
    region = Region(name="object", memory=0, offset=0, stride=size, size=size)
    return Geometry(
        num_blocks=kv_cache_config.num_blocks,
        hash_unit=hash_unit,
        groups=(Group(block_size=spec.block_size, regions=(region,)),),
    )


def worker_facts(vllm_config: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how an attention backend lays a page out."""
    from vllm.distributed.kv_transfer.kv_connector.utils import (
        get_current_attn_backends,
    )

    context = vllm_config.compilation_config.static_forward_context
    variants = {str(getattr(context.get(name), "isa", "")) for name in layers}
    backends = [
        backend.full_cls_name() for backend in get_current_attn_backends(vllm_config)
    ]
    shapes = {
        (str(tensor.dtype), tuple(tensor.shape[1:]), tensor.device.type)
        for tensor in layers.values()
    }
    return {
        "backends": sorted(str(backend) for backend in backends),
        "variants": sorted(variants),
        "pages": sorted(repr(shape) for shape in shapes),
    }


def engine_fingerprint(
    vllm_config: Any, kv_cache_config: KVCacheConfig, worker: Mapping[str, Any]
) -> Fingerprint:
    """The digest of all that gives this engine's blocks their meaning."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    parallel = vllm_config.parallel_config
    return fingerprint(
        {
            "weights": _weights(vllm_config),
            "architecture": _digest(_model_facts(model.hf_config)),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": [str(cache.cache_dtype), str(spec.dtype)],
            "spec": repr(spec),
            "layers": list(group.layer_names),
            "layout": str(kv_cache_config.kv_cache_layout),
            "hash": str(cache.prefix_caching_hash_algo),
            "hash_seed": _hash_seed(cache),
            "parallel": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
            ],
            "worker": dict(worker),
            "vllm": vllm.__version__,
        }
    )


def _weights(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:{model.seed}"
    path = Path(model.model)
    if not path.exists():
        found = _hub_file(model.model, model.revision)
        if found is None:
            log.warning(
                "akv: cannot see the weights of %s; its name and revision stand for "
                "them, so change the namespace when they change",
                model.model,
            )
            return f"name:{model.model}:{model.revision}"
        path = Path(found).parent
    return weights_identity(path)


def _hub_file(name: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return found if isinstance(found, str) else None


def _hash_seed(cache: Any) -> str:
    if str(cache.prefix_caching_hash_algo) in _CRYPTOGRAPHIC:
        return ""
    return os.environ.get("PYTHONHASHSEED", "")


def _model_facts(hf_config: Any) -> dict[str, Any]:
    facts = dict(hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    return facts


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
