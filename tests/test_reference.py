"""The reference in docs/ is what the code says, the tables in README.md what the results say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts_loader import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load_script("reference")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_script("tables")


def test_the_reference_is_up_to_date(reference: ModuleType) -> None:
    wanted = reference.text()
    assert reference.FILE.read_text(encoding="utf-8") == wanted, "run `python scripts/reference.py`"


def test_it_names_settings_metrics_and_routes(reference: ModuleType) -> None:
    text = reference.text()
    for name in ("`max_waiting`", "`moedraft_spec_decode_num_drafts_total`", "`/v1`"):
        assert name in text


def test_every_table_stands_in_the_readme_and_is_up_to_date(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*tables.SOURCES, "kernels"):
        assert text.count(f"<!-- table:{name} -->") == 1
    assert tables.filled(text, ROOT / "results") == text, "run `python scripts/tables.py`"


def test_an_empty_table_is_filled_and_takes_nothing_with_it(tables: ModuleType, tmp_path: Path) -> None:
    text = "<!-- table:bench -->\n<!-- end -->\nkept\n<!-- table:router -->\nold\n<!-- end -->\n"
    filled = tables.filled(text, tmp_path)
    assert filled.count(tables.MISSING) == 2
    assert "kept" in filled
    assert "old" not in filled
