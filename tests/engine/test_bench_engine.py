"""The engine's benchmark on scripted models: what it claims about them, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return pytest.importorskip("bench_engine")


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.9, 1.0])
def test_the_draft_is_right_so_often(bench: Any, accuracy: float) -> None:
    tokens = torch.randint(128_256, (8, 1000))
    positions = torch.arange(1000).expand(8, -1)
    says = bench.next_tokens(tokens, positions, 128_256, accuracy)
    right = says == bench.next_tokens(tokens, positions, 128_256, 1.0)
    assert right.double().mean().item() == pytest.approx(accuracy, abs=0.03)
    assert says.unique().numel() > 7000  # no few tokens again and again
    assert 0 <= says.min() <= says.max() < 128_256


def test_it_runs_and_measures_what_it_was_told(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = bench.Shape(32, 2, 4, 2, 64, 211)
    monkeypatch.setattr(bench, "PAIRS", {"tiny": (small, small)})
    options = "--pair tiny --batch 3 --acceptance 0.8 --prompt 5 --max-tokens 60 --rounds 2 --device cpu"
    options += " --dtype float32 --out"
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *options.split(), str(tmp_path)])
    bench.main()
    [found] = json.loads((tmp_path / "engine-cpu.json").read_text())["pairs"]["tiny"]
    systems = found["systems"]
    assert systems["plain"]["tokens_per_step"] == systems["plain"]["ratio"] == 1
    for name in ("draft", "experts"):
        one = systems[name]
        if one["draft_tokens_per_round"] > 0.2:  # the budget may find that it does not pay
            assert one["tokens_per_step"] > 1
            assert 0.3 < one["accepted"] <= 1


def test_a_run_that_is_broken_off_keeps_what_it_measured(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, measured = bench.Shape(32, 2, 4, 2, 64, 211), iter([{"plain": {"ratio": 1.0}}])

    def measure(*_: object) -> Any:
        if (found := next(measured, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(bench, "PAIRS", {"tiny": (small, small)})
    monkeypatch.setattr(bench, "measure", measure)
    options = "--pair tiny --batch 1 3 --acceptance 0.8 --device cpu --dtype float32 --out"
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *options.split(), str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    [found] = json.loads((tmp_path / "engine-cpu.json").read_text())["pairs"]["tiny"]
    assert (found["batch"], found["systems"]) == (1, {"plain": {"ratio": 1.0}})
