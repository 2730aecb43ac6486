"""What all tests share: few threads, fixed seeds, and real data where it lies beside the repository."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from moedraft.storage.store import Store


torch.set_num_threads(1)  # the models are tiny: a second thread costs more than it gives
# Folders, slowest files first.
LONG = ("showcase", "kernels", "serve", "distill", "engine", "drafting", "cli", "selecting", "routing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that two workers end at about the same time."""
    items.sort(key=lambda item: LONG.index(name) if (name := item.path.parent.name) in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Libraries and tests stay until the end, so the garbage collector need not look through them again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # bindings report what is left at the end


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _tables_are_copied() -> Iterator[None]:
    """What migrations make of a new home is always the same; `real_migrations` is for what tests them."""
    try:
        import new_homes
    except ModuleNotFoundError:  # the kernels' tests also run on machines that have no database library
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_homes.Home, "_migrate", new_homes.copy_or_migrate)
        yield


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine draws for requests without a seed is the same whenever the test runs."""
    monkeypatch.setattr("moedraft.engine.engine.secrets.randbits", random.Random(0).getrandbits)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of a new home, open for writing."""
    # Imported here, because the kernels' tests also run on machines that have no database library.
    from moedraft.storage.store import Store

    store = Store.open(tmp_path / "home")
    yield store
    store.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder `shared` beside the repository; it is no part of the project, so tests can do without."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("the folder with real data, ../shared/data, is not there")
    return folder
