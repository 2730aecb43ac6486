"""The texts that the embedded pair is trained on: reading, splitting, tokenising, batching."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

OPENING = 200  # characters of a text without a prompt that are used as its prompt
BOS, EOS = "<s>", "</s>"
HELD_OUT_EVERY = 200  # every 200th document of a domain (by hash of its text) is never trained on


def input_files(paths: list[Path]) -> list[Path]:
    """All readable files under `paths`, sorted, so that the order does not depend on the disk."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += [p for p in path.rglob("*") if p.name.endswith((".jsonl", ".jsonl.xz", ".txt", ".md"))]
        elif path.is_file():
            found.append(path)
        else:
            raise SystemExit(f"train_mini: no such file or folder: {path}")
    if not found:
        raise SystemExit("train_mini: no .jsonl, .jsonl.xz, .txt or .md file in the given folders")
    return sorted(found)


class Document(NamedTuple):
    text: str
    prompt: str  # the part that a user would send


def documents(path: Path) -> Iterator[Document]:
    """The texts of one file: each row's prompt, blank line, reference; or its `text`; or the file."""
    if path.suffix in (".txt", ".md"):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield Document(text, text[:OPENING])
        return
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "text" in row:
                    document = Document(row["text"], row["text"][:OPENING])
                else:
                    document = Document(f"{row['prompt']}\n\n{row['reference']}", row["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"train_mini: {path}, line {number}: {error!r}") from error
            yield document


def read_domains(
    paths: list[Path],
) -> tuple[dict[str, list[Document]], dict[str, list[Document]], dict[str, str]]:
    """Texts to train on and held-out texts, both by domain, and the sha256 of every file by its name."""
    train: dict[str, list[Document]] = {}
    held_out: dict[str, list[Document]] = {}
    hashes: dict[str, str] = {}
    for path in input_files(paths):
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        domain = path.name.split(".")[0] if ".jsonl" in path.name else path.parent.name
        for document in documents(path):
            digest = int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "big")
            part = held_out if digest % HELD_OUT_EVERY == 0 else train
            part.setdefault(domain, []).append(document)
    return train, held_out, hashes


def train_tokenizer(texts: dict[str, list[Document]], vocab: int, seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on an equal number of characters from every domain."""
    rng = random.Random(seed)
    budget = 4_000_000
    sample = []
    for domain in sorted(texts):
        used = 0
        for text, _ in rng.sample(texts[domain], len(texts[domain])):
            sample.append(text)
            used += len(text)
            if used > budget:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True)
class Corpus:
    """The documents of one domain, one after the other: BOS text EOS BOS text EOS …"""

    tokens: np.ndarray  # uint16 [N]
    starts: np.ndarray  # int64 [docs], where each document begins

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start` on; after the last token comes the first one."""
        return np.take(self.tokens, np.arange(start, start + length), mode="wrap")


def tokenise(tokenizer: PreTrainedTokenizerFast, texts: list[Document], seed: int) -> Corpus:
    order = [document.text for document in texts]
    random.Random(seed).shuffle(order)
    pieces, starts, length = [], [], 0
    for begin in range(0, len(order), 2000):
        for ids in tokenizer(order[begin : begin + 2000])["input_ids"]:
            starts.append(length)
            pieces.append(np.asarray([*ids, tokenizer.eos_token_id], dtype=np.uint16))
            length += len(ids) + 1
    return Corpus(np.concatenate(pieces), np.asarray(starts))


class Batches:
    """Random windows that begin where a document begins. A domain's weight is the square root of its size."""

    def __init__(self, corpora: dict[str, Corpus], seq_len: int, size: int, seed: int) -> None:
        self.size, self.tokens_per_step = size, size * seq_len
        self.corpora = [corpora[name] for name in sorted(corpora)]
        weights = np.sqrt([len(c.tokens) for c in self.corpora])
        self.weights = weights / weights.sum()
        self.seq_len = seq_len
        self.seed = seed

    def batch(self, step: int) -> torch.Tensor:
        """Token ids [size, seq_len + 1], int64, the same for the same step."""
        rng = np.random.default_rng((self.seed, step))
        rows = []
        for which in rng.choice(len(self.corpora), size=self.size, p=self.weights):
            corpus = self.corpora[which]
            rows.append(corpus.window(int(rng.choice(corpus.starts)), self.seq_len + 1))
        return torch.from_numpy(np.stack(rows).astype(np.int64))
