"""A home full of invented traffic and running parts that only say what they are told to.

Run as a program it serves the dashboard over them, to be looked at.
"""

from __future__ import annotations

import argparse
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from moedraft.config import load_settings
from moedraft.core import (
    SHARED,
    AdapterVersion,
    Domain,
    ReplayRecord,
    RequestOutput,
    RequestStats,
    UpdateRecord,
)
from moedraft.learning_state import LearningKind, LearningState, waiting
from moedraft.routing.router import Route
from moedraft.selecting.prior.confusion import Mistake
from moedraft.serve.auth.access import Authority, Guard
from moedraft.serve.auth.keyring import Keyring
from moedraft.serve.auth.login import login_router
from moedraft.serve.dashboard import mount
from moedraft.serve.supervisor.supervisor import TrainerState
from moedraft.serve.worker.worker import Snapshot
from moedraft.speculation import SpeculationStats, Standing
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store
from moedraft.system.domains.suggest import Suggestion, Suggestions

HOSTILE = '<img src=x onerror="window.hacked=1">{{7*7}}${window.hacked=2}`'
SERVING = Snapshot(
    running=5,
    waiting=2,
    slots=8,
    steps=184_203,
    last_step_at=0.0,
    idle_share=0.12,
    tokens_total=611_904,
    tokens_per_second=214.3,
    speedup=1.42,
    learning=LearningState(LearningKind.LEARNING),
    draining=False,
    failed=None,
)
IDLE = replace(
    SERVING,
    running=0,
    waiting=0,
    steps=0,
    idle_share=1.0,
    tokens_total=0,
    tokens_per_second=0.0,
    speedup=None,
)


WAITING = TrainerState(
    waiting("The engine is busy: 12 % idle, and 30 % are needed"),
    pid=4711,
    restarts=1,
    updates=57,
)


@dataclass
class FakeWorker:
    now: Snapshot = SERVING
    asked: list[str] = field(default_factory=list)
    compares: bool = True
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def search(self) -> FakeWorker:
        return self

    async def overlaps(self) -> list[dict[str, Any]]:
        return [{"first": "sql", "second": "python", "should_merge": True}]

    async def suggestions(self) -> Suggestions:
        found = Suggestion("court-clause", (f"{HOSTILE} court", "a clause"), 12, 14, 0.25, 0.5)
        return Suggestions(40, 0.5, True, (found,))

    def snapshot(self) -> Snapshot:
        return self.now

    async def routes(self, prompts: list[str]) -> list[Route]:
        self.asked += prompts
        sure = {"sql": 0.83, "python": 0.08, "german-docs": 0.03, SHARED: 0.06}
        unsure = {"sql": 0.11, "python": 0.2, "german-docs": 0.02, SHARED: 0.67}
        known = "select" in prompts[0].lower()
        return [Route("sql", 0.83, sure) if known else Route(SHARED, 0.2, unsure)]

    async def trial(self, prompt: str, max_tokens: int) -> RequestOutput:
        self.asked.append(prompt)
        return tried(prompt, max_tokens)


