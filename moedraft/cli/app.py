"""The tree of commands. It imports nothing slow, so that `moedraft --help` answers at once."""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated

import typer

from moedraft.cli.adapter import app as adapter_app
from moedraft.cli.backup import backup, restore
from moedraft.cli.common import DeviceOption, DraftOption, DtypeOption, HomeOption, TargetOption, remember
from moedraft.cli.distill import distill
from moedraft.cli.doctor import doctor
from moedraft.cli.domain import app as domain_app
from moedraft.cli.draft import app as draft_app
from moedraft.cli.generate import generate
from moedraft.cli.key import app as key_app
from moedraft.cli.learning import app as learning_app
from moedraft.cli.replay import app as replay_app
from moedraft.cli.route import route
from moedraft.cli.serve import dashboard, serve
from moedraft.cli.stats import stats

app = typer.Typer(
    name="moedraft",
    help="Adaptive speculative decoding: draft experts that learn from the traffic they serve.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moedraft {metadata.version('moedraft')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Adaptive speculative decoding: draft experts that learn from the traffic they serve."""
    remember(ctx, home=home, target=target, draft=draft, device=device, dtype=dtype)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.add_typer(domain_app, name="domain")
app.add_typer(adapter_app, name="adapter")
app.add_typer(draft_app, name="draft")
app.add_typer(replay_app, name="replay")
app.add_typer(learning_app, name="learning")
app.add_typer(key_app, name="key")
for _command in (serve, dashboard, route, generate, distill, stats, doctor, backup, restore):
    app.command()(_command)
for _name in ("demo", "bench"):
    if find_spec(f"moedraft.cli.{_name}") is not None:
        app.command(_name)(getattr(import_module(f"moedraft.cli.{_name}"), _name))
