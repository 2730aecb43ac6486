"""Experts of a feature drafter that guess from vocabularies of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slow_cases import case, slow

from moedraft.core import SHARED, CorruptAdapter, SamplingParams
from moedraft.drafting.base import FeatureBase, features_of, first_guesses, load_feature_base
from moedraft.drafting.experts.adapter import HEAD, LORA_A, LORA_B, PREFIX, Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.engine.engine import Engine
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_features import STEADY, generated, target_of
from random_models import VOCAB, prompts_of, random_model
from tiny import NumberTokenizer

GENERAL = torch.arange(1, VOCAB, 2)
INSIDE = torch.arange(1, VOCAB, 6)  # a part of the general list
OUTSIDE = torch.arange(0, VOCAB, 3)  # half of it is not in the general list
LISTS = {"inside": INSIDE, "outside": OUTSIDE, "general": None}
WAYS = ("fast", "half", "plain")


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> LanguageModel:
    """A Llama where a test does not name other kinds."""
    return target_of(getattr(request, "param", "llama"))


@pytest.fixture(params=WAYS)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies: PyTorch, or the layouts for a CPU in float32, or with weights in half precision."""
    if request.param != "half":
        monkeypatch.setattr("moedraft.cpu.products.halves", lambda weight: False)
    found: str = request.param
    return found


