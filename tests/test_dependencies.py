"""What moedraft stands on is written down, with licences."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


def test_each_package_that_moedraft_asks_for_is_on_the_page_with_a_licence() -> None:
    """`scripts/licences.py` writes the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["serve"], *extras["triton"]]
    names = [re.split(r"[\[<>=;! ]", one)[0].lower() for one in wanted]
    rows = {
        cells[1].strip(): cells[3].strip() for line in PAGE.splitlines() if len(cells := line.split("|")) > 4
    }
    assert len(names) > 15
    assert [name for name in names if not rows.get(name)] == []
    assert "see the package" not in rows.values()


def test_each_package_is_installed() -> None:
    """An installation for development takes folders as they lie, so that it would not miss one of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {file.parent for file in (ROOT / "moedraft").rglob("__init__.py")}
    places = project["tool"]["setuptools"]["package-dir"]
    for name, place in places.items():
        folders |= {
            ROOT / "moedraft" / name.split(".")[1] / file.parent.relative_to(ROOT / place)
            for file in (ROOT / place).rglob("__init__.py")
        }
    wanted = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == wanted
