"""The bank of experts: only what fits is loaded, keys and values stay shared, memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

from moedraft.core import SHARED, CorruptAdapter, SamplingParams, Sequence, UnsupportedModel
from moedraft.cpu import groups
from moedraft.cpu.groups import Grouped
from moedraft.drafting.experts.adapter import PREFIX, Adapter
from moedraft.drafting.experts.joined import RESIDENT, STEP, Factors, numbered, residents
from moedraft.drafting.experts.layer import LoRALinear, Mixed
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.experts.modules import adaptable, keeps_cache
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_models import VOCAB, random_model
from tiny import NumberTokenizer


def state(bank: ExpertBank, names: list[str], rank: int = 4) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in names:
        out, inner = bank.layers[name].base_weight().shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inner)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(out, rank)
    return tensors


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_tail_experts_leave_every_key_and_value(kind: str) -> None:
    """The reason for the tail: one cache serves all experts. A full adapter is the negative control."""
    model = random_model(kind, 1)
    bank = ExpertBank(model)
    ids = torch.randint(97, (1, 9))
    tail = sorted(bank.tail)
    assert tail[-1] in bank.layers
    assert not any("k_proj" in name or "v_proj" in name for name in tail)
    caches = {}
    for name, modules in (("none", []), ("tail", tail), ("full", list(bank.layers))):
        stale = bank.publish("x", bank.read(1, {"lora_alpha": 4}, state(bank, modules)) if modules else None)
        assert stale == (name == "full")
        bank.select(["x"])
        caches[name] = model.new_cache(1)
        model.forward(caches[name], 0, ids, [0])
        bank.publish("x", None)
    for before, tailed in zip(caches["none"].layers, caches["tail"].layers, strict=True):
        assert torch.equal(before.keys, tailed.keys)
        assert torch.equal(before.values, tailed.values)
    assert not torch.equal(caches["none"].layers[0].keys, caches["full"].layers[0].keys)


def test_adapters_that_do_not_fit_are_refused() -> None:
    bank = ExpertBank(random_model("llama", 1))
    name = sorted(bank.tail)[0]
    good = state(bank, [name])
    assert bank.read(3, {}, good).version == 3
    stranger = {key.replace(name, "model.layers.9.mlp.up_proj"): value for key, value in good.items()}
    with pytest.raises(CorruptAdapter, match="does not exist"):
        bank.read(1, {}, stranger)
    with pytest.raises(CorruptAdapter, match="something else"):
        bank.read(1, {}, {})
    with pytest.raises(CorruptAdapter, match="something else"):
        bank.read(1, {}, good | {"base_model.model.lm_head.bias": torch.zeros(3)})
    crooked = {key: value[..., :-1] if "lora_A" in key else value for key, value in good.items()}
    with pytest.raises(CorruptAdapter, match="shapes"):
        bank.read(1, {}, crooked)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda key, value: (key.removeprefix(PREFIX), value), "something else"),
        (lambda key, value: (key, value.sum() if "lora_A" in key else value), "shapes"),
        (lambda key, value: (key, value.sum() if "lora_B" in key else value), "shapes"),
        (lambda key, value: (key, value[0]), "shapes"),
        (lambda key, value: (key, value[None]), "shapes"),
        (lambda key, value: (key, value.int()), "int32"),
        (lambda key, value: (key, value.to(torch.complex64)), "complex64"),
        (lambda key, value: (key, value.to(torch.float8_e5m2)), "float8"),
    ],
)
def test_odd_tensors_are_corrupt(change: Callable[..., tuple[str, torch.Tensor]], complaint: str) -> None:
    bank = ExpertBank(random_model("llama", 1))
    tensors = dict(change(key, value) for key, value in state(bank, ["lm_head"]).items())
    with pytest.raises(CorruptAdapter, match=complaint):
        bank.read(1, {}, tensors)


def test_of_two_pairs_one_without_the_prefix_is_corrupt() -> None:
    bank = ExpertBank(random_model("llama", 1))
    bare = {key.removeprefix(PREFIX): value for key, value in state(bank, [sorted(bank.tail)[-1]]).items()}
    with pytest.raises(CorruptAdapter, match="something else"):
        bank.read(1, {}, state(bank, [sorted(bank.tail)[0]]) | bare)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"lm_head": 16}}, 4.0),
        ({}, 1.0),
    ],
)
def test_scaling_is_pefts(config: dict, factor: float) -> None:
    bank = ExpertBank(random_model("llama", 1))
    tensors = state(bank, ["lm_head"])
    _, b = bank.read(1, config, tensors).deltas["lm_head"]
    torch.testing.assert_close(b, tensors[f"{PREFIX}lm_head.lora_B.weight"] * factor)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("with_shared", [False, True])
def test_a_mixed_batch_by_groups_by_masks_and_row_by_row(kind: str, with_shared: bool) -> None:
    rows = ["a", SHARED, "b", "a"]
    ids = torch.randint(97, (len(rows), 5))

    def logits(megabytes: int, one_by_one: bool = False) -> torch.Tensor:
        torch.manual_seed(5)
        model = random_model(kind, 1)
        bank = ExpertBank(model, merged_cache_mb=megabytes)
        if with_shared:
            bank.publish(SHARED, bank.read(1, {}, state(bank, list(bank.layers))))
        bank.publish("a", bank.read(1, {}, state(bank, sorted(bank.tail))))
        bank.publish("b", bank.read(1, {}, state(bank, ["lm_head"])))  # its other layers are the base's
        grouped = any(isinstance(layer.product, Grouped) for layer in select(bank, rows).layers.values())
        assert grouped == (megabytes > 0)
        if not one_by_one:
            return model.forward(model.new_cache(len(rows)), 0, ids, [0] * len(rows))
        parts = [run(model, select(bank, [row]), ids[b : b + 1]) for b, row in enumerate(rows)]
        return torch.cat(parts)

    def select(bank: ExpertBank, names: list[str]) -> ExpertBank:
        bank.select(names)
        return bank

    def run(model: LanguageModel, bank: ExpertBank, part: torch.Tensor) -> torch.Tensor:
        assert bank.selected is not None
        return model.forward(model.new_cache(1), 0, part, [0])

    groups, masks, alone = logits(512), logits(0), logits(512, one_by_one=True)
    torch.testing.assert_close(groups, alone, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(masks, alone, atol=1e-3, rtol=1e-3)
    assert (groups[0] - groups[1]).abs().max() > 0.01


@pytest.mark.parametrize("rank", [4, 40])
def test_many_large_experts_in_a_small_batch_leave_it_to_the_shared_draft(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """While the terms of all of them are fewer numbers than one's merged weights, each drafts its rows."""
    names = ["a", "b", "c", "a"]
    ids = torch.randint(97, (4, 3))

    def logits(rows: list[str], scope: str = "tail") -> torch.Tensor:
        torch.manual_seed(5)
        model = random_model("llama", 1)
        bank = ExpertBank(model)
        modules = sorted(bank.tail) if scope == "tail" else list(bank.layers)
        for name in "abc":
            bank.publish(name, bank.read(1, {}, state(bank, modules, rank)))
        drafters = bank.drafters(rows)
        bank.select(drafters)
        few = set(drafters) == {SHARED}
        assert few == (rows == [SHARED] * 4 or (rank == 40 and scope == "tail" and bank.grouped))
        parts = any(isinstance(layer.product, Grouped) for layer in bank.layers.values())
        assert parts == (bank.grouped and rank == 40 and not few)
        return model.forward(model.new_cache(4), 0, ids, [0] * 4)

    assert (difference(logits(names), logits([SHARED] * 4)) > 0.01) == (rank == 4)
    assert difference(logits(names, "full"), logits([SHARED] * 4, "full")) > 0.01  # they own the cache
    here = logits(names)
    monkeypatch.setattr("moedraft.cpu.SMALL", 1000)  # where mixing is cheap by comparison
    elsewhere = logits(names)
    assert difference(elsewhere, logits([SHARED] * 4)) > 0.01
    if rank == 4:
        torch.testing.assert_close(here, elsewhere, atol=1e-3, rtol=1e-3)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_experts_that_stay_joined_are_as_few_as_a_batch_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small model on a CPU: others of former batches are read as well, at each step."""
    bank = ExpertBank(random_model("llama", 1))
    names = [f"expert {i}" for i in range(6)]
    for name in names:
        bank.publish(name, bank.read(1, {}, state(bank, sorted(bank.tail), rank=6)))
    adapters = [bank.experts[name] for name in names]
    most = next(n for n in range(6, 0, -1) if groups.light(adapters[:n]))
    assert 2 < most < 6
    for first in range(6 - 2):
        bank.select(names[first : first + 3])
        assert groups.light(bank.joined._adapters.values())
        assert set(names[first : first + 3]) <= bank.joined._adapters.keys()
    assert len(bank.joined._adapters) == most


class OnAGpu(LanguageModel):
    """A model that says it runs on a GPU; its weights lie where the test can reach them."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_on_a_gpu_every_row_keeps_its_own_expert() -> None:
    """However many experts a batch holds, and however small the draft is: all go through the mixed layers."""
    rows = ["a", "b", "c", SHARED, "a"]
    model = random_model("llama", 1)
    model.__class__ = OnAGpu
    model.lean = None
    bank = ExpertBank(model)
    for name in "abc":
        bank.publish(name, bank.read(1, {}, state(bank, sorted(bank.tail))))
    assert bank.drafters(rows) == rows
    ids = torch.randint(97, (1, 4)).expand(len(rows), 4)
    bank.select(bank.drafters(rows))
    mixed = model.forward(model.new_cache(len(rows)), 0, ids, [0] * len(rows))
    for row, name in enumerate(rows):
        bank.select([name])
        alone = model.forward(model.new_cache(1), 0, ids[:1], [0])
        torch.testing.assert_close(mixed[row], alone[0], atol=1e-3, rtol=1e-3)
    assert (mixed[0] - mixed[3]).abs().max() > 0.01


