"""Verification at its edges, reference and Triton alike: what must come out is known without statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chain_cases import Chain, make_chain, oracle, pack, same

from moedraft import kernels
from moedraft.kernels import DRAFT_INVALID, TARGET_INVALID

NEG = float("-inf")
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 4097])
@pytest.mark.parametrize("temperature", [0.0, 0.7, [0.0, 1.0, 1.9]])
def test_tokens_follow_the_definition(
    vocab: int, temperature: float | list[float], backend: str, device: str
) -> None:
    chain = make_chain(4, 2, vocab, device=device, temperature=temperature)
    tokens, num_accepted, status = chain.run(backend)
    for row in range(4):
        emitted, accepted = oracle(chain, row)
        assert tokens[row].tolist() == emitted + [-1] * (3 - len(emitted))
        assert int(num_accepted[row]) == accepted
    assert (tokens.dtype, num_accepted.dtype, status.dtype) == (torch.int64, torch.int64, torch.int32)
    assert not status.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_drafts_the_target_gives_one_token(temperature: float, backend: str, device: str) -> None:
    chain = make_chain(3, 0, 127, device=device, temperature=temperature)
    tokens, num_accepted, _ = chain.run(backend)
    assert tokens.shape == (3, 1)
    assert num_accepted.tolist() == [0, 0, 0]
    assert [oracle(chain, row)[0] for row in range(3)] == tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_identical_distributions_accept_everything(temperature: float, backend: str, device: str) -> None:
    chain = make_chain(4, 3, 127, device=device, temperature=temperature, spread=0.0)
    tokens, num_accepted, _ = chain.run(backend)
    assert num_accepted.tolist() == [3] * 4
    assert torch.equal(tokens[:, :3], chain.tokens)
    assert bool((tokens[:, 3] >= 0).all())


def test_disjoint_support_rejects_at_once(backend: str, device: str) -> None:
    chain = make_chain(6, 2, 1000, device=device)
    chain.target[..., 500:] = NEG
    chain.draft[..., :500] = NEG
    chain.tokens = chain.tokens % 500 + 500
    tokens, num_accepted, status = chain.run(backend)
    assert num_accepted.tolist() == [0] * 6
    assert bool(((tokens[:, 0] >= 0) & (tokens[:, 0] < 500)).all())
    assert not status.any()
    assert bool((tokens[:, 1:] == -1).all())


def test_greedy_ties_go_to_the_lowest_index(backend: str, device: str) -> None:
    target = torch.zeros(1, 2, 600, device=device)
    target[0, 0, [300, 520]] = 5.0  # in different chunks of the fused kernel
    target[0, 1, [7, 8]] = 5.0
    seed = position = torch.zeros(1, dtype=torch.int64, device=device)
    for drafted, expected in ((300, [300, 7]), (520, [300, -1])):
        draft = torch.tensor([[drafted]], device=device)
        found = kernels.verify_chain(
            target, draft, temperature=0.0, seed=seed, position=position, backend=backend
        )
        assert found[0].tolist() == [expected]


def test_one_hot_draft_never_repeats_the_rejected_token(backend: str, device: str) -> None:
    chain = make_chain(12, 2, 40, device=device)
    chain.draft = None
    tokens, num_accepted, _ = chain.run(backend)
    assert int((num_accepted < 2).sum()) > 3
    for row in range(12):
        assert tokens[row, : int(num_accepted[row]) + 1].tolist() == oracle(chain, row)[0]
        if num_accepted[row] < 2:
            assert tokens[row, num_accepted[row]] != chain.tokens[row, num_accepted[row]]


def test_a_one_hot_draft_of_the_only_token_is_taken(backend: str, device: str) -> None:
    """The residual is empty then: the target's row as it is."""
    chain = make_chain(2, 1, 300, device=device)
    chain.draft = None
    chain.target[:, 0] = NEG
    chain.target[:, 0, 299] = 1.0
    chain.tokens[:] = torch.tensor([[299], [5]])
    tokens, num_accepted, status = chain.run(backend)
    assert tokens[0, 0] == 299
    assert num_accepted.tolist() == [1, 0]
    assert tokens[1].tolist() == [299, -1]
    assert not status.any()


def test_zero_residual_falls_back_to_the_target(backend: str, device: str) -> None:
    """Equal rows reject only what the target excludes, and leave nothing between them."""
    chain = make_chain(4, 1, 300, device=device, spread=0.0)
    chain.target[:, 0, 280:] = NEG
    chain.draft[:, 0, 280:] = NEG
    chain.tokens[:] = 290
    tokens, num_accepted, status = chain.run(backend)
    assert num_accepted.tolist() == [0] * 4
    assert bool(((tokens[:, 0] >= 0) & (tokens[:, 0] < 280)).all())
    assert not status.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")  # the interpreter is NumPy
