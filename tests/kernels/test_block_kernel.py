"""Fused block verification: the reference's tokens, whatever the batch and the order of its programs.

On a CPU through Triton's interpreter, with few rows; on a GPU the same tests take many.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from chain_cases import Chain, chi_square, chi_square_limit, make_chain, pack, same
from law_cases import VOCAB, tables
from slow_cases import slow
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import block, block_kernels, reference_block, verify, verify_block

pytestmark = pytest.mark.filterwarnings("ignore:invalid value|All-NaN|divide by zero:RuntimeWarning")
TEMPERATURES = [1.0, 0.7, 0.0, 1.6]
CASES = [
    {"length": 1, "vocab": 40, "spread": 0.5},
    {"length": 3, "vocab": 127, "spread": 2.0},
    {"length": 4, "vocab": 300, "spread": 1.0},
    {"length": 7, "vocab": 30, "spread": 0.4},
    {"length": 2, "vocab": 1100, "spread": 2.0, "dtype": torch.bfloat16},
    {"length": 2, "vocab": 4097, "spread": 1.0, "dtype": torch.float16},
]


def both(chain: Chain, **changes: object) -> bool:
    """Whether the fused kernels and the reference return the same."""
    found, expected = (
        chain.run(backend, verify_block, **changes)  # type: ignore[arg-type]
        for backend in ("triton", "reference")
    )
    return same(found, expected)


@pytest.mark.parametrize(
    ("case", "draft"),
    [
        *((case, "logits") for case in CASES),
        *((CASES[i], "with lse") for i in (1, 4)),
        *((CASES[i], "certain") for i in (2, 5)),
    ],
    ids=str,
)
def test_results_equal_the_references(case: dict[str, object], draft: str, device: str) -> None:
    case = dict(case)
    batch = 4096 if device == "cuda" else 5
    chain = make_chain(batch, device=device, temperature=TEMPERATURES, **case)  # type: ignore[arg-type]
    chain.lse = chain.extra["lse"] if draft == "with lse" else None
    chain.draft = None if draft == "certain" else chain.draft
    fused, plain = (chain.run(backend, verify_block) for backend in ("triton", "reference"))
    differing = int((fused[0] != plain[0]).any(dim=1).sum())
    assert differing <= (4 if device == "cuda" else 0)  # a number at the border of a chance, or of a token
    assert torch.equal(fused[2], plain[2])
    assert int((fused[1] < case["length"]).sum()) > 0  # type: ignore[operator]
    assert draft == "certain" or int(fused[1].sum()) > 0


@pytest.mark.parametrize("draft", ["logits", slow("with lse"), "certain"])
def test_the_production_chunk(draft: str, device: str) -> None:
    chain = make_chain(3, 2, 33_000, device=device, temperature=[1.0, 0.8, 0.0], spread=1.5)
    assert verify.chunk_width(33_000) == 4096
    chain.lse = chain.extra["lse"] if draft == "with lse" else None
    chain.draft = None if draft == "certain" else chain.draft
    assert both(chain)


def test_the_longest_drafts(device: str) -> None:
    chain = make_chain(4, 16, 24, device=device, spread=0.3)
    fused, plain = (chain.run(backend, verify_block) for backend in ("triton", "reference"))
    assert same(fused, plain)
    assert int(fused[1].max()) > 8


@pytest.mark.parametrize("fault", ["shares", "chance"])
def test_control_a_fault_in_the_kernel_shows(
    fault: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("compiled kernels keep what they call")
    chain = make_chain(24, 4, 40, device=device)
    if fault == "shares":  # those of a chain: what one token has more is not kept for the next

        def forgetful(ratio: Tensor, length: Tensor, padded: int) -> Tensor:
            return real(block_kernels.tl.minimum(ratio, 1.0), length, padded)

        real = block_kernels.kept_shares.fn
        monkeypatch.setattr(block_kernels, "kept_shares", forgetful)
    else:

        def eager(shares: Tensor, *rest: Tensor) -> Tensor:
            return longest(block_kernels.tl.sqrt(shares), *rest)

        longest = block_kernels.longest_accepted.fn
        monkeypatch.setattr(block_kernels, "longest_accepted", eager)
    assert not both(chain)


def test_ragged_and_packed_rows(device: str) -> None:
    chain = make_chain(5, 3, 300, device=device, temperature=TEMPERATURES)
    counts = torch.tensor([3, 0, 2, 1, 3], device=device)
    for lse in (None, chain.extra["lse"]):
        chain.lse = lse
        expected = chain.run("reference", verify_block, num_draft=counts)
        assert same(chain.run("triton", verify_block, num_draft=counts), expected)
        target, draft = pack(chain, counts)
        packed = {"target_logits": target, "draft_logits": draft, "num_draft": counts.to(torch.int32)}
        assert same(chain.run("triton", verify_block, **packed), expected)
    marked = chain.tokens.masked_fill(torch.arange(3, device=device) >= counts[:, None], -1)
    assert same(chain.run("triton", verify_block, draft_tokens=marked), expected)
    for row, count in enumerate(counts.tolist()):  # what lies behind the end is not looked at
        chain.target[row, count + 1 :] = float("nan")
        chain.draft[row, count:] = float("nan")  # type: ignore[index]
        chain.tokens[row, count:] = 10**9
    assert same(chain.run("triton", verify_block, num_draft=counts), expected)


@pytest.mark.parametrize(
    ("position", "value"), [(0, "nan"), (0, "-inf"), (1, "nan"), (1, "inf"), (3, "nan"), (3, "-inf")]
)
def test_broken_target_rows(value: str, position: int, device: str) -> None:
    chain = make_chain(4, 3, 300, device=device, temperature=TEMPERATURES, spread=0.2)
    if value == "-inf":
        chain.target[::2, position] = float(value)
    else:
        chain.target[::2, position, 280] = float(value)
    fused, plain = (chain.run(backend, verify_block) for backend in ("triton", "reference"))
    assert same(fused, plain)
    status = fused[2]
    assert bool((status[::2] == kernels.TARGET_INVALID).any())
    assert not status[1::2].any()


@pytest.mark.parametrize(
    ("how", "with_lse"),
    [("nan", False), ("inf", False), ("-inf", False), ("token", False), ("nan", True), ("token", True)],
)
def test_broken_drafts(how: str, with_lse: bool, device: str) -> None:
    chain = make_chain(4, 3, 300, device=device, temperature=TEMPERATURES, spread=0.2)
    chain.lse = chain.extra["lse"] if with_lse else None
    assert chain.draft is not None
    if how == "token":
        chain.tokens[::2, 1] = 300
    elif how == "-inf":
        chain.draft[::2, 1] = float(how)
    else:
        chain.draft[::2, 1, 280] = float(how)
    if with_lse and how != "token":
        chain.lse[::2, 1] = float("nan")  # type: ignore[index]
    fused, plain = (chain.run(backend, verify_block) for backend in ("triton", "reference"))
    assert same(fused, plain)
    status = fused[2]
    assert bool((status[::2] == kernels.DRAFT_INVALID).any())
    assert not status[1::2].any()


def test_filtered_rows_and_draws_within_them(device: str) -> None:
    """The target excludes what the draft may draw: no share is left behind such a token."""
    chain = make_chain(6, 3, 300, device=device, spread=0.5)
    chain.target[:, 1::2, ::3] = -torch.inf
    chain.draft[:, ::2, 1::3] = -torch.inf  # type: ignore[index]
    for lse in (None, kernels_lse(chain)):
        chain.lse = lse
        assert both(chain)
    tokens, _, status = chain.run("triton", verify_block)
    assert not status.any()
    emitted = tokens[:, 1::2]
    assert bool(((emitted % 3 != 0) | (emitted < 0)).all())


def kernels_lse(chain: Chain) -> Tensor:
    assert chain.draft is not None
    return (chain.draft.float() / chain.temperature[:, None, None]).logsumexp(-1)


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
def test_nothing_is_read_behind_a_token_that_the_target_excludes(device: str) -> None:
    chain = make_chain(4, 3, 300, device=device, spread=0.1)
    chain.lse = chain.extra["lse"]
    chain.target.scatter_(-1, torch.nn.functional.pad(chain.tokens, (0, 1))[..., None][:, :1], -torch.inf)
    expected = chain.run("triton", verify_block)
    assert not expected[1].any()
    chain.draft[:, 1:] = float("nan")  # type: ignore[index]
    assert same(chain.run("triton", verify_block), expected)


def test_identical_distributions_accept_everything(device: str) -> None:
    chain = make_chain(6, 3, 127, device=device, spread=0.0, temperature=[1.0, 0.0])
    tokens, count, _ = chain.run("triton", verify_block)
    assert count.tolist() == [3] * 6
    assert torch.equal(tokens[:, :3], chain.tokens)


def test_nothing_drafted_and_empty_batches(device: str) -> None:
    assert both(make_chain(5, 0, 40, device=device, temperature=TEMPERATURES))
    chain = make_chain(2, 2, 8, device=device)
    fields = ("target", "tokens", "draft", "temperature", "seed", "position")
    empty = Chain(*(getattr(chain, name)[:0] for name in fields))
    assert [tuple(part.shape) for part in empty.run("triton", verify_block)] == [(0, 3), (0,), (0,)]


def test_a_row_does_not_depend_on_its_batch_or_the_grid(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(5, 2, 1100, device=device, temperature=TEMPERATURES)
    expected = chain.run("triton", verify_block)
    fields = ("target", "tokens", "draft", "temperature", "seed", "position")
    order = torch.tensor([3, 1, 0, 4, 2], device=device)
    mixed = Chain(*(getattr(chain, name)[order] for name in fields)).run("triton", verify_block)
    assert same(mixed, tuple(part[order] for part in expected))
    for per in (1, 2, 4):
        monkeypatch.setattr(block, "chunks_per_program", lambda rows, chunks, per=per: per)
        assert same(chain.run("triton", verify_block), expected)


def test_results_do_not_depend_on_which_program_is_last(device: str, request: pytest.FixtureRequest) -> None:
    chain = make_chain(6, 3, 1100, device=device, temperature=TEMPERATURES)
    expected = chain.run("triton", verify_block)
    request.getfixturevalue("backwards")
    assert same(chain.run("triton", verify_block), expected)


def test_two_launches_and_no_reference(
    device: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    chain = make_chain(3, 2, 40, device=device, temperature=[1.0, 0.0, 0.5])

    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference_block, "verify_block", refuse)
    for changes in ({}, {"draft_lse": chain.extra["lse"]}, {"draft_logits": None}):
        launched.clear()
        chain.run("triton", verify_block, **changes)  # type: ignore[arg-type]
        assert launched == ["sweep", "judge"]
    with pytest.raises(AssertionError, match="the reference ran"):
        chain.run("reference", verify_block)  # the trap works


def test_it_follows_the_target(device: str) -> None:
    """The first token's law, with a draft that is the target's opposite.

    The interpreter is too slow for enough rows: there the tokens are the reference's on these inputs, whose
    law `test_verify_block.py` proves.
    """
    batch = 200_000 if device == "cuda" else 24
    target, draft = (table[0] for table in tables(device))
    seed = torch.arange(batch, device=device) + 5
    position = torch.full_like(seed, 41)
    propose = partial(kernels.sample_draft, draft.expand(batch, VOCAB), 1.0, seed, backend="reference")
    drawn = [propose(position + j) for j in range(2)]
    verdict = partial(
        verify_block,
        target.expand(batch, 3, VOCAB), torch.stack([one[0] for one in drawn], 1),
        draft.expand(batch, 2, VOCAB), draft_lse=torch.stack([one[1] for one in drawn], 1),
        temperature=1.0, seed=seed, position=position,
    )  # fmt: skip
    tokens, count, status = verdict(backend="triton")
    assert int(count.sum()) > 0
    if device == "cpu":
        assert same((tokens, count, status), verdict(backend="reference"))
        return
    probs = torch.softmax(target.double().cpu(), -1)
    statistic, freedom = chi_square(torch.bincount(tokens[:, 0].cpu(), minlength=VOCAB), probs)
    assert statistic < chi_square_limit(freedom)
