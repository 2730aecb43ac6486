"""A fake embedder, and example prompts of a few domains that are easy to tell apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from moedraft.routing.embedder import Floats, unit

WORDS = {
    "sql": "select table rows join where count schema column query order",
    "maths": "apples price each total sum minutes twice half remaining dollars",
    "python": "function return argument class method list tuple docstring loop raise",
    "kochen": "Zwiebel schneiden Ofen Teig Mehl Pfanne Soße würzen Löffel köcheln",
    "garten": "Beet Rosen gießen Erde Dünger Hecke Rasen mähen Knolle pflanzen",
    "weather": "rain cloud sunny wind storm forecast degrees snow humid front",
}
TOPICS = {domain: words.split() for domain, words in WORDS.items()}


class WordEmbedder:
    """The mean of a random vector per word: texts that share words are alike. Counts what it embeds."""

    def __init__(self, identity: str = "words/1", size: int = 48) -> None:
        self.identity = identity
        self.size = size
        self.embedded: list[str] = []

    @property
    def id(self) -> str:
        return self.identity

    def embed(self, texts: Sequence[str]) -> Floats:
        self.embedded += texts
        return unit(np.stack([self._mean(text) for text in texts]))

    def _mean(self, text: str) -> Floats:
        seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) for word in text.lower().split()]
        vectors = [np.random.default_rng(seed).normal(size=self.size) for seed in seeds or [0]]
        return np.mean(vectors, axis=0).astype(np.float32)


def prompts(domain: str, count: int, seed: int = 0) -> list[str]:
    """Different prompts of six words of the domain's topic."""
    rng = np.random.default_rng([seed, *domain.encode()])
    return [" ".join(rng.permutation(TOPICS[domain])[:6]) for _ in range(count)]


def distinct(domains: int, count: int, seed: int = 0) -> dict[str, list[str]]:
    """Prompts of domains with letters of their own, which n-grams alone tell apart."""
    rng = np.random.default_rng(seed)
    return {f"d{i:02}": [_text(rng, 0x4E00 + 100 * i) for _ in range(count)] for i in range(domains)}


def _text(rng: np.random.Generator, first: int) -> str:
    letters = rng.integers(first, first + 12, size=(8, 5))
    return " ".join("".join(map(chr, word)) for word in letters)
