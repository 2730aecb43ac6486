"""The demo's report: a picture of acceptance over time and an HTML page. Neither holds any prompt."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #15181c; }
  img { background: #fff; }
}
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; border-radius: 6px; }
"""


@dataclass(frozen=True)
class Row:
    """A domain's acceptance on held-out prompts: the generic draft's before, its expert's after learning."""

    domain: str
    before: float
    after: float


@dataclass(frozen=True)
class Point:
    """One answered request: its place in the stream, its expert, its accepted share of drafted tokens."""

    index: int
    expert: str
    acceptance: float


@dataclass(frozen=True)
class Result:
    """Everything the demo found."""

    rows: list[Row]
    points: list[Point]
    updates: list[int]  # stream index at which a version was published
    speed: dict[str, float]  # tokens per second by system
    facts: dict[str, str]

    @property
    def before(self) -> float:
        return sum(row.before for row in self.rows) / len(self.rows)

    @property
    def after(self) -> float:
        return sum(row.after for row in self.rows) / len(self.rows)


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean over the last `width` values at each place."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def draw(result: Result, path: Path) -> None:
    """Draw acceptance over the stream and per domain before and after. The suffix says whether PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), width_ratios=[3, 2])
    xs, ys = [p.index for p in result.points], [p.acceptance for p in result.points]
    left.plot(xs, ys, ".", color="#9db4c8", markersize=3, label="one request")
    left.plot(xs, running_mean(ys, 40), color="#1f5f99", linewidth=2, label="mean of the last 40")
    for number, index in enumerate(result.updates):
        left.axvline(index, color="#d98c3f", linewidth=0.5, alpha=0.4, label=None if number else "update")
    left.set(xlabel="requests served", ylabel="accepted / drafted tokens", ylim=(0, 1), title="The stream")
    left.legend(loc="lower right", frameon=False, markerscale=3)
    places = range(len(result.rows))
    right.barh(
        [p + 0.2 for p in places], [r.before for r in result.rows], 0.38, color="#b9c6d2", label="before"
    )
    right.barh(
        [p - 0.2 for p in places], [r.after for r in result.rows], 0.38, color="#1f5f99", label="after"
    )
    right.set_yticks(list(places), [row.domain for row in result.rows])
    right.invert_yaxis()
    right.set(xlabel="greedy acceptance", xlim=(0, 1), title="Held-out prompts")
    right.legend(loc="lower right", frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_html(result: Result, picture: Path, path: Path) -> None:
    """Write an HTML page that shows the picture, which must lie beside it. All text is escaped."""
    rows = "".join(
        f"<tr><td>{html.escape(r.domain)}</td><td>{r.before:.3f}</td><td>{r.after:.3f}</td>"
        f"<td>{r.after - r.before:+.3f}</td></tr>"
        for r in [*result.rows, Row("mean", result.before, result.after)]
    )
    base = next(iter(result.speed.values()))
    speed = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.1f}</td><td>{value / base:.2f}×</td></tr>"
        for name, value in result.speed.items()
    )
    facts = "".join(f"<li>{html.escape(k)}: {html.escape(v)}</li>" for k, v in result.facts.items())
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>moedraft demo</title><style>{CSS}</style>
<h1>moedraft demo</h1>
<p>Acceptance on held-out prompts rose from <b>{result.before:.3f}</b> to <b>{result.after:.3f}</b>
while the experts learned from the stream.</p>
<img src="{html.escape(picture.name)}" alt="Acceptance over the stream and per domain before and after">
<h2>Greedy acceptance on held-out prompts</h2>
<table><tr><th>domain</th><th>before</th><th>after</th><th>gain</th></tr>{rows}</table>
<h2>Tokens per second</h2>
<table><tr><th>system</th><th>tokens/s</th><th>against the first</th></tr>{speed}</table>
<h2>How</h2><ul>{facts}</ul></html>
""",
        encoding="utf-8",
    )
