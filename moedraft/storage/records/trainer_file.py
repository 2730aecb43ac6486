"""The file in which a trainer keeps what it has learned beside the published versions.

All of it was learned from replay records, so it goes whenever somebody deletes some. What the file holds is
the trainer's business; nothing else reads it, no backup has it, and a home without it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moedraft.core import StorageError
from moedraft.folders import sync
from moedraft.storage.db import storage_errors

NAME = "trainer.safetensors"
SCRATCH = "trainer-{}.tmp"  # what is being written, by the process of this number
WORDS = "words"  # in the file's metadata
SPARE = 4  # times its size must be free on the disk, since the database is worth more


def write(home: Path, words: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the file. Raises StorageError, also where the disk is nearly full; then the old one stays."""
    scratch = home / SCRATCH.format(os.getpid())
    size = sum(tensor.nbytes for tensor in tensors.values())
    with storage_errors(home):
        if shutil.disk_usage(home).free < SPARE * size:
            raise StorageError(f"the disk that holds {home} has no room to spare.")
        try:
            scratch.touch(mode=0o600)
            save_file(dict(tensors), scratch, metadata={WORDS: words})
            sync(scratch)
            scratch.replace(home / NAME)
            sync(home)
        except SafetensorError as error:
            raise StorageError(f"{scratch} cannot be written: {error}.") from error
        finally:
            scratch.unlink(missing_ok=True)


def read(home: Path) -> tuple[str, dict[str, torch.Tensor]] | None:
    """The words and the tensors; None without a file. Raises StorageError where it cannot be read.

    Call it before anything is written: what a killed trainer had begun to write is removed.
    """
    path = home / NAME
    _remove(home, SCRATCH.format("*"))
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            words = (file.metadata() or {}).get(WORDS, "")
            return words, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, NotImplementedError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error


def remove(home: Path) -> None:
    """Remove the file, where there is one, and one that is being written. Raises StorageError."""
    _remove(home, SCRATCH.format("*"), NAME)


def _remove(home: Path, *patterns: str) -> None:
    with storage_errors(home):
        found = [path for pattern in patterns for path in home.glob(pattern)]
        for path in found:
            path.unlink(missing_ok=True)
        if found:
            sync(home)
