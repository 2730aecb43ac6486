"""Which draft base belongs to a target, and experts on one that reads the target's states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moedraft.config import load_settings
from moedraft.core import SHARED, InvalidRequest, SamplingParams, UnsupportedModel
from moedraft.drafting import base as base_module
from moedraft.drafting.base import (
    FeatureBase,
    draft_name,
    features_of,
    first_guesses,
    is_feature_checkpoint,
    load_feature_base,
    target_hash,
)
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.engine.engine import Engine
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.loading.checks import greedy_answers
from moedraft.loading.hashes import hash_files
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_models import VOCAB, prompts_of, random_model
from tiny import NumberTokenizer


@pytest.fixture
def target() -> LanguageModel:
    return random_model("llama", 0)


def saved(model: LanguageModel, folder: Path, layers: tuple[int, ...] = (0, 1, 2), **options: Any) -> Path:
    torch.manual_seed(5)
    words = torch.arange(1, VOCAB, 2)
    config = config_for(model.hf.config, draft_vocab_size=len(words), feature_layers=layers)
    weights = (
        model.hf.get_input_embeddings().weight.detach(),
        model.hf.get_output_embeddings().weight.detach(),
    )
    save_draft(FeatureDraft(config, words, *weights), folder, **options)
    return folder


@pytest.fixture
def base(target: LanguageModel, tmp_path: Path) -> FeatureBase:
    return load_feature_base(saved(target, tmp_path / "draft"), target)


def random_adapter(bank: ExpertBank, version: int, scale: float) -> Adapter:
    generator = torch.Generator().manual_seed(version)
    deltas = {}
    for name in sorted(bank.tail):
        out, inner = bank.layers[name].base_weight().shape
        a, b = (torch.randn(*shape, generator=generator) * scale for shape in ((4, inner), (out, 4)))
        deltas[name] = (a, b)
    return Adapter(version, deltas)


def test_experts_touch_what_leaves_keys_and_values_alone(base: FeatureBase) -> None:
    bank = ExpertBank(base)
    leaves = {name.rpartition(".")[2] for name in bank.tail}
    assert leaves == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert not any(name.startswith("fc") for name in bank.layers)


@pytest.mark.parametrize(
    ("kind", "fast"), [("llama", True), ("llama", False), ("qwen2", True), ("gpt_neox", True)]
)
def test_experts_are_swapped_in_mid_answer_and_answers_stay_the_targets(
    kind: str, fast: bool, tmp_path: Path
) -> None:
    """Good, random and adversarial versions, any mix of them in a batch; against transformers' `generate`."""
    target = random_model(kind, 0)
    base = load_feature_base(saved(target, tmp_path / "draft"), target)
    base.cpu_fast_paths = fast
    bank = ExpertBank(base)
    assert not bank.grouped, "a mixed batch is one product with all experts' low-rank terms"
    drafter = FeatureDrafter(base.hf, bank, 4, VOCAB)
    one = Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=4, adaptive_budget=False)
    prompts, names = prompts_of(6, seed=6), ["a", "b", SHARED]
    ids = [
        one.add(prompt, SamplingParams(max_tokens=32), expert=names[i % 3])
        for i, prompt in enumerate(prompts)
    ]
    done, step = {}, 0
    while one.has_work:
        if step % 4 == 2:
            bank.publish(names[step % 3], random_adapter(bank, step, [0.01, 0.3, 10.0][step % 3]))
        done |= {o.request_id: o for o in one.step() if o.finish_reason}
        step += 1
    plain = random_model(kind, 0, cpu_fast_paths=False)
    assert [done[i].token_ids for i in ids] == [greedy_answers(plain, [one], 32)[0] for one in prompts]
    assert any(o.adapter_version for o in done.values())
    assert bank.shares_cache


