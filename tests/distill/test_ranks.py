"""An expert is published with the rank that it needs, and learns on with the rank that it had."""

from __future__ import annotations

import torch
from feature_records import a_draft, a_target
from torch import nn
from torch.nn.functional import linear

from moedraft.core import SHARED
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.lora.joint_lora import LowRank
from moedraft.distill.lora.ranks import cut
from moedraft.drafting.experts.adapter import Delta


def a_term(squares: list[float], size_in: int = 12, size_out: int = 9) -> Delta:
    """A term B·A with these singular values' squares; its factors are not orthogonal."""
    torch.manual_seed(len(squares))
    rank = len(squares)
    left, right = (torch.linalg.qr(torch.randn(size, rank))[0] for size in (size_out, size_in))
    turn = torch.randn(rank, rank)
    values = torch.tensor(squares).sqrt()
    return turn @ right.T, (left * values) @ torch.linalg.inv(turn)


def test_the_smallest_rank_with_the_share_of_all_squares_is_kept() -> None:
    terms = {"one": a_term([60.0, 20.0, 3.0, 1.0]), "two": a_term([10.0, 4.0, 2.0])}
    for kept, rank in ((0.5, 1), (0.69, 1), (0.71, 2), (0.94, 2), (0.95, 3), (0.995, 4), (0.0, 1)):
        found = cut(terms, kept)
        assert [len(a) for a, _ in found.values()] == [rank, min(rank, 3)], kept
        for name, (a, b) in found.items():
            whole = terms[name][1] @ terms[name][0]
            left, values, right = torch.linalg.svd(whole)
            best = (left[:, : len(a)] * values[: len(a)]) @ right[: len(a)]
            torch.testing.assert_close(b @ a, best, rtol=1e-4, atol=1e-4)


def test_all_is_kept_where_all_is_asked_for() -> None:
    terms = {"one": a_term([9.0, 1.0])}
    assert cut(terms, 1.0)["one"] is terms["one"]


def test_a_term_that_has_learned_nothing_has_rank_one() -> None:
    a, b = cut({"one": (torch.randn(8, 12), torch.zeros(9, 8))}, 0.95)["one"]
    assert a.shape == (1, 12)
    assert b.shape == (9, 1)
    assert not b.any()


def test_growing_changes_nothing_yet_and_can_learn() -> None:
    torch.manual_seed(0)
    small = LowRank(6, 5, 2, torch.device("cpu"))
    nn.init.normal_(small.b)
    wide, x = small.grown(4), torch.randn(3, 6)
    assert wide.a.shape == (4, 6)
    torch.testing.assert_close(wide(x), linear(x, small.b @ small.a))
    wide(x).sum().backward()
    assert wide.b.grad is not None
    assert wide.b.grad[:, 2:].abs().min() > 0
    assert small.grown(1).a.shape == (2, 6)


def taught(squares: list[float]) -> FeatureStudent:
    """A student whose expert and shared adapter are such terms in every layer."""
    student = FeatureStudent(a_draft(a_target()), "base", rank=len(squares), shared_rank=len(squares))
    for name in ("code", SHARED):
        student.add(name)
        for layer in student.layers.values():
            part, (out, inner) = layer.adapter(name), layer.weight.shape
            assert part is not None
            a, b = a_term(squares, inner, out)
            part.a.data, part.b.data = a, b
    return student


def test_an_exported_expert_is_small_says_so_and_guesses_nearly_the_same() -> None:
    student = taught([8.0, 4.0, 0.004, 0.004])
    config, tensors = student.export("code", kept=0.95)
    assert config["r"] == config["lora_alpha"] == 2
    assert {len(value) for key, value in tensors.items() if "lora_A" in key} == {2}
    other = FeatureStudent(a_draft(a_target()), "base", rank=4, shared_rank=4)
    other.load("code", 1, config, tensors)
    for module, layer in other.layers.items():
        part, before = layer.adapter("code"), student.layers[module].adapter("code")
        assert part is not None
        assert before is not None
        whole = before.b @ before.a
        assert torch.linalg.norm(part.b @ part.a - whole) < 0.05 * torch.linalg.norm(whole)
    other.grow("code")
    assert {len(p) for p in other.parameters("code") if p.shape[0] == 4} == {4}
