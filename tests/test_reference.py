"""The reference in docs/ is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(reference: ModuleType) -> None:
    wanted = reference.text()
    assert reference.FILE.read_text(encoding="utf-8") == wanted, "run `python scripts/reference.py`"


def test_it_names_settings_metrics_and_routes(reference: ModuleType) -> None:
    text = reference.text()
    for name in ("`max_waiting`", "`moedraft_spec_decode_num_drafts_total`", "`/v1`"):
        assert name in text
