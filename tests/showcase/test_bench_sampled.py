"""What scripts/bench_sampled.py makes of answers that were drawn several times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scripts_loader import load_script

bench, tables = (load_script(name) for name in ("bench_sampled", "sampled_tables"))
ONE = bench.ONE


def answer(tokens: int, steps: int) -> Any:
    return SimpleNamespace(token_ids=[1] * tokens, speculation=SimpleNamespace(num_steps=steps))


def a_round(names: list[str], tokens: int, seconds: float) -> dict[str, Any]:
    """Two prompts; every system but plain decoding needs half the steps and half the time."""
    found = {}
    for name in names:
        half = 1 if name == "plain" else 2
        found[name] = ([answer(tokens, tokens // half)] * 2, [seconds / half] * 2)
    return found


def accepted(names: list[str]) -> dict[str, Any]:
    """Of two prompts; the experts' drafts are accepted more often by .1, the one adapter's by .05."""
    rates = {"static": 0.3, "experts": 0.4, ONE: 0.35}
    wanted = [name for name in rates if name in names]
    rows = {name: [(10 * rates[name], 10.0)] * 2 for name in wanted}
    return rows | {f"{name}, by kept tokens": rows[name] for name in wanted}


def test_rounds_are_added_up_by_prompt() -> None:
    speed, length = bench.counted([a_round(["plain"], 8, 2.0), a_round(["plain"], 4, 3.0)])
    assert speed == {"plain": [(12.0, 5.0)] * 2}
    assert length == {"plain": [(12.0, 12.0)] * 2}


def test_experts_stand_beside_the_one_adapter() -> None:
    names = list(bench.NAMES)
    found = bench.figures([a_round(names, 8, 2.0)], accepted(names))
    assert found["experts"]["times_plain"][0] == pytest.approx(2.0)
    assert found["experts"]["tokens_per_step"][0] == pytest.approx(2.0)
    assert found[f"experts / {ONE}"][0] == pytest.approx(1.0)
    assert found["acceptance"]["gain"][0] == pytest.approx(0.1)
    assert found["acceptance"][f"more than {ONE}"][0] == pytest.approx(0.05)


def test_without_the_one_adapter_nothing_is_said_of_it() -> None:
    names = [name for name in bench.NAMES if not name.startswith(ONE)]
    found = bench.figures([a_round(names, 8, 2.0)], accepted(names))
    assert not [key for key in (*found, *found["acceptance"]) if ONE in key]


def test_a_domains_gain_comes_with_its_interval() -> None:
    rows = accepted(["static", "experts"])
    found = bench.by_domain([("sql", "a"), ("sql", "b")], rows)
    assert found["sql"]["gain"] == pytest.approx([0.1, 0.1, 0.1])
    report = {"seeds": [{"by_domain": found}]}
    assert tables._moved(report, ("by_domain", "sql")) == "0.30 → 0.40 (+0.10 to +0.10)"
    del found["sql"]["gain"]
    assert tables._moved(report, ("by_domain", "sql")) == "0.30 → 0.40", "as older files have it"
