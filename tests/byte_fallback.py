"""A tokenizer as Llama's: words with the space before them, and bytes for what the vocabulary lacks."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "▁time", "▁the", "a", "▁a", "x", "▁"]


def byte_fallback() -> PreTrainedTokenizerFast:
    vocab = {piece: i for i, piece in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def spelt(*parts: str | bytes) -> list[int]:
    """Words as their tokens, all else byte by byte."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str) and part in WORDS:
            ids.append(WORDS.index(part))
        else:
            ids += [len(WORDS) + byte for byte in (part.encode() if isinstance(part, str) else part)]
    return ids
