"""Systems and workers to test the server with: tiny ones without weights, and one with the shipped pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_fakes import tiny_system

from moedraft.config import load_settings
from moedraft.serve.worker.worker import Worker
from moedraft.system.build import System, build


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """Two domains, "code" and "prose"; four slots; every word is a token."""
    system = tiny_system(tmp_path / "home")
    yield system
    system.close()


@pytest.fixture
def worker(system: System) -> Iterator[Worker]:
    """Over `system`, started; eight requests may wait."""
    worker = Worker(system, max_waiting=8)
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def mini_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The shipped pair over a new home without domains; one for all tests of a module."""
    system = build(load_settings(home=tmp_path_factory.mktemp("mini") / "home"))
    yield system
    system.close()
