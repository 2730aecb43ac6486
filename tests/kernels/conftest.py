"""Kernel tests run everywhere: on CUDA compiled, elsewhere through Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from quick_interpreter import prepare_once_in_a_launch


def choose_the_interpreter() -> None:
    """What Triton's decorator makes of a function depends on this variable, its own library's included.

    That library is read again if something collected earlier (transformers, say) has imported it without.
    """
    already = "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    assert "moedraft.kernels.primitives" not in sys.modules or not already, "kernels decorated too early"
    if already:
        for name in ("standard", "random", ""):
            importlib.reload(sys.modules[f"triton.language.{name}".rstrip(".")])


def installed(name: str) -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


if not torch.cuda.is_available():
    choose_the_interpreter()
    if installed("triton"):
        prepare_once_in_a_launch(importlib.import_module("triton.runtime.interpreter"))

# The machine for GPU runs has torch, triton and pytest; the engine needs more.
collect_ignore = [] if installed("sklearn") else ["test_warm_up.py", "test_bench_as_served.py"]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The interpreter runs a launch's programs from the last to the first: another one arrives last."""
    if device == "cuda":
        pytest.skip("the order of programs on a GPU is the GPU's")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "range", lambda *bounds: range(*bounds)[::-1], raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the verification kernels that are launched, in order."""
    names: list[str] = []
    found = {"verify": ("sweep", "resolve"), "block": ("judge",), "coupled": ("sweep_coupled", "choose")}
    found["fused_cut"] = ("survey", "aim", "narrow", "cut")
    for module, kernels in found.items():
        home = importlib.import_module(f"moedraft.kernels.{module}")
        for name in kernels:
            monkeypatch.setattr(home, name, Recorder(name, getattr(home, name), names))
    return names


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages that the kernel benchmark compares with is found, whatever PYTHONPATH holds."""
    names = {"flashinfer", "sglang", "sgl_kernel", "vllm", "liger_kernel", "speculators"}
    for module in [name for name in sys.modules if name.split(".")[0] in names]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Hiding(finder, names) for finder in sys.meta_path])


class Hiding:
    """A finder of modules that does not find some packages."""

    def __init__(self, finder: Any, names: set[str]) -> None:
        self._finder, self._names = finder, names

    def find_spec(self, name: str, *rest: Any) -> Any:
        return None if name.split(".")[0] in self._names else self._finder.find_spec(name, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


class Recorder:
    """A kernel that writes its name down when it is launched."""

    def __init__(self, name: str, kernel: Any, names: list[str]) -> None:
        self._name, self._kernel, self._names = name, kernel, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._names.append(self._name)
        return self._kernel[grid]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
