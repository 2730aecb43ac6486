"""scripts/house.py counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from scripts_loader import load_script


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return load_script("house")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small project: two rooms, one of them two folders deep, and one long function."""
    body = "".join("    x = 1\n" for _ in range(40))
    imports = "from moedraft import core\nfrom ..serve.http import app\n"
    sources = {
        "moedraft/core.py": "X = 1\n",
        "moedraft/engine/__init__.py": "",
        "moedraft/engine/step.py": f"{imports}def f():\n{body}",
        "moedraft/serve/http/app.py": "from moedraft.core import X\nimport json\ndef g():\n    return X\n",
        "kernels/verify.py": "y = 2\n",
        "tests/engine/test_step.py": "def test_f():\n    assert True\n",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


def test_rooms_are_counted(house: ModuleType, root: Path) -> None:
    found = house.house(root)
    rooms = found["code"]["rooms"]
    assert sorted(rooms) == ["engine", "kernels", "moedraft", "serve/http"]
    assert rooms["engine"]["files"] == 1
    assert rooms["engine"]["lines"] == rooms["engine"]["longest"] == 43
    assert rooms["engine"]["long_functions"] == ["moedraft/engine/step.py:f 41"]
    assert rooms["serve/http"]["long_functions"] == []
    assert found["code"]["totals"]["functions"] == 2
    assert found["tests"]["totals"]["lines"] == 2


def test_imports_between_rooms_are_counted(house: ModuleType, root: Path) -> None:
    assert house.house(root)["imports"] == {
        "engine": {"moedraft": 1, "serve/http": 1},
        "serve/http": {"moedraft": 1},
    }


def test_figures_print_as_text_and_json(house: ModuleType, root: Path) -> None:
    found = house.house(root)
    assert json.loads(json.dumps(found)) == found
    assert "moedraft/engine/step.py:f 41" in house.text(found)
