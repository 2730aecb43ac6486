"""What only a CUDA device shows: real vocabularies, offsets past 2^31, graphs, synchronisation, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from chain_cases import make_chain, same
from cut_cases import all_limits, assert_nearly_same

from moedraft import kernels
from moedraft.kernels import fused_cut

pytestmark = pytest.mark.gpu
Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
KINDS = ["fkl", "rkl", "jsd", "tvd"]


@contextmanager
def synchronisation(mode: str) -> Iterator[None]:
    """With "error", whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_real_vocabularies_equal_the_reference(vocab: int, with_lse: bool) -> None:
    chain = make_chain(16, 4, vocab, device="cuda", dtype=torch.bfloat16, temperature=[1.0, 0.0, 0.6])
    chain.lse = chain.extra["lse"] if with_lse else None
    fused, plain = chain.run("triton"), chain.run("reference")
    assert (
        int((fused[0] != plain[0]).any(dim=1).sum()) <= 1
    )  # a border of the inverse CDF, once in many draws
    assert not fused[2].any()
    assert bool((fused[0] < vocab).all())


@pytest.mark.parametrize("draft", ["logits", "with lse", "certain"])
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_block_verification_of_real_vocabularies_equals_the_reference(vocab: int, draft: str) -> None:
    chain = make_chain(16, 4, vocab, device="cuda", dtype=torch.bfloat16, temperature=[1.0, 0.0, 0.6])
    chain.lse = chain.extra["lse"] if draft == "with lse" else None
    chain.draft = None if draft == "certain" else chain.draft
    fused, plain = (chain.run(backend, kernels.verify_block) for backend in ("triton", "reference"))
    assert int((fused[0] != plain[0]).any(dim=1).sum()) <= 1
    assert not fused[2].any()


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_coupled_sampling_of_real_vocabularies_equals_the_reference(vocab: int) -> None:
    """Token for token, and those of a CPU too: a seed's answer does not depend on the machine."""
    chain = make_chain(16, 2, vocab, device="cuda", dtype=torch.bfloat16, temperature=[1.0, 0.0, 0.6])
    fused = chain.run("triton", kernels.verify_coupled)
    assert same(fused, chain.run("reference", kernels.verify_coupled))
    row = (chain.target[:, 0], chain.temperature, chain.seed, chain.position)
    tokens, _, _ = kernels.sample_coupled(*row)
    assert torch.equal(tokens, fused[0][:, 0])
    assert torch.equal(tokens.cpu(), kernels.sample_coupled(*(part.cpu() for part in row))[0])


