"""What a trainer that is started again has lost."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import RESTARTED
from evidence.paper import variants
from evidence.streams import CROSSED, title_of

ABOUT = """## After a restart

Versions keep the weights of adapters, averaged over their last steps and, of an expert, cut to the directions
that matter. The optimiser's state, the weights themselves and what was cut off are in memory alone. One
arrangement loses these after each update, as if its trainer had been started again each time. It has no gate,
so nothing is shown here of candidates that a gate kept unpublished, which are lost as well. With {title}:"""


def part(whole: dict[str, Any]) -> str:
    """The section; nothing where it was not run."""
    about = ABOUT.format(title=title_of(CROSSED))
    return variants(whole, [RESTARTED], about, CROSSED, "never restarted has more")
