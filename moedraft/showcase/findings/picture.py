"""The demo's picture: the stream, the domains before and after, seconds per answer. It holds no prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moedraft.showcase.findings.estimates import Estimate
from moedraft.showcase.findings.report import Result
from moedraft.showcase.trials import EARLIER, EXPERTS, LOOKUP, PLAIN, SERVED, STATIC

LOOK_BACK = 40  # requests that the line over the stream is a mean of
GREY, BLUE, ORANGE, INK = "#97a3ae", "#1f5f99", "#d9822b", "#25313b"
BARS = {PLAIN: "#c6ced5", STATIC: GREY, EXPERTS: BLUE, LOOKUP: GREY, EARLIER: BLUE, SERVED: BLUE}
NAMES = {
    PLAIN: "plain\ndecoding",
    STATIC: "static\ndraft",
    EXPERTS: "experts",
    LOOKUP: "lookup\nin the\ntext",
    EARLIER: "and in\nearlier\nanswers",
    SERVED: "and with\nexperts,\nas served",
}
STYLE = {
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7d8a95",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean over the last `width` values at each place."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def draw(result: Result, path: Path) -> None:
    """Draw the three parts beside each other. The path's suffix says whether PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 3.6 + 0.24 * max(8, len(result.rows))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(17, height), width_ratios=[5, 4.4, 5])
        _stream(axes[0], result)
        _domains(axes[1], result)
        _seconds(axes[2], result)
        figure.tight_layout(w_pad=1.0)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _stream(axis: Any, result: Result) -> None:
    """Tokens per target step over the requests, and where new versions came."""
    xs, ys = [p.index + 1 for p in result.points], [p.tokens_per_step for p in result.points]
    means = running_mean(ys, LOOK_BACK)
    top = max([1.5, *sorted(ys)[: max(1, int(0.98 * len(ys)))]]) + 0.15
    for number, index in enumerate(result.updates):
        label = None if number else "experts updated"
        axis.axvline(index, color=ORANGE, linewidth=1, alpha=0.6, linestyle=(0, (4, 3)), label=label)
    axis.plot(xs, ys, ".", color="#b4c6d6", markersize=4, label="one request")
    # The first means of few requests say little, and would draw a line that jumps.
    first = min(len(xs), LOOK_BACK // 4)
    axis.plot(xs[first:], means[first:], color=BLUE, linewidth=3, label=f"mean of the last {LOOK_BACK}")
    axis.axhline(1, color=GREY, linewidth=2, label="plain decoding")
    axis.set(xlabel="requests served", ylim=(0.8, top), xlim=(0, max([1, *xs]) + 1))
    axis.set_title("Tokens per step of the large model,\nwhile the experts learn")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False, fontsize=12)


def _domains(axis: Any, result: Result) -> None:
    """Each domain's right first guesses, of the static draft and of the experts, with intervals.

    Unlike tokens per step they do not depend on how far the engine found it worth to draft.
    """
    rows = [*result.rows, result.whole]
    labels = [row.label for row in result.rows] + ["All domains"]
    parts = (("before, static draft", GREY, -0.17), ("after, experts", BLUE, 0.17))
    for place, row in enumerate(rows):
        figures = [100 * f for f in (row.first_guess.before, row.first_guess.after)]
        axis.plot([f.value for f in figures], [place - 0.17, place + 0.17], color="#c6ced5", linewidth=1.5)
        for (label, color, shift), figure in zip(parts, figures, strict=True):
            axis.errorbar(
                figure.value,
                place + shift,
                xerr=_arms(figure),
                fmt="o",
                color=color,
                markersize=8,
                linewidth=2,
                capsize=0,
                label=None if place else label,
            )
    axis.axhline(len(rows) - 1.5, color="#c6ced5", linewidth=1)
    axis.set_xlim(left=0)
    axis.set_yticks(range(len(rows)), labels)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.set_title("First guesses that are right,\nby domain, on held-out prompts")
    axis.set_xlabel("% of tokens, with 95 % intervals")
    axis.legend(loc="upper center", bbox_to_anchor=(0.35, -0.17), ncols=2, frameon=False, fontsize=12)


def _seconds(axis: Any, result: Result) -> None:
    """How long an answer takes."""
    figures = [one.seconds for one in result.systems]
    highest = max(figure.high for figure in figures)
    axis.bar(
        range(len(figures)), [f.value for f in figures], 0.66, color=[BARS[o.name] for o in result.systems]
    )
    for place, (one, figure) in enumerate(zip(result.systems, figures, strict=True)):
        axis.errorbar(place, figure.value, yerr=_arms(figure), fmt="none", color=INK, linewidth=1.5)
        text = f"{figure.value:.2f} s" + (f"\n{one.speedup.value:.2f}×" if place else "")
        axis.text(
            place, figure.high + 0.03 * highest, text, ha="center", va="bottom", weight="bold", fontsize=12
        )
    axis.set_xticks(range(len(figures)), [NAMES[one.name] for one in result.systems], fontsize=10)
    axis.tick_params(axis="x", length=0)
    axis.set(ylim=(0, 1.25 * highest))
    axis.set_title("Seconds per answer,\none at a time")


def _arms(figure: Estimate) -> list[list[float]]:
    """The interval as matplotlib wants it: the distances below and above."""
    return [[max(0.0, figure.value - figure.low)], [max(0.0, figure.high - figure.value)]]