@pytest.mark.parametrize("poison", ["nan", "inf", "all -inf"])
def test_invalid_target_rows_set_a_status(temperature: float, poison: str, backend: str, device: str) -> None:
    chain = make_chain(3, 2, 300, device=device, temperature=temperature, spread=0.0)
    row = chain.target[:, 1]
    if poison == "all -inf":
        row[:2] = NEG
    else:
        row[:2, 270] = float(poison)
    tokens, num_accepted, status = chain.run(backend)
    assert num_accepted.tolist() == [1, 1, 2]
    assert tokens[:2, 1:].tolist() == [[0, -1]] * 2
    assert status.tolist() == [TARGET_INVALID, TARGET_INVALID, 0]
    assert bool((tokens < 300).all())


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("poison", ["nan", "all -inf", "token"])
def test_invalid_drafts_are_rejected(poison: str, with_lse: bool, backend: str, device: str) -> None:
    chain = make_chain(3, 2, 300, device=device, spread=0.0)
    chain.lse = chain.extra["lse"] if with_lse else None
    chain.target[:2, 1, 100:] = NEG
    if poison == "token":
        chain.tokens[:2, 1] = 300
    else:
        chain.tokens[:2, 1] = 200  # what the target excludes, so that it is rejected in any case
        chain.draft[:2, 1, :] = NEG if poison == "all -inf" else float("nan")
        if with_lse:
            chain.lse[:2, 1] = float("nan")
    tokens, num_accepted, status = chain.run(backend)
    assert num_accepted.tolist() == [1, 1, 2]
    assert status.tolist() == [DRAFT_INVALID, DRAFT_INVALID, 0]
    assert bool(((tokens[:2, 1] >= 0) & (tokens[:2, 1] < 100)).all())
    assert same(chain.run("reference"), (tokens, num_accepted, status))


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
def test_a_nan_in_the_residual_sets_a_status(backend: str, device: str) -> None:
    chain = make_chain(2, 1, 600, device=device)
    chain.lse = chain.extra["lse"]
    chain.target[0, 0, chain.tokens[0, 0]] = NEG  # row 0 is rejected, and its draft row read
    chain.draft[:, 0, 599] = float("nan")
    chain.target[1, 0, chain.tokens[1, 0]] = 80.0  # row 1 is accepted without looking there
    tokens, num_accepted, status = chain.run(backend)
    assert status.tolist() == [DRAFT_INVALID, 0]
    assert num_accepted.tolist() == [0, 1]
    assert bool((tokens[:, 0] >= 0).all())


def test_cold_temperatures_become_the_argmax(backend: str, device: str) -> None:
    chain = make_chain(6, 2, 127, device=device, temperature=0.0)
    greedy = chain.run(backend)
    chain.draft = None
    for value in (1e-30, 1e-6, 1e-5, 1e-3):  # the last one is sampled, from what is all but one-hot
        assert same(chain.run(backend, temperature=torch.full((6,), value, device=device))[:2], greedy[:2])
    assert same(chain.run(backend, temperature=0.0), greedy)
    assert same(chain.run(backend, temperature=torch.full((6,), float("nan"), device=device)), greedy)


def test_a_draw_never_leaves_the_filter(backend: str, device: str) -> None:
    chain = make_chain(10, 2, 1000, device=device)
    kept = torch.zeros(1000, dtype=torch.bool, device=device)
    kept[[0, 254, 255, 256, 511, 999]] = True
    chain.target.masked_fill_(~kept, NEG)
    chain.draft.masked_fill_(~kept, NEG)
    chain.tokens = torch.tensor([0, 254, 255, 256, 511, 999], device=device)[chain.tokens % 6]
    tokens, _, status = chain.run(backend)
    assert bool(kept[tokens[tokens >= 0]].all())
    assert not status.any()


