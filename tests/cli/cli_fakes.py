"""What the tests of the command line share: results, rows of numbers, an embedder without weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moedraft.routing.embedder import Floats

from random_models import VOCAB

Pair = tuple[str, ...]


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """stdout as JSON lines: fails where it holds anything else."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def data(self) -> dict[str, Any]:
        (row,) = self.rows
        return row


Run = Callable[..., Result]


class LetterEmbedder:
    """Texts by the letters and digits in them: enough to tell domains of numbers apart."""

    id = "letters"

    def __init__(self, source: str = "letters", **_: object) -> None:
        self.source = source

    def embed(self, texts: Sequence[str]) -> Floats:
        vectors = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, zlib.crc32(word.encode()) % 64] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-6)


def save_tokenizer(folder: Path, words: int = VOCAB) -> None:
    """Word "7" is token 7."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(words)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(folder)


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbers(low: int, count: int = 12) -> list[dict[str, object]]:
    """Example rows of a "domain" that is a corner of the vocabulary."""
    return [
        {"prompt": " ".join(str(low + (7 * i + 3 * k) % 24) for k in range(6)), "origin": "here"}
        for i in range(count)
    ]
