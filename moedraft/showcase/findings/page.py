"""The demo's report as files: the picture, an HTML page beside it, and the numbers. None holds a prompt."""

from __future__ import annotations

import html
import json
from pathlib import Path

from moedraft.showcase.findings.estimates import Estimate, PairedChange
from moedraft.showcase.findings.picture import draw
from moedraft.showcase.findings.report import FEWEST, Result, Row, SystemRow, sentences, summary

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #15181c; }
  img { background: #fff; }
}
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
td.better { color: #1a7f37; font-weight: 600; }
td.worse { color: #c93c37; font-weight: 600; }
td.open { color: #808890; }
img { max-width: 100%; border-radius: 6px; }
"""
ALT = "Tokens per step of the target over the stream, right guesses by domain, and seconds per answer"


def publish(result: Result, folder: Path) -> dict[str, Path]:
    """Write picture, page and numbers into `folder`. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"picture": "demo.png", "report": "report.html", "numbers": "demo.json"}
    paths = {name: folder / file for name, file in files.items()}
    draw(result, paths["picture"])
    paths["report"].write_text(page(result, paths["picture"].name), encoding="utf-8")
    paths["numbers"].write_text(json.dumps(summary(result), indent=1) + "\n", encoding="utf-8")
    return paths


def page(result: Result, picture: str) -> str:
    """The HTML page with the picture of that name. All text is escaped."""
    said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences(result))
    rows = "".join(map(_domain, [*result.rows, result.whole]))
    systems = "".join(map(_system, result.systems))
    facts = "".join(f"<li>{html.escape(k)}: {html.escape(v)}</li>" for k, v in result.facts.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>moedraft demo</title><style>{CSS}</style>
<h1>moedraft demo</h1>
{said}
<img src="{html.escape(picture)}" alt="{ALT}">
<h2>Six ways to the same answers</h2>
<table><tr><th>system</th><th>seconds per answer</th><th>against plain</th><th>tokens per step</th>
<th>tokens/s, one at a time</th><th>tokens/s, full batch</th></tr>{systems}</table>
<h2>By domain, static draft → experts</h2>
<table><tr><th>domain</th><th>prompts</th><th>tokens per step</th><th>change</th>
<th>first guess right</th><th>change</th></tr>{rows}</table>
<p>Intervals: 95 %, over prompts; those of a change compare the same prompts. A grey change may be chance;
one without an interval is of fewer than {FEWEST} prompts.</p>
<h2>How</h2><ul>{facts}</ul></html>
"""


def _system(one: SystemRow) -> str:
    cells = [
        with_interval(one.seconds),
        f"{one.speedup.value:.2f}×",
        f"{one.tokens_per_step.value:.2f}",
        f"{one.tokens_per_second:.1f}",
        f"{one.batched_tokens_per_second:.1f}",
    ]
    return f"<tr><td>{html.escape(one.name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _domain(row: Row) -> str:
    label = "All domains" if row.domain == "all" else row.label
    changes = "".join(map(_change, (row.tokens_per_step, row.first_guess)))
    prompts = f"{row.prompts}" if row.alone == row.prompts else f"{row.prompts}, {row.alone} of them alone"
    return f"<tr><td>{html.escape(label)}</td><td>{prompts}</td>{changes}</tr>"


def _change(one: PairedChange) -> str:
    whole = f"{one.before.value:.2f} → {one.after.value:.2f}"
    return f'<td>{whole}</td><td class="{one.verdict}">{with_interval(one.difference, "+")}</td>'


def with_interval(figure: Estimate, sign: str = "") -> str:
    """1.23 (1.20 to 1.26); where both ends are the figure, that alone."""
    value, low, high = (f"{each:{sign}.2f}" for each in (figure.value, figure.low, figure.high))
    return f"{value} ({low} to {high})" if figure.low < figure.high else value
