"""Products in other layouts give what PyTorch's linear layer gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from moedraft.cpu.products import (
    PackedLinear,
    Product,
    generate_ahead,
    halves,
    multiplies_bfloat16,
    pack_layers,
    packs,
    pays,
    rounded,
)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 16, 17, 40, 301])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_same_as_a_linear_layer(rows: int, biased: bool, small: bool) -> None:
    weight, x = torch.randn(37, 24), torch.randn(rows, 24)
    bias = torch.randn(37) if biased else None
    product = Product(weight, bias, small=small)
    torch.testing.assert_close(product(x), linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    shaped = x.view(1, rows, 24)
    assert product(shaped).shape == (1, rows, 37)


@pytest.mark.skipif(not halves(torch.ones(1)), reason="FBGEMM is not there")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 40, 301])
@pytest.mark.parametrize("biased", [False, True])
def test_weights_in_half_precision_are_rounded_and_nothing_else(rows: int, biased: bool) -> None:
    weight, x = torch.randn(37, 24), torch.randn(rows, 24)
    bias = torch.randn(37) if biased else None
    product = Product(weight, bias, small=True, half=True)
    assert product.weight.numel() == 0  # one copy is kept, of half the size
    torch.testing.assert_close(product(x), linear(x, weight.half().float(), bias), atol=1e-5, rtol=1e-5)
    assert product(x.view(1, rows, 24)).shape == (1, rows, 37)


@pytest.mark.parametrize("number", [1e5, -1e5, float("inf"), float("nan")])
def test_a_weight_that_half_precision_cannot_hold_stays_as_it_is(number: float) -> None:
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    weight[2, 1] = number
    assert not halves(weight)
    product = Product(weight, small=True, half=True)
    torch.testing.assert_close(product(x), linear(x, weight), equal_nan=True)


@pytest.mark.parametrize("weight", [torch.randn(4, 4).bfloat16(), torch.randn(4, 4).double()])
def test_only_float32_is_kept_in_half_precision(weight: torch.Tensor) -> None:
    assert not halves(weight)
    assert Product(weight, small=True, half=True).half is None
    assert Product(weight.float(), small=True).half is None  # a target's, or that of an independent draft


@pytest.mark.parametrize("rows", [1, 2, 7, 130])
def test_bfloat16_rows_do_not_depend_on_what_is_computed_beside_them(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    product = Product(weight, small=True)
    torch.testing.assert_close(product(x), linear(x, weight), atol=0.1, rtol=0.02)
    if multiplies_bfloat16():
        assert all(torch.equal(product(x[i : i + 1])[0], product(x)[i]) for i in range(min(rows, 8)))


def test_only_small_cpu_models_are_repacked() -> None:
    weight = torch.randn(8, 4)
    assert Product(weight, small=False).blocked is None
    half = Product(weight.bfloat16(), small=True)
    assert (half.blocked is not None) == packs(weight.bfloat16())
    assert not pays(weight.double())
    assert (Product(weight, small=True).blocked is not None) == pays(weight)


def test_works_without_blocked_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.cpu.products.packs", lambda weight: False)
    weight, x = torch.randn(8, 4), torch.randn(6, 4)
    product = Product(weight, small=True)
    assert product.blocked is None
    torch.testing.assert_close(product(x), linear(x, weight))


def test_few_row_counts_are_ever_used() -> None:
    """Each costs memory for good; a served prompt may have any length."""
    used = {rounded(rows) for rows in range(3, 4097)}
    assert len(used) <= 26
    assert all(rows <= rounded(rows) <= (1.25 if rows <= 16 else 1.5) * rows for rows in range(3, 4097))
    assert [rounded(rows) for rows in (3, 4, 5, 6, 7, 8)] == [3, 4, 5, 6, 7, 8]
    assert [rounded(rows) for rows in (15, 16, 17, 24, 25, 33, 49)] == [16, 16, 24, 24, 32, 48, 64]


@pytest.mark.skipif(not pays(torch.ones(1)), reason="no blocked products here")
def test_code_is_generated_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.cpu.products.SHAPES", {})
    for bias in (None, torch.zeros(8), torch.ones(8)):
        Product(torch.randn(8, 4), bias, small=True)
    Product(torch.randn(9, 4), small=False)
    assert generate_ahead() == 2
    assert generate_ahead() == 0
    Product(torch.randn(4, 8), small=True)
    assert generate_ahead() == 1


@pytest.mark.parametrize("rows", [1, 7, 9, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_layers_give_the_same(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(40, 16, bias=False))
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), inner).to(dtype)
    x = torch.randn(2, rows, 24, dtype=dtype)
    before = model(x)
    pack_layers(model, 32)
    packed = [isinstance(layer, PackedLinear) for layer in (model[0], inner[0])]
    assert packed == [pays(torch.ones(1)) and (dtype == torch.float32 or multiplies_bfloat16())] * 2
    torch.testing.assert_close(model(x), before)


def test_layers_that_cannot_be_packed_stay() -> None:
    """Those of other precisions, and subclasses, which may do more than multiply."""

    class Louder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8).double(), Louder(8, 8))
    pack_layers(model, 32)
    assert [type(layer) for layer in model] == [nn.Linear, Louder]
