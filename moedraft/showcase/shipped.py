"""The prompts that come with moedraft: examples to register with, a mixed stream, held-out prompts."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Query:
    """A prompt, and the domain it was written for. The system never sees that domain."""

    prompt: str
    domain: str
    max_tokens: int


def examples() -> dict[str, list[str]]:
    """Example prompts by domain name, of the domains that the stream and the held-out prompts are of."""
    folder = importlib.resources.files("moedraft.data") / "domains"
    served = {f"{query.domain}.jsonl" for query in heldout()}
    files = sorted((f for f in folder.iterdir() if f.name in served), key=lambda f: f.name)
    return {file.name.removesuffix(".jsonl"): [row["prompt"] for row in _rows(file)] for file in files}


def traffic() -> list[Query]:
    """The mixed stream of 360 prompts, in the order in which it is served."""
    return _queries("traffic.jsonl")


def heldout() -> list[Query]:
    """The 60 prompts for measurements before and after learning."""
    return _queries("heldout.jsonl")


def _queries(name: str) -> list[Query]:
    rows = _rows(importlib.resources.files("moedraft.data") / name)
    return [Query(row["prompt"], row["true_domain"], row["max_tokens"]) for row in rows]


def _rows(file: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