@pytest.mark.parametrize("most", [0, fused_cut.READINGS])
@pytest.mark.parametrize("vocab", [50_257, 151_936, 262_144])
def test_cuts_of_real_vocabularies_are_the_references(
    vocab: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous rows: all limits, and each of them alone; by several programs a row, and by one.

    That one copies chunks ahead. It finds what the others have not, here after no reading: all.
    """
    assert fused_cut.tile(vocab)["STAGES"] == 3
    monkeypatch.setattr(fused_cut, "READINGS", most)
    gen = torch.Generator("cuda").manual_seed(vocab)
    limits = all_limits("cuda", 0.9)
    for start in range(0, len(limits["top_k"]), 4):
        some = {name: limit[start : start + 4] for name, limit in limits.items()}
        size = (len(some["top_k"]), 3, vocab)
        assert_nearly_same((torch.randn(size, device="cuda", generator=gen) * 3).bfloat16(), **some)
        for name in ("top_k", "top_p", "min_p"):  # the kernel is another one without the rest
            one = {"temperature": some["temperature"], name: some[name]}
            assert_nearly_same((torch.randn(size, device="cuda", generator=gen) * 3).bfloat16(), **one)


@pytest.mark.parametrize("verify", [kernels.verify_chain, kernels.verify_block])
def test_results_do_not_depend_on_which_program_is_last(verify: Callable[..., Verdict]) -> None:
    """Many calls, on two streams at once and in a graph: the same bits, whoever arrives last."""
    chain = make_chain(32, 4, 151_936, device="cuda", dtype=torch.bfloat16, spread=2.0)
    chain.lse = chain.extra["lse"]
    expected = chain.run("triton", verify)
    assert bool((expected[1] < 4).any())
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(chain.run("triton", verify))
    torch.cuda.synchronize()
    assert all(same(one, expected) for one in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run("triton", verify)
    for _ in range(20):
        graph.replay()
        assert same(captured, expected)


def test_verify_offsets_pass_two_to_the_31() -> None:
    batch, length, vocab = 2900, 4, 151_936
    target = torch.empty(batch, length + 1, vocab, dtype=torch.bfloat16, device="cuda")
    assert target.numel() > 2**31
    target.normal_()
    tokens = torch.randint(0, vocab, (batch, length), device="cuda")
    seed = torch.arange(batch, device="cuda")
    everything = kernels.verify_chain(target, tokens, temperature=1.0, seed=seed, position=seed)
    last = slice(batch - 8, batch)
    alone = kernels.verify_chain(
        target[last].clone(), tokens[last], temperature=1.0, seed=seed[last], position=seed[last]
    )
    assert all(torch.equal(whole[last], part) for whole, part in zip(everything, alone, strict=True))


def test_divergence_offsets_past_two_to_the_31() -> None:
    rows, vocab = 14_500, 151_936
    student = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_()
    assert student.numel() > 2**31
    teacher = student.roll(1, 0)
    tail = student[-4:].clone().requires_grad_()
    expected = kernels.divergence(tail, teacher[-4:], reduction="sum")
    expected.backward()
    loss = kernels.divergence(student.requires_grad_(), teacher, reduction="none", inplace_grad=True)
    assert torch.equal(loss[-4:].sum(), expected)
    assert torch.equal(student.detach()[-4:], tail.grad)


def test_verification_runs_in_a_cuda_graph() -> None:
    chain = make_chain(4, 4, 32_000, device="cuda", temperature=[1.0, 0.0])
    chain.lse = chain.extra["lse"]
    chain.run("triton")  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run("triton")
    other = make_chain(4, 4, 32_000, device="cuda", temperature=[1.0, 0.0], seed=9)
    for mine, theirs in (
        (chain.target, other.target),
        (chain.draft, other.draft),
        (chain.tokens, other.tokens),
        (chain.lse, other.extra["lse"]),
        (chain.seed, other.seed),
        (chain.position, other.position),
    ):
        mine.copy_(theirs)
    graph.replay()
    other.lse = other.extra["lse"]
    assert all(torch.equal(a, b) for a, b in zip(captured, other.run("triton"), strict=True))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_verification_never_waits_for_the_device(backend: str) -> None:
    chain = make_chain(4, 3, 5000, device="cuda", temperature=[1.0, 0.0])
    counts = torch.tensor([3, 0, 2, 1], device="cuda")
    for mode in ("default", "error"):  # the first round compiles
        with synchronisation(mode):
            chain.run(backend, num_draft=counts)
            logits = chain.draft[:, 0]
            kernels.sample_draft(logits, chain.temperature, chain.seed, chain.position, backend=backend)
    with synchronisation("error"), pytest.raises(RuntimeError):
        counts.sum().item()  # the trap works


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_equals_the_reference(kind: str) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    student = (torch.randn(32, 151_936, device="cuda", generator=gen) * 2).bfloat16()
    teacher = (student + torch.randn(32, 151_936, device="cuda", generator=gen)).bfloat16()
    exact = student.double().requires_grad_()
    expected = kernels.divergence(exact, teacher.double(), kind=kind, reduction="none", backend="reference")
    expected.sum().backward()
    given = student.clone().requires_grad_()
    loss = kernels.divergence(given, teacher, kind=kind, reduction="none")
    loss.sum().backward()
    assert exact.grad is not None
    assert given.grad is not None
    assert float((loss - expected).norm() / expected.norm()) < 1e-5
    assert float((given.grad.double() - exact.grad).norm() / exact.grad.norm()) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [16, 64, 100])
def test_divergence_from_a_list_equals_the_reference(count: int, kind: str) -> None:
    """In place too, where the listed tokens' gradient comes after that of the rest, from other threads."""
    gen = torch.Generator("cuda").manual_seed(0)
    student = (torch.randn(64, 151_936, device="cuda", generator=gen) * 2).bfloat16()
    listed = torch.arange(count, device="cuda") * 512 % 151_936  # four to a block, in four lanes of many
    topk = listed.expand(64, -1), torch.full((64, count), 0.9 / count, device="cuda").log()
    exact = student.double().requires_grad_()
    expected = kernels.divergence(exact, teacher_topk=topk, kind=kind, reduction="none", backend="reference")
    expected.sum().backward()
    assert exact.grad is not None
    grads = []
    for inplace in (False, True, False, True):
        leaf = student.clone().requires_grad_()
        loss = kernels.divergence(leaf, teacher_topk=topk, kind=kind, reduction="none", inplace_grad=inplace)
        grads.append(torch.autograd.grad(loss.sum(), leaf)[0])
        assert float((loss - expected).norm() / expected.norm()) < 1e-5
    assert all(torch.equal(grads[0], other) for other in grads[1:])
    assert float((grads[0].double() - exact.grad).norm() / exact.grad.norm()) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_needs_no_memory_and_no_sync(kind: str) -> None:
    student = torch.randn(512, 151_936, device="cuda", dtype=torch.bfloat16)
    teacher = torch.randn_like(student)
    for mode in ("default", "error"):  # the first round compiles
        leaf = student.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with synchronisation(mode):
            loss = kernels.divergence(leaf, teacher, kind=kind, inplace_grad=True)
            torch.autograd.grad(loss, leaf)
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_inductor_compiles_the_divergence() -> None:
    student = torch.randn(4, 1000, device="cuda", requires_grad=True)
    teacher = torch.randn(4, 1000, device="cuda")

    def learn(x: torch.Tensor) -> torch.Tensor:
        return kernels.divergence(x * 2, teacher, kind="jsd")

    (expected,) = torch.autograd.grad(learn(student), student)
    (found,) = torch.autograd.grad(torch.compile(learn, fullgraph=True)(student), student)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)
