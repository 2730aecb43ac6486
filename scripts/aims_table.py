"""Makes the table of what was aimed at on the real model and what was reached, from the files in results/."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert_tables import mean, shown
from markdown_tables import table

CARD = Path(__file__).resolve().parents[1] / "data" / "models" / "smollm2-eagle3" / "README.md"
FILES = ("smollm2/experts", "step", "peers")
Figure = list[float]  # estimate, and its interval where it has one
CHANCE = ", but chance may have decided it: the interval reaches to both sides of what was wanted"


@dataclass(frozen=True)
class Aim:
    """One line of the table. cause: told where the aim is missed. below: the figure must not be higher.

    figure: [] where the results do not hold it; then `unmeasured` says what is known instead.
    """

    what: str
    wanted: float
    figure: Figure
    cause: str = ""
    below: bool = False
    unmeasured: str = ""

    @property
    def reached(self) -> str:
        value = self.figure[0]
        met = value <= self.wanted if self.below else value >= self.wanted
        sure = len(self.figure) == 1 or not self.figure[1] < self.wanted < self.figure[2]
        return ("yes" if met else "no") + ("" if sure else CHANCE)

    def row(self) -> list[str]:
        sign = "≤" if self.below else "≥"
        if not self.figure:
            return [self.what, f"{sign} {self.wanted:.2f}", self.unmeasured, "", ""]
        value = shown(self.figure) if len(self.figure) == 3 else f"{self.figure[0]:.2f}"
        if value.startswith(f"{self.wanted:.2f}") and self.reached.startswith("no"):
            value = value.replace(
                f"{self.wanted:.2f}", f"{self.figure[0]:.4f}", 1
            )  # or it would look reached
        cause = self.cause if self.reached.startswith("no") else ""
        return [self.what, f"{sign} {self.wanted:.2f}", value, self.reached, cause]


def aims(results: Path) -> str:
    """The table; "" where a file is missing."""
    paths = [results / f"{name}.json" for name in FILES]
    if not all(path.exists() for path in paths):
        return ""
    experts, step, peers = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    lines = [*guesses(experts), *speeds(experts), *costs(experts, step["step_ms"]), *plainly(peers)]
    head = ["aim", "wanted", "measured", "reached", "what holds it back"]
    return f"{table(head, [line.row() for line in lines])}\n\n{NOTE}"


ANSWERS = "lookup in answers"
SERVED = f"experts + {ANSWERS}"
NOTE = (
    "Over the six domains of the table above, with 95 % intervals where there are any (one seed). Full "
    "batches were timed twice, one queue after the other: their lines decide nothing. In a run of "
    "2026-11-26, without earlier answers and short lists, experts were 1.06 times plain decoding and 1.07 "
    "times static there, and with lookup 1.00 times lookup alone. Each ratio is "
    "within one run; the runs are of different days and processors. First guess on general English: the "
    "drafter's card. Costs of steps: `results/step.json`, bfloat16, medians; those of the run with the "
    "experts stand in brackets. Plain decoding: `results/peers.json`."
)


def measured(found: dict[str, Any], *path: str) -> Figure:
    figure = mean(found, *path)
    assert figure is not None, path
    return figure


def guesses(found: dict[str, Any]) -> list[Aim]:
    """What base and experts guess."""
    general = re.search(r"^\| general English \| [\d ]+ \| (\.\d+) ", CARD.read_text(encoding="utf-8"), re.M)
    assert general is not None, "the card has no figure for general English"
    gains = {name: measured(found, "by_domain", name, "first_step", "gain") for name in domains(found)}
    steps = {
        name: measured(found, "by_domain", name, "experts / static", "tokens_per_step")
        for name in domains(found)
    }
    lost = sum(gains[name][2] < 0 or steps[name][2] < 1 for name in gains)
    return [
        Aim("base: first guess right on general English that it never saw", 0.50, [float(general[1])]),
        Aim("experts: first guess right, − static", 0.15, measured(found, "all", "first_step", "gain")),
        Aim(
            "experts: tokens per target step, × static",
            1.25,
            measured(found, "all", "experts / static", "tokens_per_step"),
        ),
        Aim("experts: domains below static, by the interval of either", 0, [float(lost)], below=True),
    ]


def domains(found: dict[str, Any]) -> list[str]:
    return list(found["seeds"][0]["by_domain"])


def speeds(found: dict[str, Any]) -> list[Aim]:
    """Tokens per second at batch 1 and 8."""
    static, adapted = (round_cost(found, name) for name in ("static", "experts"))
    tokens = measured(found, "all", "static", "tokens_per_step")[0]
    ratio = "experts + lookup / lookup"
    full = {
        name: measured(found, "batch", name, "tokens_per_second")[0]
        for name in ("lookup", "experts + lookup", ANSWERS, SERVED)
    }
    return [
        Aim(
            "batch 1, static, × plain",
            1.25,
            measured(found, "all", "static", "times_plain"),
            f"base and vocabulary: {tokens:.2f} tokens a step on domains that it has not read; a round "
            f"takes {static:.2f} plain ones",
        ),
        Aim(
            "batch 1, experts, × plain",
            1.60,
            measured(found, "all", "experts", "times_plain"),
            f"cost of drafting and of verification: a round takes {adapted:.2f} plain ones",
        ),
        Aim(
            "batch 1, experts, × static",
            1.20,
            measured(found, "all", "experts / static", "tokens_per_second"),
            f"cost of drafting: a round of the experts takes {adapted:.2f} plain ones, one of the static "
            f"draft {static:.2f}",
        ),
        Aim(
            "batch 8, experts, × plain",
            1.25,
            in_batches(found, "times_plain"),
            "cost of verification, which grows with the rows, and of drafting for rows of several experts",
        ),
        Aim(
            "batch 8, experts, × static",
            1.10,
            in_batches(found, "times_static"),
            "cost of checking and drafting further, which takes back most of what better guesses bring",
        ),
        Aim(
            "batch 1, experts with lookup in the text, × that lookup alone",
            1.10,
            measured(found, "all", ratio, "tokens_per_second"),
        ),
        Aim(
            "batch 8, experts with lookup in the text, × that lookup alone",
            1.10,
            [full["experts + lookup"] / full["lookup"]],
            "cost of verification and of drafting, as above: what lookup guesses costs no drafting",
        ),
        Aim(
            "batch 1, experts with both lookups, × both lookups",
            1.10,
            measured(found, "all", f"{SERVED} / {ANSWERS}", "tokens_per_second"),
            "what lookup in earlier answers leaves is harder to guess",
        ),
        Aim(
            "batch 8, experts with both lookups, × both lookups",
            1.10,
            [full[SERVED] / full[ANSWERS]],
            "the same",
        ),
    ]


def in_batches(found: dict[str, Any], what: str) -> Figure:
    """Of experts in full batches; without an interval where each queue was answered only once."""
    figure = measured(found, "batch", "experts", what)
    return figure[:1] if found["settings"]["queue_rounds"] == "1" else figure


def round_cost(found: dict[str, Any], name: str) -> float:
    """Mean time of a round at batch 1 in plain steps: tokens per step over the speed-up."""
    tokens, times = (measured(found, "all", name, what)[0] for what in ("tokens_per_step", "times_plain"))
    return tokens / times


def costs(found: dict[str, Any], step: dict[str, Any]) -> list[Aim]:
    """What steps cost in plain steps of as many rows."""
    ms = found["seeds"][0]["step_ms"]

    def verify(rows: int) -> float:
        one, five = (step[f"{rows}x{tokens}"]["moedraft bfloat16"]["ms"] for tokens in (1, 5))
        return float(five / one)

    beside = ms["verify5_ms"] / ms["target_ms"]
    return [
        Aim(
            "a draft step with the shared vocabulary, target steps",
            0.10,
            [ms["draft_ms"] / ms["target_ms"]],
            "cost of drafting",
            below=True,
        ),
        Aim(
            "a draft step with an expert's own list, target steps",
            0.06,
            [ms["draft_own_list_ms"] / ms["target_ms"]] if "draft_own_list_ms" in ms else [],
            "cost of drafting",
            below=True,
            unmeasured="not measured on this processor; 0.047 on another, with AMX",
        ),
        Aim(
            f"verifying five tokens at batch 1, plain steps ({beside:.2f})",
            1.15,
            [verify(1)],
            "cost of verification; medians of a machine that others used",
            below=True,
        ),
        Aim(
            "verifying five tokens at batch 8, plain steps",
            1.50,
            [verify(8)],
            "cost of verification",
            below=True,
        ),
    ]


def plainly(peers: dict[str, Any]) -> list[Aim]:
    """Plain decoding beside the best of the others."""
    lines = []
    for batch in (1, 8):
        why = "the small operations of a step between its matrix products" + (
            ", attention most of all" if batch > 1 else ""
        )
        for dtype in ("bfloat16", "float32"):
            best, rate = best_of(peers["systems"], batch, lambda name, dtype=dtype: name.endswith(dtype))
            own = rate_of(peers["systems"][f"moedraft {dtype}"], batch)
            lines.append(Aim(f"batch {batch}, plain, {dtype}, × {best}", 1.0, [own / rate], why))
        best, rate = best_of(peers["systems"], batch, lambda name: name.endswith("as it is"))
        own = rate_of(peers["systems"]["moedraft bfloat16"], batch)
        best = best.removesuffix(" as it is")
        lines.append(
            Aim(f"batch {batch}, plain, bfloat16, × {best} (four bits)", 1.0, [own / rate], FOUR_BITS)
        )
    return lines


FOUR_BITS = "weights in four bits are a quarter of what a step reads"


def best_of(systems: dict[str, Any], batch: int, counts: Any) -> tuple[str, float]:
    """The fastest other system that counts and does not speculate, and its tokens per second."""
    found = {
        name: rate_of(each, batch)
        for name, each in systems.items()
        if counts(name) and not re.match(r"moedraft|.*-(ngram|lookup)", name)
    }
    best = max(found, key=lambda name: found[name])
    return best, found[best]


def rate_of(system: dict[str, Any], batch: int) -> float:
    return float(system[f"batch {batch}"]["tokens_per_second"])
