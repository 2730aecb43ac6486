"""Which base an adapter belongs to: a short hash of architecture and weights. Knows no transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

PIECE = 256  # bytes read at each of some 16 places of a stored tensor, to tell checkpoints apart


def hash_files(folder: Path, pattern: str = "model*.safetensors") -> str:
    """Of the configuration and a sample of every tensor as stored; "" where there are no such files."""
    files = sorted(folder.glob(pattern))
    if not files:
        return ""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for loose in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(loose, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            base = file.tell()
            digest.update(header)
            for name, tensor in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                for at in range(begin, end, max(PIECE, (end - begin) // 16)):
                    file.seek(base + at)
                    digest.update(file.read(min(PIECE, end - at)))
    return digest.hexdigest()[:16]


def hash_tensors(hf: torch.nn.Module) -> str:
    """Of the architecture and a sample of each tensor, at bfloat16 precision."""
    digest = hashlib.sha256(type(hf).__name__.encode())
    for name, value in sorted(hf.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        flat = value.flatten()
        probe = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).cpu()
        digest.update(probe.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
