"""A trained adapter before it is a version: what it is, how good it was, and the files it is kept in."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file

from moedraft.core import InvalidRequest
from moedraft.storage.db import StorageFull

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
VOCABULARY = "vocabulary.safetensors"  # beside them, where the adapter's output rows are tokens of its own
LIMITS = ("File too large", "quota exceeded")  # how safetensors words the errors EFBIG and EDQUOT


@dataclass(frozen=True)
class CandidateSummary:
    """All that is known of a candidate except its weights; small enough to be sent to another process."""

    expert: str  # a domain, or SHARED
    parent: int  # the version that the update began with; 0 is the untrained adapter
    base_hash: str  # of the draft base that it was trained on
    rank: int
    modules: tuple[str, ...]  # of the draft base, that the adapter changes
    records: int  # different ones that it was trained on; some may be other domains', see `distill/rows`
    held_out: int  # records it was measured by and not trained on
    steps: int  # of the optimiser
    loss: float  # mean over the update, nats per token
    acceptance_before: float | None  # of first guesses on held-out records, 0 to 1
    acceptance_after: float | None  # the same of what was learned, before an expert is cut to its rank


class Weights(Protocol):
    """An adapter as it is stored or exported: a `LoadedAdapter` or a `Candidate`."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def vocabulary(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, eq=False)
class Candidate(CandidateSummary):
    """The result of one update, not yet published. Its tensors are copies that no update changes."""

    config: Mapping[str, Any]  # PEFT's adapter_config.json
    tensors: Mapping[str, torch.Tensor]
    vocabulary: torch.Tensor | None = None  # int32, ascending: token ids, by row of the output layer

    def summary(self) -> CandidateSummary:
        names = [field.name for field in fields(CandidateSummary)]
        return CandidateSummary(**{name: getattr(self, name) for name in names})


def write_files(candidate: Candidate, folder: Path) -> None:
    """Writes the candidate in PEFT's format into `folder`. Raises StorageFull, OSError or SafetensorError."""
    config = json.dumps(dict(candidate.config), indent=2, sort_keys=True)
    try:
        (folder / CONFIG).write_text(config, encoding="utf-8")
        save_file(dict(candidate.tensors), folder / WEIGHTS, metadata={"format": "pt"})
        if candidate.vocabulary is not None:
            save_file({"vocabulary": candidate.vocabulary}, folder / VOCABULARY, metadata={"format": "pt"})
    except SafetensorError as error:
        if "No space left" in str(error):
            raise StorageFull(f"The disk that holds {folder.parent} is full; free some space.") from error
        if any(limit in str(error) for limit in LIMITS):
            raise StorageFull(f"{folder.parent} may hold no more: {error}.") from error
        raise
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EDQUOT):
            raise StorageFull(f"{folder.parent} may hold no more: {error.strerror}.") from error
        raise


def move_files(staged: Path, folder: Path) -> None:
    """Moves a candidate's files from `staged` to `folder`; anything else in `staged` stays there."""
    if staged.is_symlink():
        raise InvalidRequest("an update must stand in the home itself.")
    for name in (CONFIG, WEIGHTS):
        (staged / name).rename(folder / name)
    if (staged / VOCABULARY).exists():
        (staged / VOCABULARY).rename(folder / VOCABULARY)
