"""What a case of the kernel benchmark is, and how one is run. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from kernel_callers import callers
from kernel_timing import Bench, Call, captured, measured


class About(NamedTuple):
    """What is said of an operation beside its times."""

    launches: str  # kernels on the device, of one call; of a divergence with its backward
    replaces: str  # what it stands in for
    when: str  # the package calls it
    function: str  # of moedraft.kernels
    keyword: str = ""  # count calls with this argument only,
    given: bool = True  # or only those without it

    @property
    def called_by(self) -> str:
        """The files that call it."""
        return ", ".join(callers(self.function, self.keyword, self.given))


# What may stand in place of a contender's times.
NOT_INSTALLED, SKIPPED = "not installed", "skipped"
BEGUN, LOST = "begun", "failed: did not return"
# In which pass a contender is measured: ours, which the targets are about; peers; and last what compiles for
# half a minute before it runs.
OURS, PEERS, COMPILED = PASSES = range(3)
SAMPLED, FILTERED = "steps that sample", "steps with top-k, top-p or min-p"
# Filters of long bfloat16 rows: `survey`, `aim`, three times `narrow`, `cut`. What heeds them has two more.
FILTERS, AFTER_FILTERS = "6", "8"
# A divergence's kernel and the one that scales its gradient, beside what makes the rows' weights, sorts the
# list of tokens and sums the rows' losses: about fifteen operations on tensors of one entry a row or a token.
LOSS = "2 kernels + small operations"
ABOUT = {
    "topk divergence": About(
        LOSS, "log_softmax, gather, scatter and their backward", "updates", "divergence", "teacher_topk"
    ),
    "verify_chain": About("2", "two softmaxes, gathers, a draw", SAMPLED, "verify_chain"),
    "verify_chain, greedy": About("2 + 1 fill", "argmax, compare", "greedy steps", "verify_chain"),
    "verify_chain, filtered": About(AFTER_FILTERS, "sort, softmaxes, a draw", FILTERED, "verify_chain"),
    "sample_draft, filtered": About(AFTER_FILTERS, "sort, softmax, a draw", FILTERED, "sample_draft"),
    "verify_block, filtered": About(
        AFTER_FILTERS,
        "sort, softmaxes, all residuals, a draw",
        f"{FILTERED}, verification = block",
        "verify_block",
    ),
    "verify_coupled, filtered": About(
        AFTER_FILTERS,
        "sort, noise in memory, argmax",
        f"{FILTERED}, verification = coupled",
        "verify_coupled",
    ),
    "sample_coupled, filtered": About(
        AFTER_FILTERS,
        "sort, noise in memory, argmax",
        f"{FILTERED}, verification = coupled",
        "sample_coupled",
    ),
    "find_cuts": About(FILTERS, "a full sort, filtered logits in memory", FILTERED, "find_cuts"),
    "sample_draft": About("2", "softmax, a draw", "drafted tokens", "sample_draft"),
    "verify_block": About("2", "softmaxes, all residuals, a draw", "verification = block", "verify_block"),
    "verify_coupled": About(
        "2", "noise in memory, argmax, compare", "verification = coupled", "verify_coupled"
    ),
    "sample_coupled": About("2", "noise in memory, argmax", "verification = coupled", "sample_coupled"),
    "divergence": About(
        LOSS,
        "two log_softmaxes, products and their backward",
        "base training, for each block of an output layer",
        "linear_divergence",
        "teacher_logits",
    ),
    "linear and divergence": About(
        "each block: products, 1 kernel + small operations",
        "the output layer and the loss after it",
        "base training, and updates of an independent draft model; the output layer is frozen in both",
        "linear_divergence",
    ),
}


@dataclass(frozen=True)
class Contender:
    """`make` gives one call for each set of data; `facts` what else is said of it, such as its error.

    graph: false where a call waits for the device, which ends a capture.
    """

    make: Callable[[], list[Call]]
    facts: Callable[[], dict[str, Any]] = dict
    graph: bool = True


@dataclass(frozen=True)
class Case:
    operation: str
    shape: dict[str, Any]
    floor_bytes: int
    data_bytes: int  # that a contender reads of all sets of data together, before it reads one again
    contenders: Callable[[], dict[str, Contender]]  # makes the data, so that only one case's lie in memory
    floor_operations: int = 0  # of matrix products; 0: moving the bytes takes longer

    @property
    def key(self) -> str:
        return f"{self.operation} {self.shape}"


class Skipped(Exception):
    """Says why a contender is not measured. Nothing is wrong."""


@contextmanager
def reported(entry: dict[str, Any]) -> Iterator[None]:
    """Put what stops a measurement beside what it has found so far, so that it does not end the run."""
    try:
        yield
    except ImportError as error:
        entry["status"] = f"{NOT_INSTALLED}: {str(error)[:200]}"
        entry["missing"] = (error.name or "").split(".")[0]
    except Skipped as reason:
        entry["status"] = f"{SKIPPED}: {reason}"
    except Exception as error:
        entry["status"] = f"failed: {type(error).__name__}: {str(error)[:200]}"


def run_contender(contender: Contender, bench: Bench) -> dict[str, Any]:
    """What is found of it. The graph comes last, because a failed capture spoils what comes after it.

    Facts that cannot be found leave the times as they are: "facts" then says why.
    """
    entry: dict[str, Any] = {}
    with reported(entry):
        calls = contender.make()
        entry |= measured(calls, bench)
        trouble: dict[str, Any] = {}
        with reported(trouble):
            entry |= contender.facts()
        if trouble:
            entry["facts"] = trouble
        if contender.graph and bench.cuda:
            entry["graph"] = captured(calls, bench)
    return entry


def failed(entry: dict[str, Any]) -> bool:
    """Whether the process that measured this may have lost the device to a broken capture or kernel."""
    status = str(entry.get("status", NOT_INSTALLED)).split(":")[0]
    return status not in (NOT_INSTALLED, SKIPPED) or "facts" in entry or "status" in entry.get("graph", {})


def settle(entry: dict[str, Any]) -> None:
    """What was begun when its process ended did not return, and is not begun again."""
    if entry.get("status") == BEGUN:
        entry["status"] = LOST


def settle_case(case: dict[str, Any]) -> None:
    """The same for all contenders. One whose package is there by now is left to be measured."""
    found = case["contenders"]
    for name, entry in list(found.items()):
        settle(entry)
        if entry.get("missing") and find_spec(entry["missing"]):
            del found[name]
            case["waiting"].append(name)
    if found.get("data", {}).get("status") == LOST:
        case["waiting"] = []  # nothing can be measured without
    else:
        case["waiting"] = [name for name in case["waiting"] if name not in found]
    case["left"] = len(case["waiting"])


def pass_of(contender: str) -> int:
    """In which pass it is measured, by its name."""
    if contender.startswith("moedraft"):
        return OURS
    return COMPILED if contender == "torch.compile" else PEERS


def waits(known: dict[str, Any] | None, number: int) -> bool:
    """Whether something of a case is left to this pass. Of one that was never made, something of ours is."""
    if known is None:
        return number == OURS
    return any(pass_of(name) == number for name in known["waiting"])


def run_case(
    case: Case, bench: Bench, bandwidth: float | None, number: int, known: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Measure the contenders of this pass, beyond those that are known. Yields what is known before each
    and after it.

    Before it, its status is "begun": one that hangs, or that ends the process, is told by that. So is the
    making of the data, as "data".
    bandwidth: bytes per second of a copy, to compare with. On a CUDA device the first contender that fails is
    the last to be measured here. "waiting" names those of all passes that are not measured, "left" counts
    them, and "broken" says that a new process must take over.
    """
    results: dict[str, Any] = dict((known or {}).get("contenders", {}))
    waiting: list[str] = list((known or {}).get("waiting", []))

    def state(broken: bool = False) -> dict[str, Any]:
        left = {"waiting": list(waiting), "left": len(waiting), "broken": broken}
        return described(case, bench) | {"contenders": dict(results), **left}

    unmade: dict[str, Any] = {}
    made: dict[str, Contender] = {}
    results["data"] = {"status": BEGUN}
    yield state()
    with reported(unmade):
        made = case.contenders()
    del results["data"]
    if unmade:
        results["data"] = unmade
    waiting = [name for name in made if name not in results]
    broken = bench.cuda and failed(unmade)
    for name in [name for name in waiting if pass_of(name) == number]:
        if broken:
            break
        results[name] = {"status": BEGUN}
        yield state()
        results[name] = run_contender(made[name], bench)
        waiting.remove(name)
        broken = bench.cuda and failed(results[name])
        if bandwidth and not case.floor_operations:
            compare(results[name], case.floor_bytes, bandwidth)
        yield state(broken)
    yield state(broken)


def compare(entry: dict[str, Any], size: int, bandwidth: float) -> None:
    """Add to times what share of a copy's bandwidth they stand for."""
    for timing in (entry, entry.get("graph", {})):
        if timing.get("us"):
            timing["share_of_copy"] = round(size / (timing["us"] * 1e-6) / bandwidth, 4)


def described(case: Case, bench: Bench) -> dict[str, Any]:
    """What is said of a case beside its times."""
    said = ABOUT[case.operation]
    return {
        "operation": case.operation,
        "shape": {"dtype": str(bench.dtype).removeprefix("torch."), **case.shape},
        "floor_bytes": case.floor_bytes,
        "data_bytes": case.data_bytes,
        "floor_operations": case.floor_operations,
        "launches": said.launches,
        "replaces": said.replaces,
        "called_by": said.called_by,
    }
