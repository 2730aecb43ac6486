from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import new_homes
import pytest
from storage_fakes import domain

from moedraft.storage import Home, Registry


@pytest.fixture
def real_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Home, "_migrate", new_homes.migrate)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def home(path: Path) -> Iterator[Home]:
    with Home.open(path) as home:
        yield home


@pytest.fixture
def registry(home: Home) -> Registry:
    """With the domain "sql"."""
    registry = Registry(home)
    registry.add_domain(domain())
    return registry
