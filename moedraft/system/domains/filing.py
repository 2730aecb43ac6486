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
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from moedraft.chat import asked_text
from moedraft.core import SHARED, MoedraftError, ReplayRecord
from moedraft.routing.router import Router
from moedraft.storage.filing import file_under
from moedraft.storage.store import Store

LOOKED_AT = 400  # records; embedding their prompts takes some seconds
AT_ONCE = 16  # records that are routed and moved without asking whether to go on
WAIT = 60.0  # seconds after a registration, in which answers that had begun before it end
AGAIN = 600.0  # seconds after a failure
FILED = "filed"  # meta key: the domains, each with the time of its registration, when records were filed last

log = logging.getLogger(__name__)


class Filing:
    """Files the records of one home.

    changing: held while records are moved, so that no purge goes on meanwhile. What was looked at is
    remembered by its id, so that a call that was ended early is taken up by the next.
    """

    def __init__(
        self, store: Store, router: Router, tokenizer: Any, changing: AbstractContextManager[Any]
    ) -> None:
        self.store, self.router, self.tokenizer, self.changing = store, router, tokenizer, changing
        self._looked_at: set[int] = set()
        self._for: dict[str, float] = {}  # the domains that these were looked at for
        self._failed_at: float | None = None  # monotonic

    def look(self, still: Callable[[], bool] = lambda: True) -> None:
        """File records if that is due. A failure is logged, and it is tried again after a while."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < AGAIN:
            return
        try:
            if is_due(self.store):
                for name, count in self.file(still).items():
                    text = "%d earlier records are of the domain %r now; its expert learns from them."
                    log.info(text, count, name)
            self._failed_at = None
        except MoedraftError as error:
            self._failed_at = time.monotonic()
            log.warning("Earlier records were not filed under new domains: %s", error)

    def file(self, still: Callable[[], bool] = lambda: True) -> dict[str, int]:
        """Move records of "shared" to domains that are new to it. Returns how many, by domain.

        still: asked now and then; False ends it. Then, and where the router does not know all domains yet,
        it stays due.
        """
        fresh, seen = _fresh(self.store), _registered(self.store)
        if not seen.keys() <= {*self.router.domains}:
            return {}
        if fresh != self._for:
            self._for, self._looked_at = fresh, set()
        found = self.store.replay.unclaimed(LOOKED_AT)
        left = [record for record in found if record.id not in self._looked_at]
        moved = Counter[str]()
        for first in range(0, len(left), AT_ONCE):
            if not still():
                return dict(moved)
            moved += self._file(left[first : first + AT_ONCE], fresh.keys())
        self.store.registry.set_meta(FILED, json.dumps(seen))
        return dict(moved)

    def _file(self, records: Sequence[ReplayRecord], names: Collection[str]) -> Counter[str]:
        texts: dict[str, list[int]] = {}
        for record in records:
            asked = asked_text(self.tokenizer, record.token_ids[: record.num_prompt_tokens])
            texts.setdefault(asked, []).append(record.id)
        moved = Counter[str]()
        for text, name in owners(self.store, self.router, list(texts)).items():
            if name in names:
                with self.changing:
                    moved[name] += file_under(self.store, name, texts[text])
        self._looked_at.update(record.id for record in records)
        return moved


def is_due(store: Store, now: float | None = None) -> bool:
    """Whether a domain was registered since records were filed, WAIT ago or longer. now: epoch seconds."""
    fresh = _fresh(store)
    age = (time.time() if now is None else now) - max(fresh.values(), default=0.0)
    return bool(fresh) and not 0 <= age < WAIT  # a clock that was set back does not make it wait


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
