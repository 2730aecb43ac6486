"""Makes the table of what lookup in earlier answers brings, from the file that `bench_answers.py` writes."""

from __future__ import annotations

from typing import Any

from evidence.streams import title_of
from markdown_tables import table

SYSTEMS = {"own text": "own text", "one store": "with one store", "by domain": "with a store for each domain"}


def answers(found: dict[str, Any]) -> str:
    """Tokens per step by the order of requests, and by how many came before."""
    rows = []
    for pattern, stages in found["patterns"].items():
        for stage, systems in stages.items():
            more = systems["by domain"]["more than own text"]
            sure = "{:+.2f} ({:+.2f} to {:+.2f})".format(*more)
            figures = [f"{systems[name]['tokens_per_step'][0]:.2f}" for name in SYSTEMS]
            rows.append([title_of(pattern), stage, *figures, sure])
    s = found["settings"]
    note = (
        f"{s['target']}, float32, {s['requests']} requests of five domains, {s['seeds']} seeds, answers of "
        f"up to {s['max_tokens']} tokens, at most {s['longest']} tokens drafted in a step, {s['heldout']} "
        f"held-out prompts a domain; {found['date']}. Intervals are 95 %, paired, over the prompts. No clock "
        "and no draft model: what does not pay is drafted as well."
    )
    head = ["traffic", "requests", *SYSTEMS.values(), "a store for each domain, more than own text"]
    return f"{table(head, rows)}\n\n{note}"
