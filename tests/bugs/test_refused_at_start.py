"""What akv does not serve yet is refused at start, in a sentence, by both roles.

B, C, D, A5, A6 and K11 of the bug log are about drafters, hybrid groups, several ranks,
hash units below a block, and layouts that nobody has looked at. None of them can go
wrong in an engine that does not start: each test changes one fact of a configuration
that is served, and reads what a person would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import akv
from akv.vllm.connector import AkvConnector
from engine.config import (
    EngineConfig,
    build_kv_cache_config,
    build_vllm_config,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path


class Facts:
    """The configuration of an engine that akv serves, to be changed."""

    def __init__(self, directory: Path) -> None:
        config = EngineConfig(extra_config={"store": "memory:"})
        self.vllm = build_vllm_config(config, write_model(directory, config))
        self.cache = build_kv_cache_config(config)

    def start(self, role: KVConnectorRole) -> None:
        """Construct the connector as vLLM does, and let it go."""
        AkvConnector(self.vllm, role, self.cache).shutdown()

    def refused(self, words: str) -> None:
        """Both roles refuse, with these words."""
        for role in KVConnectorRole:
            with pytest.raises(akv.ConfigError, match=words):
                self.start(role)


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """Facts that both roles start with."""
    facts = Facts(tmp_path)
    for role in KVConnectorRole:
        facts.start(role)
    return facts


def window_spec(base: Any) -> SlidingWindowSpec:
    """A sliding window in place of full attention."""
    return SlidingWindowSpec(
        block_size=base.block_size,
        num_kv_heads=base.num_kv_heads,
        head_size=base.head_size,
        dtype=base.dtype,
        sliding_window=32,
    )


def test_several_groups_are_refused(facts: Facts) -> None:
    """C1-C7, A5: a hybrid model, whose groups have tables of their own."""
    (group,) = facts.cache.kv_cache_groups
    other = KVCacheGroupSpec(
        layer_names=["window"], kv_cache_spec=window_spec(group.kv_cache_spec)
    )
    facts.cache.kv_cache_groups = [group, other]
    facts.refused(r"one full-attention group.*FullAttentionSpec, SlidingWindowSpec")


def test_no_group_at_all_is_refused(facts: Facts) -> None:
    """C: a model without attention has nothing to keep."""
    facts.cache.kv_cache_groups = []
    facts.refused("no KV cache")


@pytest.mark.parametrize("kind", ["window", "mamba"])
def test_another_kind_of_cache_is_refused(facts: Facts, kind: str) -> None:
    """C1, C7: one group, but of a kind whose blocks move or are dropped."""
    (group,) = facts.cache.kv_cache_groups
    spec: Any = window_spec(group.kv_cache_spec)
    if kind == "mamba":
        spec = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    facts.cache.kv_cache_groups = [
        KVCacheGroupSpec(layer_names=group.layer_names, kv_cache_spec=spec)
    ]
    facts.refused("causal full attention")


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_more_than_one_rank_is_refused(facts: Facts, name: str) -> None:
    """D: shards of several ranks would be stored under one key."""
    assert hasattr(facts.vllm.parallel_config, name)
    setattr(facts.vllm.parallel_config, name, 2)
    facts.refused(f"{name}=2.*set it to 1")


def speculative(method: str) -> SpeculativeConfig:
    """vLLM's own class, without the draft model that it would read."""
    config = object.__new__(SpeculativeConfig)
    object.__setattr__(config, "method", method)
    return config


def test_a_drafter_with_a_cache_of_its_own_is_refused(facts: Facts) -> None:
    """B1, B3, B4, F6: EAGLE's layers would not be in the objects."""
    facts.vllm.speculative_config = speculative("eagle")
    facts.refused(r"speculative_config.method='eagle'.*ngram or none")


def test_a_drafter_without_a_cache_is_served(facts: Facts) -> None:
    """B: drafts from the prompt need no memory; hashes cover committed tokens only."""
    facts.vllm.speculative_config = speculative("ngram")
    for role in KVConnectorRole:
        facts.start(role)


def test_a_hash_that_differs_from_process_to_process_is_refused(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M9: nothing would ever be found."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    facts.vllm.cache_config.prefix_caching_hash_algo = "xxhash"
    facts.refused(r"'xxhash'.*PYTHONHASHSEED")


def test_an_object_of_more_than_one_hash_unit_cannot_come_up(facts: Facts) -> None:
    """A5, A6: a hash unit is a block, so a hit never ends inside of one."""
    (group,) = facts.cache.kv_cache_groups
    assert isinstance(group.kv_cache_spec, FullAttentionSpec)
    with pytest.raises(akv.PlanError, match="hash unit 32 does not divide"):
        akv.Geometry(
            num_blocks=4,
            hash_unit=32,
            groups=(
                akv.Group(
                    block_size=16,
                    regions=(
                        akv.Region(name="a", memory=0, offset=0, stride=8, size=8),
                    ),
                ),
            ),
        )


def test_attention_that_looks_ahead_is_refused(facts: Facts) -> None:
    """K11: a block of an encoder depends on what comes after it."""
    (group,) = facts.cache.kv_cache_groups
    spec = replace(group.kv_cache_spec, non_causal=True)
    facts.cache.kv_cache_groups = [
        KVCacheGroupSpec(layer_names=group.layer_names, kv_cache_spec=spec)
    ]
    facts.refused("causal full attention")
