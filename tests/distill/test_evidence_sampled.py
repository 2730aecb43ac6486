"""Answers that are sampled, in scripts/evidence.py and the benchmarks that use its workplace."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from feature_records import a_target
from scripts_loader import load_script

answers, command = (load_script(f"evidence.{name}") for name in ("answers", "command"))
feature_answers = load_script("feature_answers")

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
TARGET = a_target()


def sampled(prompts: list[list[int]], temperature: float = 1.0) -> list[tuple[int, ...]]:
    found = feature_answers.answered(TARGET, prompts, "law", 8, temperature=temperature)
    assert [one.temperature for one in found] == [temperature] * len(prompts)
    return [tuple(one.token_ids) for one in found]


def test_a_prompt_has_the_same_sampled_answer_in_any_batch() -> None:
    together = sampled(PROMPTS)
    assert together == [answer for prompt in PROMPTS for answer in sampled([prompt])]
    assert together != sampled(PROMPTS, 0.0)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chances = [torch.Generator().manual_seed(seed) for seed in range(4000)]
    found = feature_answers.drawn(logits.expand(4000, 4), 0.7, chances).flatten()
    share = torch.bincount(found, minlength=4) / 4000
    assert torch.allclose(share, (logits[0] / 0.7).softmax(0), atol=0.03)
    assert feature_answers.drawn(logits, 0.0, chances[:1]).tolist() == [[0]]


def test_sampled_and_greedy_answers_are_kept_apart(tmp_path: Path) -> None:
    kept = {t: answers.Answers(TARGET, None, tmp_path, 8, t) for t in (0.0, 1.0)}
    (greedy,) = feature_answers.answered(TARGET, PROMPTS[:1], "", 8)
    kept[0.0].keep(greedy)
    assert not kept[1.0]._file(PROMPTS[0]).exists()
    (drawn,) = feature_answers.answered(TARGET, PROMPTS[:1], "", 8, temperature=1.0)
    kept[1.0].keep(drawn)
    for temperature, given in ((0.0, greedy), (1.0, drawn)):
        found = kept[temperature]._load(PROMPTS[0])
        assert found.token_ids == given.token_ids
        assert found.temperature == temperature


def test_the_settings_of_a_run_tell_a_temperature_and_those_of_greedy_runs_stay_as_they_were() -> None:
    given = ["--data", "d", "--out", "o"]
    greedy, drawn = (command.settings(arguments(given, more)) for more in ([], ["--temperature", "1"]))
    assert "temperature" not in greedy
    assert drawn == greedy | {"temperature": 1.0}


def arguments(given: list[str], more: list[str]) -> argparse.Namespace:
    found = command.arguments([*given, *more])
    assert isinstance(found, argparse.Namespace)
    return found