def test_ragged_rows_are_equal_however_given(backend: str, device: str) -> None:
    chain = make_chain(5, 3, 300, device=device, temperature=[1.0, 0.0, 0.8])
    counts = torch.tensor([3, 0, 2, 1, 3], device=device)
    expected = [oracle(Chain(**{**vars(chain), "num_draft": counts}), row) for row in range(5)]
    padded = chain.run(backend, num_draft=counts)
    assert [row[: n + 1] for row, n in zip(padded[0].tolist(), padded[1].tolist(), strict=True)] == [
        emitted for emitted, _ in expected
    ]
    steps = torch.arange(3, device=device)
    marked = chain.tokens.masked_fill(steps >= counts[:, None], -1)
    assert same(chain.run(backend, draft_tokens=marked), padded)
    target, draft = pack(chain, counts)
    packed = chain.run(backend, target_logits=target, draft_logits=draft, num_draft=counts.to(torch.int32))
    assert same(packed, padded)
    wider = torch.cat((chain.target, torch.full_like(chain.target, 7.0)), dim=1)[:, :5]
    more = torch.cat((marked, torch.full((5, 1), -1, device=device)), dim=1)
    draft = torch.cat((chain.draft, chain.draft[:, :1]), dim=1)
    padded_further = chain.run(backend, target_logits=wider, draft_tokens=more, draft_logits=draft)
    assert torch.equal(padded_further[0][:, :4], padded[0])
    assert bool((padded_further[0][:, 4] == -1).all())


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
def test_rows_behind_the_end_are_not_looked_at(backend: str, device: str) -> None:
    chain = make_chain(4, 3, 300, device=device)
    counts = torch.tensor([1, 0, 3, 2], device=device)
    expected = chain.run(backend, num_draft=counts)
    for row, count in enumerate(counts.tolist()):
        chain.target[row, count + 1 :] = float("nan")
        chain.draft[row, count:] = float("nan")
        chain.tokens[row, count:] = 10**9
    assert same(chain.run(backend, num_draft=counts), expected)


def test_strided_inputs_give_the_same(backend: str, device: str) -> None:
    chain = make_chain(4, 2, 127, device=device)
    expected = chain.run(backend)
    store = torch.full((2, 4, 3, 127 * 2 + 5), 99.0, device=device)
    target, draft = store[0, :, :, 3:-2:2], store[1, :, :2, 5::2]
    target.copy_(chain.target)
    draft.copy_(chain.draft)
    assert not target.is_contiguous()
    assert same(chain.run(backend, target_logits=target, draft_logits=draft), expected)
    turned = chain.target.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    columns = {
        "draft_tokens": chain.tokens.t().contiguous().t(),
        "seed": torch.stack((chain.seed, chain.seed), 1)[:, 0],
    }
    assert same(chain.run(backend, target_logits=turned, **columns), expected)


def test_a_row_does_not_depend_on_its_batch(backend: str, device: str) -> None:
    chain = make_chain(7, 2, 1000, device=device, temperature=[1.0, 0.0, 0.6])
    expected = chain.run(backend)
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2], device=device)
    fields = {
        "target_logits": chain.target,
        "draft_tokens": chain.tokens,
        "draft_logits": chain.draft,
        "temperature": chain.temperature,
        "seed": chain.seed,
        "position": chain.position,
    }
    permuted = chain.run(backend, **{name: value[order] for name, value in fields.items()})
    assert same(permuted, tuple(part[order] for part in expected))
    alone = chain.run(backend, **{name: value[4:5] for name, value in fields.items()})
    assert same(alone, tuple(part[4:5] for part in expected))
    other = chain.run(backend, seed=chain.seed + 1)
    assert not torch.equal(other[0], expected[0])  # the seed does matter


def test_one_temperature_serves_all_rows(backend: str, device: str) -> None:
    chain = make_chain(3, 2, 127, device=device, temperature=0.8)
    assert same(chain.run(backend, temperature=0.8), chain.run(backend))


@pytest.mark.parametrize("temperature", [0.0, 0.9, [0.0, 1.3]])
def test_sample_draft_gives_token_and_lse(
    temperature: float | list[float], backend: str, device: str
) -> None:
    chain = make_chain(4, 1, 1000, device=device, temperature=temperature)
    logits = chain.draft[:, 0]
    logits[0, 10:] = NEG
    row = (chain.temperature, chain.seed, chain.position)
    tokens, lse, top = kernels.sample_draft(logits, *row, backend=backend)
    safe = torch.where(chain.temperature > 0, chain.temperature, 1.0).double()[:, None]
    expected = torch.logsumexp(logits.double() / safe, -1)
    assert (tokens.dtype, lse.dtype, top.dtype) == (torch.int64, torch.float32, torch.float32)
    assert torch.allclose(top.double(), (logits.double() / safe).softmax(-1).amax(-1), rtol=1e-5)
    assert float((lse - expected).abs().max()) < 1e-5  # float32 sums of a thousand terms, lse about 10
    greedy = chain.temperature == 0
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert int(tokens[0]) < 10


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_draft_marks_invalid_rows(temperature: float, backend: str, device: str) -> None:
    logits = torch.randn(3, 300, device=device)
    logits[0], logits[1, 280] = NEG, float("nan")
    seed = torch.arange(3, device=device)
    tokens, lse, top = kernels.sample_draft(logits, temperature, seed, seed, backend=backend)
    assert tokens[:2].tolist() == [0, 0]
    assert lse.isnan().tolist() == top.isnan().tolist() == [True, True, False]


