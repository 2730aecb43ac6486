"""Makes the README's one table: for each measured target, what every way of drafting brings.

The figures come from the same files as the long tables in docs/benchmarks.md. Every target has a folder of
its own below results/ with files of the same names; the embedded pair's lie in results/ itself. A target
without files is left out, so a new one appears in the README as soon as its measurements are stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGETS = {".": "embedded pair (toy)", "smollm2": "SmolLM2-135M"}  # folder below results/ → name in the table
HEAD = [
    "target",
    "drafts come from",
    "batch 1, × transformers",
    "tokens per target step",
    "eight streams, × plain",
    "acceptance",
]
# The names of one way of drafting differ between the measurements; these are the table's.
SERVED = {"generic draft": "generic draft + lookup", "experts": "experts + lookup"}
LEARNED = {"static": "generic draft", "both": "experts"}
PLAIN = {"plain": "nobody (plain decoding)"}
ORDER = ("plain", "generic draft", "experts", "lookup", "generic draft + lookup", "experts + lookup")


def stored(file: Path) -> dict[str, Any]:
    """The measurement in that file, or nothing where it does not exist."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def figures(folder: Path) -> dict[str, dict[str, str]]:
    """Way of drafting → column → figure, for one target."""
    found: dict[str, dict[str, str]] = {}
    for name, system in stored(folder / "bench.json").get("systems", {}).items():
        if name.startswith("moedraft "):
            row = found.setdefault(name.removeprefix("moedraft "), {})
            row["batch 1, × transformers"] = f"{system['ratio']:.2f}"
            if system["tokens_per_step"] is not None:
                row["tokens per target step"] = f"{system['tokens_per_step']:.2f}"
    streams = stored(folder / "serve.json").get("loads", {}).get("streams", {})
    for name, system in streams.items():
        if "learning" not in name:
            found.setdefault(SERVED.get(name, name), {})["eight streams, × plain"] = f"{system['ratio']:.2f}"
    for name, arm in stored(folder / "learning.json").get("arms", {}).items():
        if name in LEARNED:
            found.setdefault(LEARNED[name], {})["acceptance"] = f"{arm['acceptance']:.3f}"
    return found


def note(folder: Path, target: str) -> str:
    """What the acceptance column says of learning, or nothing where that was not measured."""
    arms = stored(folder / "learning.json").get("arms", {})
    if not {"static", "both", "shared"} <= set(arms):
        return ""
    updates, shared = arms["both"]["updates"], arms["shared"]["acceptance"]
    return (
        f"Acceptance of the {target}: the generic draft has learned nothing; the experts, with the adapter "
        f"that they share, had {updates} updates. That shared adapter alone, with about as many updates, "
        f"reached {shared:.3f}."
    )


def table(results: Path) -> str:
    """The whole table in Markdown, with a note for each target below it."""
    lines, notes = [HEAD, ["---"] * len(HEAD)], []
    for folder, target in TARGETS.items():
        found = figures(results / folder)
        names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
        for number, name in enumerate(names):
            cells = [found[name].get(column, "") for column in HEAD[2:]]
            lines.append(["" if number else target, PLAIN.get(name, name), *cells])
        notes.append(note(results / folder, target))
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([rows, *filter(None, notes)])
