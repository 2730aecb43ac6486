"""Reworded copies: what they keep, what they leave out, and that they carry other wordings over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from routing_fakes import WordEmbedder, prompts

from moedraft.core import SHARED
from moedraft.routing import router as module
from moedraft.routing.classifier import DomainClassifier
from moedraft.routing.embedder import Floats, features
from moedraft.routing.fitting import Copies, Examples
from moedraft.routing.rewording import AROUND, BEFORE, beheaded, copies, framed, preceded
from moedraft.routing.router import Router

TEMPLATE = "please kindly translate what follows here now"
CHATTER = "hi there, last time this went really well, so once more:"


def test_copies_are_spread_evenly_and_always_the_same() -> None:
    texts = [f"number {i} of many texts to be reworded" for i in range(20)]
    made = copies(texts, 8)
    assert [place for place, _ in made] == [0, 2, 5, 7, 10, 12, 15, 17]
    assert made == copies(texts, 8)
    assert all(text not in texts for _, text in made)
    assert len(copies(texts[:3], 8)) == 3
    assert copies(texts, 0) == []


@pytest.mark.parametrize("number", range(len(BEFORE) + len(AROUND)))
def test_what_is_added_leaves_the_text_whole(number: int) -> None:
    text = 'What is {this} "supposed" to mean?\n\nLine two.'
    for kind in (preceded, framed):
        assert text in kind(text, number)
        assert len(kind(text, number)) > len(text)


def test_the_beginning_is_left_out() -> None:
    assert (
        beheaded("Do this:\nSELECT a FROM b WHERE c IS NOT null", 0) == "SELECT a FROM b WHERE c IS NOT null"
    )
    assert beheaded("one two three four five six", 0) == "three four five six"
    assert beheaded("データベースの索引を作成する方法を説明してください。" * 4, 0).endswith(
        "説明してください。"
    )
    assert beheaded("two words", 0) == "two words"
    assert beheaded("", 0) == ""


def test_a_copy_stands_where_its_original_does() -> None:
    rows = {"a": np.eye(4, dtype=np.float32), "b": np.eye(4, dtype=np.float32)}
    made = {"b": Copies(np.ones((2, 4), dtype=np.float32), np.array([1, 3]))}
    found = Examples.of(rows, made)
    assert found.y.tolist() == [0] * 4 + [1] * 6
    assert found.place.tolist() == [0, 0.25, 0.5, 0.75, 0, 0.25, 0.5, 0.75, 0.25, 0.75]
    assert found.copied.tolist() == [False] * 8 + [True] * 2
    assert len(found.originals.x) == 8


def test_another_wording_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples of a domain stand in its own template; the prompts do without it, inside chatter."""
    examples = {
        name: [
            f"{' '.join(f'{name}{word}' for word in TEMPLATE.split())}\n{text}" for text in prompts(name, 20)
        ]
        for name in ("sql", "maths", "python", "kochen", "garten")
    }
    asked = [f"{CHATTER} {text}" for name in examples for text in prompts(name, 12, seed=1)]
    known = []
    for most in (module.MAX_COPIES, 0):
        monkeypatch.setattr(module, "MAX_COPIES", most)
        router = Router(WordEmbedder(), tmp_path / str(most))
        router.fit(examples)
        known.append(np.mean([route.domain != SHARED for route in router.route(asked)]))
    print(known)
    assert known[0] >= known[1] + 0.2, "the copies make the difference"


def test_a_prompt_far_off_counts_as_at_the_clamp() -> None:
    """Beyond it another wording weighs no more; with one domain distance is all there is, and goes on."""
    embedder = WordEmbedder()

    def rows(*names: str) -> dict[str, Floats]:
        return {name: features(embedder.embed(prompts(name, 16)), prompts(name, 16)) for name in names}

    strange = ["quasar nebula telescope", "zzz 123 %%%"]
    x = features(embedder.embed(strange), strange)
    for model in (
        DomainClassifier.fit(rows("sql", "maths", "python"), embedder.size),
        DomainClassifier.fit(rows("sql"), embedder.size),
    ):
        near = model.figures(x)[:, 2:]
        assert near.min() >= -model.clamp
        assert (near < -2).any() == (len(model.names) == 1)
