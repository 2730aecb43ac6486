"""How a drafter learns: from the right position, and the same whether or not it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.feature import unroll as unrolling
from moedraft.feature.model import FeatureDraft
from moedraft.feature.training import session
from moedraft.feature.training.corpus import TrainingText, answered, choose_vocabulary
from moedraft.feature.training.reading import Reader
from moedraft.feature.training.session import collect, new_draft, read_texts
from moedraft.feature.training.trainer import FeatureTrainer, TrainingPlan
from moedraft.feature.unroll import Batch, loss_of
from moedraft.loading.checks import until_end
from moedraft.models import LanguageModel

from feature_rig import VOCABULARY, draft_for, target, teacher_of, texts_of
from tiny import NumberTokenizer

PLAN = TrainingPlan(rows=4, longest=16, unrolled=2)


def trainer(seed: int = 0, count: int = 10) -> FeatureTrainer:
    model = target()
    texts = [TrainingText(text, 4) for text in texts_of(count, 16)]
    return FeatureTrainer(draft_for(model, seed), teacher_of(model), texts, PLAN)


@pytest.mark.parametrize(("shift", "right"), [(0, True), (1, False), (-1, False)])
def test_each_guess_is_taught_the_distribution_of_its_own_token(
    shift: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that knows the target's states one step ahead is perfect; any other offset is not."""
    model = target()
    draft, teacher = draft_for(model), teacher_of(model)
    batch = Batch.read(teacher, texts_of(2, 9))

    def oracle(
        draft: FeatureDraft, features: torch.Tensor, token_ids: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:
        for step in range(1, steps + 1):  # row i must equal what the target's states at i + step say
            yield batch.states.roll(-step - shift, dims=1)

    monkeypatch.setattr(unrolling, "unroll", oracle)
    monkeypatch.setattr(draft, "logits", teacher.logits)
    inner = Batch(batch.token_ids, torch.tensor([7, 7]), batch.features, batch.states)
    loss = loss_of(draft, teacher, inner, steps=2)
    assert (loss < 1e-6) == right


class NextInLine:
    """A target whose next token depends on its last one alone: states name the token, features are noise."""

    def __init__(self, delay: int) -> None:
        self.states = torch.nn.functional.one_hot(torch.arange(16), 32).float() * 12
        self.next = torch.randperm(16, generator=torch.Generator().manual_seed(3))
        self.delay = delay

    def batch(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(16, (8, 14), generator=generator)
        states = self.states[self.next[ids]].roll(-self.delay, dims=1)
        features = torch.randn(8, 14, 96, generator=generator)
        return Batch(ids, torch.full((8,), 12), features, states)


@pytest.mark.parametrize(("delay", "learnable"), [(0, True), (1, False)])
def test_the_right_shift_is_learnable_and_the_wrong_one_is_not(delay: int, learnable: bool) -> None:
    """Tokens are drawn by lot: taught one position too late, the drafter must guess one it has not seen."""
    model = target()
    draft, teacher, rule = draft_for(model), teacher_of(model), NextInLine(delay)
    teacher.rows = torch.eye(46, 32)
    trained = list(draft.parameters())
    optimiser = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(60):
        draft.lm_head.weight.requires_grad_(True)
        loss = loss_of(draft, teacher, rule.batch(step), 1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert (loss_of(draft, teacher, rule.batch(99), 1) < 0.7) == learnable


def test_learning_lowers_the_loss_and_touches_nothing_of_the_targets() -> None:
    training = trainer()
    rows, embeddings = training.draft.lm_head.weight.clone(), training.draft.embeddings.clone()
    losses = [training.step(i / 60) for i in range(30)]  # one step is unrolled, several after the half
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert torch.equal(training.draft.lm_head.weight, rows)
    assert torch.equal(training.draft.embeddings, embeddings)
    assert training.tokens == 30 * 4 * 16


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, first, second = trainer(), trainer(), trainer(seed=5)
    for i in range(6):
        whole.step(i / 6)
    for i in range(3):
        first.step(i / 6)
    first.save(tmp_path / "state.safetensors")
    second.load(tmp_path / "state.safetensors")
    for i in range(3, 6):
        second.step(i / 6)
    assert (second.steps, second.tokens) == (whole.steps, whole.tokens)
    for name, value in whole.draft.state_dict().items():
        assert torch.equal(value, second.draft.state_dict()[name]), name


def test_the_target_reads_a_text_once_while_there_is_room() -> None:
    model, read = target(), []
    texts = list(enumerate(texts_of(3, 12)))
    texts[1] = (1, texts[1][1][:5])
    reader = Reader(teacher_of(model), room=12 * (3 + 1) * 32 * 4 + 1)  # float32, of the first text alone
    model.hf.base_model.register_forward_pre_hook(lambda *_: read.append(1))
    fresh, again = reader.batch(texts), reader.batch(texts)
    assert len(read) == 2  # the others are read once more
    assert reader.batch(texts[:1]).token_ids.tolist() == [texts[0][1]]
    assert len(read) == 2
    assert fresh.lengths.tolist() == [12, 5, 12]
    whole = Batch.read(reader.teacher, [text for _, text in texts])
    for name in ("token_ids", "lengths", "features", "states"):
        real = torch.arange(12) < torch.tensor([[12], [5], [12]]) if name != "lengths" else slice(None)
        for found in (fresh, again):
            torch.testing.assert_close(getattr(found, name)[real], getattr(whole, name)[real])


def test_what_is_kept_is_an_average_of_the_steps(tmp_path: Path) -> None:
    training, again = trainer(), trainer(seed=5)
    seen = []
    for i in range(8):
        training.step(i / 8)
        seen.append(training.draft.fc.weight.detach().clone())
    lowest, highest = torch.stack(seen).amin(0), torch.stack(seen).amax(0)
    with training.averaged() as draft:
        assert ((draft.fc.weight >= lowest - 0.05) & (draft.fc.weight <= highest + 0.05)).all()
        assert not torch.equal(draft.fc.weight, seen[-1])
        kept = draft.fc.weight.clone()
    assert torch.equal(training.draft.fc.weight, seen[-1]), "the training goes on from its own weights"
    training.save(tmp_path / "state.safetensors")
    again.load(tmp_path / "state.safetensors")
    with again.averaged() as draft:
        assert torch.equal(draft.fc.weight, kept)


def test_a_target_that_no_drafter_fits_is_refused_by_name(tmp_path: Path) -> None:
    """OPT may have embeddings that are narrower than its states; nothing is written then."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=16, pad_token_id=0,
    )  # fmt: skip
    model = LanguageModel(transformers.OPTForCausalLM(config).eval(), None, "opt")
    with pytest.raises(UnsupportedModel, match="opt: no drafter can be trained for this target"):
        session.begin(model, (), tmp_path / "draft", 8)
    assert not list(tmp_path.iterdir())


def test_a_drafter_begins_with_the_targets_own_layer() -> None:
    model = target()
    draft = new_draft(model, [TrainingText([1, 2, 3], 1)], 40, (0, 1, 2))
    theirs, own = model.hf.model.layers[-2], draft.layer
    assert torch.equal(own.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert torch.equal(own.self_attn.q_proj.weight[:, 32:], theirs.self_attn.q_proj.weight)
    assert torch.equal(own.hidden_norm.weight, theirs.input_layernorm.weight)


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen2"])
def test_a_layer_that_does_not_fit_is_left_out(kind: str) -> None:
    model = target(kind)
    draft = new_draft(model, [TrainingText([1, 2, 3], 1)], 40, (0, 1, 2))
    assert all(value.isfinite().all() for value in draft.parameters())


def test_another_drafters_state_is_refused(tmp_path: Path) -> None:
    training = trainer()
    training.save(tmp_path / "state.safetensors")
    model = target()
    other = FeatureTrainer(draft_for(model, fc_norm=True), teacher_of(model), training.texts, PLAN)
    with pytest.raises(InvalidRequest, match="of another drafter"):
        other.load(tmp_path / "state.safetensors")
    training.draft.vocabulary = training.draft.vocabulary.flip(0)
    with pytest.raises(InvalidRequest, match="other prompts"):
        training.load(tmp_path / "state.safetensors")
    with pytest.raises(InvalidRequest, match="no text"):
        FeatureTrainer(draft_for(model), teacher_of(model), [], PLAN)


def test_damaged_lines_of_answers_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_bytes(b'[[1, 2, 3], 2]\n[5, 3]\nnull\n\xff\xfe\n[["a"], 1]\n{}\n[[4, 5], 1]\n[[6, 7')
    assert read_texts(file) == [TrainingText([1, 2, 3], 2), TrainingText([4, 5], 1)]
    assert read_texts(tmp_path / "none") == []


@pytest.mark.parametrize("damage", ["shorter", "empty", "no metadata"])
def test_a_damaged_state_gets_one_sentence(damage: str, tmp_path: Path) -> None:
    training, file = trainer(), tmp_path / "state.safetensors"
    training.step(0)
    training.save(file)
    if damage == "no metadata":
        tensors, file = load_file(file), tmp_path / "other.safetensors"
        save_file(tensors, file)
    else:
        file.write_bytes(file.read_bytes()[: 1000 if damage == "shorter" else 0])
    with pytest.raises(InvalidRequest, match="is damaged; delete it to train from the beginning"):
        trainer().load(file)


def test_every_text_is_read_once_a_pass() -> None:
    training = trainer(count=8)
    seen = []
    for step in range(2):
        training.steps = step
        seen += list(training._next())
    assert sorted(seen) == list(range(8))


def test_the_target_answers_as_it_would_alone() -> None:
    model = target()
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5]]
    texts = answered(model, prompts, max_tokens=6, rows=2)
    for prompt, text in zip(prompts, texts, strict=True):
        alone = model.hf.generate(input_ids=torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert text == TrainingText(alone[0].tolist(), len(prompt))


def test_answers_are_the_bare_models_whatever_its_checkpoint_asks_for() -> None:
    """A checkpoint's penalties and sampling would teach what the engine never says."""
    model = target()
    ids, own = [5, 6, 7], model.hf.generation_config
    own.update(do_sample=True, repetition_penalty=3.0)
    bare = list(ids)
    for _ in range(12):
        bare.append(int(model.hf(input_ids=torch.tensor([bare])).logits[0, -1].argmax()))
    [text] = answered(model, [ids], max_tokens=12)
    assert text.token_ids == bare
    assert model.hf.generation_config is own
    theirs = model.hf.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert theirs[0].tolist() != bare, "the checkpoint's penalty would have changed the answer"


def test_prompt_and_answer_fit_into_the_context(tmp_path: Path) -> None:
    """GPT-2 has no position behind its last one."""
    model = target("gpt2")
    model.tokenizer = lambda text, **_: NumberTokenizer()(text)
    prompts = [" ".join(str(i % 90) for i in range(length)) for length in (40, 250, 300)]
    texts = collect(model, [(prompt, None) for prompt in prompts], tmp_path, max_tokens=16, longest=400)
    sizes = sorted((text.num_prompt_tokens, len(text.token_ids)) for text in texts)
    assert sizes == [(40, 56), (250, 256), (255, 256)]
    [given] = collect(model, [(prompts[2], "1 2 3")], tmp_path, max_tokens=16, longest=400)
    assert len(given.token_ids) == 256


def test_what_is_measured_on_depends_on_the_texts_alone_and_is_never_learned_from() -> None:
    own = [TrainingText([i, i + 1, 5], 1) for i in range(200)]
    read = [TrainingText([i, 9, 9], 1, is_given=True) for i in range(200)]
    held_out, learned = session.divided([*own[:100], *read])
    assert held_out
    assert not any(text.is_given for text in held_out)
    assert len(held_out) + len(learned) == 300
    more, learned_then = session.divided([*read, *own[::-1]])
    assert {*map(str, held_out)} <= {*map(str, more)}
    assert not {*map(str, learned)} & {*map(str, more)}
    assert len(more) + len(learned_then) == 400
    assert len(session.divided(read)[0]) > 1
    assert len(session.divided(own[:2])[0]) == 1
    unlucky = [TrainingText([19437, 19438, 7], 1), TrainingText([19437, 19439, 9], 1)]
    assert [len(part) for part in session.divided(unlucky)] == [1, 1], "one is left to learn from"


def test_the_vocabulary_is_what_answers_use() -> None:
    text = TrainingText([9, 9, 9, 4, 7, 7], 4)  # the prompt is 9, 9, 9, 4
    assert choose_vocabulary([text], 2, 20).tolist() == [7, 9]
    assert choose_vocabulary([text], 5, 20, always=[19]).tolist() == [0, 4, 7, 9, 19]
    assert until_end([3, 2, 5, 2], [2]) == [3, 2]


def test_acceptance_of_a_trained_drafter_is_reported_by_depth() -> None:
    training = trainer()
    rates = training.acceptance([TrainingText(text, 4) for text in texts_of(9, 16)], depth=3)
    assert len(rates) == 3
    assert all(0 <= rate <= 1 for rate in rates)
    assert len(VOCABULARY) == 46
