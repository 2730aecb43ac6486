"""The example data that ship with the package."""

import json
from collections import Counter
from importlib.resources import files
from itertools import pairwise

import pytest

DATA = files("moedraft.data")
LANGUAGES = ("en", "de", "fr", "es", "pt", "zh", "ja", "ko", "ru")
DOMAINS = ("math", "sql", "python", "medical", "general", "textbook", *(f"docs-{lang}" for lang in LANGUAGES))
NARROW = "support"  # its stream and its held-out prompts stand in files of their own
SCRIPTS = {
    "zh": ("\u4e00", "\u9fff"),
    "ja": ("\u3040", "\u30ff"),
    "ko": ("\uac00", "\ud7a3"),
    "ru": ("\u0400", "\u04ff"),
}


def read_rows(*path):
    text = DATA.joinpath(*path).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def normalized(prompt):
    return "".join(prompt.lower().split())


@pytest.fixture(scope="module")
def examples():
    return {domain: read_rows("domains", f"{domain}.jsonl") for domain in (*DOMAINS, NARROW)}


@pytest.fixture(scope="module")
def traffic():
    return read_rows("traffic.jsonl")


@pytest.fixture(scope="module")
def heldout():
    return read_rows("heldout.jsonl")


@pytest.fixture(scope="module")
def support():
    """Rows of the narrow domain, of the stream and held out."""
    return read_rows("support-traffic.jsonl"), read_rows("support-heldout.jsonl")


def language(domain):
    return domain.removeprefix("docs-") if domain.startswith("docs-") else "en"


def test_every_domain_has_forty_examples(examples):
    names = {entry.name for entry in DATA.joinpath("domains").iterdir() if entry.name.endswith(".jsonl")}
    assert names == {f"{domain}.jsonl" for domain in (*DOMAINS, NARROW)}
    assert len(names) >= 10
    counts = {domain: len(rows) for domain, rows in examples.items()}
    assert counts == dict.fromkeys(DOMAINS, 40) | {NARROW: 60}


def test_examples_have_these_fields(examples):
    for rows in examples.values():
        for row in rows:
            assert row.keys() == {"prompt", "origin", "license"}


@pytest.mark.parametrize(("name", "per_domain"), [("traffic", 24), ("heldout", 4)])
def test_mixed_files_have_these_fields(name, per_domain, request):
    rows = request.getfixturevalue(name)
    assert Counter(row["true_domain"] for row in rows) == dict.fromkeys(DOMAINS, per_domain)
    for row in rows:
        assert row.keys() == {"prompt", "true_domain", "lang", "max_tokens", "origin", "license"}
        assert row["lang"] == language(row["true_domain"])
        assert row["max_tokens"] == 48


def test_the_narrow_domain_has_prompts_of_its_own(support):
    assert [len(rows) for rows in support] == [64, 12]
    for row in (row for rows in support for row in rows):
        assert row.keys() == {"prompt", "true_domain", "lang", "max_tokens", "origin", "license"}
        assert (row["true_domain"], row["lang"], row["max_tokens"]) == (NARROW, "en", 48)


def test_every_row_states_origin_and_licence(examples, traffic, heldout, support):
    mixed = traffic + heldout + support[0] + support[1]
    for row in [row for rows in examples.values() for row in rows] + mixed:
        assert row["origin"] == "written for moedraft"
        assert row["license"] == "CC0-1.0"
        assert row["prompt"] == row["prompt"].strip()
        assert 20 <= len(row["prompt"]) <= 600


def test_no_prompt_occurs_twice(examples, traffic, heldout, support):
    rows = [row for domain in examples.values() for row in domain] + traffic + heldout
    rows += support[0] + support[1]
    counts = Counter(normalized(row["prompt"]) for row in rows)
    assert [prompt for prompt, count in counts.items() if count > 1] == []


def test_the_three_sets_are_disjoint(examples, traffic, heldout):
    shown = {normalized(row["prompt"]) for rows in examples.values() for row in rows}
    replayed = {normalized(row["prompt"]) for row in traffic}
    measured = {normalized(row["prompt"]) for row in heldout}
    assert shown.isdisjoint(replayed)
    assert shown.isdisjoint(measured)
    assert replayed.isdisjoint(measured)


def test_traffic_is_interleaved(traffic):
    assert all(a["true_domain"] != b["true_domain"] for a, b in pairwise(traffic))
    first_rounds = Counter(row["true_domain"] for row in traffic[: 3 * len(DOMAINS)])
    assert first_rounds == dict.fromkeys(DOMAINS, 3)


@pytest.mark.parametrize("lang", sorted(SCRIPTS))
def test_docs_prompts_use_their_script(lang, examples, traffic, heldout):
    low, high = SCRIPTS[lang]
    mixed = [row for row in traffic + heldout if row["lang"] == lang]
    for row in examples[f"docs-{lang}"] + mixed:
        assert any(low <= char <= high for char in row["prompt"]), row["prompt"]


def test_the_readme_names_domains_and_licence():
    text = DATA.joinpath("README.md").read_text(encoding="utf-8")
    assert "CC0-1.0" in text
    assert [domain for domain in (*DOMAINS, NARROW) if f"`{domain}`" not in text] == []