@pytest.fixture
def tolerance(how: str) -> dict[str, float]:
    """Weights in half precision have eleven binary digits."""
    return {"rtol": 1e-2, "atol": 2e-3} if how == "half" else {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def base(target: LanguageModel, tmp_path: Path, how: str) -> FeatureBase:
    torch.manual_seed(5)
    config = config_for(target.hf.config, draft_vocab_size=len(GENERAL), feature_layers=(0, 1, 2))
    layers = target.hf.get_input_embeddings(), target.hf.get_output_embeddings()
    save_draft(
        FeatureDraft(config, GENERAL, *(layer.weight.detach() for layer in layers)), tmp_path / "draft"
    )
    found = load_feature_base(tmp_path / "draft", target)
    found.cpu_fast_paths = how != "plain"
    return found


def base_dtype(bank: ExpertBank) -> torch.dtype:
    return bank.layers[HEAD].base_weight().dtype


def adapter_of(bank: ExpertBank, seed: int, vocabulary: torch.Tensor | None, scale: float = 0.3) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    deltas = {}
    for name in sorted(bank.tail):
        out, inner = bank.layers[name].base_weight().shape
        rows = len(vocabulary) if name == HEAD and vocabulary is not None else out
        a, b = (torch.randn(*shape, generator=generator) * scale for shape in ((4, inner), (rows, 4)))
        deltas[name] = (a.to(base_dtype(bank)), b.to(base_dtype(bank)))
    return Adapter(seed, deltas, vocabulary)


def bank_of(base: FeatureBase, shared: torch.Tensor | None = None) -> ExpertBank:
    """A bank with an expert for each list, and a shared adapter."""
    bank = ExpertBank(base)
    bank.publish(SHARED, adapter_of(bank, 7, shared))
    for seed, (name, tokens) in enumerate(LISTS.items(), start=1):
        bank.publish(name, adapter_of(bank, seed, tokens))
    return bank


def logits_of(base: FeatureBase, bank: ExpertBank, rows: list[str]) -> torch.Tensor:
    """[B, V] after the same hidden state in each row; −inf for what cannot be guessed."""
    hidden = torch.randn(1, 1, base.hf.config.hidden_size, generator=torch.Generator().manual_seed(0))
    bank.select(rows)
    logits = base.hf.logits(hidden.expand(len(rows), 1, -1))[:, 0]
    every = torch.full((len(rows), VOCAB), -torch.inf)
    return every.scatter_reduce_(1, base.hf.vocabulary.expand_as(logits), logits, "amax")


@pytest.mark.parametrize("shared", [None, OUTSIDE, torch.arange(VOCAB)], ids=["general", "other", "all"])
def test_a_row_has_the_logits_of_its_own_list_in_any_batch(
    base: FeatureBase, tolerance: dict[str, float], shared: torch.Tensor | None
) -> None:
    bank = bank_of(base, shared)
    rows = ["outside", SHARED, "inside", "general", "outside", "nobody"]
    mixed = logits_of(base, bank, rows)
    for row, name in zip(mixed, rows, strict=True):
        alone = logits_of(base, bank, [name])[0]
        own = {SHARED: shared, "nobody": shared}.get(name, LISTS.get(name))
        assert alone.isfinite().nonzero()[:, 0].tolist() == (GENERAL if own is None else own).tolist()
        torch.testing.assert_close(row, alone, **tolerance)


def test_what_experts_have_in_common_is_multiplied_once(
    base: FeatureBase, tolerance: dict[str, float]
) -> None:
    """Where that is less than the rows of each, and only for the rows of the batch that have an expert."""
    bank = bank_of(base)
    assert bank.heads is not None
    alike = ["inside", "general", "again"]
    bank.publish("outside", None)
    bank.publish("again", adapter_of(bank, 8, GENERAL))
    for rows in (alike, [*alike, SHARED], [*alike, "nobody", *alike]):
        together = logits_of(base, bank, rows)
        assert bank.heads.joined.common is not None
        assert torch.equal(bank.heads.joined.common.tokens, GENERAL)
        for row, name in zip(together, rows, strict=True):
            torch.testing.assert_close(row, logits_of(base, bank, [name])[0], **tolerance)
    bank.select(alike)
    assert torch.equal(base.hf.vocabulary, GENERAL)
    far = torch.arange(0, VOCAB, 2)
    bank.publish("far", adapter_of(bank, 9, far))
    bank.select(alike)
    assert base.hf.vocabulary.shape == (3, len(GENERAL))  # a list for each row: all tokens would be too many
    bank.publish("as far", adapter_of(bank, 10, far))
    bank.select([*alike, "far", "as far"])
    assert torch.equal(base.hf.vocabulary, torch.arange(VOCAB))


@pytest.mark.parametrize(("a_row_more", "joined"), [(0.0, True), (0.01, False)])
def test_whether_rows_are_joined_follows_from_what_products_take_here(
    base: FeatureBase, monkeypatch: pytest.MonkeyPatch, a_row_more: float, joined: bool
) -> None:
    """Where a full batch takes as long as one row, joined rows pay; where each row costs, they do not."""
    bank, clock = bank_of(base), [0.0]
    assert bank.heads is not None
    product = bank.heads.base[1]

    def timed(x: torch.Tensor) -> torch.Tensor:
        clock[0] += 0.01 + a_row_more * (len(x) - 1)
        return product(x)

    monkeypatch.setattr("moedraft.drafting.heads.joined_heads.time.perf_counter", lambda: clock[0])
    bank.heads.base = (bank.heads.base[0], timed)
    bank.measure(8)
    assert bank.heads.joined.worth == pytest.approx(0.8 if joined else 0.8 / 8)
    bank.publish("outside", None)
    bank.publish("again", adapter_of(bank, 8, GENERAL))
    assert (bank.heads.joined.common is not None) is joined


def test_what_no_batch_gains_by_is_not_made(base: FeatureBase) -> None:
    bank = bank_of(base)
    assert bank.heads is not None
    assert bank.heads.joined.common is None  # half of one list lies outside of the others
    bank.publish("outside", None)
    bank.publish("again", adapter_of(bank, 8, GENERAL))
    assert bank.heads.joined.common is not None


def test_a_batch_that_failed_to_be_joined_is_joined_at_the_next(
    base: FeatureBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory is short for a moment."""
    bank, rows = bank_of(base), ["inside", "general", "again"]
    bank.publish("outside", None)
    bank.publish("again", adapter_of(bank, 8, GENERAL))
    wanted = logits_of(base, bank, rows)
    for place in (
        "moedraft.drafting.heads.joined_heads.Factors",
        "moedraft.drafting.experts.joined.Factors",
    ):
        bank.publish("again", adapter_of(bank, 8, GENERAL))
        with monkeypatch.context() as broken:
            broken.setattr(place, None)
            for _ in range(2):
                with pytest.raises(TypeError):
                    logits_of(base, bank, rows)
        torch.testing.assert_close(logits_of(base, bank, rows), wanted)


def test_new_versions_are_joined_anew(base: FeatureBase, tolerance: dict[str, float]) -> None:
    bank, rows = bank_of(base), ["inside", "general", "outside", "again"]
    bank.publish("outside", None)
    bank.publish("again", adapter_of(bank, 8, GENERAL))
    before = logits_of(base, bank, rows)
    bank.publish("inside", adapter_of(bank, 11, INSIDE))
    after = logits_of(base, bank, rows)
    assert not torch.allclose(before[0], after[0])
    torch.testing.assert_close(before[1:], after[1:])
    bank.publish(SHARED, adapter_of(bank, 12, None))
    moved = logits_of(base, bank, rows)
    assert not any(torch.allclose(a, b) for a, b in zip(after, moved, strict=True))
    for row, name in zip(moved, rows, strict=True):
        torch.testing.assert_close(row, logits_of(base, bank, [name])[0], **tolerance)


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_exact_batches_do_not_round_differently(base: FeatureBase, room: bool) -> None:
    """Not even in half precision, where a sum of products and a product of a sum differ in most digits."""
    base.hf.to(torch.bfloat16)
    bank = bank_of(base, OUTSIDE)
    if not room:
        bank.merged.budget = 0
    rows = ["outside", SHARED, "inside", "general"]
    hidden = torch.randn(4, 1, base.hf.config.hidden_size).bfloat16()

    def output(names: list[str], states: torch.Tensor, exact: bool) -> list[torch.Tensor]:
        bank.select(names, exact=exact)
        after = base.hf.layers[0].mlp(states)
        return [after, base.hf.logits(states)]

    for exact in (True, False) if room else (True,):
        together = output(rows, hidden, exact)
        same = [
            torch.equal(alone[0], whole[i][:, : alone.shape[-1]])
            for i, name in enumerate(rows)
            for alone, whole in zip(output([name], hidden[i : i + 1], exact), together, strict=True)
        ]
        assert all(same) == exact


def test_rows_are_those_of_base_shared_adapter_and_expert_together(
    base: FeatureBase, how: str, tolerance: dict[str, float]
) -> None:
    """Against the sum written out for one token that only the expert and one that all of them can guess."""
    bank = bank_of(base)
    output, (shared, own) = base.hf.output, (bank.shared, bank.experts["outside"])
    assert shared is not None
    hidden = torch.randn(1, 1, base.hf.config.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = base.hf.norm(hidden)[0, 0]
    logits = logits_of(base, bank, ["outside"])[0]
    both, alone = 3, 6
    (sa, sb), (oa, ob) = shared.deltas[HEAD], own.deltas[HEAD]
    of_shared = sb[GENERAL.tolist().index(both)] @ (sa @ normed)
    of_own = {token: ob[OUTSIDE.tolist().index(token)] @ (oa @ normed) for token in (both, alone)}
    exactly = tolerance if how == "half" else {}
    torch.testing.assert_close(logits[both], output[both] @ normed + of_shared + of_own[both], **exactly)
    torch.testing.assert_close(logits[alone], output[alone] @ normed + of_own[alone], **exactly)


def test_rows_that_a_checkpoint_has_trained_stay_its_own(base: FeatureBase) -> None:
    own = torch.randn(len(GENERAL), base.hf.config.hidden_size)
    base.hf.trained = (GENERAL, own)
    rows = base.hf.rows(torch.tensor([2, 3, 4, 5]))
    assert torch.equal(rows[[1, 3]], own[[1, 2]])
    assert torch.equal(rows[[0, 2]], base.hf.output[[2, 4]])


def test_the_bare_base_guesses_from_the_general_list(base: FeatureBase) -> None:
    bank = bank_of(base, OUTSIDE)
    bank.bare(True)
    assert logits_of(base, bank, ["outside"])[0].isfinite().nonzero()[:, 0].tolist() == GENERAL.tolist()
    bank.bare(False)
    assert logits_of(base, bank, ["outside"])[0].isfinite().nonzero()[:, 0].tolist() == OUTSIDE.tolist()


def test_lists_are_kept_to_whatever_little_memory_there_is(base: FeatureBase) -> None:
    bank = ExpertBank(base, merged_cache_mb=0)
    for name, tokens in LISTS.items():
        bank.publish(name, adapter_of(bank, 3, tokens))
    for rows in (["outside"], ["outside", "inside", SHARED]):
        found = logits_of(base, bank, rows)[0].isfinite().nonzero()[:, 0]
        assert found.tolist() == OUTSIDE.tolist()
    assert not list(bank.heads.kept if bank.heads else [0])


def test_output_rows_of_new_versions_are_ready_before_they_are_used(base: FeatureBase) -> None:
    bank = bank_of(base)
    prepared = bank.prepare({SHARED: adapter_of(bank, 20, None)}, ahead=True)
    assert prepared.heads.keys() == {*LISTS, SHARED}
    bank.take(prepared)
    prepared = bank.prepare({"outside": adapter_of(bank, 21, OUTSIDE)}, ahead=True)
    assert prepared.heads.keys() == {"outside"}
    bank.take(prepared)
    kept = list(bank.heads.kept if bank.heads else [])
    assert (set(kept), kept[-1]) == (set(LISTS), "outside")


def test_what_was_used_last_is_kept_longest_after_a_new_version_too(base: FeatureBase) -> None:
    bank = bank_of(base)
    assert bank.heads is not None
    bank.select(["outside"])
    bank.take(bank.prepare({SHARED: adapter_of(bank, 20, None)}, ahead=True))
    assert list(bank.heads.kept)[-1] == "outside"
    bank.heads.kept.budget = sum(bank.heads.kept._bytes(one) for one in bank.experts.values())
    assert bank.heads.kept.fitting({"new": bank.experts["outside"]}) == []  # beside all that are kept


def test_as_many_output_rows_are_made_ready_as_are_kept(base: FeatureBase) -> None:
    bank = bank_of(base)
    bank.select(["outside"])
    assert bank.heads is not None
    bank.heads.kept.budget = bank.heads.kept._bytes(bank.experts["outside"])
    prepared = bank.prepare({SHARED: adapter_of(bank, 20, None)}, ahead=True)
    assert prepared.heads.keys() == {"outside", SHARED}


def test_a_new_version_may_have_another_list(base: FeatureBase, target: LanguageModel) -> None:
    bank = bank_of(base)
    text = prompts_of(1, seed=2, longest=80)[0]
    for number, tokens in enumerate([OUTSIDE, INSIDE, None], start=10):
        bank.publish("outside", adapter_of(bank, number, tokens))
        bank.select(["outside"])
        allowed = set((GENERAL if tokens is None else tokens).tolist())
        guesses = first_guesses(base, text, features_of(base, target, text))
        assert set(guesses[2:]) <= allowed


NAMES = ["outside", "inside", SHARED]


def answers(
    base: FeatureBase,
    bank: ExpertBank,
    target: LanguageModel,
    jobs: list[tuple[int, list[int]]],
    **sampling: float,
) -> list[list[int]]:
    """The answers to (number, prompt) pairs, in one batch where they fit; the experts take turns."""
    drafter = FeatureDrafter(base.hf, bank, 4, VOCAB)
    slots = min(4, len(jobs))
    engine = Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=slots, adaptive_budget=False
    )
    ids = [
        engine.add(prompt, SamplingParams(max_tokens=30, seed=i, **sampling), expert=NAMES[i % 3])
        for i, prompt in jobs
    ]
    done: dict[str, list[int]] = {}
    step = 0
    while engine.has_work:
        if not sampling and step % 5 == 2:  # lists are exchanged in mid-answer
            tokens = [OUTSIDE, INSIDE, None][step % 3]
            bank.publish(NAMES[step % 2], adapter_of(bank, step, tokens, [0.01, 10.0][step % 2]))
        done |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
        step += 1
    return [done[i] for i in ids]


@pytest.mark.parametrize(
    ("target", "how"),
    [
        *(("llama", how) for how in WAYS),
        *(case(kind, "fast") for kind in ("gpt_neox", STEADY)),
        *(slow("qwen2", how) for how in WAYS),
        *(slow(kind, how) for kind in ("gpt_neox", STEADY) for how in ("half", "plain")),
    ],
    indirect=True,
)
def test_greedy_answers_of_mixed_batches_stay_the_targets(base: FeatureBase, target: LanguageModel) -> None:
    """They are those of transformers' own `generate`, while lists are exchanged in mid-answer."""
    prompts = prompts_of(6, seed=6)
    found = answers(base, bank_of(base), target, list(enumerate(prompts)))
    assert found == [generated(target.name, tuple(prompt), 30) for prompt in prompts]


def test_a_seeded_answer_is_the_same_alone_and_among_others(base: FeatureBase, target: LanguageModel) -> None:
    bank, jobs = bank_of(base), list(enumerate(prompts_of(6, seed=6)))
    together = answers(base, bank, target, jobs, temperature=0.9)
    assert together == [answers(base, bank, target, [job], temperature=0.9)[0] for job in jobs]


def stored(bank: ExpertBank, vocabulary: torch.Tensor) -> dict[str, torch.Tensor]:
    deltas = adapter_of(bank, 1, vocabulary).deltas
    return {
        PREFIX + name + key: value
        for name, pair in deltas.items()
        for key, value in zip((LORA_A, LORA_B), pair, strict=True)
    }


def test_a_stored_list_is_checked(base: FeatureBase) -> None:
    bank = ExpertBank(base)
    tensors = stored(bank, OUTSIDE)
    found = bank.read(3, {"r": 4, "lora_alpha": 4}, tensors, OUTSIDE.to(torch.int32))
    assert found.vocabulary is not None
    assert torch.equal(found.vocabulary, OUTSIDE)
    for wrong in (OUTSIDE.flip(0), OUTSIDE + VOCAB, OUTSIDE[:-1], None):
        with pytest.raises(CorruptAdapter):
            bank.read(3, {"r": 4, "lora_alpha": 4}, tensors, wrong)


def test_an_independent_draft_takes_no_list() -> None:
    bank = ExpertBank(random_model("llama", 1))
    with pytest.raises(CorruptAdapter, match="no feature drafter"):
        bank.read(1, {}, {}, OUTSIDE)


@pytest.mark.parametrize(
    "rows", [["outside"], ["outside", "inside"], ["inside", "outside", SHARED, "nobody"]]
)
@pytest.mark.parametrize("exact", [False, True])
def test_where_the_base_alone_serves_a_row_drafts_as_without_adapters(
    base: FeatureBase, tolerance: dict[str, float], rows: list[str], exact: bool
) -> None:
    """In any batch, also after the shared adapter has moved on, and until the expert serves again."""
    bank = bank_of(base, OUTSIDE)
    hidden = torch.randn(1, 1, base.hf.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def found(names: list[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What the layer gives for the row of each, and its logits."""
        logits = logits_of(base, bank, names)
        bank.select(names, exact=exact)
        states = base.hf.layers[0].mlp(hidden.expand(len(names), 1, -1))[:, 0]
        return dict(zip(names, zip(states, logits, strict=True), strict=True))

    adapted = found(rows)
    bank.bare(True)
    plain = found(rows)["outside"]
    bank.bare(False)
    bank.take(bank.prepare({}, unadapted={"outside", "never seen"}))
    for _ in range(2):
        now = found(rows)
        torch.testing.assert_close(now["outside"], plain, **tolerance)
        bank.publish(SHARED, adapter_of(bank, 7, OUTSIDE))  # the others stay as they were
        for name in set(rows) - {"outside"}:
            torch.testing.assert_close(now[name], adapted[name], **tolerance)
    bank.publish(SHARED, adapter_of(bank, 30, None))
    torch.testing.assert_close(found(rows)["outside"], plain, **tolerance)
    assert (bank.version("outside"), bank.held("outside")) == (0, 2)
    bank.publish(SHARED, adapter_of(bank, 7, OUTSIDE))
    bank.take(bank.prepare({}, unadapted=()))
    torch.testing.assert_close(found(rows)["outside"], adapted["outside"], **tolerance)


def test_an_expert_that_stands_aside_still_gets_its_new_versions(base: FeatureBase) -> None:
    bank = bank_of(base)
    bank.take(bank.prepare({}, unadapted={"outside"}))
    bank.publish("outside", adapter_of(bank, 9, OUTSIDE))
    assert (bank.version("outside"), bank.held("outside")) == (0, 9)
    assert "outside" in bank.names
    bank.publish(SHARED, None)  # then there is nothing to take away
    assert "outside" not in bank.experts
    bank.take(bank.prepare({}, unadapted=()))
    assert bank.version("outside") == 9
