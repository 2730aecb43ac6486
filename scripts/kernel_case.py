"""What a case of the kernel benchmark is, and how one is run. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kernel_callers import callers
from kernel_timing import Bench, Call, measured


class About(NamedTuple):
    """What is said of an operation beside its times."""

    launches: int  # on the device
    replaces: str  # what it stands in for
    when: str  # the package calls it
    function: str  # of moedraft.kernels
    keyword: str = ""  # count calls with this argument only,
    given: bool = True  # or only those without it

    @property
    def called_by(self) -> str:
        """The files that call it."""
        return ", ".join(callers(self.function, self.keyword, self.given))


SAMPLED, FILTERED = "steps that sample", "steps with top-k, top-p or min-p"
ABOUT = {
    "topk divergence": About(
        1, "log_softmax, gather, scatter and their backward", "updates", "divergence", "teacher_topk"
    ),
    "verify_chain": About(2, "two softmaxes, gathers, a draw", SAMPLED, "verify_chain"),
    "verify_chain, greedy": About(2, "argmax, compare", "greedy steps", "verify_chain"),
    "verify_chain, filtered": About(3, "sort, softmaxes, a draw", FILTERED, "verify_chain"),
    "find_cuts": About(1, "a full sort, filtered logits in memory", FILTERED, "find_cuts"),
    "sample_draft": About(2, "softmax, a draw", "drafted tokens", "sample_draft"),
    "verify_block": About(2, "softmaxes, all residuals, a draw", "verification = block", "verify_block"),
    "verify_coupled": About(
        2, "noise in memory, argmax, compare", "verification = coupled", "verify_coupled"
    ),
    "sample_coupled": About(2, "noise in memory, argmax", "verification = coupled", "sample_coupled"),
    "divergence": About(
        1,
        "two log_softmaxes, products and their backward",
        "base training",
        "divergence",
        "teacher_topk",
        False,
    ),
    "linear and divergence": About(
        1,
        "the output layer and the loss after it",
        "updates with its whole output layer",
        "linear_divergence",
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
    said = ABOUT[case.operation]
    results: dict[str, Any] = {}
    for name, contender in case.contenders().items():
        with reported(name, results):
            results[name] = {**measured(contender.make(), bench, contender.graph), **contender.facts()}
    for entry in results.values():
        for timing in (entry, entry.get("graph", {})):
            if timing.get("us") and bandwidth:
                timing["share_of_copy"] = round(case.floor_bytes / (timing["us"] * 1e-6) / bandwidth, 4)
    about = {"launches": said.launches, "replaces": said.replaces, "called_by": said.called_by}
    shape = {**case.shape, "dtype": str(bench.dtype).removeprefix("torch.")}
    return {
        "operation": case.operation,
        "shape": shape,
        "floor_bytes": case.floor_bytes,
        **about,
        "contenders": results,
    }
