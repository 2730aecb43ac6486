"""The forward for large models on a CPU: the model's own logits, and each token's whatever goes with it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moedraft.cpu.huge_pages import use_huge_pages
from moedraft.cpu.products import halves, packs
from moedraft.cpu.steady import attention
from moedraft.cpu.steady import forward as steady
from moedraft.cpu.steady.independence import independent, made_independent, sums_alike
from moedraft.evidence import Beside, HiddenStates
from moedraft.loading.checks import self_check
from moedraft.models import LanguageModel, count_parameters

from random_models import CONFIGS, random_model

pytestmark = pytest.mark.skipif(not packs(torch.ones(1)), reason="no blocked products here")
fbgemm = pytest.mark.skipif(not halves(torch.ones(1)), reason="FBGEMM is not there")
half = pytest.mark.skipif(
    not packs(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU does not multiply bfloat16 itself"
)


SMOLLM2 = SimpleNamespace(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
)
TWO_ROWS = steady.Arrangement(5, fewest=2)
APART = steady.Arrangement(5, fewest=2, apart=True)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Where only one computes, buffers lie alike whatever is computed."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def steady_model(
    kind: str,
    dtype: torch.dtype = torch.float32,
    arranged: steady.Arrangement | None = None,
    fuse: bool = True,
) -> LanguageModel:
    model = random_model(kind, 3)
    model.hf.to(dtype)
    model.lean = steady.SteadyForward(model.hf, arranged, fuse=fuse)
    return model


@pytest.mark.parametrize("arranged", [None, TWO_ROWS, APART])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("fuse", [True, False])
def test_same_logits_ragged_and_chunked(fuse: bool, kind: str, arranged: steady.Arrangement | None) -> None:
    model = steady_model(kind, arranged=arranged, fuse=fuse)
    ids = torch.randint(97, (3, 11))
    whole = model.hf(ids).logits
    self_check(model)
    cache = model.new_cache(4)
    first = model.forward(cache, 1, ids[:, :6], [0, 0, 0])
    torch.testing.assert_close(first, whole[:, :6], atol=1e-4, rtol=1e-4)
    ragged = torch.stack([ids[0, 4:7], ids[1, 6:9], ids[2, 5:8]])
    rest = model.forward(cache, 1, ragged, [4, 6, 5], keep=2)
    for row, start in enumerate((4, 6, 5)):
        torch.testing.assert_close(rest[row], whole[row, start + 1 : start + 3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.hf(ids).logits, whole, atol=1e-5, rtol=1e-5)  # its layers still work


def halved_model(kind: str, arranged: steady.Arrangement) -> LanguageModel:
    model = random_model(kind, 3)
    assert steady.halve(model.hf)
    model.lean = steady.SteadyForward(model.hf, arranged)
    return model


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for it, and models that are large enough."""
    for module in ("products", "steady.forward"):
        monkeypatch.setattr(f"moedraft.cpu.{module}.multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("moedraft.cpu.steady.forward.SMALL", 100)


@fbgemm
@pytest.mark.parametrize("arranged", steady.HALVED)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.usefixtures("no_bfloat16", "two_threads")
def test_weights_in_half_precision_are_the_models_own(kind: str, arranged: steady.Arrangement) -> None:
    """transformers has the same numbers afterwards, and each token's do not depend on what goes with it."""
    before = random_model(kind, 3).hf.model.layers[0].mlp.up_proj.weight
    model = halved_model(kind, arranged)
    after = model.hf.model.layers[0].mlp.up_proj.weight
    assert torch.equal(after, before.half().float())
    assert not torch.equal(after, before)
    self_check(model)
    ids = torch.randint(model.vocab_size, (2, 40))
    found, wanted = model.forward(model.new_cache(2), 0, ids, [0, 0]), model.hf(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    if not made_independent(model, steady.HALVED):
        pytest.skip("on this CPU this model would stay in float32")
    assert independent(model)


@fbgemm
def test_numbers_of_rows_that_would_be_summed_otherwise_are_filled_up() -> None:
    """The negative control is the product without that: it differs where rows are filled up, only there."""
    random = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(160, 200, bias=False)
    layer.weight.data = torch.randn(200, 160, generator=random)
    x = torch.randn(300, 160, generator=random)
    product, table = steady.SteadyProduct([layer], steady.HALVED[0]), steady.in_one_order()
    bare = {r: torch.ops.quantized.linear_dynamic_fp16(x[:r], product.packed) for r in range(1, 41)}
    if table == list(range(len(table))) and not torch.equal(bare[1], bare[40][:1]):
        pytest.skip("on this CPU filling up does not help, and targets stay in float32")
    singly = torch.cat([product(x[row : row + 1]) for row in range(300)])
    assert all(torch.equal(product(x[:rows]), singly[:rows]) for rows in range(1, 301))
    otherwise = [rows for rows, y in bare.items() if not torch.equal(y, singly[:rows])]
    assert otherwise == [rows for rows in bare if table[rows] != rows]
    assert all(rows <= filled <= rows + steady.SPARE for rows, filled in enumerate(table))


@fbgemm
@pytest.mark.usefixtures("no_bfloat16")
def test_a_weight_out_of_range_keeps_a_model_in_float32() -> None:
    model = random_model("llama", 3)
    weight = model.hf.model.layers[1].mlp.up_proj.weight
    weight.data[0, 0] = 1e6
    before = weight.clone()
    assert not steady.halve(model.hf)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("fuse", [True, False])
def test_padding_is_left_out(fuse: bool) -> None:
    model = steady_model("llama", fuse=fuse)
    ids = torch.randint(model.vocab_size, (4, 9))
    lengths = [9, 1, 2, 1]
    whole = model.forward(model.new_cache(4), 0, ids, [0] * 4)
    packed = model.forward(model.new_cache(4), 0, ids, [0] * 4, lengths=lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(packed[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fuse", [True, False])
def test_prompts_are_read_along_with_rows_that_decode(fuse: bool, rows: int) -> None:
    """Keys, values and hidden states, and the logits beside them, are those of forwards of their own."""
    model = steady_model("llama", fuse=fuse)
    ids = torch.randint(model.vocab_size, (4, 60))
    lengths = [40, 7, 1][:rows]
    together, apart = model.new_cache(4), model.new_cache(4)
    for cache in (together, apart):
        model.forward(cache, 0, ids[:1, :50], [0])
    states = [HiddenStates((0, 2)) for _ in range(4)]
    beside = Beside(1, ids[1 : 1 + rows, :40], [0] * rows, lengths, states[1])
    mixed = model.forward(together, 0, ids[:1, 50:53], [50], hidden=states[0], beside=beside)
    model.forward(apart, 1, beside.token_ids, beside.starts, lengths=lengths, hidden=states[3])
    alone = model.forward(apart, 0, ids[:1, 50:53], [50], hidden=states[2])
    torch.testing.assert_close(mixed, alone, rtol=1e-4, atol=1e-5)
    for layer in (0, 2):
        torch.testing.assert_close(states[0].states[layer], states[2].states[layer], rtol=1e-4, atol=1e-5)
        for row, length in enumerate(lengths):
            read = [state.states[layer][row, :length] for state in (states[1], states[3])]
            torch.testing.assert_close(*read, rtol=1e-4, atol=1e-5)
    then = [model.forward(cache, 1, ids[1 : 1 + rows, 40:42], lengths) for cache in (together, apart)]
    torch.testing.assert_close(*then, rtol=1e-4, atol=1e-5)


def test_a_long_prompt_goes_in_pieces_and_past_the_first_capacity() -> None:
    model = steady_model("llama")
    ids = torch.randint(model.vocab_size, (1, 300))
    whole = model.hf(ids).logits
    torch.testing.assert_close(model.forward(model.new_cache(1), 0, ids, [0]), whole, atol=1e-4, rtol=1e-4)


@half
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_bfloat16_a_token_is_the_same_whatever_goes_with_it(kind: str, two_threads: None) -> None:
    model = steady_model(kind, torch.bfloat16)
    self_check(model)
    if not made_independent(model):
        pytest.skip("on this CPU this model would run in float32")
    self_check(model)
    exact = steady_model(kind)
    ids = torch.randint(97, (2, 30))
    right = exact.forward(exact.new_cache(2), 0, ids, [0, 0])
    gap = model.forward(model.new_cache(2), 0, ids, [0, 0]).float() - right
    assert gap.square().mean().sqrt() < 0.05 * right.std()


@half
def test_what_depends_on_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: logits that depend on how many tokens there are, or on what is read beside them."""
    model = steady_model("llama", torch.bfloat16)
    forward = model.forward

    def wide(c, f, ids, s, **rest):
        return forward(c, f, ids, s, **rest) * (1 + 2**-6 * (ids.shape[1] > 1))

    def mixed(c, f, ids, s, beside=None):
        return forward(c, f, ids, s, beside=beside) * (1 + 2**-6 * (beside is not None))

    monkeypatch.setattr("moedraft.cpu.steady.independence.sums_alike", lambda config, dtype, arranged: True)
    if not made_independent(model):
        pytest.skip("on this CPU this model would run in float32")
    for shaken in (wide, mixed):
        monkeypatch.setattr(model, "forward", shaken)
        assert not independent(model)
        assert not made_independent(model)


@half
def test_what_cannot_be_found_out_is_no(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moedraft.cpu.steady.independence.sums_alike", lambda config, dtype, arranged: 1 / 0)
    assert not made_independent(steady_model("llama", torch.bfloat16))
    assert "could not be found out" in caplog.text


@half
def test_logits_that_differ_rule_out_an_arrangement_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def the_third(model: LanguageModel) -> bool:
        looked.append(model.lean.arranged)  # type: ignore[union-attr]
        return len(looked) == 3

    monkeypatch.setattr("moedraft.cpu.steady.independence.sums_alike", lambda config, dtype, arranged: True)
    monkeypatch.setattr("moedraft.cpu.steady.independence.independent", the_third)
    assert made_independent(steady_model("llama", torch.bfloat16))
    assert looked == list(steady.ARRANGEMENTS[torch.bfloat16][:3])


@half
@pytest.mark.parametrize("found", [0, 1, 3, None])
def test_the_first_arrangement_whose_sums_are_alike_is_taken(
    monkeypatch: pytest.MonkeyPatch, found: int | None
) -> None:
    arrangements = steady.ARRANGEMENTS[torch.bfloat16]
    alike = [] if found is None else arrangements[found:]
    monkeypatch.setattr(
        "moedraft.cpu.steady.independence.sums_alike", lambda config, dtype, arranged: arranged in alike
    )
    monkeypatch.setattr("moedraft.cpu.steady.independence.independent", lambda model: True)
    model = steady_model("llama", torch.bfloat16)
    first = model.lean
    assert made_independent(model) == (found is not None)
    assert (model.lean is first) == (not found)
    if found:
        assert model.lean.arranged == arrangements[found]
    self_check(model)


@pytest.mark.parametrize("arranged", [TWO_ROWS, APART])
def test_another_order_of_summing_is_noticed(
    monkeypatch: pytest.MonkeyPatch, two_threads: None, arranged: steady.Arrangement
) -> None:
    """Negative controls: attention in batches, or a product of several rows, that sums in another order."""
    product, attend = steady.SteadyProduct._piece, attention.attend

    def backwards(queries, keys, values, bias, singly):
        if len(queries) == 1:
            return attend(queries, keys, values, bias, singly)
        return attend(queries, keys.flip(2), values.flip(2), bias.flip(3), singly)

    def of_two_halves(self, x):
        if len(x) < 4:
            return product(self, x)
        left, right = x.clone(), x.clone()
        left[:, x.shape[1] // 2 :], right[:, : x.shape[1] // 2] = 0, 0
        return product(self, left) + product(self, right)

    if not sums_alike(SMOLLM2, torch.float32, arranged):
        pytest.skip("on this CPU sums depend on the rows in float32 as well")
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", backwards)
        assert not sums_alike(SMOLLM2, torch.float32, arranged)
    monkeypatch.setattr(steady.SteadyProduct, "_piece", of_two_halves)
    assert not sums_alike(SMOLLM2, torch.float32, arranged)


@functools.cache
def arranged_alike(dtype: torch.dtype) -> steady.Arrangement | None:
    """The first arrangement in which sums of SmolLM2's shape do not depend on the rows."""
    return next((a for a in steady.ARRANGEMENTS[dtype] if sums_alike(SMOLLM2, dtype, a)), None)


@half
@pytest.mark.parametrize("fuse", [True, False])
def test_a_whole_model_in_bfloat16_is_independent_where_its_sums_are(two_threads: None, fuse: bool) -> None:
    """Of SmolLM2's shape and fewer layers, random weights: long rows, prompts in one piece and in several."""
    if (arranged := arranged_alike(torch.bfloat16)) is None:
        pytest.skip("on this CPU no target runs in bfloat16: its sums depend on the rows in any arrangement")
    config = LlamaConfig(**{**vars(SMOLLM2), "vocab_size": 97}, num_hidden_layers=2)
    torch.manual_seed(1)
    model = LanguageModel(
        LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False), None, "random"
    )
    model.lean = steady.SteadyForward(model.hf, arranged, fuse=fuse)
    ids = torch.randint(97, (3, 420))
    cache = model.new_cache(3)
    singly = [
        torch.cat([model.forward(cache, row, ids[row : row + 1, at : at + 1], [at])[0] for at in range(420)])
        for row in range(3)
    ]
    for length in (33, 190, 230, 420):
        whole = model.forward(model.new_cache(3), 1, ids[1:2, :length], [0])
        assert torch.equal(whole[0], singly[1][:length])
    for starts, width in (([5, 190, 340], 5), ([250, 100, 30], 2), ([410, 11, 195], 9)):
        tokens = torch.stack([ids[row, start : start + width] for row, start in enumerate(starts)])
        logits = model.forward(cache, 0, tokens, starts)
        for row, start in enumerate(starts):
            assert torch.equal(logits[row], singly[row][start : start + width])


@pytest.mark.parametrize(
    ("length", "read"),
    [(1, 32), (32, 32), (33, 64), (192, 192), (193, 384), (384, 384), (385, 416), (512, 512), (513, 544)],
)
def test_as_many_positions_are_read_as_sums_need(length: int, read: int) -> None:
    assert attention.positions_read(length) == read
    assert attention.positions_read(length + 512) == read + 512


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 4), (3, 2), (2, 5)])
@pytest.mark.parametrize("apart", [False, True])
def test_attention_in_any_arrangement_is_attention(rows: int, width: int, apart: bool) -> None:
    queries, (keys, values) = torch.randn(rows, 2, width, 3, 8), torch.randn(2, rows, 2, 32, 8)
    mask = torch.zeros(rows, width, 32).masked_fill_(torch.rand(rows, width, 32) < 0.3, -9.0)
    bias = attention.bias_of(mask, 3, apart)
    assert bias.shape[2] % attention.QUERIES == 0
    each = mask.repeat_interleave(3, dim=1)[:, None]
    whole = torch.nn.functional.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, each)
    singly, asked = width if apart else 1, attention.laid_out(queries, apart)
    assert asked.shape[2] == bias.shape[2] == attention.places_of(width, 3, apart)[1]
    mixed = attention.attend(asked, keys, values, bias, singly)
    torch.testing.assert_close(attention.taken_back(mixed, width, 3, apart).flatten(2, 3), whole)


