#!/usr/bin/env python3
"""Fill the marked tables of the documents from the measurements in results/ and the models' training.json.

python scripts/tables.py            # --check: change nothing, fail where a document is out of date
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import aims_table
import answer_tables
import expert_tables
import feature_tables
import gate_tables
import kernel_tables
import resampled_tables
import sampled_tables
import selection_tables
import step_tables
from markdown_tables import table

ROOT = Path(__file__).resolve().parents[1]
MISSING = "not yet measured"
DOCUMENTS = (
    "README.md",
    "docs/benchmarks.md",
    "docs/experiments.md",
    "docs/robustness.md",
    "data/models/README.md",
)


def bench(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found["systems"].items():
        length, theory = one["tokens_per_step"], one["theoretical_speedup"]
        rows.append(
            [
                name,
                f"{one['tokens_per_second']:.0f}",
                f"{one['ratio']:.2f}",
                "" if length is None else f"{length:.2f}",
                "" if theory is None else f"{theory:.2f}",
                {True: "yes", False: "no", None: ""}[one["same_answers"]],
            ]
        )
    head = ["system", "tokens/s", "× transformers", "tokens per step", "theory", "same answers"]
    note = (
        f"{found['prompts']} prompts, device {found['device']}, {found['threads']} threads; a draft step "
        f"costs {found['cost_ratio']:.2f} target steps, deciding which guesses stay "
        f"{found['verify_share']:.1%} of a step."
    )
    alike = found.get("answers_as_transformers", found["prompts"])
    if alike is None:
        note += f" Answers were sampled at temperature {found['temperature']:g}, so they are not compared."
    elif alike < found["prompts"]:
        note += (
            f" Same answers: as each one's own plain decoding; {alike} of the {found['prompts']} without "
            "drafts are those of transformers too, which rounds otherwise in bfloat16."
        )
    return f"{table(head, rows)}\n\n{note}"


def router(found: dict[str, Any]) -> str:
    speed, plain, beside = found["speed"], found["plain"], found["in_target_steps"]

    def steps(name: str) -> str:
        some, every = (beside[f"steps_per_prompt_{name}{kind}_mean"] for kind in ("", "_full_model"))
        return f"{some:.2f} ({every:.2f})"

    rows = [
        ["to its own domain", f"{plain['routed_right']:.1%}"],
        ["to the shared draft", f"{plain['routed_shared']:.1%}"],
        ["most likely domain right", f"{plain['best_domain_right']:.1%}"],
        ["told by n-grams alone, not embedded", f"{found['first_stage']['plain']['decided']:.0%}"],
        ["of these as the full model says", f"{found['first_stage']['plain']['agreement_of_decided']:.1%}"],
        ["a prompt alone, target steps (if embedded)", steps("alone")],
        ["a prompt among eight, target steps (if all are embedded)", steps("batch_8")],
        ["refit after one more domain, s", f"{speed['fit_seconds_one_domain_added']:.1f}"],
    ]
    return table(["unseen real prompts", ""], rows)


EXAMPLES = {"random": "drawn from all", "first": "of few origins", "one_wording": "of one wording"}


def refusals(found: dict[str, Any]) -> str:
    """Of unseen prompts, as they are and reworded, how many the router sends where they belong."""
    rows = []
    for key, name in EXAMPLES.items():
        sets = found["refusals"][key]
        for kind, counts in sets.items():
            if isinstance(counts, dict) and "right" in counts:
                rows.append([name, kind, *(str(counts[column]) for column in REFUSAL_COLUMNS)])
        rows.append([name, "their domain not registered", *[""] * 3, f"{sets['strangers_refused']:.0%}", ""])
    total = found["refusals"]["random"]["as is"]["prompts"]
    head = ["examples", f"{total} prompts", "right", "wrong", "likeliest right", "refused", "of these right"]
    return table(head, rows)


REFUSAL_COLUMNS = ("right", "wrong", "best_domain_right", "refused", "refused_though_right")


def serving(found: dict[str, Any]) -> str:
    rows = []
    for load, systems in found["loads"].items():
        for name, one in systems.items():
            first, gap = one["ttft_ms"], one["gap_ms"]
            rows.append(
                [
                    load,
                    name,
                    f"{one['tokens_per_second']:.0f}",
                    f"{one['ratio']:.2f}",
                    f"{first['p50']:.0f} / {first['p99']:.0f}",
                    f"{gap['p50']:.0f} / {gap['p99']:.0f}",
                    str(one["failed"]),
                ]
            )
    head = [
        "load",
        "system",
        "tokens/s",
        "× plain",
        "first token, ms p50 / p99",
        "gap, ms p50 / p99",
        "failed",
    ]
    settings = found["settings"]
    note = (
        f"{settings['requests']} requests of {settings['max_tokens']} tokens a load, "
        f"{settings['rounds']} rounds ({settings['open_rounds']} of the open loops), "
        f"{settings['streams']} slots; open loops at {settings['load']:.0%} of what plain decoding takes."
    )
    return f"{table(head, rows)}\n\n{note}"


TIMES = {"gap": "gap between pieces", "per_token": "per token", "ttft": "first token"}

# A load with fewer rounds is left out, since its 99th percentile would be noise. A run that measures open
# loops also holds a few rounds of closed ones, which only tell it how fast to send.
FEWEST = 5


def learning_cost(found: dict[str, Any]) -> str:
    def ratio(system: dict[str, Any], what: str) -> str:
        one = system["p99_against_first"][what]
        return f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"

    rows = []
    for load, systems in found["loads"].items():
        with_it, control = systems["experts + learning"], systems["nothing kept again"]
        if len(with_it["rounds"]) < FEWEST:
            continue
        for what, name in TIMES.items():
            before, after = with_it["p99_against_first"][what]["base_ms"], with_it[f"{what}_ms"]["p99"]
            rows.append(
                [load, name, f"{before:.0f} → {after:.0f}", ratio(with_it, what), ratio(control, what)]
            )
        rate = with_it["tokens_per_second"]
        before = f"{rate / with_it['ratio']:.0f} → {rate:.0f}"
        rows.append([load, "tokens/s", before, f"{with_it['ratio']:.2f}", f"{control['ratio']:.2f}"])
    most = max(len(systems["experts + learning"]["rounds"]) for systems in found["loads"].values())
    settings, updates = found["settings"], sum(one["updates"] for one in found["learned"])
    note = (
        "p99 in ms (tokens/s: median of the rounds) where nothing is kept and learning is paused → with "
        "learning, which every load finds in the middle of an update; ratios with their 95% intervals. The "
        "same servers throughout; control: one half of the loads without learning against the other. "
        f"{most} rounds of {settings['requests']} requests (open loops at {settings['load']:.0%} of "
        f"capacity), {settings['instances']} servers, all in turns; {updates} updates meanwhile."
    )
    head = ["load", "", "without → with", "with learning", "control"]
    return f"{table(head, rows)}\n\n{note}"


def faults(found: dict[str, Any]) -> str:
    """Each fault of the campaign, what must hold, how often it was tried, and what was found."""
    rows = []
    for part, row in [(one, row) for one in found["parts"].values() for row in one["rows"]]:
        kept = "kept" if row["kept"] else "**not kept**: " + "; ".join(row["broken"])
        figures = f": {row['figures']}" if row["figures"] else ""
        cases = f"{row['cases']:,}" + (" (quick)" if part["quick"] else "")
        rows.append([row["fault"], row["must"], cases, kept + figures])
    days = sorted({part["date"] for part in found["parts"].values()})
    when = "; ".join(
        f"{day}: {', '.join(n for n, p in found['parts'].items() if p['date'] == day)}" for day in days
    )
    note = f"Run on {found['cores']} cores that other work used too, part by part ({when})."
    return f"{table(['fault', 'must hold', 'cases', 'found'], rows)}\n\n{note}"


SUMMARY = ("smollm2/experts.json", expert_tables.summary)  # the README's one table


def verification(data: Any) -> str:
    """Tokens per step by rule, and how likely the first drafted token is kept, with 95 % intervals."""
    lengths = [case["num_speculative_tokens"] for case in data["cases"]]
    found: dict[str, list[list[float]]] = {}
    for case in data["cases"]:
        for rule, values in case["tokens_per_step"].items():
            found.setdefault(f"tokens per step, {rule}", []).append(values)
        found.setdefault("block more than chain in whole answers", []).append(case["tokens_per_step_gain"])
        found.setdefault("block more than chain on the same drafts", []).append(case["kept_gain"])
        for rule, values in case["first_position_accepted"].items():
            found.setdefault(f"first position keeps a token, {rule}", []).append(values)
    rows = [
        [name, *(f"{mean:.2f} ({low:.2f}–{high:.2f})" for mean, low, high in values)]
        for name, values in found.items()
    ]
    seeds = "1 seed" if data["seeds"] == 1 else f"{data['seeds']} seeds"
    note = f"{data['prompts']} prompts, {seeds} each, {data['tokens']} tokens, temperature 1."
    return table(["", *[f"{length} drafted" for length in lengths]], rows) + f"\n\n{note}"


def linear(found: dict[str, Any]) -> str:
    """Memory and time of the output layer with its loss, by what learns; what is calculated beside it."""
    rows = []
    for learns, ways in found["measured"].items():
        shown = [f"{one['peak_mib']:,.0f} MiB, {one['seconds']:.2f} s" for one in ways.values()]
        calculated = f"{found['calculated_mib'][learns]:,.0f} MiB"
        rows.append(
            [learns, *shown, calculated, f"{found['large']['calculated_mib'][learns] / 1024:.2f} GiB"]
        )
    large = found["large"]
    ways = list(next(iter(found["measured"].values())))
    head = ["what learns", *ways, "calculated", "calculated, large, on a GPU"]
    note = (
        f"Measured on a CPU with {found['threads']} thread(s), float32: {found['rows']:,} rows of width "
        f"{found['width']}, V = {found['vocab']:,}. Large: {large['rows']:,} rows of width "
        f"{large['width']:,}, V = {large['vocab']:,}, bfloat16; not measured."
    )
    return f"{table(head, rows)}\n\n{note}"


SOURCES = {
    "linear": ("linear_divergence.json", linear),
    "experts": ("smollm2/experts.json", expert_tables.by_domain),
    "answers": ("answers.json", answer_tables.answers),
    "serving": ("serve.json", serving),
    "learning_cost": ("serve_learning.json", learning_cost),
    "learning_cost_closed": ("serve_learning_closed.json", learning_cost),
    "bench": ("bench.json", bench),
    "bench_smollm2": ("smollm2/bench.json", bench),
    "router": ("router.json", router),
    "refusals": ("router.json", refusals),
    "bert_router": ("bert_router.json", selection_tables.routers),
    "selection": ("selection.json", selection_tables.selection),
    "selection_mini": ("selection_mini.json", selection_tables.selection),
    "streams": ("streams.json", selection_tables.streams),
    "streams_avx2": ("streams_avx2.json", selection_tables.streams),
    "made_good": ("streams.json", selection_tables.made_good),
    "mixtures": ("mixtures.json", expert_tables.mixtures),
    "strength": ("strength.json", expert_tables.strength),
    "records": ("records.json", expert_tables.records),
    "lists": ("lists.json", expert_tables.lists),
    "resampled": ("resampled.json", resampled_tables.resampled),
    "sampled": ("smollm2/sampled.json", sampled_tables.sampled),
    "sampled_beside": ("smollm2/sampled.json", sampled_tables.beside),
    "sampled_fkl": ("smollm2/sampled_fkl.json", sampled_tables.sampled),
    "sampled_fkl_beside": ("smollm2/sampled_fkl.json", sampled_tables.beside),
    "sampled_gate": ("smollm2/sampled_gate.json", sampled_tables.updates),
    "sampled_factors": ("smollm2/sampled_gate.json", sampled_tables.factors),
    "sampled_objectives": ("smollm2/sampled_objectives.json", sampled_tables.objectives),
    "objectives": ("smollm2/objectives.json", sampled_tables.over_all),
    "gate": ("gate.json", gate_tables.rules),
    "gate_agreement": ("gate.json", gate_tables.agreement),
    "corrected": ("corrected.json", selection_tables.won_back),
    "corrected_quarters": ("corrected.json", selection_tables.quarters),
    "own_tokens": ("smollm2/own_tokens.json", expert_tables.own_tokens),
    "mix": ("mix.json", selection_tables.mix),
    "mix_avx2": ("mix_avx2.json", selection_tables.mix),
    "draft_mix": ("draft_mix.json", selection_tables.draft_mix),
    "features": ("features.json", feature_tables.features),
    "step": ("step.json", step_tables.step),
    "step_avx2": ("step_avx2.json", step_tables.step),
    "peers": ("peers.json", step_tables.peers),
    "verification": ("verification.json", verification),
    "verification_smollm2": ("smollm2/verification.json", verification),
    "faults": ("faults.json", faults),
}


def models(folder: Path) -> str:
    """Size, training and held-out loss of the embedded pair, from the training.json beside the weights."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/training.json"))]
    if not found:
        return MISSING
    shape = "{layers} layers, width {hidden}, {heads} heads, MLP {ffn}"
    facts = {
        "parameters": [f"{one['parameters'] / 1e6:.2f} M" for one in found],
        "shape": [shape.format(**one["shape"]) for one in found],
        "documents seen": [f"{sum(one['documents'].values()):,}" for one in found],
        "tokens trained on": [f"{one['tokens'] / 1e6:.1f} M" for one in found],
        "minutes": [f"{one['minutes']:.0f} ({one['device']})" for one in found],
    }
    for domain in found[0]["held_out_loss"]:
        facts[f"loss, {domain}"] = [f"{one['held_out_loss'][domain]:.2f}" for one in found]
    return table(["", *[one["model"] for one in found]], [[name, *row] for name, row in facts.items()])


def filled(text: str, results: Path) -> str:
    """The document, with every table between its two markers replaced by one made from the results."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "models":
            body = models(ROOT / "data" / "models")
        elif match[1] == "aims":
            body = aims_table.aims(results) or MISSING
        elif match[1] == "kernels":
            body = kernel_tables.tables(results)
        elif match[1] == "kernel_facts":
            body = kernel_tables.facts()
        else:
            file, render = {**SOURCES, "summary": SUMMARY}[match[1]]
            path = results / file
            body = render(json.loads(path.read_text())) if path.exists() else MISSING
        return f"<!-- table:{match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table:(\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for name in DOCUMENTS:
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        new = filled(text, ROOT / "results")
        if args.check and new != text:
            raise SystemExit(f"The tables in {name} are out of date; run `python scripts/tables.py`.")
        document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
