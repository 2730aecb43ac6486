"""The documents say what the code and the measurements say, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts_loader import load_script

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/**/*.md")])


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load_script("reference")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_script("tables")


def test_the_reference_matches_the_code(reference: ModuleType) -> None:
    wanted = reference.text()
    assert reference.FILE.read_text(encoding="utf-8") == wanted, "run `python scripts/reference.py`"


def test_no_result_tells_where_it_was_measured() -> None:
    """A path of the machine says nothing to others, and whose machine it was to everybody."""
    place = re.compile(r'"(/[^/"]+){2,}')
    assert place.search('"draft": "/home/me/models/base"')
    files = sorted((ROOT / "results").rglob("*.json"))
    assert len(files) > 10
    assert [file.name for file in files if place.search(file.read_text(encoding="utf-8"))] == []


def test_the_reference_names_all_three(reference: ModuleType) -> None:
    text = reference.text()
    for name in ("`max_waiting`", "`moedraft_spec_decode_num_drafts_total`", "`/v1`"):
        assert name in text


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/benchmarks.md", "docs/experiments.md", "docs/robustness.md", "data/models/README.md"],
)
def test_tables_are_up_to_date(tables: ModuleType, name: str) -> None:
    assert name in tables.DOCUMENTS
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tables.filled(text, ROOT / "results") == text, "run `python scripts/tables.py`"


def test_every_table_has_its_place(tables: ModuleType) -> None:
    names = ("benchmarks.md", "experiments.md", "robustness.md")
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    for name in (*tables.SOURCES, "kernels", "aims"):
        assert pages.count(f"<!-- table:{name} -->") == 1
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- table:(\w+) -->", readme) == ["summary"]


CHANCE = ", but chance may have decided it: the interval reaches to both sides of what was wanted"


@pytest.mark.parametrize(
    ("figure", "below", "wanted", "said"),
    [
        ([1.2, 1.1, 1.3], False, 1.0, "yes"),
        ([1.2, 0.9, 1.3], False, 1.0, f"yes{CHANCE}"),
        ([0.9, 0.8, 1.1], False, 1.0, f"no{CHANCE}"),
        ([0.9], False, 1.0, "no"),
        ([0.9], True, 1.0, "yes"),
        ([1.1], True, 1.0, "no"),
    ],
)
def test_an_aim_is_reached_or_missed(figure: list[float], below: bool, wanted: float, said: str) -> None:
    """And its cause stands beside it where it is missed."""
    row = load_script("aims_table").Aim("speed", wanted, figure, "cost", below).row()
    assert row[3] == said
    assert row[4] == ("cost" if said.startswith("no") else "")


def test_an_aim_without_a_figure_says_so() -> None:
    row = load_script("aims_table").Aim("speed", 1.0, [], "cost", unmeasured="not measured here").row()
    assert row == ["speed", "≥ 1.00", "not measured here", "", ""]


def test_a_column_without_values_is_left_out() -> None:
    found = load_script("markdown_tables").without_empty(["a", "b", "c"], [["1", "", ""], ["2", "", "3"]])
    assert found == (["a", "c"], [["1", ""], ["2", "3"]])


def test_what_evidence_makes_good_is_told_by_arms() -> None:
    ways = {"owner": 2.0, "classifier": 1.0, "evidence as served": 1.25, "evidence": 1.5}
    part = {"ways": {way: {"tokens_per_step": [steps] * 3} for way, steps in ways.items()}}
    streams = dict.fromkeys(("labelled", "permuted 16 arms", "permuted"), part)
    shown = load_script("selection_tables").made_good(
        {"streams": streams, "settings": {"domains": "sql_en,math_en"}}
    )
    assert shown.splitlines()[2:] == ["| 3 | 25% | 50% |", "| 16 | 25% | 50% |"]


@pytest.mark.parametrize(("wrong", "words"), [(1.7, "above 0.60"), (1.9, "above 0.33"), (2.0, ""), (2.1, "")])
def test_the_threshold_follows_from_what_right_and_wrong_experts_are_worth(wrong: float, words: str) -> None:
    steps = {"owner": 2.2, "shared": 2.0, "classifier": 2.2, "evidence as served": 2.2, "evidence": 2.2}
    streams = {
        name: {"ways": {way: {"tokens_per_step": [value] * 3} for way, value in ways.items()}}
        for name, ways in {"labelled": steps, "permuted": steps | {"classifier": wrong}}.items()
    }
    shown = load_script("selection_tables").made_good({"streams": streams, "settings": {"domains": "sql_en"}})
    assert ("should draft" in shown) == bool(words)
    assert words in shown


def test_a_missing_result_says_not_yet_measured(tables: ModuleType, tmp_path: Path) -> None:
    text = "<!-- table:bench -->\n<!-- end -->\nkept\n<!-- table:router -->\nold\n<!-- end -->\n"
    filled = tables.filled(text, tmp_path)
    assert filled.count(tables.MISSING) == 2
    assert "kept" in filled
    assert "old" not in filled


def test_figures_of_several_seeds_are_averaged(tables: ModuleType, tmp_path: Path) -> None:
    text = "<!-- table:summary -->\n<!-- end -->\n<!-- table:experts -->\n<!-- end -->\n"
    assert tables.filled(text, tmp_path).count(tables.MISSING) == 2

    def seed(speed: float) -> dict[str, object]:
        ways = {
            name: {"times_plain": [speed, speed - 0.5, speed + 0.5], "tokens_per_step": [2.0, 2.0, 2.0]}
            for name in ("plain", "static", "experts", "lookup", "experts + lookup")
        }
        first = {"static": [0.25, 0.2, 0.3], "experts": [0.5, 0.4, 0.6], "gain": [0.25, 0.1, 0.4]}
        part = {**ways, "first_step": first, "experts / static": {"tokens_per_step": [1.5, 1.25, 1.75]}}
        learned = {"requests": 600, "updates": 19}
        facts = {"prompts": 120, "threads": 2, "same_answers": True, "batch": ways, "learning": learned}
        facts |= {
            "step_ms": {"target_ms": 20.0, "draft_ms": 1.0, "draft_own_list_ms": 0.5, "verify5_ms": 22.0}
        }
        return {"all": part, "by_domain": {"sql": part}, **facts}

    (tmp_path / "smollm2").mkdir()
    found: dict[str, Any] = {"seeds": [seed(1.0), seed(2.0)], "date": "2026-01-01"}
    found["settings"] = {"queue_rounds": "2"}
    (tmp_path / "smollm2" / "experts.json").write_text(json.dumps(found))
    filled = tables.filled(text, tmp_path)
    assert (
        "| the drafter with experts | 2.00 | 0.50 (0.40–0.60) | 1.50 (1.00–2.00) | 1.50 (1.00–2.00) |"
        in filled
    )
    assert "| sql | 0.25 (0.20–0.30) | 0.50 (0.40–0.60) | +0.250 (+0.100 to +0.400) |" in filled
    assert "2 seeds" in filled
    assert "a draft step costs 0.050 target steps by itself with the shared list of tokens" in filled
    assert "0.025 with an expert's own; checking five tokens costs 1.10; a round" in filled
    assert "takes 1.33 plain ones" in filled
    assert "each answered 2 times, and its interval is over these timings" in filled
    found["settings"]["queue_rounds"] = "1"
    (tmp_path / "smollm2" / "experts.json").write_text(json.dumps(found))
    once = tables.filled(text, tmp_path)
    assert "| the drafter with experts | 2.00 | 0.50 (0.40–0.60) | 1.50 (1.00–2.00) | 1.50 |" in once
    assert "each answered once, which is too few timings for an interval" in once


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def anchors(text: str) -> set[str]:
    """The names by which headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path, text: str) -> list[str]:
    """Links inside the repository whose file, or whose heading in it, does not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        if link.startswith(("http://", "https://")):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/none.md) [b](README.md#nowhere) [c](README.md#serve-it) [d](https://example.org/x)"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "README.md#nowhere"]


NAMED = re.compile(r"`([\w/]+\.(?:py|md|json))(?:: (\w+))?`")
COUNTED = re.compile(r"`([\w/]+\.py)`[ ,(]+(\d+) lines")


def named_file(name: str) -> Path | None:
    """The file that a page of architecture means: inside `moedraft/`, or beside it."""
    return next((path for path in (ROOT / "moedraft" / name, ROOT / name) if path.is_file()), None)


def wrong_names(text: str) -> list[str]:
    """What a text says of files and their contents that is not so."""
    wrong = []
    for name, inside in NAMED.findall(text):
        file = named_file(name)
        if file is None:
            wrong.append(f"{name} does not exist")
        elif inside and not re.search(rf"^ *(?:def|class) {inside}\b", file.read_text("utf-8"), re.MULTILINE):
            wrong.append(f"{name} has no {inside}")
    for name, lines in COUNTED.findall(text):
        if (file := named_file(name)) is None or len(file.read_text("utf-8").splitlines()) != int(lines):
            wrong.append(f"{name} does not have {lines} lines")
    return wrong


def test_the_architecture_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(NAMED.findall(text)) > 50
    assert wrong_names(text) == []


def test_a_wrong_name_in_the_architecture_is_found() -> None:
    text = "`engine/rounds.py`, `engine/round.py: verified`, `engine/round.py` (1 lines)"
    assert len(wrong_names(text)) == 3


def test_the_selection_table_shows_what_was_measured() -> None:
    tables = load_script("selection_tables")
    way = {"tokens_per_step": [2.0, 1.9, 2.1], "times_oracle": [0.987, 0.97, 1.01]}
    worse = {"permuted classifier": way | {"times_oracle": [0.8, 0.7, 0.9]}}
    kind = dict.fromkeys(("oracle", *tables.WAYS), way) | worse | {"recovered": 0.834, "prompts": 90}
    cost = {"share_of_time": {"evidence": 0.021}, "evidence / classifier": [1.012, 0.99, 1.03]}
    kinds = {"as is": kind, "typos": kind | {"recovered": None}, "noise": kind | {"permuted classifier": way}}
    shown = tables.selection({"tokens per step": kinds, "cost": {"batch 1": cost}})
    assert "| as is | 90 | 2.00 | 98.7 % (97.0 to 101.0) |" in shown
    assert "| 83% |" in shown
    assert shown.count("| hardly anything lost |") == 2
    assert "batch 1: 2.1% of the time, 1.012 × the classifier's tokens/s" in shown
