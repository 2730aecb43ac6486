"""What a trainer that is started again has lost."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import RESTARTED
from evidence.paper import variants
from evidence.streams import CROSSED, title_of

ABOUT = """## After a restart

Versions keep the weights of adapters. The optimiser's state, the weights between two averages and candidates
that the gate kept unpublished are in memory alone. An arrangement without a gate that loses all of this after
each update shows the most that restarts can cost, with {title}:"""


def part(whole: dict[str, Any]) -> str:
    """The section; nothing where it was not run."""
    table = variants(whole, [RESTARTED], ABOUT.format(title=title_of(CROSSED)), CROSSED)
    return table.replace("the default has more", "without restarts more")
