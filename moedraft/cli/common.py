"""What all commands share: their common options, how they print, how they open the home.

Data goes to stdout and everything else to stderr. With `--json`, stdout carries JSON lines and nothing else.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moedraft.core import DOMAIN_NAME, SHARED, Domain, InvalidRequest, StorageError

if TYPE_CHECKING:
    from moedraft.config import Settings
    from moedraft.storage.store import Store

# What a terminal would obey rather than show: control characters other than tab and line feed, and those that
# turn the direction of writing. Texts of requests and files may hold them.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PANEL = "Where and with what"
HomeOption = Annotated[  # a text, since `Path("")` is the folder one stands in
    str | None,
    typer.Option("--home", metavar="DIR", rich_help_panel=PANEL, help="State folder, or MOEDRAFT_HOME."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel=PANEL,
        help="Target: `mini`, `smollm2`, a local folder, a GGUF file or a hub id.",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="MODEL", rich_help_panel=PANEL, help="Draft base, named like the target."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", rich_help_panel=PANEL, help="`auto`, `cpu`, `cuda`, `cuda:1` …"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", rich_help_panel=PANEL, help="`auto`, `float32`, `bfloat16` or `float16`."),
]
# is called with how many are done and, optionally, what is being done and how many there are
Advance = Callable[..., None]
RawOption = Annotated[
    bool,
    typer.Option("--raw", help="Prompts as they are, not through the chat template that the target has."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]

err = Console(stderr=True, highlight=False)


def remember(ctx: typer.Context, **options: object) -> None:
    """Remember the options that were given before the name of the subcommand."""
    ctx.obj = {name: value for name, value in options.items() if value is not None}


def settings_for(ctx: typer.Context, **options: object) -> Settings:
    """The settings, with the options of the command line. Options after the subcommand have priority."""
    from moedraft.config import load_settings

    given = {name: value for name, value in options.items() if value is not None}
    return load_settings(**{**(ctx.obj or {}), **given})


def is_missing(settings: Settings) -> bool:
    """Whether there is no home yet. A file at its path does not count as missing; opening it is an error."""
    from moedraft.storage.db import DATABASE

    return not settings.home.exists() or (settings.home.is_dir() and not (settings.home / DATABASE).exists())


@contextmanager
def reading(settings: Settings) -> Iterator[Store | None]:
    """The home, opened read-only while others may write to it; None if there is none yet."""
    if is_missing(settings):
        yield None
        return
    with _opened(settings, write=False) as store:
        yield store


@contextmanager
def writing(settings: Settings, *, create: bool = False) -> Iterator[Store]:
    """The home, opened with its write lock. Without `create`, a missing home is an error."""
    if not create and is_missing(settings):
        raise StorageError(f"There is no moedraft home at {settings.home}; register a domain to make one.")
    with _opened(settings, write=True) as store:
        yield store


@contextmanager
def _opened(settings: Settings, *, write: bool) -> Iterator[Store]:
    from moedraft.config import check_home
    from moedraft.storage.store import Store

    check_home(settings.home)
    store = Store.open(
        settings.home,
        write=write,
        replay_capacity=settings.replay_capacity,
        replay_policy=settings.replay_policy,
        states_bytes=settings.states_bytes,
    )
    try:
        yield store
    finally:
        store.close()


def check_expert(store: Store | None, name: str) -> str:
    """`name` itself if it is `shared` or a registered domain. Otherwise raises InvalidRequest."""
    if name != SHARED:
        find_domain(store, name)
    return name


def find_domain(store: Store | None, name: str) -> Domain:
    """The registered domain `name`. Raises InvalidRequest if there is none, or no home yet."""
    if store is None or not DOMAIN_NAME.fullmatch(name):
        raise InvalidRequest(
            f"There is no domain named '{name}'; `moedraft domain list` shows those there are."
        )
    return store.registry.domain(name)


def say_error(sentence: str) -> None:
    """Print an error as one line on stderr, even if the text holds line breaks or odd characters."""
    line = " ".join(sentence.split()).encode("utf-8", "backslashreplace").decode()
    print("Error:", visible(line), file=sys.stderr)


def note(text: str) -> None:
    """Print a dim remark on stderr."""
    err.print(Text(visible(text), style="dim"), soft_wrap=True)


def note_missing(settings: Settings) -> None:
    note(f"There is no home at {settings.home} yet.")


def note_left(done: dict[str, Any]) -> None:
    """Say what a deletion did not reach yet: `moedraft.storage.changes.left_of_deleted`."""
    if not done["overwritten"]:
        note("Something reads the home; the bytes are overwritten when it has ended and the home is written.")
    if not done["router"]:
        note("The router has learned from deleted prompts; the next start fits it without them.")
    if done["copies"]:
        names = ", ".join(done["copies"])
        note(f"Copies from before an upgrade may still hold records; delete them in the home: {names}.")


def emit(data: dict[str, Any]) -> None:
    """Print one JSON object as one line on stdout, without buffering."""
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(visible(json.dumps(_finite(data), ensure_ascii=plain, allow_nan=False)), flush=True)


def say(text: str) -> None:
    """Print a line of text on stdout. Control characters, and what its encoding lacks, become escapes."""
    write_text(f"{visible(text)}\n")


def visible(text: str) -> str:
    """`text` with its control characters as escapes (`\\u001b`), which are the same in JSON."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_text(text: str) -> None:
    """Write `text` to stdout as it is; to a terminal, with its control characters as escapes."""
    if sys.stdout.isatty():
        text = visible(text)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout. In a pipe it is wide, so that rows are not wrapped."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(visible(str(cell))) for cell in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def shorten(text: str, width: int = 48) -> str:
    """The text on one line, with `…` in place of what goes beyond `width` letters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def serving_of(expert: Mapping[str, Any]) -> str:
    """What drafts for an expert that the inventory or a server, which may be older, describes."""
    from moedraft.insight.views import serving

    unadapted, pinned = bool(expert.get("unadapted")), bool(expert.get("pinned"))
    return serving(expert["version"], unadapted=unadapted, pinned=pinned)


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def moment(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def busy(text: str) -> AbstractContextManager[object]:
    """A spinner on stderr, if that is a terminal."""
    return err.status(f"{text} …")


@contextmanager
def bar(text: str, total: int | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr, if that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not (shown and err.is_terminal)
    with Progress(*columns, console=err, transient=True, disable=hidden, redirect_stdout=False) as progress:
        task = progress.add_task(text, total=total)

        def advance(done: int, what: object = None, of: int | None = None) -> None:
            described = what if isinstance(what, str) else None  # a trainer's callback passes its loss here
            progress.update(task, completed=done, total=of, description=described)

        yield advance


def _finite(value: Any) -> Any:
    """The same data with null for numbers that JSON lacks, such as NaN."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
