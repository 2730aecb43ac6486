"""Products in other layouts give what PyTorch's linear layer gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from moedraft.products import Product, pays, rounded


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


def test_second_layouts_are_for_small_float32_models_on_a_cpu() -> None:
    weight = torch.randn(8, 4)
    assert Product(weight, small=False).blocked is None
    assert Product(weight.bfloat16(), small=True).blocked is None
    assert not pays(weight.double())
    assert (Product(weight, small=True).blocked is not None) == pays(weight)


def test_a_pytorch_without_blocked_products_still_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.products.pays", lambda weight: False)
    weight, x = torch.randn(8, 4), torch.randn(6, 4)
    product = Product(weight, small=True)
    assert product.blocked is None
    torch.testing.assert_close(product(x), linear(x, weight))


def test_few_row_counts_are_ever_used() -> None:
    """Each costs memory for good; a served prompt may have any length."""
    used = {rounded(rows) for rows in range(3, 4097)}
    assert len(used) <= 42
    assert all(rows <= rounded(rows) <= 1.25 * rows for rows in range(3, 4097))
    assert [rounded(rows) for rows in (3, 4, 5, 6, 7, 8)] == [3, 4, 5, 6, 7, 8]
