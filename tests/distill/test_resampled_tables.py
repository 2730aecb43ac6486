"""Tables of further answers and of sampled ones, and runs of the evidence that a benchmark may use again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

bench, tables, sampled_tables = (
    load_script(name) for name in ("bench_resampled", "resampled_tables", "sampled_tables")
)
SERVED = "joint+gate:wide"


def a_run(count: int, right: int, seed: int = 0, pattern: str = "steady") -> dict[str, Any]:
    rows = [[10, right + i % 2, 2, 1] for i in range(20)]
    which = {"target": "t", "dtype": "float32", "pattern": pattern, "arrangement": SERVED, "seed": seed}
    return which | {"requests": 4, "resampled": count, "held_out": rows, "came": rows[:4]}


def test_runs_with_further_answers_stand_beside_those_without() -> None:
    runs = [a_run(0, 4), a_run(2, 6), a_run(4, 7), a_run(2, 9, seed=1), a_run(0, 3, pattern="drift")]
    text = tables.resampled({"runs": runs, "date": "2026-01-01"})
    title = "joint, with gate, wide, further updates"
    change = "0.450 → 0.650 (+0.200 to +0.200)"
    assert f"| steady mix | {title} | 2 | 0 | {change} | {change} |" in text
    assert f"| steady mix | {title} | 4 | 0 | 0.450 → 0.750" in text
    assert text.count("| steady mix |") == 2, "the other seed has none without"
    assert "slow drift" not in text
    assert "4 requests, 20 held-out prompts, the target in float32, 2026-01-01" in text


def test_a_run_of_the_evidence_is_used_again_only_where_all_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    run = made_up("steady", SERVED, 0, [0.4, 0.5], strength=0.85, own_tokens=8, precision="float32")
    run["settings"] |= {"target": "x/t"}
    run |= {"resampled": 2, "text_tokens": True}
    (tmp_path / "runs" / "one.json").write_text(json.dumps(run), encoding="utf-8")
    which = {"target": "t", "dtype": "float32", "pattern": "steady", "arrangement": SERVED, "seed": 0}
    which |= {"requests": 40, "resampled": 2}
    monkeypatch.setattr(bench, "settings", lambda args: args)

    def found(strength: float = 0.85, tokens: int = 8, text: bool = True, **changes: Any) -> Any:
        manner = SimpleNamespace(strength=strength, own_tokens=tokens, text_tokens=text)
        place = SimpleNamespace(args=run["settings"], manner=manner)
        return bench.reused(place, tmp_path, which | changes)

    assert found() == run
    assert (
        found(resampled=0)
        is found(seed=1)
        is found(strength=1.0)
        is found(tokens=4)
        is found(text=False)
        is None
    )
    assert bench.kept(run, which)["came"] == run["stream"]


def test_what_is_accepted_over_all_tokens_stands_beside_forward_kl() -> None:
    def one(name: str, further: int, accepted: float) -> dict[str, Any]:
        rows = [[10, accepted, [accepted - 1, 1, 0]]] * 20
        which = {"arrangement": name, "resampled": further, "seed": 0, "temperature": 1.0, "requests": 4}
        return which | {"rows": rows}

    runs = [one("static", 0, 3.0), one("joint", 0, 4.0), one("joint:jsd", 0, 4.5), one("joint:jsd", 2, 5.0)]
    text = sampled_tables.over_all({"runs": runs, "date": "2026-01-01"})
    assert "| joint, no gate | 0 | 0 | 0.400 | 0.300 | — |" in text
    assert "| static | 0 | 0 | 0.300 | 0.200 | -0.100 (-0.100 to -0.100) |" in text
    assert "| joint, jsd | 2 | 0 | 0.500 | 0.400 | +0.100 (+0.100 to +0.100) |" in text
