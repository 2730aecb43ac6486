"""The cases of the kernel benchmark ask for what the engine and the trainer do, with cold caches."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts_loader import SCRIPTS, load_script

from moedraft import kernels

MIB = 2**20


def bench(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "device": "cpu", "cuda": True, "seconds": 0.0, "cold_bytes": 4000, "dtype": torch.float32,
        "vocab": 96, "vocabs": (64,), "batches": (1, 2, 3), "rows": 8, "top_k": 4,
    }  # fmt: skip
    return load_script("kernel_timing").Bench(**given | changes)


@pytest.mark.parametrize("quick", [False, True])
def test_all_data_of_a_case_takes_four_times_the_cache(quick: bool) -> None:
    """Of an H200, whose cache is 60 MiB."""
    cache = load_script("kernel_tables").H200_CACHE
    assert cache == 60 * MIB
    cases = load_script("kernel_cases").cases(load_script("kernel_timing").cuda_bench(quick, cache))
    assert {case.key: case.data_bytes // MIB for case in cases if case.data_bytes < 4 * cache} == {}


def test_control_one_set_of_short_rows_would_not_take_as_much() -> None:
    quick = load_script("kernel_timing").cuda_bench(True, 60 * MIB)
    assert quick.rows * 32_000 * quick.dtype.itemsize < 4 * 60 * MIB


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_losses_take_turns_with_as_many_sets_as_they_say(rows: int) -> None:
    losses, size = load_script("kernel_loss_cases"), bench(rows=rows)
    for case, read in (
        (losses.topk_case(size, "fkl", 96, rows), rows * 96 * 4),
        (losses.dense_case(size, "fkl"), 2 * rows * 96 * 4),
    ):
        calls = case.contenders()["moedraft"].make()
        assert len(calls) * read == case.data_bytes >= size.cold_bytes
        assert len({float(call().abs().sum()) for call in calls}) == len(calls)  # each with its own data


def passed(case: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """By what the gradient of our own contender is multiplied."""
    autograd = importlib.import_module("moedraft.kernels.autograd")
    real, found = autograd._times, []

    def times(grad: torch.Tensor, upstream: torch.Tensor, *more: bool) -> torch.Tensor:
        found.append(float(upstream))
        return torch.Tensor(real(grad, upstream, *more))

    monkeypatch.setattr(autograd, "_times", times)
    case.contenders()["moedraft"].make()[0]()
    (factor,) = found
    return factor


def test_gradients_are_multiplied_by_what_the_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, size = load_script("kernel_loss_cases"), bench()
    found = {
        case.shape["upstream"]: passed(case, monkeypatch)
        for case in (
            losses.topk_case(size, "fkl", 96, 8),
            losses.dense_case(size, "fkl", 0.8),
        )
    }
    assert found == {"1": 1.0, "0.8": pytest.approx(0.8)}
    assert passed(losses.topk_case(size, "fkl", 96, 8, divided=True), monkeypatch) == 1


def test_a_sum_that_is_divided_has_the_gradient_of_the_mean() -> None:
    losses, size = load_script("kernel_loss_cases"), bench()
    summed, mean = (
        losses.topk_case(size, "rkl", 96, 8, divided=each).contenders()["moedraft"].make()[0]()
        for each in (True, False)
    )
    torch.testing.assert_close(summed, mean)


def kept(logits: torch.Tensor, **limits: float) -> torch.Tensor:
    """What our own filter leaves."""
    types = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    given = {name: torch.full((len(logits),), each, dtype=types[name]) for name, each in limits.items()}
    cuts = kernels.find_cuts(logits, temperature=torch.ones(len(logits)), **given)
    return ~kernels.apply_cuts(logits, cuts).isinf()


def test_plain_filters_leave_what_ours_leave() -> None:
    peers = load_script("kernel_peers")
    logits = 2 * torch.randn(5, 3, 400, generator=torch.Generator().manual_seed(1))
    by_mass, by_rank = (~peers.plain_filter(logits, top_k, 0.9).isinf() for top_k in (0, 20))
    assert torch.equal(by_mass, kept(logits, top_p=0.9))
    assert torch.equal(by_rank, kept(logits, top_p=0.9, top_k=20))
    assert by_rank.sum() < by_mass.sum()  # the control: they are two filters
    assert torch.equal(~peers.plain_min_p(logits, 0.05).isinf(), kept(logits, min_p=0.05))


def test_flashinfer_filters_by_rank_only_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def recorded(name: str) -> Any:
        def renormalise(probs: torch.Tensor, limit: float) -> torch.Tensor:
            assert probs.dim() == 2
            asked.append((name, limit))
            return probs

        return renormalise

    fake = ModuleType("flashinfer.sampling")
    fake.get_sampling_module = dict  # type: ignore[attr-defined]
    for name in ("top_k_renorm_probs", "top_p_renorm_probs"):
        setattr(fake, name, recorded(name))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", fake)
    logits = torch.randn(2, 3, 9)
    load_script("kernel_peers").flashinfer_filter(logits, 0, 0.9)()
    assert asked == [("top_p_renorm_probs", 0.9)]
    asked.clear()
    load_script("kernel_peers").flashinfer_filter(logits, 4, 0.9)()
    assert asked == [("top_k_renorm_probs", 4), ("top_p_renorm_probs", 0.9)]


def test_peers_are_found_in_the_ignored_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything that is installed. Git ignores it, so that it is never committed."""
    script, find_peers = load_script("bench_kernels"), load_script("peer_folder").find_peers
    assert find_peers.__defaults__ == (SCRIPTS.parent / ".peers",)
    assert "/.peers/" in (SCRIPTS.parent / ".gitignore").read_text().splitlines()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(script, "PEERS", ("torch", "some_peer"))
    find_peers(tmp_path / "none")
    assert script.versions()["some_peer"] == "not installed"
    for name in ("some_peer", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "some_peer-1.2.dist-info").mkdir()
    (tmp_path / "some_peer-1.2.dist-info" / "METADATA").write_text("Name: some-peer\nVersion: 1.2\n")
    (tmp_path / "some_peer-1.2.dist-info" / "top_level.txt").write_text("some_peer\n")
    find_peers(tmp_path)
    find_peers(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    found = script.versions()
    assert (found["some_peer"], found["torch"].split("+")[0]) == ("1.2", torch.__version__.split("+")[0])
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    assert not spec.origin.startswith(str(tmp_path))


def test_the_benchmark_looks_there_before_it_asks_for_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, order = load_script("bench_kernels"), []
    monkeypatch.setattr(script, "find_peers", lambda: order.append("folder"))
    monkeypatch.setattr(script, "versions", lambda: order.append("versions"))
    monkeypatch.setattr(script, "plot", lambda *_: None)
    script.main(["--out", str(tmp_path), "--resume", str(tmp_path), "--minutes", "-1"], bench(cuda=False))
    assert order == ["folder", "versions"]