def test_filling_a_cache_that_all_share_makes_no_expert_ready() -> None:
    """Merging one takes longer than a step of a small target."""
    model = random_model("llama", 1)
    bank = ExpertBank(model)
    drafter = ModelDrafter(model, bank, 4, VOCAB)
    one = Engine(random_model("llama", 0), NumberTokenizer(), drafter, FixedSelector(), adaptive_budget=False)
    for name in "abc":
        bank.publish(name, bank.read(1, {}, state(bank, sorted(bank.tail))))
        one.add([*range(1, 30)], SamplingParams(max_tokens=9), expert=name)
    one.step()
    assert all(row.speculation.num_drafts for row in one.sequences)
    assert not bank.merged


class SettlesLate(FixedSelector):
    """Expert "x" for everyone else is found while somebody's answer ends, in the middle of a round."""

    def __init__(self) -> None:
        self.rows: list[Sequence] = []

    def assign(self, sequences: list[Sequence]) -> None:
        self.rows += sequences

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        others = [row for row in self.rows if ending is not None and row is not ending]
        for row in others:
            row.expert = "x"
        return others


@pytest.mark.parametrize("scope", ["tail", "full"])
def test_an_expert_found_in_mid_round_reads_the_keys_of_no_other(scope: str) -> None:
    """With the tail alone there is nothing to read anew, which is the negative control."""
    model = random_model("llama", 1)
    bank = ExpertBank(model)
    bank.publish("x", bank.read(1, {}, state(bank, sorted(bank.tail) if scope == "tail" else [*bank.layers])))
    one = Engine(
        random_model("llama", 0),
        NumberTokenizer(),
        ModelDrafter(model, bank, 4, VOCAB),
        SettlesLate(),
        adaptive_budget=False,
        draft_source="model",
    )
    one.add([1, 2, 3], SamplingParams(max_tokens=2))
    one.add([4, 5, 6], SamplingParams(max_tokens=60))
    stays = one.sequences[-1]
    while len(one.sequences) == 2:
        assert stays.expert == SHARED
        one.step()
    assert stays.speculation.num_drafts
    assert stays.expert == "x"
    assert (stays.draft_cached == 0) == (scope == "full")
    one.step()
    assert len(stays.token_ids) >= stays.draft_cached > 3
    assert stays.adapter_version == 1


