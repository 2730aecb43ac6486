"""`moedraft draft`: draft bases. `train` makes a feature drafter from prompts, `export` hands one on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moedraft.cli.common import (
    DeviceOption,
    DraftOption,
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
    from moedraft.feature.training.corpus import TrainingText
    from moedraft.feature.training.session import Report, Session
    from moedraft.models import LanguageModel

app = typer.Typer(name="draft", help="Draft bases: train one for a target, export one.", no_args_is_help=True)

TRAINED = "draft-base"  # folder of the home in which a target's own drafter is looked for
LONGEST = 256  # tokens of a prompt with its answer that are read
Loss = Literal["fkl", "rkl", "jsd", "tvd"]  # those of moedraft.kernels, which takes long to import
PromptFiles = Annotated[
    list[Path], typer.Option(metavar="FILE", help='JSON lines of {"prompt": …}; may be given more than once.')
]


@app.callback()
def draft() -> None:
    """Draft bases: train one for a target, export one."""


@app.command()
def train(
    ctx: typer.Context,
    prompts: PromptFiles,
    minutes: Annotated[float, typer.Option(help="Training, earlier runs included; answering is extra.")] = 60,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; by default in the home.")] = None,
    texts: Annotated[bool, typer.Option("--texts", help='Read "reference" where a row has one.')] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens that the target answers.")] = 96,
    vocabulary: Annotated[int, typer.Option(min=16, help="Tokens that can be drafted.")] = 12_288,
    layers: Annotated[str | None, typer.Option(metavar="I,J,K", help="Layers; default 2, L/2, L−3.")] = None,
    kind: Annotated[Loss, typer.Option(help="Lowers forward KL, reverse KL, JSD or TVD.")] = "fkl",
    rows: Annotated[bool, typer.Option(help="Store output rows too, which other engines want.")] = True,
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
        from moedraft.feature.training.session import Session, begin, check_texts
        from moedraft.models import load_by

        check_texts(len(pairs))
        check_out(out, trains=True)
        model = load_by(settings, "target")
        set_threads(settings.threads, model)
        asks = any(answer is None for _, answer in pairs)
        chosen = begin(model, chosen, out, max_tokens if asks else None, kind)  # before it answers
    found = answers(model, pairs, out, max_tokens, vocabulary)
    session = Session(model, found, out, size=vocabulary, layers=chosen, kind=kind)
    show(learn(session, minutes * 60, rows), out, as_json)


@app.command()
def export(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; a drafter there is replaced.")],
    home: HomeOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the feature drafter in use, shipped or trained, as other engines want it: with output rows."""
    settings = settings_for(ctx, home=home, target=target, draft=draft)
    check_out(out := out.expanduser().resolve())
    with busy("Loading the target"):
        from moedraft.drafting.base import export_base

        source = export_base(settings, out)
    if as_json:
        emit({"folder": str(out), "draft": source.name})
    else:
        say(f"{out}: the drafter {source.name} with its output rows, for {settings.target}.")


def check_out(out: Path, *, trains: bool = False) -> None:
    """Raise InvalidRequest where a drafter could not be written, or would replace anything but a drafter."""
    from moedraft.drafting.base import is_feature_checkpoint
    from moedraft.feature.checkpoint import FILES
    from moedraft.feature.training.session import work_folder
    from moedraft.folders import check_replaceable

    check_replaceable(out, FILES)
    if out.exists() and any(out.iterdir()) and not is_feature_checkpoint(out):
        raise InvalidRequest(f"{out} holds something that is no drafter, which is left alone; name another.")
    if trains and work_folder(out).exists() and not work_folder(out).is_dir():
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
    from moedraft.feature.training.session import collect, work_folder

    with bar("The target answers", len(pairs)) as advance:
        return collect(model, pairs, work_folder(out), max_tokens, LONGEST, advance, vocabulary)


def learn(session: Session, seconds: float, rows: bool) -> Report:
    with bar("Training the drafter", int(seconds)) as advance:
        session.run(seconds, advance)
    with busy("Measuring"):
        return session.finish(rows=rows)


def show(report: Report, out: Path, as_json: bool) -> None:
    if as_json:
        emit({"folder": str(out), **vars(report)})
        return
    depths = ", ".join(f"{value:.2f}" for value in report.acceptance)
    say(f"{out}: {report.steps} steps, {report.tokens} tokens, {report.seconds:.0f} s.")
    say(f"Guessed right on held-out answers, by depth, each given the ones before: {depths}.")
