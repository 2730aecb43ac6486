"""`moedraft serve` and `moedraft dashboard`."""

from __future__ import annotations

import gc
import webbrowser
from importlib.util import find_spec
from typing import Annotated

import typer

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    TargetOption,
    emit,
    note,
    say,
    settings_for,
)
from moedraft.cli.remote import Unreachable, running_url
from moedraft.core import InvalidRequest

Host = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Default 127.0.0.1; a public one needs a key.")
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Default 8000; 0 takes a free one.")]
Learning = Annotated[
    bool | None, typer.Option("--learning/--no-learning", help="Learn from the traffic, beside serving.")
]
Capture = Annotated[
    bool | None, typer.Option("--capture/--no-capture", help="Keep served requests to learn from.")
]
ShutdownTimeout = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="What running answers get at SIGTERM.")
]


def serve(
    ctx: typer.Context,
    host: Host = None,
    port: Port = None,
    learning: Learning = None,
    capture: Capture = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences decoded at once.")] = None,
    max_waiting: Annotated[int | None, typer.Option(min=0, help="The longest queue; then 429.")] = None,
    shutdown_timeout: ShutdownTimeout = None,
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Serve the OpenAI-compatible API and the dashboard; learn from the traffic meanwhile.

    All settings of the server can be set in the home's config.toml or as MOEDRAFT_<SETTING>.
    """
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise InvalidRequest("The server needs more packages: pip install 'moedraft[serve]'.")
    settings = settings_for(
        ctx,
        home=home,
        target=target,
        draft=draft,
        device=device,
        dtype=dtype,
        host=host,
        port=port,
        learning=learning,
        capture=capture,
        max_batch_size=max_batch_size,
        max_waiting=max_waiting,
        shutdown_timeout=shutdown_timeout,
    )
    note("Loading the models …")
    gc.disable()  # loading frees few of its half a million objects; `run` turns it on again
    from moedraft.serve.run import serve as run

    run(settings, lambda url: note(f"Serving at {url}; the dashboard is {url}/dashboard."))


def dashboard(
    ctx: typer.Context,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the dashboard of the home's server is."""
    settings = settings_for(ctx, home=home)
    url = running_url(settings.home)
    if url is None:
        raise Unreachable(f"No server runs on the home {settings.home}; start one with `moedraft serve`.")
    page = f"{url}/dashboard"
    emit({"url": page}) if as_json else say(page)
    if open_browser:
        webbrowser.open(page)