def test_merged_weights_stay_within_their_budget() -> None:
    model = random_model("llama", 1)
    ids = torch.tensor([[1, 2, 3]])

    def logits(megabytes: int) -> tuple[ExpertBank, dict[str, torch.Tensor]]:
        torch.manual_seed(5)
        bank = ExpertBank(random_model("llama", 1), merged_cache_mb=megabytes)
        results = {}
        for name in "abcd":
            bank.publish(name, bank.read(1, {}, state(bank, sorted(bank.tail))))
        for name in "abcda":
            bank.select([name])
            layer = next(iter(bank.layers.values()))
            assert layer is not None
            results[name] = run(bank, ids)
        return bank, results

    def run(bank: ExpertBank, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(1, 3, bank.layers["lm_head"].base_weight().shape[1])
        return bank.layers["lm_head"](hidden)

    roomy, merged = logits(512)
    none, mixed = logits(0)
    assert len(roomy.merged) == 4
    assert len(none.merged) == 0
    for name in "abcd":
        torch.testing.assert_close(merged[name], mixed[name], atol=1e-4, rtol=1e-4)
    one = sum(b.shape[0] * a.shape[1] * 4 for a, b in roomy.experts["a"].deltas.values())
    roomy.merged.budget = 2 * one
    roomy.publish("a", None)
    roomy.publish("e", roomy.experts["b"])
    roomy.select(["e"])
    assert len(roomy.merged) <= 2
    assert model is not None


def test_bare_puts_everything_aside() -> None:
    model = random_model("llama", 1)
    ids = torch.tensor([[1, 2, 3]])
    plain = model.forward(model.new_cache(1), 0, ids, [0])
    bank = ExpertBank(model)
    bank.publish(SHARED, bank.read(1, {}, state(bank, list(bank.layers))))
    bank.publish("x", bank.read(1, {}, state(bank, sorted(bank.tail))))
    bank.select(["x"])
    assert (model.forward(model.new_cache(1), 0, ids, [0]) - plain).abs().max() > 0.01
    bank.bare(True)
    bank.select(["x"])
    torch.testing.assert_close(model.forward(model.new_cache(1), 0, ids, [0]), plain, atol=1e-5, rtol=1e-5)
    bank.bare(False)
    assert bank.version(SHARED) == bank.version("x") == 1
    assert bank.version("y") == 0


def test_unknown_architectures_are_refused() -> None:
    model = random_model("llama", 1)
    model.num_layers = 7
    with pytest.raises(UnsupportedModel, match="layers"):
        adaptable(model, "full")
    assert keeps_cache("model.layers.6.mlp.up_proj", 7)
    assert not keeps_cache("model.layers.5.mlp.up_proj", 7)
    assert not keeps_cache("model.layers.6.self_attn.qkv_proj", 7)
    assert Adapter(1, {}).version == 1


def tiny_opt() -> LanguageModel:
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return LanguageModel(hf, None, "opt")


def test_mixed_batches_where_layers_see_flattened_rows() -> None:
    model = tiny_opt()
    bank = ExpertBank(model)
    for name in "ab":
        bank.publish(name, bank.read(1, {"lora_alpha": 1}, state(bank, list(bank.layers))))
    ids = torch.tensor([[3, 4, 5], [3, 4, 5], [3, 4, 5]])
    bank.select(["a", "b", "none"])
    mixed = model.forward(model.new_cache(3), 0, ids, [0, 0, 0])
    for row, name in enumerate(("a", "b", "none")):
        bank.select([name])
        alone = model.forward(model.new_cache(1), 0, ids[:1], [0])[0]
        torch.testing.assert_close(mixed[row], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8), (2, 3, 4, 8)])
