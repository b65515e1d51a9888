"""Which weights these are, wherever they lie.

Two hosts that mount the same weights at other paths must agree, and two
models of one name must not. Where the weights come from a hub their commit
says so; else a digest is taken of the configuration and of each weights
file's name, size, header and a sample of its bytes. A few megabytes are read
for each file, at start only.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from akv.core.errors import ConfigError

__all__ = ("weights_identity",)

_PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_CONFIGS = ("config.json", "params.json", "quantize_config.json")
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 20


def weights_identity(path: str | Path) -> str:
    """A text that is the same for the same weights and for no others.

    ``commit:<hash>`` for a snapshot of a hub, else ``files:<digest>``.

    :param path: the folder of the weights, or one weights file
    :raises ConfigError: there are no weights at ``path``
    """
    path = Path(path)
    commit = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", path.absolute().as_posix())
    if commit:
        return f"commit:{commit[1]}"
    files = [path] if path.is_file() else _weights(path)
    if not files:
        raise ConfigError(
            "model",
            str(path),
            f"holds no weights ({', '.join(_PATTERNS)}), so akv cannot tell "
            "which model its blocks would belong to",
        )
    digest = hashlib.blake2b(digest_size=16)
    folder = path.parent if path.is_file() else path
    for name in _CONFIGS:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in files:
        _add(digest, file)
    return f"files:{digest.hexdigest()}"


def _weights(folder: Path) -> list[Path]:
    for pattern in _PATTERNS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _add(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}:".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_HEADER_BYTES))
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        for position in range(_HEADER_BYTES, size, step):
            stream.seek(position)
            digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
