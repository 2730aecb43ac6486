"""Files records anew after a domain was registered: what was asked of it before belongs to its expert.

Until then the router knew no domain for such prompts, so their records lie under the shared adapter. Looked
at are the newest of those that no expert and no client claimed. One is moved where the examples or the router
give its prompt to a domain that was registered since this was done last. Whether an update may be trained on
a record depends on its prompt alone, so that does not change.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from moedraft.chat import asked_text
from moedraft.core import SHARED
from moedraft.routing.router import Router
from moedraft.storage.filing import file_under
from moedraft.storage.store import Store

LOOKED_AT = 400  # records; embedding their prompts takes some seconds
AT_ONCE = 16  # prompts that are routed without asking whether to go on
WAIT = 60.0  # seconds after a registration, in which answers that had begun before it end
FILED = "filed"  # meta key: the domains, each with the time of its registration, when records were filed last

log = logging.getLogger(__name__)


def is_due(store: Store, now: float | None = None) -> bool:
    """Whether a domain was registered since records were filed, WAIT ago or longer. now: epoch seconds."""
    fresh = _fresh(store)
    age = (time.time() if now is None else now) - max(fresh.values(), default=0.0)
    return bool(fresh) and not 0 <= age < WAIT  # a clock that was set back does not make it wait


def file_anew(
    store: Store, router: Router, tokenizer: Any, still: Callable[[], bool] = lambda: True
) -> dict[str, int] | None:
    """Move records of "shared" to domains that are new to it. Returns how many, by domain.

    still: asked now and then; False ends it. None: it was ended, or the router does not know all domains yet,
    and nothing was done.
    """
    fresh, seen = _fresh(store), _registered(store)
    if not seen.keys() <= {*router.domains}:
        return None
    asked = defaultdict[str, list[int]](list)
    for record in store.replay.unclaimed(LOOKED_AT):
        asked[asked_text(tokenizer, record.token_ids[: record.num_prompt_tokens])].append(record.id)
    theirs, texts = defaultdict[str, list[int]](list), list(asked)
    for first in range(0, len(texts), AT_ONCE):
        if not still():
            return None
        for text, name in owners(store, router, texts[first : first + AT_ONCE]).items():
            theirs[name] += asked[text] if name in fresh else []
    moved = file_under(store.home, theirs)
    store.registry.set_meta(FILED, json.dumps(seen))
    return moved


def file_if_due(store: Store, router: Router, tokenizer: Any, still: Callable[[], bool]) -> None:
    """`file_anew` where that is due; what came of it is in the log."""
    if is_due(store):
        for name, count in (file_anew(store, router, tokenizer, still) or {}).items():
            log.info("%d earlier records are %r's now; its expert learns from them.", count, name)


def owners(store: Store, router: Router, texts: list[str]) -> dict[str, str]:
    """Whose each of these prompts is today, by the examples and the router; without those of no domain."""
    examples = {one.strip(): domain.name for domain in store.registry.domains() for one in domain.examples}
    routes = zip(texts, router.route(texts), strict=True)
    found = {text: examples.get(text.strip(), route.domain) for text, route in routes}
    return {text: name for text, name in found.items() if name != SHARED}


def _registered(store: Store) -> dict[str, float]:
    return dict(store.registry.domain_names())


def _fresh(store: Store) -> dict[str, float]:
    """The domains that were registered, or registered again, since records were filed."""
    filed: dict[str, float] = json.loads(store.registry.get_meta(FILED) or "{}")
    return {name: at for name, at in _registered(store).items() if filed.get(name) != at}