def test_a_mixed_layer_takes_any_shape_of_rows(shape: tuple[int, ...]) -> None:
    layer = LoRALinear(torch.nn.Linear(8, 5))
    x, a, b = torch.randn(shape), torch.randn(2, 8), torch.randn(5, 2)
    factors = Factors({0: (a[:1], b[:, :1]), 1: (a[1:], b[:, 1:])}, small=False)
    layer.product = Mixed(layer.base, factors.down, factors.up, factors.mask(torch.tensor([0, 1])))
    half = len(x) // 2
    want = torch.cat([layer.base(x[:half]) + x[:half] @ a[:1].T @ b[:, :1].T])
    other = layer.base(x[half:]) + x[half:] @ a[1:].T @ b[:, 1:].T
    torch.testing.assert_close(layer(x), torch.cat([want, other]), atol=1e-5, rtol=1e-5)


def an_adapter(rank: int) -> Adapter:
    return Adapter(1, {"layer": (torch.randn(rank, 6), torch.randn(5, rank))})


def test_factors_of_any_ranks_are_each_experts_own() -> None:
    """Their number is filled up, so that few shapes of products are met; what was filled in is nobody's."""
    adapters = {"a": an_adapter(3), "b": an_adapter(STEP), "c": an_adapter(1)}
    numbers = {name: number for number, name in enumerate(adapters)}
    deltas = {name: one.deltas["layer"] for name, one in adapters.items()}
    by_number = {numbers[name]: delta for name, delta in deltas.items()}
    factors, x = Factors(by_number, small=False), torch.randn(4, 1, 6)
    assert len(factors.owners) == 2 * STEP
    rows = ["b", "", "a", "c"]
    mask = factors.mask(torch.tensor([numbers.get(row, -1) for row in rows]))
    found = factors.up(factors.down(x) * mask)
    for row, name in enumerate(rows):
        a, b = deltas.get(name, (torch.zeros(1, 6), torch.zeros(5, 1)))
        torch.testing.assert_close(found[row], x[row] @ a.T @ b.T, rtol=1e-4, atol=1e-4)


