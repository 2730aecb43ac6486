"""The drafter's forward: one way over a cache, one over whole texts, and both are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.feature.config import default_layers
from moedraft.feature.features import FeatureCapture, Teacher
from moedraft.feature.model import FeatureDraft
from moedraft.feature.unroll import Batch, acceptance, unroll

from feature_rig import LAYERS, VOCABULARY, config_of, draft_for, target, teacher_of, texts_of, weights_of

SWITCHES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"kind": "qwen3", "attention_bias": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.mark.parametrize("switches", SWITCHES)
def test_steps_over_a_cache_are_the_whole_pass(switches: dict[str, Any]) -> None:
    model = target()
    draft = draft_for(model, **switches)
    batch = Batch.read(teacher_of(model), texts_of(2, 12))
    with torch.no_grad():
        whole = next(unroll(draft, batch.features, batch.token_ids, 1))[:, :11]
        cache, after = draft.new_cache(3), batch.token_ids[:, 1:]
        parts = [draft.step(cache, 1, batch.features[:, :4], after[:, :4], [0, 0])]
        parts += [
            draft.step(cache, 1, batch.features[:, i : i + 1], after[:, i : i + 1], [i, i])
            for i in range(4, 11)
        ]
    torch.testing.assert_close(torch.cat([hidden for hidden, _ in parts], 1), whole, atol=1e-5, rtol=1e-4)
    assert parts[0][1].shape == (2, 4, len(VOCABULARY))


def test_rotations_stay_precise_in_half_precision() -> None:
    """Rounded, their angles would be off by a radian at the end of a long text."""
    draft = draft_for(target()).to(torch.bfloat16)
    [attention] = [module for module in draft.modules() if hasattr(module, "frequencies")]
    assert draft.fc.weight.dtype == torch.bfloat16
    assert attention.frequencies.tolist() == pytest.approx(draft.config.frequencies(), rel=1e-6)


def test_rows_of_a_batch_may_stand_at_different_places() -> None:
    model = target()
    draft = draft_for(model)
    batch = Batch.read(teacher_of(model), texts_of(2, 12))
    after, states = batch.token_ids[:, 1:], draft.fuse(batch.features)
    with torch.no_grad():
        whole = next(unroll(draft, batch.features, batch.token_ids, 1))
        cache = draft.new_cache(2)
        draft.step(cache, 0, states[:, :6], after[:, :6], [0, 0])
        picked = torch.stack([states[0, 3:5], states[1, 6:8]]), torch.stack([after[0, 3:5], after[1, 6:8]])
        hidden, logits = draft.step(cache, 0, *picked, [3, 6], keep=1)
    torch.testing.assert_close(hidden, torch.stack([whole[0, 3:5], whole[1, 6:8]]), atol=1e-5, rtol=1e-4)
    assert logits.shape == (2, 1, len(VOCABULARY))


@pytest.mark.parametrize("switches", SWITCHES[:2])
def test_unrolled_steps_are_those_of_drafting(switches: dict[str, Any]) -> None:
    """From each start: true entries up to it, then the drafter's own output and the tokens that follow."""
    model = target()
    draft = draft_for(model, **switches)
    batch = Batch.read(teacher_of(model), texts_of(1, 10))
    after = batch.token_ids[:, 1:]
    with torch.no_grad():
        unrolled = list(unroll(draft, batch.features, batch.token_ids, 3))
        for start in range(6):
            cache = draft.new_cache(1)
            hidden, _ = draft.step(cache, 0, batch.features[:, : start + 1], after[:, : start + 1], [0])
            for step in range(3):
                torch.testing.assert_close(hidden[:, -1], unrolled[step][:, start], atol=1e-5, rtol=1e-4)
                place = start + step + 1
                hidden, _ = draft.step(cache, 0, hidden[:, -1:], after[:, place : place + 1], [place])


