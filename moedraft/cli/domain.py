"""`moedraft domain`: register, list, show and remove domains."""

from __future__ import annotations

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
    emit,
    find_domain,
    moment,
    note,
    note_left,
    note_missing,
    print_table,
    rate,
    reading,
    say,
    serving_of,
    settings_for,
    shorten,
    writing,
)
from moedraft.cli.files import check_text, read_examples
from moedraft.cli.remote import ServerOption, given_server, owner_of
from moedraft.cli.suggest import show_overlaps, suggest
from moedraft.config import Settings
from moedraft.core import InvalidRequest, MoedraftError

if TYPE_CHECKING:
    from moedraft.distill.warmstart import WarmStart

SERVER_LEARNS = "A server that runs learns by itself; leave out --warm-start, or stop it first."

app = typer.Typer(help="Domains: register, list, show, suggest, remove.")
app.command()(suggest)
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def register(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="1-64 of a-z, 0-9, '_' and '-'.")],
    examples: Annotated[
        Path,
        typer.Option(metavar="FILE", help='JSON lines with a "prompt" each, 8 or more; - is standard input.'),
    ],
    description: Annotated[str, typer.Option(help="What the domain is about.")] = "",
    warm_start: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Let the target answer N examples and learn from them now."),
    ] = None,
    raw: RawOption = False,
    home: HomeOption = None,
    server: ServerOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register a domain by example prompts, and fit the router to it."""
    settings = settings_for(ctx, home=home, target=target, draft=draft, device=device, dtype=dtype)
    prompts = read_examples(examples)
    check_text(description, "the description")
    from moedraft.system.domains.registering import check_description, check_examples

    check_description(description)
    check_examples(name, prompts)
    remote, warm = owner_of(settings, server), None
    if remote is not None:
        if warm_start is not None:
            raise InvalidRequest(SERVER_LEARNS)
        with busy("Fitting the router"):
            row = {"name": name, "examples": prompts, "description": description}
            data = remote.post("admin", "domains", data=row)
    elif warm_start is None:
        data = _register(settings, name, prompts, description)
    else:
        data, warm = _register_warm(settings, name, prompts, description, warm_start, chat=not raw)
    _show_registered(data, warm, as_json)


def _register(settings: Settings, name: str, prompts: list[str], description: str) -> dict[str, Any]:
    from moedraft.insight.inventory import summary
    from moedraft.system.build import open_router
    from moedraft.system.domains.registering import register_domain
    from moedraft.system.domains.suggest import coinciding

    with writing(settings, create=True) as store, busy("Fitting the router"):
        router = open_router(settings, store, fit=False)
        domain = register_domain(store, router, name, prompts, description)
        return {**summary(domain), "coincides_with": coinciding(store, router, name)}


def _register_warm(
    settings: Settings, name: str, prompts: list[str], description: str, count: int, *, chat: bool
) -> tuple[dict[str, Any], WarmStart]:
    with busy("Loading the models"):
        from moedraft.distill.assembly import build_loop
        from moedraft.distill.warmstart import warm_start
        from moedraft.insight.inventory import summary
        from moedraft.system.build import build
        from moedraft.system.domains.registering import register_domain

        system = build(settings.model_copy(update={"adaptive_budget": False}))
    try:
        with busy("Fitting the router"):
            domain = register_domain(system.store, system.router, name, prompts, description)
        try:
            loop = build_loop(settings, system.store)
            system.refresh()
            with bar("Warm start") as advance:
                warm = warm_start(system, loop, domain, count, chat=chat, on_progress=advance)
                return summary(domain), warm
        except MoedraftError as error:
            raise type(error)(f"Domain {name!r} is registered, but its warm start failed: {error}") from error
        except KeyboardInterrupt:
            note(f"Domain {name!r} is registered, but its warm start was interrupted.")
            raise
    finally:
        system.close()


def _show_registered(domain: dict[str, Any], warm: WarmStart | None, as_json: bool) -> None:
    if as_json:
        emit({**domain, "warm_start": _warm_data(warm) if warm else None})
        return
    say(f"Domain {domain['name']!r} is registered with {domain['examples']} examples.")
    if others := domain.get("coincides_with"):
        note(
            f"{' and '.join(others)} held nearly the same before; `moedraft domain list --overlap` shows it."
        )
    if warm:
        gain = f"{rate(warm.acceptance_before)} → {rate(warm.acceptance_after)}"
        say(
            f"Warm start: {warm.answered} examples answered, {len(warm.updates)} updates; "
            f"acceptance on {warm.held_out} held-out examples {gain}"
        )
        if warm.reason:
            say(f"No expert of its own serves it yet. {warm.reason}")


@app.command("list")
def list_(
    ctx: typer.Context,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Show which domains lie into one another, and which to merge.")
    ] = False,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the registered domains."""
    from moedraft.insight import inventory

    settings, remote = settings_for(ctx, home=home), given_server(server)
    if overlap:
        show_overlaps(settings, remote, as_json)
        return
    if remote is not None:
        found = remote.get("admin", "domains")["domains"]
    else:
        with reading(settings) as store:
            if store is None:
                note_missing(settings)
            found = inventory.domains(store) if store else []
    if as_json:
        emit({"domains": found})
        return
    keys = ("name", "description", "examples")
    covered = [rate((one.get("vocabulary") or {}).get("share")) for one in found]  # an older server has none
    rows = [
        (*(one[key] for key in keys), serving_of(one), one["replay_size"], guessed, moment(one["created_at"]))
        for one, guessed in zip(found, covered, strict=True)
    ]
    columns = ["name", "description", "examples", "serves", "replay", "on its list", "registered"]
    print_table("Domains", columns, rows)