def test_the_experts_used_last_stay_joined() -> None:
    known = {f"known-{i}": an_adapter(8) for i in range(RESIDENT)}
    assert list(residents(known, {})) == list(known)
    now = {"new": an_adapter(600)}
    assert list(residents(known, now)) == [*list(known)[1:], "new"]
    newer = {"known-3": an_adapter(8)}
    found = residents(known, newer)
    assert list(found) == [name for name in known if name != "known-3"] + ["known-3"]
    assert found["known-3"] is newer["known-3"]
    many = {f"new-{i}": an_adapter(1) for i in range(RESIDENT + 2)}
    assert list(residents(known, many)) == list(many), "what a batch has is always joined"


def test_rows_that_one_adapter_serves_share_its_factors() -> None:
    """As all rows of the base alone do in a mixed batch, whose adapter takes the shared one away."""
    away = an_adapter(4)
    assert numbered({"a": away, "b": an_adapter(4), "c": away}) == {"a": 0, "b": 1, "c": 0}


def test_routed_experts_and_routers_are_left_out() -> None:
    model = random_model("llama", 1)
    layer = model.hf.get_submodule("model.layers.1.mlp")
    layer.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    layer.gate, layer.blocks = torch.nn.Linear(4, 2), torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    names = adaptable(model, "full")
    assert "model.layers.1.mlp.up_proj" in names
    assert not any(name.endswith((".0", ".gate")) for name in names)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": "abc"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": None},
        {"alpha_pattern": {"(": 3}},
        {"alpha_pattern": {"lm_head": [1]}},
        {"r": 8},
        {"r": 4, "rank_pattern": {"lm_head": 8}},
        {"rank_pattern": {"(": 3}},
    ],
)
def test_a_scaling_that_makes_no_sense_is_corrupt(config: dict) -> None:
    bank = ExpertBank(random_model("llama", 1))
    with pytest.raises(CorruptAdapter, match="makes no sense"):
        bank.read(1, config, state(bank, ["lm_head"]))


def test_another_kind_of_adapter_is_refused() -> None:
    bank = ExpertBank(random_model("llama", 1))
    with pytest.raises(CorruptAdapter, match="kind is 'IA3'"):
        bank.read(1, {"peft_type": "IA3"}, state(bank, ["lm_head"]))


def test_a_rank_may_differ_by_module_where_the_configuration_says_so() -> None:
    bank = ExpertBank(random_model("llama", 1))
    rank = len(next(iter(state(bank, ["lm_head"]).values())))
    bank.read(1, {"peft_type": "LORA", "r": 99, "rank_pattern": {"lm_head": rank}}, state(bank, ["lm_head"]))
