"""Answers that are sampled, in the benchmarks that use the workplace of scripts/evidence.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_records import a_target
from scripts_loader import load_script

answers, benches = (load_script(f"evidence.{name}") for name in ("answers", "benches"))
feature_answers, strength = load_script("feature_answers"), load_script("bench_strength")

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


def test_a_temperature_that_records_cannot_tell_of_is_refused(tmp_path: Path) -> None:
    parser = benches.parser("What it does.", samples=True)
    for wrong in ("1.5", "-1", "nan"):
        args = parser.parse_args(["--data", "d", "--out", str(tmp_path / "o"), f"--temperature={wrong}"])
        with pytest.raises(SystemExit, match="between 0 and 1"):
            benches.workplace(args)


def test_greedy_and_sampled_runs_of_a_benchmark_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "strength.json", list[Any]()

    class Workplace:
        precision = "float32"

        def run(self, *which: Any) -> dict[str, Any]:
            made.append(which[:3])
            return {"at_end": {"1.0": [[4, 2, 1, 0]]}}

    monkeypatch.setattr(benches, "workplace", lambda args: Workplace())
    given = ["bench_strength.py", "--data", "d", "--out", str(out), "--patterns", "steady"]
    warm, cooler, further = ["--temperature", "1"], ["--temperature", ".7"], ["--resampled", "2"]
    for more in ([], warm, [], warm, cooler, further, further):
        monkeypatch.setattr("sys.argv", [*given, "--arrangements", "joint", *more])
        strength.main()
    assert len(made) == 4
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert [run.get("temperature") for run in runs] == [None, 1.0, 0.7, None]
    assert [run.get("resampled") for run in runs] == [None, None, None, 2]


def test_records_that_keep_more_of_a_token_have_files_of_their_own(tmp_path: Path) -> None:
    for topk in (feature_answers.TOPK, 3):
        kept = answers.Answers(TARGET, None, tmp_path, 8, 1.0, topk)
        assert not kept._file(PROMPTS[0]).exists()
        kept._answer(PROMPTS[:1])
        assert {len(ids) for ids in kept._load(PROMPTS[0]).topk_ids} == {topk}