def test_an_empty_batch_gives_empty_results(backend: str, device: str) -> None:
    chain = make_chain(2, 2, 8, device=device)
    fields = ("target", "tokens", "draft", "temperature", "seed", "position")
    empty = Chain(*(getattr(chain, name)[:0] for name in fields))
    assert [tuple(part.shape) for part in empty.run(backend)] == [(0, 3), (0,), (0,)]


RULES = [kernels.verify_chain, kernels.verify_block, kernels.verify_coupled]
ELSEWHERE = [("draft_tokens", "tokens"), ("draft_logits", "draft"), ("temperature", "temperature")]
ELSEWHERE += [("seed", "seed"), ("position", "position")]


@pytest.mark.parametrize("rule", RULES)
def test_bad_arguments_are_refused_by_name(rule: Rule, backend: str, device: str) -> None:
    chain = make_chain(2, 2, 8, device=device)
    short = torch.zeros(1, dtype=torch.int64, device=device)
    bad: list[tuple[dict[str, object], str]] = [
        ({"draft_tokens": chain.tokens.to(torch.int32)}, "draft_tokens must be int64"),
        ({"target_logits": chain.target[:, :2]}, "must be"),
        ({"target_logits": chain.target.long()}, "floating"),
        ({"target_logits": chain.target[0]}, "num_draft"),
        ({"draft_logits": chain.draft[..., :7]}, "do not fit"),
        ({"draft_logits": chain.draft.long()}, "do not fit"),
        ({"draft_logits": chain.draft[:, :1]}, "must be"),
        ({"draft_lse": torch.zeros(2, 3, device=device)}, "draft_lse"),
        ({"draft_lse": chain.tokens}, "draft_lse must be floating"),
        ({"num_draft": torch.zeros(3, dtype=torch.int64, device=device)}, r"num_draft .* \[2\], not .*\[3\]"),
        ({"num_draft": torch.zeros(2, device=device)}, "num_draft must be of integers"),
        ({"num_draft": torch.zeros(2, dtype=torch.bool, device=device)}, "num_draft must be of integers"),
        ({"seed": short}, r"seed must be int64 \[2\], not torch.int64 \[1\]"),
        ({"seed": chain.seed.to(torch.int32)}, "seed must be int64"),
        ({"position": short}, r"position must be int64 \[2\]"),
        ({"position": chain.position.to(torch.int32)}, "position must be int64"),
        ({"temperature": chain.temperature[:1]}, "temperature must be a number or floating"),
        ({"temperature": chain.position}, "temperature must be a number or floating"),
    ]
    bad += [({name: getattr(chain, field).to("meta")}, f"{name} must be where") for name, field in ELSEWHERE]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            chain.run(backend, rule, **changes)
    with pytest.raises(ValueError, match="backend"):
        chain.run("cuda", rule)


@pytest.mark.parametrize("rule", RULES)
def test_packed_rows_that_cannot_be_are_refused(rule: Rule, backend: str, device: str) -> None:
    chain = make_chain(3, 2, 8, device=device)
    counts = torch.tensor([2, 0, 1], device=device)
    target, draft = pack(chain, counts)
    given = {"target_logits": target, "draft_logits": draft, "num_draft": counts}
    chain.run(backend, rule, **given)
    with pytest.raises(ValueError, match=r"draft_logits must have 3 rows, .* not 2"):
        chain.run(backend, rule, **{**given, "draft_logits": draft[:2]})  # type: ignore[index]
    for rows in (2, 10):
        with pytest.raises(ValueError, match="1 to K"):
            chain.run(backend, rule, **{**given, "target_logits": target.new_zeros(rows, 8)})


@pytest.mark.parametrize("draw", [kernels.sample_draft, kernels.sample_coupled])
def test_bad_arguments_of_a_draft_are_refused(draw: Rule, backend: str, device: str) -> None:
    chain = make_chain(2, 2, 8, device=device)
    good = {"logits": chain.target[:, 0], "temperature": 1.0, "seed": chain.seed, "position": chain.position}
    bad: list[tuple[dict[str, object], str]] = [
        ({"logits": chain.target}, "logits must be floating"),
        ({"seed": chain.seed[:1]}, "seed must be int64"),
        ({"position": chain.position.to(torch.int32)}, "position must be int64"),
        ({"temperature": chain.temperature[:1]}, "temperature must be"),
        ({"seed": chain.seed.to("meta")}, "seed must be where the logits are"),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            draw(**{**good, **changes}, backend=backend)
    numbers = chain.temperature.double(), chain.temperature.half()
    assert [draw(**{**good, "temperature": t}, backend=backend)[0].shape for t in numbers] == [(2,)] * 2