def test_an_expert_changes_the_guesses_and_the_zero_adapter_does_not(
    target: LanguageModel, base: FeatureBase
) -> None:
    ids = prompts_of(1, seed=2, longest=80)[0]
    text = ids, features_of(base, target, ids)  # once, for all experts
    bank = ExpertBank(base)
    bank.select([SHARED])
    before = first_guesses(base, *text)
    bank.select(["a"])
    assert first_guesses(base, *text) == before
    bank.publish("a", random_adapter(bank, 1, 0.5))
    bank.select(["a"])
    assert first_guesses(base, *text) != before
    bank.select(["b"])
    assert first_guesses(base, *text) == before
    assert len(before) == len(ids)
    assert before[:2] == [-1, -1]
    assert {token % 2 for token in before[2:]} == {1}  # the draft vocabulary


def test_a_folder_says_whether_it_is_a_feature_drafter(target: LanguageModel, tmp_path: Path) -> None:
    assert is_feature_checkpoint(saved(target, tmp_path / "draft"))
    assert not is_feature_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not is_feature_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_feature_checkpoint(tmp_path)


def test_a_drafter_that_does_not_fit_is_refused_by_name(target: LanguageModel, tmp_path: Path) -> None:
    folder = saved(target, tmp_path / "deep", (0, 1, 3))
    with pytest.raises(UnsupportedModel, match="behind the target's last layer"):
        load_feature_base(folder, target)
    other = random_model("gpt2", 0)
    other.hf.transformer.wte.weight = torch.nn.Parameter(torch.zeros(VOCAB, 16))
    with pytest.raises((InvalidRequest, UnsupportedModel)):
        load_feature_base(saved(target, tmp_path / "wide"), other)


def test_auto_finds_what_belongs_to_the_target(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    assert draft_name(load_settings(home=home)) == "mini"
    assert draft_name(load_settings(home=home, target="mini", draft="x")) == "x"
    with pytest.raises(InvalidRequest, match="--draft"):
        draft_name(load_settings(home=home, target="some/model"))
    for settings in ({"target": "a/copy"}, {"target": "mini"}):
        named = draft_name(load_settings(home=home, draft="smollm2-eagle3", **settings))
        assert is_feature_checkpoint(Path(named))
    monkeypatch.setattr(base_module, "SHIPPED", {"some/model": "mini-draft"})
    assert draft_name(load_settings(home=home, target="some/model")).endswith("mini-draft")
    saved(target, home / "draft-base")
    assert draft_name(load_settings(home=home, target="some/model")) == str(home / "draft-base")
    assert draft_name(load_settings(home=home)) == "mini", "it does not say for whom it was trained"


def test_a_trained_base_belongs_to_its_target_alone(target: LanguageModel, tmp_path: Path) -> None:
    """Told by the target's weights, wherever they lie; by its name where these are not at hand."""
    home, base = tmp_path / "home", tmp_path / "home" / "draft-base"
    for name, model in (("one", target), ("two", random_model("llama", 1))):
        model.hf.save_pretrained(tmp_path / name)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    known = hash_files(tmp_path / "one")
    saved(target, base, target="one", target_hash=known)
    for name in ("one", "moved"):
        assert draft_name(load_settings(home=home, target=str(tmp_path / name))) == str(base)
    for name in ("two", "some/model"):
        with pytest.raises(InvalidRequest, match=r"no draft base .* the home was trained for another"):
            draft_name(load_settings(home=home, target=str(tmp_path / name) if name == "two" else name))
    assert draft_name(load_settings(home=home)) == "mini"
    saved(target, base, target="some/model", target_hash=known)
    assert draft_name(load_settings(home=home, target="some/model")) == str(base)


def test_a_base_trained_for_the_embedded_target_goes_before_the_embedded_draft(
    target: LanguageModel, tmp_path: Path
) -> None:
    settings = load_settings(home=tmp_path)
    saved(target, tmp_path / "draft-base", target="mini", target_hash=target_hash(settings))
    assert draft_name(settings) == str(tmp_path / "draft-base")
