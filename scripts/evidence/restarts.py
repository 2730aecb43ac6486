"""What a trainer that is started again has lost."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import RESTARTED, RESUMED
from evidence.paper import variants
from evidence.streams import CROSSED, title_of

ABOUT = """## After a restart

Versions keep the weights of adapters, averaged over their last steps and, of an expert, cut to the directions
that matter. The optimiser's state, the weights themselves and what was cut off are in the trainer's memory,
and in a file that it writes now and then and when it ends between two updates. In two arrangements the
trainer is started again after each update: one has lost all of that, as after a crash before the file was
written, and the other has its file. They have no gate, so nothing is shown here of candidates that a gate
has kept unpublished; the file holds these as well. With {title}:"""


def part(whole: dict[str, Any]) -> str:
    """The section; nothing where it was not run."""
    about = ABOUT.format(title=title_of(CROSSED))
    return variants(whole, [RESTARTED, RESUMED], about, CROSSED, "never restarted has more")