def test_acceptance_counts_what_drafting_would_have_accepted() -> None:
    model = target()
    draft = draft_for(model)
    draft.use_vocabulary(torch.arange(97))
    text = texts_of(1, 12)[0]
    batch = Batch.read(teacher_of(model), [text])
    prompt, depth = 4, 3
    expected = torch.zeros(depth, 2, dtype=torch.int64)
    with torch.no_grad():
        for start in range(prompt - 1, len(text)):  # the token at start + 1 is verified already
            cache, hidden = draft.new_cache(1), batch.features[:, : start + 1]
            tokens = torch.tensor([text[1 : start + 2]])
            for step in range(depth):
                if start + step + 2 >= len(text):
                    break
                hidden, logits = draft.step(cache, 0, hidden, tokens, [0 if not step else start + step])
                hidden, tokens = hidden[:, -1:], torch.tensor([[text[start + step + 2]]])
                expected[step, 1] += 1
                if int(logits[0, -1].argmax()) != text[start + step + 2]:
                    break
                expected[step, 0] += 1
    assert torch.equal(acceptance(draft, batch, [prompt], depth), expected)
    assert expected[0, 1] == 7


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_features_are_the_models_hidden_states(kind: str) -> None:
    hf = target(kind).hf
    ids = torch.tensor(texts_of(2, 7))
    with torch.no_grad(), FeatureCapture(hf, (0, 1, 3)) as capture:
        states = hf(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(capture.found[0], states[0])
    assert torch.equal(capture.found[1], states[1])
    assert capture.joined().shape == (2, 7, 96)
    before = hooks(capture)
    teacher = Teacher(hf, (0, 1, 3), VOCABULARY)
    features, last = teacher.read(ids)
    assert torch.equal(last, states[3])  # transformers norms the last one, the layer's own output is not
    assert not torch.equal(features[..., 64:], states[3])
    truth = hf(input_ids=ids).logits[..., VOCABULARY]
    torch.testing.assert_close(teacher.logits(last), truth, atol=1e-4, rtol=1e-4)
    assert hooks(capture) == before


WIDE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
SCALED = {"vocab_size": 97, "num_key_value_heads": 2, **WIDE}


@pytest.mark.parametrize(
    "config",
    [
        transformers.GraniteConfig(**SCALED, logits_scaling=8.0),
        transformers.CohereConfig(**SCALED, logit_scale=0.0625),
    ],
)
def test_a_target_may_scale_its_logits(config: transformers.PreTrainedConfig) -> None:
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.tensor(texts_of(2, 7))
    teacher = Teacher(hf, (0, 1, 3), VOCABULARY)
    truth = hf(input_ids=ids).logits[..., VOCABULARY]
    torch.testing.assert_close(teacher.logits(teacher.read(ids)[1]), truth, atol=1e-5, rtol=1e-3)


def test_a_target_that_bends_its_logits_is_refused() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SCALED, head_dim=8, layer_types=["full_attention"] * 3, final_logit_softcapping=0.1
    )
    hf = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    hf.get_output_embeddings().weight.normal_(std=2.0)
    with pytest.raises(UnsupportedModel, match="changes its logits after the output matrix"):
        Teacher(hf, (0, 1, 3), VOCABULARY)


def hooks(capture: FeatureCapture) -> int:
    """How many hang on the layers, transformers' own included."""
    return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in capture.layers)


def test_default_layers_are_three_different_ones() -> None:
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(4) == (1, 2, 3)
    assert default_layers(3) == (0, 1, 2)
    assert default_layers(2) == (0, 1, 2)


def test_default_layers_are_such_as_every_engine_reads() -> None:
    """From four layers on: neither the embeddings, which are id 0, nor what leaves the last layer."""
    for count in range(4, 130):
        ids = default_layers(count)
        assert len(set(ids)) == 3
        assert min(ids) > 0
        assert max(ids) < count


def test_a_llama3_scale_slows_slow_rotations_only() -> None:
    model = target()
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, scaled = config_of(model).frequencies(), config_of(model, rope_scaling=scaling).frequencies()
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


def test_what_does_not_fit_is_refused() -> None:
    model = target()
    embeddings, output = weights_of(model)
    with pytest.raises(InvalidRequest, match="sorted list of different"):
        FeatureDraft(config_of(model), VOCABULARY.flip(0), embeddings, output)
    with pytest.raises(InvalidRequest, match="32 wide"):
        FeatureDraft(config_of(model), VOCABULARY, embeddings[:, :16], output)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        config_of(model, fc_norm=True, norm_before_fc=True)
    with pytest.raises(UnsupportedModel, match="yarn"):
        config_of(model, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(InvalidRequest, match="none of number 9"):
        FeatureCapture(model.hf, (*LAYERS, 9))
