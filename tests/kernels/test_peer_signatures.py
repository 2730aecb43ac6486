"""Peers are called as their present versions want it, and where they are installed, the packages agree.

A peer's source is read, not imported: most of them need a GPU for that, or a hundred other packages.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts_loader import load_script
from torch import Tensor

BATCH, LENGTH, VOCAB = 2, 3, 9
TREE = (
    "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling uniform_samples uniform_samples_for_final_sampling target_probs draft_probs "
    "threshold_single threshold_acc deterministic"
)
# Of vLLM 0.33.0, FlashInfer 0.7.4, SGLang 0.5.23, sgl-kernel 0.3.21, Liger 0.8.5, speculators 0.9.0: where
# each function stands and what its parameters are called, those first that have no default.
REAL = {
    ("vllm", "v1/sample/rejection_sampler.py", "rejection_sample"): (
        "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
        "bonus_token_ids sampling_metadata",
        "synthetic_mode synthetic_conditional_rates use_fp64_gumbel fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
    ),
    ("vllm", "v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p"): ("logits k p", ""),
    ("vllm", "v1/sample/ops/topk_topp_sampler.py", "random_sample"): (
        "probs generators",
        "use_fp64_gumbel",
    ),
    ("flashinfer", "sampling.py", "chain_speculative_sampling"): (
        "draft_probs draft_token_ids target_probs",
        "maybe_output_accepted_token_num maybe_output_emitted_draft_token_num deterministic generator seed "
        "offset",
    ),
    ("flashinfer", "sampling.py", "top_k_renorm_probs"): ("probs top_k", "is_deterministic"),
    ("flashinfer", "sampling.py", "top_p_renorm_probs"): ("probs top_p", "is_deterministic"),
    ("flashinfer", "sampling.py", "top_k_top_p_sampling_from_logits"): (
        "logits top_k top_p",
        "indices filter_apply_order deterministic generator check_nan seed offset top_k_max",
    ),
    ("flashinfer", "sampling.py", "top_p_sampling_from_probs"): (
        "probs top_p",
        "indices deterministic generator check_nan seed offset return_valid",
    ),
    ("flashinfer", "sampling.py", "get_sampling_module"): ("", ""),
    ("sglang", "kernels/ops/speculative/reject_sampling.py", "chain_speculative_sampling_triton"): (
        TREE,
        "block_verification",
    ),
    ("sgl_kernel", "speculative.py", "tree_speculative_sampling_target_only"): (
        TREE.removesuffix(" threshold_single threshold_acc deterministic"),
        "threshold_single threshold_acc deterministic",
    ),
    ("liger_kernel", "transformers/fused_linear_jsd.py", "LigerFusedLinearJSD.forward"): (
        "self student_input student_weight teacher_input teacher_weight shift_labels",
        "",
    ),
    ("liger_kernel", "transformers/kl_div.py", "LigerKLDIVLoss.forward"): ("self y_pred y_true", ""),
    ("liger_kernel", "transformers/tvd.py", "LigerTVDLoss.forward"): ("self p q", "shift_labels"),
    ("liger_kernel", "transformers/jsd.py", "LigerJSD.forward"): ("self log_q log_p", "shift_labels"),
    **{
        ("speculators", "losses/fused.py", f"fused_{kind}_loss"): ("logits targets", "")
        for kind in ("kl_div", "reverse_kl_div", "js_div", "tv")
    },
}


def definition(source: str, name: str) -> ast.FunctionDef:
    """The function or method in this source. An inner one of the same name is another one."""
    body: Any = ast.parse(source).body
    for part in name.split("."):
        found = next(node for node in body if getattr(node, "name", None) == part)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def parameters(function: ast.FunctionDef) -> tuple[str, str]:
    """The names of those without a default, and of those with one."""
    given = function.args
    names = [one.arg for one in given.args]
    needed = len(names) - len(given.defaults)
    assert all(default is not None for default in given.kw_defaults)
    optional = [*names[needed:], *(one.arg for one in given.kwonlyargs)]
    return " ".join(names[:needed]), " ".join(optional)


@pytest.mark.parametrize(("package", "file", "name"), REAL)
def test_an_installed_package_has_these_parameters(package: str, file: str, name: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.submodule_search_locations[0]) / file
    assert parameters(definition(path.read_text(encoding="utf-8"), name)) == REAL[package, file, name]


def test_parameters_are_read_from_a_source() -> None:
    source = "class A:\n    def f(self, x, y=1, *, z=2):\n        def f(): ...\n"
    assert parameters(definition(source, "A.f")) == ("self x", "y z")


def stub(package: str, file: str, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the real one's parameters, whose arguments `answer` gets by name."""
    needed, optional = (part.split() for part in REAL[package, file, name])
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(one, kind) for one in needed]
        + [inspect.Parameter(one, kind, default=None) for one in optional]
    )

    def called(*arguments: Any, **named: Any) -> Any:
        return answer(**signature.bind(*arguments, **named).arguments)

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def place(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of this name that holds nothing else; its packages are empty."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[0]))
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return {
        "target_logits": torch.randn(BATCH, LENGTH + 1, VOCAB).bfloat16(),
        "draft_logits": torch.randn(BATCH, LENGTH, VOCAB).bfloat16(),
        "draft_tokens": torch.randint(VOCAB, (BATCH, LENGTH)),
        "temperature": torch.ones(BATCH),
    }


@pytest.fixture
def peers() -> ModuleType:
    return load_script("kernel_peers")


def test_vllm_gets_what_it_asserts(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(**given: Any) -> str:
        rows = BATCH * LENGTH
        assert given["draft_token_ids"].shape == (rows,)
        assert (given["num_draft_tokens"], given["max_spec_len"]) == ([LENGTH] * BATCH, LENGTH)
        assert given["cu_num_draft_tokens"].tolist() == [LENGTH, 2 * LENGTH]
        assert given["draft_probs"].shape == given["target_logits"].shape == (rows, VOCAB)
        assert given["bonus_token_ids"].shape == (BATCH, 1)
        for name in ("draft_token_ids", "draft_probs", "target_logits", "bonus_token_ids"):
            assert given[name].is_contiguous()
        how = given["sampling_metadata"]
        assert (how.all_greedy, how.all_random, how.generators) == (False, True, {})
        assert how.temperature is inputs["temperature"]
        return "tokens"

    file = "v1/sample/rejection_sampler.py"
    verify = stub("vllm", file, "rejection_sample", answer)
    place(monkeypatch, "vllm.v1.sample.metadata", SamplingMetadata=type("SamplingMetadata", (), {}))
    place(monkeypatch, "vllm.v1.sample.rejection_sampler", rejection_sample=verify)
    assert peers.vllm_verify(inputs)() == "tokens"


def test_flashinfer_gets_a_seed_that_a_graph_can_hold(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one it asks the generator for its state, which no capture permits."""

    def answer(**given: Any) -> str:
        assert (given["draft_probs"].dim(), given["target_probs"].dim()) == (3, 3)
        assert given["draft_token_ids"].dtype == torch.int32
        for name in ("seed", "offset"):
            assert (given[name].dtype, given[name].shape) == (torch.int64, (1,))
        return "tokens"

    verify = stub("flashinfer", "sampling.py", "chain_speculative_sampling", answer)
    built: list[str] = []
    place(
        monkeypatch, "flashinfer.sampling", chain_speculative_sampling=verify,
        get_sampling_module=lambda: built.append("once"),
    )  # fmt: skip
    call = peers.flashinfer_verify(inputs)
    assert built == ["once"]  # before anything is measured
    assert call() == "tokens"


def test_flashinfer_is_skipped_where_its_kernels_cannot_be_built(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has happened to the device then, so that the process goes on."""

    def build() -> None:
        raise RuntimeError("Could not find nvcc")

    place(monkeypatch, "flashinfer.sampling", get_sampling_module=build, chain_speculative_sampling=print)
    case = load_script("kernel_case")
    for make in (
        lambda: peers.flashinfer_verify(inputs),
        lambda: peers.flashinfer_filter(inputs["target_logits"], 0, 0.9),
        lambda: peers.flashinfer_sample(inputs["target_logits"][:, 0], 0, 0.9),
    ):
        entry: dict[str, Any] = {}
        with case.reported(entry):
            make()
        assert entry["status"].startswith("skipped: ")
        assert "Could not find nvcc" in entry["status"]
        assert not case.failed(entry)


def test_flashinfer_draws_by_the_limits_that_it_is_asked_for(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_rank(**given: Any) -> str:
        assert (given["top_k"], given["top_p"], given["filter_apply_order"]) == (4, 0.9, "top_k_first")
        assert given["logits"].shape == (BATCH, VOCAB)
        return "by rank"

    def by_mass(**given: Any) -> str:
        assert given["top_p"] == 0.9
        torch.testing.assert_close(given["probs"].sum(-1), torch.ones(BATCH))
        return "by mass"

    functions = {"top_k_top_p_sampling_from_logits": by_rank, "top_p_sampling_from_probs": by_mass}
    found = {name: stub("flashinfer", "sampling.py", name, one) for name, one in functions.items()}
    place(monkeypatch, "flashinfer.sampling", get_sampling_module=dict, **found)
    logits = inputs["target_logits"][:, 0]
    assert peers.flashinfer_sample(logits, 4, 0.9)() == "by rank"
    assert peers.flashinfer_sample(logits, 0, 0.9)() == "by mass"


def test_flashinfer_verifies_against_what_limits_leave(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(**given: Any) -> Tensor:
        assert given["probs"].shape == (BATCH * (LENGTH + 1), VOCAB)
        return torch.as_tensor(given["probs"] / 2)

    def answer(**given: Any) -> Tensor:
        assert given["target_probs"].shape == (BATCH, LENGTH + 1, VOCAB)
        return torch.as_tensor(given["target_probs"].sum(-1))

    names = {"chain_speculative_sampling": answer, "top_k_renorm_probs": halved, "top_p_renorm_probs": halved}
    found = {name: stub("flashinfer", "sampling.py", name, one) for name, one in names.items()}
    place(monkeypatch, "flashinfer.sampling", get_sampling_module=dict, **found)
    for limits, mass in (((4, 0.9), 0.25), ((0, 0.9), 0.5), ((), 1.0)):
        sums = peers.flashinfer_verify(inputs, *limits)()
        torch.testing.assert_close(sums, torch.full((BATCH, LENGTH + 1), mass))


def limited(**given: Any) -> Tensor:
    """What vLLM does for top-k, in place."""
    logits = given["logits"]
    assert (logits.dtype, given["p"].shape) == (torch.float32, (len(logits),))
    if given["k"] is not None:
        assert (given["k"].dtype, given["k"].shape) == (torch.int32, (len(logits),))
        logits[logits < logits.topk(int(given["k"][0])).values[:, -1:]] = -torch.inf
    return torch.as_tensor(logits)


def test_vllm_filters_a_copy_of_all_rows(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes into what it is given; the sets of data are used again."""
    ops = "v1/sample/ops/topk_topp_sampler.py"
    place(
        monkeypatch, "vllm.v1.sample.ops.topk_topp_sampler",
        apply_top_k_top_p=stub("vllm", ops, "apply_top_k_top_p", limited),
        random_sample=stub("vllm", ops, "random_sample", lambda **given: given["probs"].argmax(-1)),
    )  # fmt: skip
    target = inputs["target_logits"].float()  # of the type that vLLM works in
    before = target.clone()
    rows = peers.vllm_filter(target, 3, 0.9)()
    assert (~rows.isinf()).sum(-1).tolist() == [3] * (BATCH * (LENGTH + 1))
    assert torch.equal(target, before)
    assert not peers.vllm_filter(target, 0, 0.9)().isinf().any()  # the control: k alone excludes here
    assert torch.equal(peers.vllm_sample(target[:, 0], 3, 0.9)(), target[:, 0].argmax(-1))

    def answer(**given: Any) -> int:
        assert given["target_logits"].shape == (BATCH * LENGTH, VOCAB)
        return int(given["target_logits"].isinf().sum())

    place(monkeypatch, "vllm.v1.sample.metadata", SamplingMetadata=type("SamplingMetadata", (), {}))
    verify = stub("vllm", "v1/sample/rejection_sampler.py", "rejection_sample", answer)
    place(monkeypatch, "vllm.v1.sample.rejection_sampler", rejection_sample=verify)
    given = {**inputs, "target_logits": target}
    assert peers.vllm_verify(given, 3, 0.9)() == BATCH * LENGTH * (VOCAB - 3)
    assert peers.vllm_verify(given)() == 0


def check_chain(given: dict[str, Any]) -> None:
    """A chain is a tree in which every token is the only child of the one before."""
    width = LENGTH + 1
    assert given["candidates"].shape == given["retrive_index"].shape == (BATCH, width)
    assert given["retrive_next_token"].tolist() == [[1, 2, 3, -1]] * BATCH
    assert bool((given["retrive_next_sibling"] == -1).all())
    assert given["uniform_samples"].shape == (BATCH, width)
    assert given["target_probs"].shape == (BATCH, width, VOCAB)
    for name in ("predicts", "accept_index", "accept_token_num"):
        assert given[name].dtype == torch.int32


def test_the_tree_kernel_of_sglang_gets_no_draft(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It judges by the target alone, and notes refused tokens in zeros that SGLang makes for it."""

    def answer(**given: Any) -> None:
        check_chain(given)
        assert given["draft_probs"].shape == given["target_probs"].shape
        assert not given["draft_probs"].any()
        given["accept_token_num"].fill_(2)

    verify = stub("sgl_kernel", "speculative.py", "tree_speculative_sampling_target_only", answer)
    place(monkeypatch, "sgl_kernel", tree_speculative_sampling_target_only=verify)
    assert peers.sglang_tree(inputs)().tolist() == [2, 2]


CHAIN = """
def chain_speculative_sampling_triton({parameters}, *, block_verification=False):
    assert draft_probs.shape[1] + 1 == target_probs.shape[1]
    accept_token_num.fill_(1)
"""


def test_of_sglang_the_file_with_the_kernel_alone_is_imported(
    peers: ModuleType, inputs: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its packages import beside it need not be there."""
    file = tmp_path / "sglang" / "kernels/ops/speculative/reject_sampling.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("import no_such_package\n")
    file.write_text(CHAIN.format(parameters=", ".join(TREE.split())))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    assert peers.sglang_chain(inputs)().tolist() == [1, 1]
    file.unlink()
    with pytest.raises(load_script("kernel_case").Skipped, match="reject_sampling"):
        peers.sglang_chain(inputs)


def test_control_without_it_sglang_is_not_installed(
    peers: ModuleType, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="'sglang'") as raised:
        peers.sglang_chain(inputs)
    assert raised.value.name == "sglang"


def test_what_waits_for_the_device_is_not_captured() -> None:
    """Liger's backward compares the upstream gradient with 1 on the host."""
    timing, losses = load_script("kernel_timing"), load_script("kernel_loss_cases")
    bench = timing.Bench(
        device="cpu", cuda=True, seconds=0.0, cold_bytes=400, dtype=torch.float32, vocab=96, vocabs=(),
        batches=(1,), rows=8,
    )  # fmt: skip
    for case in (losses.dense_case(bench, "jsd"), losses.linear_dense_case(bench, 8, 4)):
        graphs = {name: one.graph for name, one in case.contenders().items()}
        assert {name for name, graph in graphs.items() if not graph} == {
            name for name in graphs if "Liger" in name
        }
        assert not all(graphs.values())
