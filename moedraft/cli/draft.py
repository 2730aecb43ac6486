"""`moedraft draft`: draft bases. `train` makes a feature drafter for a target, from prompts alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moedraft.cli.common import (
    DeviceOption,
    DtypeOption,
    HomeOption,
    JsonOption,
    TargetOption,
    bar,
    busy,
    emit,
    say,
    settings_for,
)
from moedraft.cli.files import read_pairs
from moedraft.core import InvalidRequest

if TYPE_CHECKING:
    from moedraft.feature.corpus import TrainingText
    from moedraft.feature.session import Report
    from moedraft.models import LanguageModel

app = typer.Typer(name="draft", help="Draft bases: train one for a target.", no_args_is_help=True)

TRAINED = "draft-base"  # folder of the home in which a target's own drafter is looked for
LONGEST = 256  # tokens of a prompt with its answer that are read
PromptFiles = Annotated[
    list[Path],
    typer.Option(metavar="FILE", help='JSON lines of {"prompt": …}; may be given more than once.'),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to; by default in the home, where it is found.")
]
TextsOption = Annotated[
    bool, typer.Option("--texts", help='Rows have a "reference", which is read in place of an answer.')
]
LayersOption = Annotated[
    str | None, typer.Option(metavar="I,J,K", help="Target layers to read; default 2, L/2, L−3.")
]
RowsOption = Annotated[
    bool, typer.Option("--rows/--no-rows", help="Store output rows too, which other engines want.")
]


@app.callback()
def draft() -> None:
    """Draft bases: train one for a target."""


@app.command()
def train(
    ctx: typer.Context,
    prompts: PromptFiles,
    minutes: Annotated[float, typer.Option(help="Time to train, once the target has answered.")] = 60,
    out: OutOption = None,
    texts: TextsOption = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens that the target answers.")] = 96,
    vocabulary: Annotated[int, typer.Option(min=16, help="Tokens that can be drafted.")] = 12_288,
    layers: LayersOption = None,
    rows: RowsOption = True,
    home: HomeOption = None,
    target: TargetOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a feature drafter for the target. Run again, it goes on where it stopped.

    The target answers the prompts, then a single layer learns to guess its next tokens from what it computes
    anyway. The drafter is written in the EAGLE-3 format of speculators, which other engines read too. These
    look for the target under the name or folder that was given here.
    """
    settings = settings_for(ctx, home=home, target=target, device=device, dtype=dtype)
    chosen = layer_ids(layers)
    if not 0 < minutes < float("inf"):
        raise InvalidRequest(f"--minutes must be above 0, not {minutes:g}.")
    pairs = [pair for file in prompts for pair in read_pairs(file, with_answers=texts)]
    out = (out or settings.home / TRAINED).expanduser().resolve()
    with busy("Loading the target"):
        from moedraft.cpu.threads import set_threads
        from moedraft.feature.session import check_texts, chosen_layers
        from moedraft.models import load_by

        check_texts(len(pairs))
        check_out(out)
        model = load_by(settings, "target")
        set_threads(settings.threads, model)
    chosen = chosen_layers(chosen, model.num_layers)  # before the target answers, which takes long
    found = answers(model, pairs, out, max_tokens, vocabulary)
    report = learn(model, found, out, minutes, vocabulary, chosen, rows)
    show(report, out, as_json)


def check_out(out: Path) -> None:
    """Raise InvalidRequest where the training could not write, or would replace anything but a drafter."""
    from moedraft.drafting.base import is_feature_checkpoint
    from moedraft.feature.checkpoint import FILES
    from moedraft.feature.session import work_folder
    from moedraft.folders import check_replaceable

    check_replaceable(out, FILES)
    if out.exists() and any(out.iterdir()) and not is_feature_checkpoint(out):
        raise InvalidRequest(f"{out} holds something that is no drafter, which is left alone; name another.")
    if work_folder(out).exists() and not work_folder(out).is_dir():
        raise InvalidRequest(f"{work_folder(out)} is a file; the training keeps its state in such a folder.")


def layer_ids(text: str | None) -> tuple[int, ...]:
    """`2,15,27` → numbers. Raises InvalidRequest."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise InvalidRequest(f"--layers takes numbers such as 2,15,27, not {text!r}.") from error


def answers(
    model: LanguageModel, pairs: list[tuple[str, str | None]], out: Path, max_tokens: int, vocabulary: int
) -> list[TrainingText]:
    from moedraft.feature.session import collect, work_folder

    with bar("The target answers", len(pairs)) as advance:
        done = 0

        def progress(more: int, what: str) -> None:
            nonlocal done
            done += more
            advance(done)

        return collect(model, pairs, work_folder(out), max_tokens, LONGEST, progress, vocabulary)


def learn(
    model: LanguageModel,
    texts: list[TrainingText],
    out: Path,
    minutes: float,
    vocabulary: int,
    layers: tuple[int, ...],
    rows: bool,
) -> Report:
    from moedraft.feature.session import Session

    session = Session(model, texts, out, size=vocabulary, layers=layers)
    with bar("Training the drafter", int(minutes * 60)) as advance:
        done = 0

        def progress(more: int, what: str) -> None:
            nonlocal done
            done += more
            advance(done, what or None)

        session.run(minutes * 60, progress)
    with busy("Measuring"):
        return session.finish(rows=rows)


def show(report: Report, out: Path, as_json: bool) -> None:
    if as_json:
        emit({"folder": str(out), **vars(report)})
        return
    depths = ", ".join(f"{value:.2f}" for value in report.acceptance)
    say(f"{out}: {report.steps} steps, {report.tokens} tokens, {report.seconds:.0f} s.")
    say(f"Guessed right on held-out answers, by depth, each given the ones before: {depths}.")
