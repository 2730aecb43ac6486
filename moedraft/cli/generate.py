"""`moedraft generate`: answers prompts and prints the answers in the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    RawOption,
    TargetOption,
    bar,
    busy,
    check_expert,
    emit,
    note,
    rate,
    reading,
    say_error,
    settings_for,
    write_text,
)
from moedraft.cli.files import PromptRow, check_prompt, check_text, read_prompts
from moedraft.config import Settings
from moedraft.core import InvalidRequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from moedraft.engine.engine import Engine
    from moedraft.system.build import System


PromptsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='Rows {"prompt", "domain"?, "max_tokens"?}; - is standard input.'),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends an answer; repeatable.")]
PinnedDomain = Annotated[
    str | None, typer.Option(metavar="NAME", help="This expert (or `shared`) instead of the router's.")
]


def generate(
    ctx: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...")] = None,
    prompts_file: PromptsFile = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 switches it off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Stop = None,
    domain: PinnedDomain = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding, for comparison.")] = False,
    learn: Annotated[bool, typer.Option("--learn/--no-learn", help="Learn from the answers.")] = False,
    raw: RawOption = False,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts: exactly what the target says, faster.

    A prompt is a user's message where the target has a chat template; --raw lets it be continued instead.
    """
    params = SamplingParams(temperature, top_k, top_p, max_tokens, tuple(stop or ()), seed)
    for text in params.stop:
        check_text(text, "a stop string")
    rows = [replace(row, domain=row.domain or domain) for row in _rows(prompts or [], prompts_file)]
    settings = settings_for(ctx, home=home, target=target, draft=draft, device=device, dtype=dtype)
    _check_domains(settings, rows)
    system = _loaded(settings, 0 if no_draft else len(rows), keeps=learn)
    try:
        failed = _run(system, rows, params, draft=not no_draft, learn=learn, chat=not raw, as_json=as_json)
    finally:
        system.close()
    if failed:
        say_error(f"the model gave no usable probabilities for {failed} of {len(rows)} prompts.")
        raise typer.Exit(1)


def _loaded(settings: Settings, drafted: int, *, keeps: bool) -> System:
    """Load the system; with prompts to draft for, time rounds of so many; with more than a few, forwards."""
    with busy("Loading the models"):
        from moedraft.engine.calibration import calibrate
        from moedraft.system.build import build

        system = build(settings, keeps=keeps)
        try:
            if drafted:
                calibrate(system.engine, {min(drafted, settings.max_batch_size)}, forwards=drafted > 8)
        except BaseException:
            system.close()
            raise
        return system


def _rows(prompts: list[str], file: Path | None) -> list[PromptRow]:
    if bool(prompts) == (file is not None):
        raise InvalidRequest("Give either prompts or --prompts-file.")
    if file is not None:
        return read_prompts(file)
    where = "prompt {}" if len(prompts) > 1 else ""
    rows = [PromptRow(prompt, where=where.format(number)) for number, prompt in enumerate(prompts, 1)]
    for row in rows:
        check_prompt(row.prompt, row.where or "the prompt")
    return rows


def _check_domains(settings: Settings, rows: list[PromptRow]) -> None:
    with reading(settings) as store:
        for row in rows:
            try:
                check_expert(store, row.domain) if row.domain is not None else None
            except InvalidRequest as error:
                raise row.complaint(error) from error


def _run(
    system: System,
    rows: list[PromptRow],
    params: SamplingParams,
    *,
    draft: bool,
    learn: bool,
    chat: bool,
    as_json: bool,
) -> int:
    """Answer all rows; returns how many of them failed."""
    ids = [_add(system.engine, row, params, draft=draft, capture=learn, chat=chat) for row in rows]
    between = _learner(system) if learn else lambda: None
    failed = 0
    with bar("Answering", len(rows), shown=_wants_bar(as_json, len(rows))) as advance:
        done = 0

        def on_finish() -> None:
            nonlocal done
            done += 1
            advance(done)
            between()

        for answer in in_order(system.engine, ids, on_finish):
            failed += _show_json(answer) if as_json else _show_text(answer)
    return failed


