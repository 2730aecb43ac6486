"""What an adapter's folder holds: PEFT's files, never pickled, and the manifest with their checksums.

This module does not know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from moedraft.core import AdapterVersion, CorruptAdapter
from moedraft.storage.versions.candidate import CONFIG, VOCABULARY, WEIGHTS, CandidateSummary

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2  # in format 1 the manifest had no checksum of its own
ALLOWED = (".safetensors", ".json", ".md")


def checked(folder: Path) -> dict[str, bytes]:
    """Read the files of a new adapter. Raises CorruptAdapter where they are not an intact one."""
    title = "The new adapter"
    files = contents(folder, title)
    parsed(files, title)
    vocabulary_in(files, title)
    return files


def contents(folder: Path, title: str) -> dict[str, bytes]:
    """The bytes of each file. Raises CorruptAdapter for anything but plain files of the allowed kinds."""
    files = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix not in ALLOWED or path.is_symlink() or not path.is_file():
                raise CorruptAdapter(
                    f"{title} holds '{path.name}'; only {', '.join(ALLOWED)} files are taken."
                )
            files[path.name] = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptAdapter(f"{title}: its folder is gone.") from error
    return files


def parsed(files: dict[str, bytes], title: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    missing = [name for name in (CONFIG, WEIGHTS) if name not in files]
    if missing:
        raise CorruptAdapter(f"{title} lacks {' and '.join(missing)}.")
    try:
        tensors: dict[str, torch.Tensor] = load_tensors(files[WEIGHTS])
        finite = {name: bool(tensor.isfinite().all()) for name, tensor in tensors.items()}
    except (SafetensorError, KeyError, NotImplementedError) as error:  # the last two: unknown dtypes
        raise CorruptAdapter(f"{title}: {WEIGHTS} cannot be read: {error}.") from error
    for name in finite:
        if not finite[name]:
            raise CorruptAdapter(f"{title}: tensor '{name}' is not finite.")
    return json_object(files[CONFIG], f"{CONFIG} of {title}"), tensors


def vocabulary_in(files: dict[str, bytes], title: str) -> torch.Tensor | None:
    """The token ids of an adapter's own output rows; the draft base checks whether they are valid."""
    if VOCABULARY not in files:
        return None
    try:
        found: torch.Tensor = load_tensors(files[VOCABULARY])["vocabulary"]
    except (SafetensorError, KeyError, NotImplementedError) as error:
        raise CorruptAdapter(f"{title}: {VOCABULARY} cannot be read: {error}.") from error
    return found


def json_object(text: bytes, title: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CorruptAdapter(f"{title} is missing or no JSON.") from error
    if not isinstance(value, dict):
        raise CorruptAdapter(f"{title} is no JSON object.")
    return value


def manifest_of(version: AdapterVersion, summary: CandidateSummary, files: dict[str, bytes]) -> str:
    written = {
        "format": MANIFEST_FORMAT,
        "domain": version.domain,
        "version": version.version,
        "parent": version.parent,
        "base_hash": version.base_hash,
        "acceptance": version.acceptance,
        "created_at": version.created_at,
        "files": hashes_of(files),
        "rank": summary.rank,
        "modules": list(summary.modules),
    }
    return json.dumps(sealed(written), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_manifest(files: dict[str, bytes], title: str) -> dict[str, Any]:
    """Take the manifest out of `files`. Raises CorruptAdapter where it or one of the files was changed."""
    manifest = json_object(files.pop(MANIFEST, b""), f"{MANIFEST} of {title}")
    if manifest.get("format") not in (1, MANIFEST_FORMAT):
        raise CorruptAdapter(f"{title}: its manifest has an unknown format.")
    if manifest["format"] != 1 and sealed(manifest) != manifest:
        raise CorruptAdapter(f"{title}: its manifest was changed.")
    if manifest.get("files") != hashes_of(files):
        raise CorruptAdapter(f"{title}: its files do not match its manifest.")
    return manifest


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the SHA-256 of its other entries."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def hashes_of(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