def test_for_large_models_of_known_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    small = random_model("llama", 0)
    assert not steady.fits(small.hf)
    monkeypatch.setattr("moedraft.cpu.steady.forward.SMALL", 1000)
    assert steady.fits(small.hf)
    assert not steady.fits(random_model("gpt_neox", 0).hf)
    assert not steady.fits(random_model("llama", 0).hf.double())


@pytest.mark.parametrize("multiplies", [True, False])
def test_large_known_targets_are_rounded_as_the_cpu_likes_it(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 with weights in half precision where there is FBGEMM and no bfloat16."""
    for module in ("products", "steady.forward"):
        monkeypatch.setattr(f"moedraft.cpu.{module}.multiplies_bfloat16", lambda: multiplies)
    llama, gpt2 = CONFIGS["llama"], CONFIGS["gpt2"]
    assert steady.preferred(llama, count_parameters(llama)) is None
    monkeypatch.setattr("moedraft.cpu.steady.forward.SMALL", 1000)
    assert steady.preferred(gpt2, count_parameters(gpt2)) is None
    wanted = "bfloat16" if multiplies else "half" if halves(torch.ones(1)) else None
    assert steady.preferred(llama, count_parameters(llama)) == wanted


def test_few_row_counts_are_ever_used() -> None:
    used = {steady.stepped(rows) for rows in range(1, steady.PIECE + 1)}
    assert len(used) <= 26
    assert all(rows <= steady.stepped(rows) < rows + 8 for rows in range(1, steady.PIECE + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_weights_are_unchanged_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(2048, 1024), torch.randn(2, 1024)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 5)
    before = torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], "")
    use_huge_pages([blocked])
    assert torch.equal(torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], ""), before)
    monkeypatch.setattr("moedraft.cpu.huge_pages.sys.platform", "other")
    assert not use_huge_pages([blocked])
