"""The selector sets experts from the prior, for all new sequences at once."""

from __future__ import annotations

from pathlib import Path

import torch
from routing_fakes import WordEmbedder, prompts

from moedraft.core import SHARED, SamplingParams, Sequence, Verdict
from moedraft.routing.classifier import Route, Router
from moedraft.routing.selector import ExpertSelector, Selector


def sequence(prompt: str, **fields: object) -> Sequence:
    made = Sequence("r", [1, 2], 2, SamplingParams(), 0, prompt)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class CountingRouter(Router):
    calls: list[int]

    def route(self, texts: object) -> list[Route]:
        assert isinstance(texts, list)
        self.calls.append(len(texts))
        return super().route(texts)


def test_assigns_all_at_once_and_leaves_pinned_ones(
    tmp_path: Path, embedder: WordEmbedder, examples: dict[str, list[str]]
) -> None:
    router = CountingRouter(embedder, tmp_path)
    router.calls = []
    router.fit(examples)
    new = [
        sequence(prompts("sql", 1, seed=3)[0]),
        sequence(prompts("sql", 1, seed=3)[0], pinned=True, expert="garten"),
        sequence("quasar nebula telescope xylophone"),
        sequence(prompts("kochen", 1, seed=3)[0], draft=False),
        sequence(prompts("kochen", 1, seed=3)[0], draft=False, capture=True),
    ]
    Selector(router).assign(new)
    assert [s.expert for s in new] == ["sql", "garten", SHARED, SHARED, "kochen"]
    assert router.calls == [3]


def test_without_domains(tmp_path: Path, embedder: WordEmbedder) -> None:
    new = [sequence("anything")]
    Selector(Router(embedder, tmp_path)).assign(new)
    assert new[0].expert == SHARED


def test_verification_changes_nothing(tmp_path: Path, embedder: WordEmbedder) -> None:
    selector: ExpertSelector = Selector(Router(embedder, tmp_path))
    row = sequence("anything", expert="sql")
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    selector.observe([row], Verdict(tokens, tokens[:, 0], tokens[:, 0].int()))
    assert row.expert == "sql"
