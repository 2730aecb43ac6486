"""An expert is published with the rank that it needs, and learns on with the rank that it had."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from feature_records import a_draft, a_target
from peft import PeftModel

from moedraft.core import SHARED, Domain
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.lora.ranks import ALL, Kept, cut, filled_up
from moedraft.distill.peft_config import widened
from moedraft.distill.single.student import Student
from moedraft.distill.text.text_student import TextStudent
from moedraft.drafting.experts.adapter import LORA_A, Delta
from moedraft.models import LanguageModel
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate, write_files

from random_models import random_model


def a_term(squares: list[float], size_in: int = 12, size_out: int = 9) -> Delta:
    """A term B·A with these singular values' squares; its factors are not orthogonal."""
    torch.manual_seed(len(squares))
    rank = len(squares)
    left, right = (torch.linalg.qr(torch.randn(size, rank))[0] for size in (size_out, size_in))
    turn = torch.randn(rank, rank)
    values = torch.tensor(squares).sqrt()
    return turn @ right.T, (left * values) @ torch.linalg.inv(turn)


def test_the_smallest_rank_with_the_share_of_the_squares_of_each_term_is_kept() -> None:
    """The larger term alone would need less: .71 of its squares, and of all, lie in one direction."""
    terms = {"one": a_term([60.0, 20.0, 3.0, 1.0]), "two": a_term([10.0, 4.0, 2.0])}
    for kept, rank in ((0.5, 1), (0.62, 1), (0.63, 2), (0.87, 2), (0.94, 3), (0.98, 3), (0.995, 4), (0.0, 1)):
        found = cut(terms, Kept(kept))
        assert [len(a) for a, _ in found.values()] == [rank, min(rank, 3)], kept
        for name, (a, b) in found.items():
            whole = terms[name][1] @ terms[name][0]
            left, values, right = torch.linalg.svd(whole)
            best = (left[:, : len(a)] * values[: len(a)]) @ right[: len(a)]
            torch.testing.assert_close(b @ a, best, rtol=1e-4, atol=1e-4)


def test_the_share_can_be_that_of_all_squares_together() -> None:
    terms = {"one": a_term([60.0, 20.0, 3.0, 1.0]), "two": a_term([10.0, 4.0, 2.0])}
    for share, rank in ((0.5, 1), (0.69, 1), (0.71, 2), (0.94, 2), (0.95, 3), (0.995, 4), (0.0, 1)):
        found = cut(terms, Kept(share, together=True))
        assert [len(a) for a, _ in found.values()] == [rank, min(rank, 3)], share


def test_all_is_kept_where_all_is_asked_for() -> None:
    terms = {"one": a_term([9.0, 1.0])}
    assert cut(terms, ALL)["one"] is terms["one"]


def test_a_term_that_has_learned_nothing_has_rank_one() -> None:
    a, b = cut({"one": (torch.randn(8, 12), torch.zeros(9, 8))}, Kept(0.95))["one"]
    assert a.shape == (1, 12)
    assert b.shape == (9, 1)
    assert not b.any()


def test_growing_changes_nothing_yet_and_can_learn() -> None:
    torch.manual_seed(0)
    small_a, small_b, x = torch.randn(2, 6), torch.randn(5, 2), torch.randn(3, 6)
    a, b = filled_up(small_a, small_b, 4)
    assert (a.shape, b.shape) == ((4, 6), (5, 4))
    torch.testing.assert_close(x @ a.T @ b.T, x @ small_a.T @ small_b.T)
    b.requires_grad_()
    (x @ a.T @ b.T).sum().backward()
    assert b.grad is not None
    assert b.grad[:, 2:].abs().min() > 0
    assert filled_up(small_a, small_b, 1)[0].shape == (2, 6)


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
    config, tensors = student.export("code", kept=Kept(0.95))
    assert config["r"] == config["lora_alpha"] == 2
    assert student.export("code", kept=Kept(0.95), scaling=0.8)[0]["lora_alpha"] == pytest.approx(1.6)
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


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|is_gradient_checkpointing|fan_in_fan_out)")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # the layers of the second lie the other way round
def test_peft_loads_an_independent_drafts_expert_that_was_cut(tmp_path: Path, kind: str) -> None:
    def a_model() -> LanguageModel:
        return random_model(kind, 2, layers=2, cpu_fast_paths=False)

    student = TextStudent(a_model(), rank=4, shared_rank=4)
    student.add("code")
    for module, part in student.low_ranks("code").items():
        out, inner = student.layers[module].weight.shape
        part.a.data, part.b.data = a_term([0.08, 0.04, 1e-5, 1e-5], inner, out)
    config, tensors = student.export("code", kept=Kept(0.95))
    assert config["r"] == 2
    modules = student.modules("code")
    made = Candidate("code", 0, "base", 2, modules, 1, 0, 1, 0.0, None, None, config, tensors, None)
    (tmp_path / "code").mkdir()
    write_files(made, tmp_path / "code")
    plain, ids = a_model().hf, torch.randint(97, (1, 9))
    peft = PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path / "code"))
    student.routing.parts = [("code", 1)]
    with torch.no_grad():
        ours, theirs, without = student.draft.hf(ids).logits, peft(ids).logits, plain(ids).logits
    assert (theirs - ours).norm() < 0.1 * (theirs - without).norm()


def test_an_expert_that_was_cut_learns_on_in_turns_with_its_whole_rank(store: Store) -> None:
    draft = random_model("llama", 2, layers=2)
    joint = TextStudent(draft, rank=4, shared_rank=4)
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    joint.add("code")
    for module, part in joint.low_ranks("code").items():
        out, inner = joint.layers[module].weight.shape
        part.a.data, part.b.data = a_term([0.08, 0.04, 1e-5, 1e-5], inner, out)
    config, tensors = joint.export("code", kept=Kept(0.95))
    summary = ("code", 0, joint.base_hash, 2, joint.modules("code"), 1, 0, 1, 0.0, None, None)
    store.adapters.publish(Candidate(*summary, config, tensors, None))
    turns = Student(random_model("llama", 2, layers=2), store.adapters, scope="tail", rank=4, shared_rank=4)
    turns.activate("code")
    config, wide = turns.export("code")
    assert config["r"] == 4
    for key in (key for key in tensors if key.endswith(LORA_A)):
        other = key.replace("lora_A", "lora_B")
        assert len(wide[key]) == 4
        torch.testing.assert_close(wide[other] @ wide[key], tensors[other] @ tensors[key])


def test_what_has_a_scaling_of_its_own_is_not_widened() -> None:
    tensors = {f"x{LORA_A}": torch.ones(2, 3), "x.lora_B.weight": torch.ones(5, 2)}
    for odd in ({"lora_alpha": 4}, {"lora_alpha": 2, "rank_pattern": {"x": 2}}):
        config, same = widened({"r": 2} | odd, tensors, 4)
        assert config["r"] == 2
        assert same == tensors
    config, wide = widened({"r": 2, "lora_alpha": 2}, tensors, 4)
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert {key: tuple(value.shape) for key, value in wide.items()} == {
        f"x{LORA_A}": (4, 3),
        "x.lora_B.weight": (5, 4),
    }
