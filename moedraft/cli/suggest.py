"""`moedraft domain suggest` and `domain list --overlap`: what to register next, and what to merge."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from moedraft.cli.common import (
    DraftOption,
    HomeOption,
    JsonOption,
    TargetOption,
    busy,
    emit,
    note,
    note_missing,
    print_table,
    rate,
    reading,
    say,
    settings_for,
)
from moedraft.cli.remote import Remote, ServerOption, owner_of
from moedraft.cli.replay import private
from moedraft.config import NO_TEXT, Settings
from moedraft.core import InvalidRequest

NOTHING: dict[str, Any] = {"looked_at": 0, "unknown_share": None, "capture": True, "suggestions": []}


def suggest(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the prompts of each group into a file there.")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Fit an expert to each group for a while, and tell its gain.")
    ] = False,
    home: HomeOption = None,
    server: ServerOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show groups of prompts that no expert serves, each with the command that makes it a domain."""
    settings = settings_for(ctx, home=home, target=target, draft=draft)
    if trial and server is not None:
        raise InvalidRequest("--trial learns from the records of this machine's home; leave out --server.")
    with busy("Trying an expert for each group" if trial else "Comparing prompts"):
        remote = None if trial else owner_of(settings, server)  # a trial only reads, beside any server
        found = _found(settings, remote, every_prompt=out is not None, trial=trial)
    refused: InvalidRequest | None = None
    if out is not None:
        try:
            _write(out, found)
        except InvalidRequest as error:
            refused = error  # what was found took long, so it is shown all the same
    for one in found["suggestions"]:
        one.pop("prompts", None)
    if as_json:
        emit(found)
    else:
        _show(found, written=out is not None and refused is None, tried=trial)
    if refused is not None:
        raise refused


def _found(settings: Settings, remote: Remote | None, *, every_prompt: bool, trial: bool) -> dict[str, Any]:
    if remote is not None:
        return remote.get("admin", "suggestions", prompts="true" if every_prompt else None)
    with reading(settings) as store:
        if store is None:
            note_missing(settings)
            return dict(NOTHING)
        from moedraft.models import load_tokenizer
        from moedraft.storage.last_target import check_tokenizer
        from moedraft.system.build import open_router
        from moedraft.system.domains.suggest import suggest, suggestions_data

        tokenizer = load_tokenizer(settings)
        check_tokenizer(store.registry, tokenizer)
        router = open_router(settings, store)
        trials = None
        if trial:
            from moedraft.distill.assembly import joint_trainer
            from moedraft.distill.judging.trial import ExpertTrials, TrialTrainer

            trainer = joint_trainer(settings, store, TrialTrainer)
            trials = ExpertTrials(trainer, max(1, settings.num_speculative_tokens))
        groups = suggest(store, router, tokenizer, capture=settings.capture, trials=trials)
        return suggestions_data(groups, texts=settings.capture, every_prompt=every_prompt)


def _write(folder: Path, found: dict[str, Any]) -> None:
    """Write one new file for each group, with one prompt a line. The commands then name these files."""
    from moedraft.storage.registry import check_domain_name  # only here: `--help` loads no database

    if not found["capture"]:
        raise InvalidRequest(NO_TEXT)
    for one in found["suggestions"]:
        check_domain_name(one["name"])  # it may come from another machine, and becomes a file's name
    files = {one["name"]: folder / f"{one['name']}.jsonl" for one in found["suggestions"]}
    for path in files.values():
        if path.exists():
            raise InvalidRequest(f"{path} exists already; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for one in found["suggestions"]:
        path = files[one["name"]]
        with open(path, "x", encoding="utf-8", opener=private) as file:
            file.writelines(
                json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in one["prompts"]
            )
        one["command"] = f"moedraft domain register {one['name']} --examples {quote(str(path))}"


def _show(found: dict[str, Any], *, written: bool, tried: bool) -> None:
    groups = found["suggestions"]
    if not groups:
        say(f"No group of prompts is large enough; {found['looked_at']} prompts without an expert were read.")
        return
    rows = [
        (
            *(one["name"], one["size"], rate(one["share"]), rate(one["acceptance"])),
            *((_gain(one["trial"]),) if tried else ()),
            _line(one["examples"]),
        )
        for one in groups
    ]
    title = f"What could be a domain, of the last {found['looked_at']} prompts without an expert"
    columns = ["name", "prompts", "share of traffic", "accepted now"]
    print_table(title, [*columns, *(["tokens per step"] if tried else []), "example"], rows)
    for one in groups:
        if one["command"]:
            say(one["command"])
    if not found["capture"]:
        note(NO_TEXT)
    elif not written:
        note("--out FOLDER writes the files that these commands name.")


def _gain(trial: dict[str, Any] | None) -> str:
    """Tokens per target step now and with the trial expert, and the interval of the gain."""
    if trial is None:
        return "not tried"
    gain = f"{trial['low']:+.2f} to {trial['high']:+.2f}"
    return f"{trial['before']:.2f} → {trial['after']:.2f} ({gain})"


def _line(examples: list[str], width: int = 60) -> str:
    text = " ".join(examples[0].split()) if examples else ""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def show_overlaps(settings: Settings, remote: Remote | None, as_json: bool) -> None:
    """Print the pairs of registered domains that overlap, and which to merge."""
    with busy("Comparing examples"):
        pairs = _overlaps(settings, remote)
    if as_json:
        emit({"overlaps": pairs})
        return
    if not pairs:
        say("No two domains overlap.")
        return
    rows = [
        (
            *(one["first"], one["second"], rate(one["first_in_second"]), rate(one["second_in_first"])),
            *(one["duplicates"], "merge them" if one["should_merge"] else ""),
        )
        for one in pairs
    ]
    columns = ["domain", "and", "of the first in the second", "of the second in the first", "the same", ""]
    print_table("Overlaps", columns, rows)
    if any(one["should_merge"] for one in pairs):
        note("To merge two, register one with the examples of both; then remove both and what they learned.")


def _overlaps(settings: Settings, remote: Remote | None) -> list[dict[str, Any]]:
    if remote is not None:
        found: list[dict[str, Any]] = remote.get("admin", "overlaps")["overlaps"]
        return found
    with reading(settings) as store:
        if store is None:
            note_missing(settings)
            return []
        from moedraft.system.build import open_router
        from moedraft.system.domains.suggest import overlaps_data

        return overlaps_data(store, open_router(settings, store))
