"""The table of all experts on the overview page: what each brings now, and how that has changed."""

from __future__ import annotations

from collections.abc import Sequence

from moedraft.core import SHARED
from moedraft.insight.change import Change
from moedraft.insight.views import Expert
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, changed, count, join, number, share, tag, tone_of
from moedraft.serve.dashboard.words import COVERAGE, FIRST_GUESS

LABELS = {  # by key of the cell: the label, and what it is
    "expert": ("expert", None),
    "share": ("traffic", None),
    "recent_tokens_per_step": ("tokens per target step", None),
    "tokens_per_step_change": ("change", None),
    "recent_first_step_share": ("first guesses right", FIRST_GUESS),
    "first_step_share_change": ("change", None),
    "coverage": ("on its list", COVERAGE),
    "replay_size": ("replay", None),
    "version": ("version", None),
}
Cell = tuple[str, float | None, Markup | str, str]  # key, exact value, text, class


def expert_rows(look: Look, experts: tuple[Expert, ...]) -> Markup:
    paints = charts.colours([expert.name for expert in experts])
    keys = [key for key in LABELS if key != "coverage" or any(expert.coverage for expert in experts)]
    labels = [LABELS[key] for key in keys]
    head = tag("tr", *(tag("th", label, scope="col", class_="num", title=about) for label, about in labels))
    body = [_row(look, expert, paints[expert.name], keys) for expert in experts]
    whole = tag("table", tag("thead", head), tag("tbody", *body), data_table="experts", class_="roomy")
    return tag("div", whole, class_="scroll")


def _row(look: Look, expert: Expert, paint: str, keys: Sequence[str]) -> Markup:
    written = [
        tag("td", text, class_=kind, data_key=key, data_value=None if value is None else repr(value))
        for key, value, text, kind in _cells(expert, paint)
        if key in keys
    ]
    name = tag("th", tag("div", _name(look, expert, paint), class_="named"), scope="row")
    return tag("tr", name, *written, data_expert=expert.name)


def _name(look: Look, expert: Expert, paint: str) -> Markup:
    kind = _kind(expert)
    return join(
        [
            tag("i", style=f"background:{paint}"),
            tag("a", expert.name, href=look.url("experts", expert=expert.name)),
            tag("small", kind) if kind else Markup(),
        ]
    )


def _kind(expert: Expert) -> str:
    if expert.name == SHARED:
        return "fits no domain"
    return "" if expert.registered else "removed"


def _cells(expert: Expert, paint: str) -> list[Cell]:
    width = f"width:{100 * (expert.share or 0):.1f}%;background:{paint}"
    meter = join([tag("span", tag("i", style=width), class_="meter"), tag("span", share(expert.share))])
    speed, guesses = expert.recent_tokens_per_step, expert.recent_first_step_share
    found = expert.coverage
    covered = tag("span", share(found.share), title=f"By {found.basis}.") if found else share(None)
    return [
        ("share", expert.share, meter, "num wide-cell"),
        ("recent_tokens_per_step", speed, number(speed), "num"),
        _change("tokens_per_step_change", expert.change_of_tokens_per_step),
        ("recent_first_step_share", guesses, share(guesses, 1), "num"),
        _change("first_step_share_change", expert.change_of_first_step_share, shares=True),
        ("coverage", found.share if found else None, covered, "num"),
        ("replay_size", expert.replay_size, count(expert.replay_size), "num"),
        ("version", expert.version, expert.serving, "num"),
    ]


def _change(key: str, change: Change | None, *, shares: bool = False) -> Cell:
    difference = None if change is None else change.difference
    return key, difference, changed(change, shares=shares), f"num {tone_of(change)}"
