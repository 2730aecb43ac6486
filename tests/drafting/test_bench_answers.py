"""The measurement of earlier answers: what is counted, and when an answer may guess."""

from __future__ import annotations

from typing import Any

import pytest
from scripts_loader import load_script

from moedraft.core import ReplayRecord

bench: Any = load_script("bench_answers")


def served(*answer: int, domain: str = "sql") -> Any:
    tops = [[token] for token in answer]
    record = ReplayRecord("", "", 0, "t", [90, 91, *answer], 2, tops, [[0.0]] * len(tops), [], 0, 0, 0.0)
    return bench.Served(record, domain)


@pytest.mark.parametrize(("system", "steps"), [("own text", 6), ("one store", 2), ("by domain", 2)])
def test_an_answer_guesses_only_after_its_end(system: str, steps: int) -> None:
    """The first token is never guessed here: nothing was said after this prompt before."""
    reader, one = bench.Reader(system, 8), served(1, 2, 3, 4, 5, 6)
    assert reader.read(one) == (6, 6)
    reader.keep(one)
    assert reader.read(one) == (6, steps)


def test_no_more_is_drafted_than_was_said() -> None:
    reader, one = bench.Reader("by domain", 2), served(1, 2, 3, 4, 5, 6)
    reader.keep(one)
    assert reader.read(one) == (6, 3), "one token, then three and two"


def test_domains_have_their_own_answers() -> None:
    by_domain, together = (bench.Reader(name, 8) for name in ("by domain", "one store"))
    mine, others = served(1, 2, 3, 4), served(1, 2, 7, 8, domain="code")
    for reader in (by_domain, together):
        reader.keep(mine)
        reader.keep(others)
    assert by_domain.read(mine) == (4, 2)
    assert together.read(mine)[1] > 2, "the newest answer of all is another domain's"


def test_figures_are_of_prompts_and_paired() -> None:
    found: dict[str, Any] = {name: {} for name in bench.SYSTEMS}
    for number in range(6):
        for name, steps in (("own text", 4), ("one store", 3), ("by domain", 2)):
            bench.add(found[name], "then", served(number, 1, 2, 3), (4, steps))
            bench.add(found[name], "then", served(number, 1, 2, 3), (4, steps))
    figures = bench.figures(found, "by domain", "then")
    assert figures["tokens_per_step"] == [2.0, 2.0, 2.0]
    assert figures["more than own text"] == [1.0, 1.0, 1.0]
    assert len(bench.pairs(found["own text"], "then")) == 6