def _wants_bar(as_json: bool, count: int) -> bool:
    return as_json and count > 1 and not sys.stdout.isatty()


def _add(engine: Engine, row: PromptRow, params: SamplingParams, **options: Any) -> str:
    try:
        own = replace(params, max_tokens=row.max_tokens or params.max_tokens)
        return engine.add(row.prompt, own, expert=row.domain, **options)
    except InvalidRequest as error:
        raise row.complaint(error) from error


def _learner(system: System) -> Callable[[], None]:
    """A function to call after each answer: it trains an adapter that is due, and loads the new version."""
    with busy("Loading the draft base"):
        from moedraft.distill.assembly import build_loop

        loop = build_loop(system.settings, system.store)

    def learn() -> None:
        update = loop.run_once()
        if update is not None:
            system.refresh()
            made = update.summary
            gain = f"{rate(made.acceptance_before)} → {rate(made.acceptance_after)}"
            note(f"{update.expert} learned: version {update.version.version}, held-out acceptance {gain}")

    return learn


def in_order(
    engine: Engine, ids: list[str], on_finish: Callable[[], None]
) -> Iterator[Iterator[RequestOutput]]:
    """For each request, in order, an iterator over its outputs as they grow.

    The last output is finished. Each iterator must be used up before the next one is taken.
    """
    latest: dict[str, RequestOutput] = {}

    def outputs(request_id: str) -> Iterator[RequestOutput]:
        while True:
            output = latest.get(request_id)
            if output is not None:
                yield output
                if output.finish_reason:
                    del latest[request_id]
                    return
            for new in engine.step():
                latest[new.request_id] = new
                if new.finish_reason:
                    on_finish()

    for request_id in ids:
        yield outputs(request_id)


def _show_json(answer: Iterator[RequestOutput]) -> bool:
    *_, last = answer
    emit(output_data(last))
    return last.finish_reason == "error"


def _show_text(answer: Iterator[RequestOutput]) -> bool:
    shown = 0
    for output in answer:
        write_text(output.text[shown:])
        shown = len(output.text)
    write_text("\n")
    note(summary(output))
    return output.finish_reason == "error"


def summary(output: RequestOutput) -> str:
    """One line about an answer: `sql v3 · 0.812 accepted · 3.40 tokens a check · 48 tokens, 215 a second`."""
    parts = [f"{output.expert} v{output.adapter_version}"]
    if output.speculation.mean_acceptance_length is not None:
        parts.append(f"{rate(output.speculation.draft_acceptance_rate)} accepted")
        parts.append(f"{output.speculation.mean_acceptance_length:.2f} tokens a check")
    if found := output.speculation.num_accepted_lookup_tokens:
        earlier = output.speculation.num_accepted_earlier_tokens
        parts.append(f"{found} looked up" + (f", {earlier} of them in earlier answers" if earlier else ""))
    parts.append(f"{len(output.token_ids)} tokens, {output.tokens_per_second:.0f} a second")
    return " · ".join(parts)


def output_data(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "expert": output.expert,
        "adapter_version": output.adapter_version,
        "draft_acceptance_rate": output.speculation.draft_acceptance_rate,
        "mean_acceptance_length": output.speculation.mean_acceptance_length,
        "num_drafts": output.speculation.num_drafts,
        "num_draft_tokens": output.speculation.num_draft_tokens,
        "num_accepted_tokens": output.speculation.num_accepted_tokens,
        "num_lookup_tokens": output.speculation.num_lookup_tokens,
        "num_accepted_lookup_tokens": output.speculation.num_accepted_lookup_tokens,
        "num_earlier_tokens": output.speculation.num_earlier_tokens,
        "num_accepted_earlier_tokens": output.speculation.num_accepted_earlier_tokens,
        "num_steps": output.speculation.num_steps,
        "tokens_per_step": output.tokens_per_step,
        "tokens_per_second": output.tokens_per_second,
    }
