"""Where Numba is missing or fails, PyTorch computes, and a line in the log says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moedraft.cpu import optional
from moedraft.cpu.products import packs
from moedraft.cpu.steady import forward as steady
from moedraft.models import LanguageModel

from random_models import VOCAB, random_model

pytestmark = pytest.mark.skipif(not packs(torch.ones(1)), reason="no blocked products here")


def steady_model() -> LanguageModel:
    model = random_model("llama", 3)
    model.lean = steady.SteadyForward(model.hf)
    ids = torch.randint(VOCAB, (1, 9))
    logits = model.forward(model.new_cache(1), 0, ids, [0])
    torch.testing.assert_close(logits, model.hf(ids).logits, rtol=1e-4, atol=1e-4)
    return model


@pytest.mark.parametrize("error", [ImportError("needs NumPy 2.4 or less"), OSError("libLLVM is broken")])
def test_numba_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def missing(name: str) -> None:
        raise error

    monkeypatch.setattr(optional, "import_module", missing)
    assert type(steady_model().lean.mixing).__name__ == "PlainMixing"  # type: ignore[union-attr]
    assert str(error) in caplog.text


@pytest.mark.parametrize("broken", ["damaged file", "another's code", "switched off"])
def test_files_of_compiled_code_that_are_damaged_or_mixed_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    compiled = pytest.importorskip("moedraft.cpu.compiled", exc_type=ImportError)
    njit = compiled.njit

    def unlucky(signature: Any, cache: bool = False, **options: Any) -> Any:
        if broken == "switched off":
            return lambda function: function
        if not cache:
            return njit(signature, **options)
        if broken == "damaged file":
            raise EOFError("Ran out of input")
        return lambda function: njit(compiled.types.void(compiled.types.float32))(lambda value: None)

    monkeypatch.setattr(compiled, "njit", unlucky)
    makers = (compiled.norm, compiled.add_norm, compiled.turn, compiled.take_back, compiled.gate)
    for maker in makers:
        maker.cache_clear()
    expected = "PlainMixing" if broken == "switched off" else "FusedMixing"
    assert type(steady_model().lean.mixing).__name__ == expected  # type: ignore[union-attr]
    assert ("Ran out of input" in caplog.text) == (broken == "damaged file")
    for maker in makers:
        maker.cache_clear()