@app.command()
def show(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a domain with its examples: the beginning of each, or with --json all of it."""
    from moedraft.insight import inventory

    settings, remote = settings_for(ctx, home=home), given_server(server)
    if remote is not None:
        found = remote.get("admin", "domains", name)
    else:
        with reading(settings) as store:
            find_domain(store, name)
            assert store is not None
            found = inventory.domain(store, name)
    if as_json:
        emit(found)
        return
    examples = found["examples"]
    say(f"{found['name']}: {found['description'] or 'no description'}")
    say(f"registered {moment(found['created_at'])}, version {found['version']}, {found['updates']} updates")
    if found.get("pinned"):  # an older server does not say
        say("It is pinned, so it gets no new version until `moedraft adapter unpin`.")
    if found["unadapted"]:
        say("The draft without any adapter serves it now: that does better, or nothing was learned yet.")
    if guessed := found.get("vocabulary"):
        basis = guessed.get("basis", f"{guessed['tokens']} tokens of its own")  # an older server does not say
        general = "" if guessed["shared"] is None else f" By the shared draft's: {rate(guessed['shared'])}."
        say(f"Of its answers {rate(guessed['share'])} is on its list: by {basis}.{general}")
    if count := found.get("examples_from_traffic"):  # an older server does not say
        say(f"The router is fitted on {count} prompts of the traffic as well.")
    print_table(f"{len(examples)} examples", ["prompt"], [[shorten(one, 120)] for one in examples])


@app.command()
def remove(
    ctx: typer.Context,
    name: NameArgument,
    home: HomeOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a domain: its examples, its replay and its adapters."""
    settings = settings_for(ctx, home=home)
    remote = owner_of(settings, server)
    done = remote.delete("admin", "domains", name) if remote is not None else _remove(settings, name)
    if as_json:
        emit(done)
        return
    say(f"Domain {name!r} is removed.")
    note_left(done)


def _remove(settings: Settings, name: str) -> dict[str, Any]:
    with writing(settings) as store:
        find_domain(store, name)
        from moedraft.system.build import open_router
        from moedraft.system.domains.registering import remove_domain

        with busy("Fitting the router"):
            left = remove_domain(store, open_router(settings, store, fit=False), name)
        return {"removed": name, **left}


def _warm_data(warm: WarmStart) -> dict[str, Any]:
    return {
        "answered": warm.answered,
        "held_out": warm.held_out,
        "updates": len(warm.updates),
        "version": warm.updates[-1].version.version if warm.updates else 0,
        "acceptance_before": warm.acceptance_before,
        "acceptance_after": warm.acceptance_after,
    }
