"""Low-rank terms over a layer that does not learn: what is kept of its weight stays true."""

from __future__ import annotations

import torch
from torch import nn

from moedraft.core import SHARED
from moedraft.distill.lora.joint_lora import LISTS_KEPT, FrozenWeight, JointLinear, Routing


def layer_with(*names: str) -> JointLinear:
    torch.manual_seed(0)
    layer = JointLinear(nn.Linear(6, 8, bias=True), Routing([(name, 1) for name in names if name != SHARED]))
    for name in names:
        layer.add(name, 2)
        part = layer.adapter(name)
        assert part is not None
        nn.init.normal_(part.b)
    return layer


def test_picked_rows_are_those_of_the_whole_product() -> None:
    layer, x, numbers = layer_with(SHARED, "sql"), torch.randn(1, 6), torch.tensor([1, 4, 7])
    assert layer.base.bias is not None
    nn.init.zeros_(layer.base.bias)
    torch.testing.assert_close(layer.rows(x, "sql", numbers), layer(x)[:, numbers])


def test_rows_are_picked_once_for_a_list_and_anew_for_another() -> None:
    frozen = FrozenWeight(nn.Linear(6, 8))
    numbers = torch.tensor([1, 4])
    assert frozen.rows("sql", numbers) is frozen.rows("sql", numbers)
    other = torch.tensor([2, 5])
    assert torch.equal(frozen.rows("sql", other), frozen.layer.weight[other])


def test_another_weight_is_noticed() -> None:
    frozen, numbers = FrozenWeight(nn.Linear(6, 8)), torch.tensor([1, 4])
    frozen.rows("sql", numbers)
    frozen.layer.weight = nn.Parameter(torch.randn(9, 6), requires_grad=False)
    assert torch.equal(frozen.whole(), frozen.layer.weight)
    assert torch.equal(frozen.rows("sql", numbers), frozen.layer.weight[numbers])


def test_the_rows_of_few_experts_are_kept() -> None:
    frozen, numbers = FrozenWeight(nn.Linear(6, 8)), torch.tensor([1, 4])
    first = frozen.rows("0", numbers)
    for number in range(1, LISTS_KEPT + 1):
        frozen.rows(str(number), numbers)
    assert frozen.rows("0", numbers) is not first


def test_the_weight_is_kept_in_the_precision_of_the_products() -> None:
    frozen = FrozenWeight(nn.Linear(6, 8))
    assert frozen.whole().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert frozen.whole().dtype == torch.bfloat16
        assert frozen.whole() is frozen.whole()
    assert frozen.whole().dtype == torch.float32
