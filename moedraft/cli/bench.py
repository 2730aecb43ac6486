"""`moedraft bench`: compares tokens per second with transformers, on the same prompts and in one run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    TargetOption,
    bar,
    emit,
    note,
    settings_for,
)
from moedraft.cli.files import PromptRow, check_writable, read_prompts

if TYPE_CHECKING:
    from moedraft.showcase.shipped import Query

PromptsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="As of `generate`; default: shipped ones for the home.")
]


def bench(
    ctx: typer.Context,
    prompts_file: PromptsFile = None,
    limit: Annotated[int, typer.Option(min=1, help="Use that many prompts at most.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers; 0 is greedy.")] = 0.0,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another draft base, compared without experts.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON there too.")] = None,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare at batch 1: transformers, assisted and with prompt lookup; ours plain, with a draft, with both.

    The experts are those of the home; after `moedraft demo` they have learned from its stream. --against adds
    a second draft base on the same target, of any kind. Drafts gain less in sampled answers (--temperature).
    """
    from moedraft.core import SamplingParams
    from moedraft.showcase.bench import run
    from moedraft.system.build import opened, with_other_draft

    SamplingParams(temperature=temperature)  # refused now, not after minutes
    given = read_prompts(prompts_file) if prompts_file else []
    settings = settings_for(ctx, home=home, target=target, draft=draft, device=device, dtype=dtype)
    if out:
        check_writable(out)
    with ExitStack() as stack:
        system = stack.enter_context(opened(settings, keeps=False))
        names = {name for name, _ in system.store.registry.domain_names()}
        queries = _queries(given[:: max(1, len(given) // limit)], names, max_tokens)[:limit]
        other = stack.enter_context(with_other_draft(system, against)) if against else None
        advance = stack.enter_context(bar("Measuring", rounds * len(queries)))
        found = run(system, queries, rounds, advance, other, temperature)
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit(found)
    else:
        _show(found, f"Batch 1, {len(queries)} prompts, {rounds} rounds, temperature {temperature:g}")


def _queries(given: list[PromptRow], domains: set[str], max_tokens: int) -> list[Query]:
    """What is given, or shipped held-out prompts of the home's domains (else of all), each domain in turn."""
    from moedraft.showcase import shipped

    if given:
        return [shipped.Query(row.prompt, row.domain or "", row.max_tokens or max_tokens) for row in given]
    held_out = (shipped.chosen() if "support" in domains else shipped.everything()).heldout
    known = [query for query in held_out if query.domain in domains] or held_out
    return [replace(query, max_tokens=max_tokens) for query in known]


def _show(found: dict[str, Any], title: str) -> None:
    """Print what was measured: one row for each system, then the times of the models' steps."""
    table = Table(title=title)
    greedy = not found["temperature"]  # sampled answers are not compared
    names = ["system", "tokens/s", "x transformers", "theory", "tokens per step"]
    for name in names + ["same answers"] * greedy:
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=name == "system")
    for name, one in found["systems"].items():
        theory = "" if one["theoretical_speedup"] is None else f"{one['theoretical_speedup']:.2f}"
        length = "" if one["tokens_per_step"] is None else f"{one['tokens_per_step']:.2f}"
        row = (f"{one['tokens_per_second']:.1f}", f"{one['ratio']:.2f}", theory, length)
        table.add_row(name, *row, *(["yes" if one["same_answers"] else "NO"] if greedy else []))
    Console(highlight=False).print(table)
    alike = found["answers_as_transformers"]
    if greedy and alike < found["prompts"]:
        note(
            f"Same answers: as each one's own plain decoding. Without drafts {alike} of {found['prompts']} "
            "answers are those of transformers too, which rounds otherwise in half precision."
        )
    steps = found["step_ms"]
    note(
        f"target step {steps['target_ms']:.2f} ms, draft step {steps['draft_ms']:.2f} ms "
        f"(c = {found['cost_ratio']:.3f}); deciding which guesses stay takes {found['verify_share']:.1%} "
        "of an engine step, the target's forward not counted."
    )
    if found["other_draft"]:
        ratio = steps["other_draft_ms"] / steps["target_ms"]
        note(f"other draft: {found['other_draft']}, step {steps['other_draft_ms']:.2f} ms (c = {ratio:.3f}).")
    if not found["adapted"]:
        note("No expert of this home has learned yet; `generate --learn` or `moedraft demo` does it.")
