"""What a case of the kernel benchmark is, and how one is run. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernel_timing import Bench, Call, measured

# for each operation: launches on the device, what it stands in for, and who calls it
ABOUT = {
    "topk divergence": (1, "log_softmax, gather, scatter and their backward", "distill: every update"),
    "verify_chain": (2, "two softmaxes, gathers, a draw", "engine/verification.py: every step that samples"),
    "verify_chain, greedy": (2, "argmax, compare", "engine/verification.py: every greedy step"),
    "verify_chain, filtered": (
        3,
        "sort, softmaxes, a draw",
        "engine/verification.py: steps with top-k or top-p",
    ),
    "find_cuts": (
        1,
        "a full sort, filtered logits in memory",
        "engine/verification.py, drafting/drawing.py: steps with top-k or top-p",
    ),
    "sample_draft": (2, "softmax, a draw", "drafting/drawing.py: every drafted token"),
    "verify_block": (2, "softmaxes, all residuals, a draw", "engine/verification.py: verification = block"),
    "verify_coupled": (
        2,
        "noise in memory, argmax, compare",
        "engine/verification.py: verification = coupled",
    ),
    "sample_coupled": (2, "noise in memory, argmax", "drafting/drawing.py: verification = coupled"),
    "divergence": (1, "two log_softmaxes, products and their backward", "feature/unroll.py: base training"),
    "linear and divergence": (
        1,
        "the output layer and the loss after it",
        "distill/student.py: every update",
    ),
}


@dataclass(frozen=True)
class Contender:
    """`make` gives one call for each set of data; `facts` what else is said of it, such as its error."""

    make: Callable[[], list[Call]]
    facts: Callable[[], dict[str, Any]] = dict
    graph: bool = True


@dataclass(frozen=True)
class Case:
    operation: str
    shape: dict[str, Any]
    floor_bytes: int
    contenders: Callable[[], dict[str, Contender]]  # makes the data, so that only one case's lie in memory

    @property
    def key(self) -> str:
        return f"{self.operation} {self.shape}"


@contextmanager
def reported(name: str, result: dict[str, Any]) -> Iterator[None]:
    """Put what stops a contender into the table, so that it does not end the run."""
    try:
        yield
    except ImportError:
        result[name] = {"status": "not installed"}
    except Exception as error:
        result[name] = {"status": f"failed: {type(error).__name__}: {str(error)[:200]}"}


def run_case(case: Case, bench: Bench, bandwidth: float | None) -> dict[str, Any]:
    """Measure all contenders, our own first. `bandwidth`: bytes per second of a copy, to compare with."""
    launches, replaces, called_by = ABOUT[case.operation]
    results: dict[str, Any] = {}
    for name, contender in case.contenders().items():
        with reported(name, results):
            results[name] = {**measured(contender.make(), bench, contender.graph), **contender.facts()}
    for entry in results.values():
        for timing in (entry, entry.get("graph", {})):
            if timing.get("us") and bandwidth:
                timing["share_of_copy"] = round(case.floor_bytes / (timing["us"] * 1e-6) / bandwidth, 4)
    about = {"launches": launches, "replaces": replaces, "called_by": called_by}
    shape = {**case.shape, "dtype": str(bench.dtype).removeprefix("torch.")}
    return {
        "operation": case.operation,
        "shape": shape,
        "floor_bytes": case.floor_bytes,
        **about,
        "contenders": results,
    }
