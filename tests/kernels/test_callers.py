"""Every public kernel is called by the engine or the trainer; what is not has its reason written here."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from scripts_loader import load_script

from moedraft import kernels

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]
# Modules that no public function leads to.
ALONE = {
    "reference_several": "the rules for several drafts, which scripts/bench_verification.py measures; "
    "kernels follow if what they keep is worth it",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_kernel_is_called(name: str) -> None:
    assert load_script("kernel_callers").callers(name) != ()


def test_what_the_benchmark_names_is_public_and_called() -> None:
    about = load_script("kernel_case").ABOUT
    for operation, said in about.items():
        assert said.function in PUBLIC, operation
        assert said.called_by, operation
    helpers = {"apply_cuts", "round_seeds"}  # plain PyTorch
    assert {said.function for said in about.values()} == set(PUBLIC) - helpers


def test_each_loss_of_the_benchmark_is_called_with_every_kind() -> None:
    """Dense divergences through an output layer; those of a teacher's lists with and without one."""
    callers = load_script("kernel_callers").callers
    assert callers("linear_divergence", "teacher_logits") == ("feature/unroll.py",)
    for function in ("divergence", "linear_divergence"):
        assert callers(function, "kind") == callers(function) != ()


def test_callers_are_found_where_a_package_is_made_of_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts/gpu_check.sh lays it out: each room is a link to its folder."""
    script, package = load_script("kernel_callers"), tmp_path / "moedraft"
    package.mkdir()
    monkeypatch.setattr(script.moedraft, "__file__", str(package / "__init__.py"))
    find = script.callers.__wrapped__  # what is found is kept otherwise
    assert find("verify_chain") == ()
    for part in ("engine", "sampling.py"):
        (package / part).symlink_to(ROOT / "moedraft" / part)
    (package / "kernels").symlink_to(ROOT / "kernels")
    assert find("verify_chain") == ("engine/verification.py",)
    assert find("find_cuts") == ("sampling.py",)


def imported(module: Path) -> set[str]:
    """The modules beside it that this one imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def test_every_module_is_reached_from_the_public_functions() -> None:
    folder = Path(kernels.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    reached, new = set(), imported(folder / "__init__.py")
    while new := (new & modules) - reached:
        reached |= new
        new = set().union(*(imported(folder / f"{name}.py") for name in new))
    assert modules - reached == set(ALONE)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from moedraft.kernels import verify_chain\nverify_chain(1)", True),
        ("from moedraft.kernels import verify_chain as check\nrules = {'chain': check}", True),
        ("from moedraft.kernels import verify_chain", False),
        ("from moedraft.kernels import verify_block\nverify_chain(1)", False),
        ("def verify_chain(): ...\nverify_chain()", False),
        ("'''verify_chain'''", False),
    ],
)
def test_what_counts_as_a_call(source: str, found: bool) -> None:
    calls = load_script("kernel_callers").calls
    assert calls(source, "verify_chain") == found


def test_a_call_is_told_apart_by_an_argument() -> None:
    calls = load_script("kernel_callers").calls
    source = "from moedraft.kernels import divergence\ndivergence(a, teacher_topk=b)"
    assert calls(source, "divergence", "teacher_topk")
    assert not calls(source, "divergence", "teacher_topk", False)
    assert calls(source + "\ndivergence(a, b)", "divergence", "teacher_topk", False)
