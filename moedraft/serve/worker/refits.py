"""Refits the router on the traffic, beside the engine and while that leaves room.

After a domain was registered, it also files the records anew that were asked of it before.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from moedraft.core import MoedraftError
from moedraft.cpu.threads import compute_alone
from moedraft.routing.router import Router
from moedraft.system.build import ROUTER_FOLDER, System
from moedraft.system.domains.filing import Filing
from moedraft.system.domains.refit import is_due, refit_by_traffic

LOOK_SECONDS = 10.0  # between two looks for enough new answers
LONGEST_WAIT = 600.0  # after failures, each of which doubles the wait, since each may cost a whole fit

log = logging.getLogger(__name__)


class Refits:
    """A thread that looks for new labels, fits a router of its own, and has the engine's take that over.

    may: whether learning may go on now. Call `start`, later `stop`.
    """

    def __init__(self, system: System, may: Callable[[], bool], *, every: float = LOOK_SECONDS) -> None:
        self._system, self._may, self._every = system, may, every
        self._tokenizer = copy.deepcopy(system.engine.tokenizer)
        self._router: Router | None = None  # made when it is needed; it remembers the vectors of its labels
        self._purges = 0
        self._filing = Filing(system.store, system.router, self._tokenizer, system.changing)
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moedraft-refits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._quit.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def look(self) -> bool:
        """Refit if that is due and may be; whether the router has changed. Raises MoedraftError."""
        system = self._system
        if (purges := system.store.registry.purges()) != self._purges:
            self._router, self._purges = None, purges  # it remembers texts that may be deleted now
        router = system.router
        if self._may() and system.settings.selector != "fixed":
            self._filing.look(lambda: self._still() and self._may())
        if not router.learns_from_traffic or not self._may() or not is_due(system.store):
            return False
        if self._router is None:
            self._router = Router(router.embedder, system.settings.home / ROUTER_FOLDER, router.threshold)
        # Nobody waits for the fit who registers or removes a domain, or purges; then it is dropped.
        found = refit_by_traffic(system.store, self._router, self._tokenizer, self._still, system.changing)
        with system.changing:
            router.reload()
        if found is not None:
            result = "serves" if found.taken else "was dropped, since the examples lose by it"
            log.info(
                "The router was fitted on %d prompts of the traffic; it %s.",
                sum(found.labels.values()),
                result,
            )
        return found is not None and found.taken

    def _still(self) -> bool:
        return not self._quit.is_set()

    def _run(self) -> None:
        compute_alone()
        wait = self._every
        while not self._quit.wait(wait):
            longer, wait = min(2 * wait, LONGEST_WAIT), self._every
            try:
                self.look()
            except MoedraftError as error:
                wait = longer
                log.warning("The router was not refitted: %s", error)
            except Exception:
                wait = longer
                log.exception("The router was not refitted.")
                with suppress(Exception):
                    self._router = None