def tried(prompt: str, max_tokens: int) -> RequestOutput:
    """An answer whose drafts were compared, if it is about queries."""
    standings = (Standing(0, {"sql": 0.7, SHARED: 0.3}), Standing(18, {"python": 0.9, "sql": 0.1}))
    return RequestOutput(
        request_id="r",
        prompt=prompt,
        text=f"{HOSTILE} answer",
        token_ids=[1] * max_tokens,
        finish_reason="length",
        expert="python",
        adapter_version=1,
        speculation=SpeculationStats(num_steps=max_tokens // 2),
        num_rejections=0,
        seconds=1.0,
        overruled=True,
        standings=standings if "select" in prompt.lower() else (),
    )


@dataclass
class FakeSupervisor:
    now: TrainerState = WAITING

    def state(self) -> TrainerState:
        return self.now


# -- invented rows -------------------------------------------------------------------------------

TRAFFIC = {"sql": 4, "python": 3, "german-docs": 2, "chinese-news": 1.5, SHARED: 1.2}
LANGS = {
    "sql": ["latin"],
    "python": ["latin", "latin", "cyrillic"],
    "german-docs": ["latin"],
    "chinese-news": ["han", "han", "latin", "kana"],
    SHARED: ["latin", "arabic", "hangul", "greek", "other"],
}


def invented(expert: str, at: float, level: float, rng: random.Random, version: int = 0) -> RequestStats:
    """A finished request whose draft tokens were accepted with about probability `level` each."""
    drafts, drafted, accepted = rng.randint(6, 24), [0] * 6, [0] * 6
    for _ in range(drafts):
        for place in range(rng.randint(2, 6)):
            drafted[place] += 1
            if rng.random() > level * (0.985**place):
                break
            accepted[place] += 1
    found = rng.randint(0, 12)
    pinned = rng.random() < 0.1
    sure = rng.betavariate(2, 6) * 0.5 if expert == SHARED else 0.35 + 0.65 * rng.betavariate(5, 1.4)
    return RequestStats(
        request_id=f"r{rng.getrandbits(60)}",
        expert=expert,
        adapter_version=version,
        lang=rng.choice(LANGS.get(expert, ["latin"])),
        num_prompt_tokens=rng.randint(8, 200),
        num_tokens=drafts + sum(accepted) + found,
        seconds=rng.uniform(0.4, 3),
        finish_reason="stop",
        created_at=at,
        confidence=None if pinned else sure,
        time_to_first_token=rng.lognormvariate(-2.6, 0.4),
        speculation=SpeculationStats(
            num_steps=drafts + 1,
            num_drafts=drafts,
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            drafted_at=drafted,
            accepted_at=accepted,
            num_lookup_tokens=2 * found,
            num_accepted_lookup_tokens=found,
            num_earlier_tokens=found,
            num_accepted_earlier_tokens=found // 3,
            first_guesses=drafts,
            right_first_guesses=accepted[0],
        ),
    )


def fill(store: Store, *, hours: float = 8, rows: int = 6000, seed: int = 7) -> None:
    """Domains, versions, traffic that gets better with them, replay and updates, up to now."""
    rng, now = random.Random(seed), time.time()
    start = now - 3600 * hours
    for place, name in enumerate(name for name in TRAFFIC if name != SHARED):
        store.registry.add_domain(Domain(name, "", tuple(f"{name} {i}" for i in range(8)), start + place))
    made = _train(store, rng, start, now)
    traffic = []
    for place in range(rows):
        at = start + (now - start) * (place / rows) ** 0.8 - rng.random()
        names = list(TRAFFIC)
        expert = rng.choices(
            names, [TRAFFIC[n] * (0.6 + 0.8 * ((place / rows + i / 5) % 1)) for i, n in enumerate(names)]
        )[0]
        version = sum(moment <= at for moment in made[expert])
        level = 0.86 - 0.3 * 0.72**version - (0.06 if expert == SHARED else 0)
        traffic.append(invented(expert, at, level, rng, version))
    store.requests.add(traffic)
    for name in TRAFFIC:
        records = [record(name, now - 60 * i) for i in range(rng.randint(20, 90))]
        store.replay.add(records[::-1])


def _train(store: Store, rng: random.Random, start: float, now: float) -> dict[str, list[float]]:
    made: dict[str, list[float]] = {}
    moments = []
    for name in TRAFFIC:
        count = rng.randint(4, 9)
        made[name] = sorted(start + (now - start) * rng.random() ** 1.4 for _ in range(count))
        moments += [(at, name, number + 1) for number, at in enumerate(made[name])]
    for at, name, version in sorted(moments):
        before = 0.86 - 0.3 * 0.72 ** (version - 1) + rng.uniform(-0.01, 0.01)
        after = before + 0.07 * 0.75**version + rng.uniform(-0.012, 0.012)
        path = f"adapters/{name}/v{version}"
        store.registry.add_version(
            AdapterVersion(name, version, version - 1, path, "base", after, at, "live")
        )
        loss, seconds = 1.9 * 0.9**version + rng.uniform(0, 0.2), rng.uniform(4, 21)
        store.updates.add(UpdateRecord(name, version, 48, 16, loss, seconds, before, after, at))
    return made


def record(domain: str, at: float) -> ReplayRecord:
    return ReplayRecord(
        domain, domain, 1, "tiny", [7, 2, 3], 2, [[3, 9]], [[-0.125, -3.5]], [], 4, 2, created_at=at
    )


# -- a server over them --------------------------------------------------------------------------


@dataclass
class Site:
    """A dashboard that is being served."""

    url: str  # of the server, without a path
    store: Store
    worker: FakeWorker
    supervisor: FakeSupervisor
    clock: Callable[[], float]


def make_app(
    store: Store,
    worker: FakeWorker,
    supervisor: FakeSupervisor | None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    authority = Authority(Keyring(KeyFile(store.home.path), open_without_keys=True), "127.0.0.1")
    context = SimpleNamespace(
        worker=worker,
        trainer=supervisor,
        store=store,
        settings=load_settings(home=store.home.path),
        authorise=authority,
    )
    app = FastAPI()
    mount(app, cast(Any, context), clock=clock)
    app.include_router(login_router(authority))
    app.add_middleware(cast(Any, Guard), authority=authority)
    return app


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def site(
    store: Store,
    worker: FakeWorker | None = None,
    supervisor: FakeSupervisor | None = None,
    clock: Callable[[], float] = time.time,
    port: int | None = None,
) -> Iterator[Site]:
    """Served from a thread of this process, on a free port unless told, until the end of the block."""
    worker, supervisor = worker or FakeWorker(), supervisor or FakeSupervisor()
    port = port or _free_port()
    config = uvicorn.Config(
        make_app(store, worker, supervisor, clock),
        port=port,
        log_config=None,  # the log is this process's, not the page's
        log_level="warning",
        ws="websockets-sansio",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.02)
        yield Site(f"http://127.0.0.1:{port}", store, worker, supervisor, clock)
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--empty", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder))
        if not options.empty:
            fill(store)
        worker = FakeWorker(IDLE if options.empty else SERVING)
        app = make_app(store, worker, None if options.empty else FakeSupervisor())
        uvicorn.run(app, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
