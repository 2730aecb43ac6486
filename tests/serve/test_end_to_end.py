"""From a request over HTTP to the figure in the browser: what clients were told, what `/metrics` counts, what
the store keeps and what the dashboard shows is the same, and none of it runs.

The shipped pair serves a scripted stream while a scripted trainer publishes two versions. What is expected
is added up here from the stored rows and the counters, by none of the code that makes the pages. Without
Chromium only the tests that need no browser run.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from dashboard_fakes import HOSTILE
from load_tools import PEFT, RANK, stamped
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from server import TARGET, Served, check_error, events, served
from waiting import wait_for

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestStats
from moedraft.distill.messages import TRAINING
from moedraft.insight.tables.figures import SOURCES
from moedraft.serve.supervisor.supervisor import TrainerSupervisor
from moedraft.showcase.shipped import examples, traffic
from moedraft.speculation import SpeculationStats
from moedraft.storage.versions.candidate import CONFIG, WEIGHTS
from moedraft.system.build import System, build

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
SHOTS = Path(__file__).resolve().parents[2] / "runs" / "dashboard"  # kept, for people to look at
PAGES = {"overview": "", "experts": "experts?expert=python", "router": "router", "learning": "learning"}
SLOW = 20_000  # ms; a machine may be busy with other things
TOKENS = 12  # of an answer
SECRET = "canary-of-a-prompt"  # in every hostile prompt
ATTACK = f'{SECRET} {HOSTILE}</textarea><script>window.hacked="script"</script><svg onload="window.hacked=3">'
BAD = "hostile"  # the domain whose description and prompts are all like that
DOMAINS = ("python", "docs-ja", BAD)
EXPERTS = (*DOMAINS, SHARED)
UNGATED = "gate_gain", "gate_least", "gate_most", "gate_witness", "gate_records", "reason"  # none: no gate
PHASES = 3  # the trainer publishes a version for `python` after each but the last

TRAINER = """
import json, select, sys
from pathlib import Path

def say(message):
    print(json.dumps(message), flush=True)

begin = json.loads(sys.stdin.readline())
lesson = Path(begin["settings"]["home"]) / "lesson.json"
while True:
    say({"type": "state", "kind": "waiting", "reason": sys.argv[1]})
    if lesson.exists():
        for message in json.loads(lesson.read_text()):
            say(message)
            sys.stdin.readline()
        lesson.unlink()
    if select.select([sys.stdin], [], [], 0.2)[0] and not sys.stdin.readline():
        break
"""

Row = dict[str, Any]


# -- the stream ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What the client of one request learned."""

    body: Row
    expert: str
    tokens: int
    prompt_tokens: int
    figures: Row  # `metrics.speculative_decoding`

    @property
    def answers(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def routed(self) -> bool:
        return bool(self.body["model"] == TARGET)


def script() -> list[list[tuple[str, Row]]]:
    """(path, body) of all requests by phase: pinned and routed, streamed and whole, several writings."""
    prompts = defaultdict[str, list[str]](list)
    for query in traffic():
        prompts[query.domain].append(query.prompt)
    strange = ("docs-ru", "docs-ko", "medical")
    phases = [
        [
            _completion(prompts["python"][i], stream=True),
            _completion(prompts["python"][PHASES + i], "python"),
            _completion(prompts["docs-ja"][i]),
            _completion(prompts["docs-ja"][PHASES + i], "docs-ja", stream=True),
            _completion(prompts[strange[i]][0], stream=bool(i % 2)),
            _completion(f"{ATTACK} {i}", stream=True),
            _chat(f"{ATTACK} {i}", BAD, stream=bool(i % 2)),
        ]
        for i in range(PHASES)
    ]
    phases[0] += [
        _completion(prompts["python"][-1], "python", n=2, temperature=0.8, seed=3),
        _completion(prompts["docs-zh"][0], SHARED),
    ]
    phases[1] += [
        _completion(prompts["sql"][0], draft=False),
        _completion(prompts["docs-ja"][-1], store=False),
    ]
    return phases


def _body(expert: str | None, stream: bool, more: Row) -> Row:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    model = f"{TARGET}:{expert}" if expert else TARGET
    return {"model": model, "max_tokens": TOKENS, "temperature": 0, **streamed, **more}


def _completion(
    prompt: str, expert: str | None = None, *, stream: bool = False, **more: Any
) -> tuple[str, Row]:
    return "/v1/completions", {**_body(expert, stream, more), "prompt": prompt}


def _chat(prompt: str, expert: str, *, stream: bool) -> tuple[str, Row]:
    messages = [{"role": "user", "content": prompt}]
    return "/v1/chat/completions", {**_body(expert, stream, {}), "messages": messages}


def ask(client: httpx.Client, path: str, body: Row) -> Told:
    if body.get("stream"):
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            last = events(response)[-1]
    else:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        last = response.json()
    figures, usage = last["metrics"]["speculative_decoding"], last["usage"]
    return Told(body, figures["expert"], usage["completion_tokens"], usage["prompt_tokens"], figures)


def register(client: httpx.Client) -> None:
    every = examples()
    attacks = [f"{ATTACK} example {i}" for i in range(12)]
    for name, prompts, about in (
        ("python", every["python"][:24], "code"),
        ("docs-ja", every["docs-ja"][:24], "マニュアル"),
        (BAD, attacks, ATTACK),
    ):
        body = {"name": name, "examples": prompts, "description": about}
        assert client.post("/admin/domains", json=body).status_code == 201


def teach(system: System, supervisor: TrainerSupervisor, version: int) -> Row:
    """Have the trainer publish `version` of `python`; the update that it tells of."""
    home, folder = system.settings.home, uuid.uuid4().hex
    staged = home / TRAINING / folder
    staged.mkdir(parents=True)
    (staged / CONFIG).write_text(json.dumps(PEFT))
    save_file(stamped(system.bank, "python", version), staged / WEIGHTS)
    part = {"folder": folder, "expert": "python", "parent": version - 1, "modules": ["m"]}
    part |= {"base_hash": system.bank.base_hash, "rank": RANK, "records": 8 * version, "held_out": 2}
    part |= {"steps": 4, "loss": 1.75 / version}
    part |= {"acceptance_before": 0.25, "acceptance_after": 0.5 + version / 16}
    update: Row = {"expert": "python", "version": version, "records": 8 * version, "steps": 4}
    update |= {"loss": 1.75 / version, "seconds": 2.5 * version, "created_at": time.time()}
    update |= {"acceptance_before": 0.25, "acceptance_after": 0.25 + version / 16}
    learned = {"type": "learned", "expert": "python", "last_id": version, "update": update}
    publish = {"type": "publish", "parts": [part]}
    lesson = home / "lesson.json"
    lesson.with_suffix(".new").write_text(json.dumps([publish, learned]))
    lesson.with_suffix(".new").rename(lesson)
    wait_for(lambda: not lesson.exists(), 30)
    assert supervisor.state().last_error is None
    wait_for(lambda: system.bank.version("python") == version, 30)
    return update


# -- what is expected ----------------------------------------------------------------------------


class Scrape:
    """`/metrics` at one moment."""

    def __init__(self, text: str) -> None:
        self.text = text
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of `name` with these labels among theirs."""
        found = [s.value for s in self._samples if s.name == f"moedraft_{name}" and self._has(s, labels)]
        return float(sum(found))

    def spec(self, name: str, **labels: str) -> float:
        return self.total(f"spec_decode_num_{name}_total", **labels)

    def labels(self, name: str, label: str) -> set[str]:
        return {s.labels[label] for s in self._samples if s.name == f"moedraft_{name}" and label in s.labels}

    def has(self, name: str) -> bool:
        return any(sample.name == f"moedraft_{name}" for sample in self._samples)

    @staticmethod
    def _has(sample: Any, labels: Row) -> bool:
        return all(sample.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True)
class Stage:
    """The server after the stream. Nothing moves any more but the wall clock."""

    found: Served
    supervisor: TrainerSupervisor
    told: list[Told]
    updates: list[Row]
    scrape: Scrape
    rows: list[RequestStats]  # oldest first

    def of(self, expert: str) -> list[RequestStats]:
        return [row for row in self.rows if row.expert == expert]

    @property
    def routed(self) -> list[RequestStats]:
        return [row for row in self.rows if row.confidence is not None]

    def acceptance(self, **labels: str) -> float | None:
        """As `/metrics` has it."""
        spec = self.scrape.spec
        return ratio(spec("accepted_tokens", **labels), spec("draft_tokens", **labels))

    def per_step(self, **labels: str) -> float | None:
        """Tokens per step of the target, as `/metrics` has it."""
        total = self.scrape.total
        return ratio(total("generation_tokens_total", **labels), total("target_steps_total", **labels))

    def first_share(self, **labels: str) -> float | None:
        """How often the first guess was right, as `/metrics` has it."""
        total = self.scrape.total
        return ratio(total("right_first_guesses_total", **labels), total("first_guesses_total", **labels))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def accepted(rows: Iterable[RequestStats]) -> int:
    return sum(row.speculation.num_accepted_tokens for row in rows)


def drafted(rows: Iterable[RequestStats]) -> int:
    return sum(row.speculation.num_draft_tokens for row in rows)


def rate(rows: list[RequestStats]) -> float | None:
    return ratio(accepted(rows), drafted(rows))


def length(rows: list[RequestStats]) -> float | None:
    extra = ratio(accepted(rows), sum(row.speculation.num_drafts for row in rows))
    return None if extra is None else 1 + extra


def speed(rows: list[RequestStats]) -> float | None:
    return ratio(sum(row.num_tokens for row in rows), sum(row.speculation.num_steps for row in rows))


def drafted_by(rows: list[RequestStats], expert: str) -> list[RequestStats]:
    """The requests that `expert` drafted for, with its drafts alone: the shared adapter's are its own."""
    return [
        replace(row, speculation=one)
        for row in rows
        if (one := _drafts_of(row, expert)) is not None
        and (row.expert == expert or one.num_drafts or one.first_guesses)
    ]


def _drafts_of(row: RequestStats, expert: str) -> SpeculationStats | None:
    whole = row.speculation
    if row.expert == expert == SHARED:
        return whole
    shared = whole.shared_first_guesses, whole.shared_right_first_guesses
    if expert == SHARED:
        return _of_positions(whole.shared_drafted_at, whole.shared_accepted_at, *shared)
    if row.expert == expert:
        made, right = whole.first_guesses - shared[0], whole.right_first_guesses - shared[1]
        return _of_positions(whole.expert_drafted_at, whole.expert_accepted_at, made, right)
    return None


def _of_positions(
    drafted_at: list[int], accepted_at: list[int], guesses: int, right: int
) -> SpeculationStats:
    return SpeculationStats(
        first_guesses=guesses,
        right_first_guesses=right,
        num_drafts=sum(drafted_at[:1]),
        num_draft_tokens=sum(drafted_at),
        num_accepted_tokens=sum(accepted_at),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
    )


def guesses(rows: list[RequestStats]) -> tuple[int, int]:
    """First guesses that were looked at, and how many of them were right."""
    counts = [row.speculation for row in rows]
    return sum(one.first_guesses for one in counts), sum(one.right_first_guesses for one in counts)


def first_share(rows: list[RequestStats]) -> float | None:
    made, right = guesses(rows)
    return ratio(right, made)


def decimal(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.2f}"


def sureness(rows: list[RequestStats]) -> float | None:
    return ratio(sum(row.confidence or 0.0 for row in rows), len(rows))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("stage") / "home"
    options: Row = {"adaptive_budget": False, "num_speculative_tokens": 3}  # so that every step drafts
    system = build(load_settings(home=home, **options))
    command = [sys.executable, "-S", "-c", TRAINER, HOSTILE]
    supervisor = TrainerSupervisor(
        load_settings(home=home), system.store, base_hash=system.bank.base_hash, command=command
    )
    on = {"dashboard": True, "learning": True, **options}
    clock = Clock()
    with (
        served(home, system=system, supervisor=supervisor, clock=clock, **on) as found,
        found.client() as client,
    ):
        supervisor.start()
        try:
            register(client)
            told, updates = list[Told](), list[Row]()
            with ThreadPoolExecutor(4) as pool:
                for place, phase in enumerate(script()):
                    told += pool.map(lambda one: ask(client, *one), phase)
                    system.recorder.flush()
                    if place < PHASES - 1:
                        updates.append(teach(system, supervisor, place + 1))
            wait_for(found.idle)
            clock.stop()  # so that gauges of the last seconds keep what they say
            scrape = Scrape(client.get("/metrics").text)
            yield Stage(found, supervisor, told, updates, scrape, system.store.requests.rows())
        finally:
            supervisor.stop()


class Clock:
    """The monotonic clock, until it is stopped."""

    def __init__(self) -> None:
        self._stopped: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self._stopped is None else self._stopped

    def stop(self) -> None:
        self._stopped = time.monotonic()


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[httpx.Client]:
    with stage.found.client() as client:
        yield client


# -- the browser ---------------------------------------------------------------------------------

READ = """() => ({
    figures: [...document.querySelectorAll('[data-figure]')].map(
        one => [one.dataset.figure, one.dataset.value, one.textContent]),
    panels: [...document.querySelectorAll('[data-panel]')].map(panel => [
        panel.dataset.panel,
        [...panel.querySelectorAll('tbody tr')].map(row => [
            row.dataset.expert ?? null,
            [...row.cells].map(cell => [cell.dataset.key ?? null, cell.dataset.value ?? null])]),
        [...panel.querySelectorAll('.legend li, .small-one p')].map(
            one => [one.querySelector('span, a').textContent, one.querySelector('b').textContent]),
        [...panel.querySelectorAll('.chart svg text')].map(one => one.textContent)]),
    choice: [...document.querySelectorAll('nav.choice a')].map(
        one => [one.querySelector('span').textContent, one.querySelector('b').textContent]),
    facts: [...document.querySelectorAll('.facts dt')].map(
        one => [one.textContent, one.nextElementSibling.textContent]),
})"""


@dataclass(frozen=True)
class Seen:
    """Everything that can be read off a page."""

    figures: Row
    texts: dict[str, str]  # of the figures, as people read them
    panels: dict[str, list[Row]]  # rows by key of the column, from the top
    legends: dict[str, dict[str, str]]
    drawn: dict[str, list[str]]  # texts in the chart
    choice: dict[str, str]
    facts: dict[str, str]

    @classmethod
    def on(cls, page: Page) -> Seen:
        found = page.evaluate(READ)
        panels: dict[str, list[Row]] = {}
        for key, rows, _, _ in found["panels"]:
            parsed = [
                {**({"expert": name} if name else {}), **{k: value(v) for k, v in cells if k}}
                for name, cells in rows
            ]
            assert panels.setdefault(key, parsed) == parsed  # one table may stand under several charts
        return cls(
            figures={key: value(exact) for key, exact, _ in found["figures"]},
            texts={key: text for key, _, text in found["figures"]},
            panels=panels,
            legends={key: dict(legend) for key, _, legend, _ in found["panels"]},
            drawn={key: texts for key, _, _, texts in found["panels"]},
            choice=dict(found["choice"]),
            facts=dict(found["facts"]),
        )


def value(text: str | None) -> Any:
    """A number where it is one; None where nothing is known."""
    if text is None or text in ("", "–"):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}\u202f%"


@dataclass
class Tabs:
    """Pages of the dashboard, each opened once, and what they did."""

    url: str
    context: BrowserContext
    hosts: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    _open: dict[str, Page] = field(default_factory=dict)

    def page(self, path: str) -> Page:
        if path not in self._open:
            page = self._open[path] = self.context.new_page()
            page.set_default_timeout(SLOW)
            page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).netloc))
            page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
            page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
            page.on("console", self._console)
            page.goto(f"{self.url}/dashboard/{path}{'&' if '?' in path else '?'}range=all")
            page.locator(".page:not([aria-busy])").wait_for()
        return self._open[path]

    def see(self, path: str) -> Seen:
        page = self.page(path)
        page.locator(".chart:visible svg text").first.wait_for(state="attached")
        return Seen.on(page)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")


@pytest.fixture(scope="module")
def tabs(stage: Stage) -> Iterator[Tabs]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to look at the dashboard with")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        tabs = Tabs(stage.found.url, context)
        context.on("request", lambda request: tabs.hosts.add(urlsplit(request.url).netloc))
        yield tabs
        browser.close()


# -- without a browser -----------------------------------------------------------------------------


def test_the_stream_is_worth_counting(stage: Stage) -> None:
    """All experts both ways, several writings, versions that changed: else the rest proves little."""
    assert {row.expert for row in stage.rows} == set(EXPERTS)
    assert {"latin", "kana", "cyrillic", "hangul", "han"} <= {row.lang for row in stage.rows}
    assert {one.expert for one in stage.told if one.routed} == set(EXPERTS)
    assert {row.adapter_version for row in stage.of("python")} == {0, 1, 2}
    rates = [stage.acceptance(expert=name) for name in EXPERTS]
    assert all(rate and 0 < rate < 1 for rate in rates)
    assert len(set(rates)) == len(rates)


def test_clients_metrics_and_store_agree(stage: Stage) -> None:
    scrape, rows = stage.scrape, stage.rows
    assert len(rows) == sum(one.answers for one in stage.told)
    assert scrape.total("request_success_total") == len(rows)
    for reason in ("stop", "length"):
        ended = sum(row.finish_reason == reason for row in rows)
        assert scrape.total("request_success_total", finished_reason=reason) == ended
    for expert in EXPERTS:
        own, told = stage.of(expert), [one for one in stage.told if one.expert == expert]
        assert len(own) == sum(one.answers for one in told)
        sums = {
            "generation_tokens_total": (sum(one.tokens for one in told), sum(r.num_tokens for r in own)),
            "target_steps_total": (sum(r.speculation.num_steps for r in own),) * 2,
            "prompt_tokens_total": (
                sum(one.prompt_tokens * one.answers for one in told),
                sum(r.num_prompt_tokens for r in own),
            ),
        }
        for name, both in sums.items():
            assert (scrape.total(name, expert=expert),) * 2 == both
        made = drafted_by(rows, expert)
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            kept = sum(getattr(row.speculation, f"num_{name}") for row in made)
            assert scrape.spec(name, expert=expert) == kept
        for lang in {row.lang for row in rows}:
            some = [row for row in made if row.lang == lang]
            assert scrape.spec("draft_tokens", expert=expert, lang=lang) == drafted(some)
            assert scrape.spec("accepted_tokens", expert=expert, lang=lang) == accepted(some)
        for place in range(3):
            hits = sum(
                row.speculation.accepted_at[place] for row in made if len(row.speculation.accepted_at) > place
            )
            assert scrape.spec("accepted_tokens_per_pos", expert=expert, position=str(place)) == hits
        ever = stage.found.system.store.requests.summary()[expert]
        assert (ever.requests, ever.draft_tokens, ever.accepted_tokens) == (
            len(own),
            drafted(made),
            accepted(made),
        )
    looked_up = [f"{kind}{name}_tokens" for kind in ("", "accepted_") for name in ("lookup", "earlier")]
    for name in ("drafts", "draft_tokens", "accepted_tokens", *looked_up):
        assert scrape.spec(name) == sum(one.figures[f"num_{name}"] for one in stage.told)


def test_what_is_kept_to_learn_from(stage: Stage, client: httpx.Client) -> None:
    kept = Counter[str]()
    for one in stage.told:
        kept[one.expert] += one.answers * (one.body.get("store") is not False)
    assert client.get("/admin/replay").json()["records"] == kept
    assert sum(kept.values()) == len(stage.rows) - 1


def test_a_hostile_name_is_refused(stage: Stage, client: httpx.Client) -> None:
    body = {"name": HOSTILE, "examples": [f"{ATTACK} {i}" for i in range(8)]}
    check_error(client.post("/admin/domains", json=body), 400)
    asked = {"model": f"{TARGET}:{HOSTILE}", "prompt": "x"}
    check_error(client.post("/v1/completions", json=asked), 404, "model")
    assert [row["name"] for row in client.get("/admin/domains").json()["domains"]] == list(DOMAINS)


# -- figures -------------------------------------------------------------------------------------


def by_step(rows: list[RequestStats], table: list[Row]) -> Iterator[tuple[Row, list[RequestStats]]]:
    """Each row of `table`, oldest first, with the requests that ended in its step; together they are all."""
    starts = [row["at"] for row in table]
    assert starts == sorted(set(starts))
    ends = [*starts[1:], math.inf]
    parts = [[r for r in rows if a <= r.created_at < b] for a, b in zip(starts, ends, strict=True)]
    assert sum(map(len, parts)) == len(rows)
    yield from zip(table, parts, strict=True)


def check_throughput(stage: Stage, table: list[Row]) -> None:
    width = table[1]["at"] - table[0]["at"]
    for row, own in by_step(stage.rows, table):
        tokens = sum(one.num_tokens for one in own)
        assert (row["requests"], row["tokens"]) == (len(own), tokens)
        assert row is table[-1] or row["tokens_per_second"] == tokens / width


def check_sources(stage: Stage, table: list[Row]) -> None:
    for row, own in by_step(stage.rows, table):
        tokens = sum(one.num_tokens for one in own)
        found = sum(one.speculation.num_accepted_lookup_tokens for one in own)
        earlier = sum(one.speculation.num_accepted_earlier_tokens for one in own)
        parts = {"draft": accepted(own), "text": found - earlier, "earlier": earlier}
        parts["target"] = tokens - accepted(own) - found
        assert parts.keys() == SOURCES.keys()
        assert {name: row[f"from_{name}"] for name in parts} == parts
        assert {name: row[f"{name}_share"] for name in parts} == {
            name: ratio(part, tokens) for name, part in parts.items()
        }


def check_per_step(stage: Stage, table: list[Row]) -> None:
    for row, own in by_step(stage.rows, table):
        assert row.pop("at")
        speeds = {f"expert {name}": speed([one for one in own if one.expert == name]) for name in EXPERTS}
        assert row == {"all": speed(own), **speeds}


def check_progress(stage: Stage, table: list[Row], expert: str) -> None:
    for row, every in by_step(stage.rows, table):
        own, made = [one for one in every if one.expert == expert], drafted_by(every, expert)
        assert (row["requests"], row["tokens"]) == (len(own), sum(one.num_tokens for one in own))
        assert row["tokens_per_step"] == speed(own)
        assert (row["first_guesses"], row["right_first_guesses"]) == guesses(made)
        assert row["first_step_share"] == first_share(made)
        assert (row["draft_tokens"], row["accepted_tokens"]) == (drafted(made), accepted(made))
        assert (row["acceptance_rate"], row["mean_acceptance_length"]) == (rate(made), length(made))


def check_shares(stage: Stage, table: list[Row]) -> None:
    for row, own in by_step(stage.routed, table):
        assert row.pop("at")
        counts = Counter(one.expert for one in own)
        shares = {f"expert {name}": ratio(counts[name], len(own)) for name in EXPERTS}
        assert row == {"requests": len(own), **shares}


def check_unknown(stage: Stage, table: list[Row]) -> None:
    for row, own in by_step(stage.routed, table):
        strange = sum(one.expert == SHARED for one in own)
        assert (row["requests"], row["unknown"]) == (len(own), strange)
        assert row["unknown_share"] == ratio(strange, len(own))
        assert row["confidence"] == pytest.approx(sureness(own))


def test_overview(stage: Stage, tabs: Tabs, client: httpx.Client) -> None:
    seen, scrape = tabs.see(PAGES["overview"]), stage.scrape
    assert seen.figures["requests"] == scrape.total("request_success_total") == len(stage.rows)
    assert seen.figures["tokens_per_step"] == stage.per_step() == speed(stage.rows)
    assert seen.texts["tokens_per_step"] == decimal(stage.per_step())
    assert seen.figures["first_step_share"] == stage.first_share() == first_share(stage.rows)
    assert seen.texts["first_step_share"] == percent(stage.first_share(), 1)
    assert seen.figures["tokens_per_second"] == scrape.total("tokens_per_second") > 0
    assert seen.figures["running"] == scrape.total("num_requests_running") == 0
    assert seen.figures["speedup"] == (scrape.total("speedup") if scrape.has("speedup") else None)
    assert (seen.figures["engine_state"], seen.figures["trainer_state"]) == ("Idle", "Waiting")
    assert {name: float(text.replace("\u202f", "")) for name, text in seen.facts.items()} == {
        "Steps": scrape.total("engine_steps"),
        "Tokens since the start": scrape.total("generation_tokens_total"),
        "Versions published": scrape.total("trainer_updates"),
        "Restarts of the trainer": scrape.total("trainer_restarts"),
    }
    tokens = sum(row.num_tokens for row in stage.rows)
    assert scrape.total("generation_tokens_total") == tokens
    expect(tabs.page("").get_by_text(f"{tokens} tokens, all time; 1 is plain.")).to_be_visible()
    check_throughput(stage, seen.panels["throughput"][::-1])
    check_per_step(stage, seen.panels["tokens_per_step"][::-1])
    check_sources(stage, seen.panels["sources"][::-1])
    heads = {name: decimal(stage.per_step(expert=name)) for name in EXPERTS}
    assert seen.legends["tokens_per_step"] == heads


def test_each_expert_in_the_overview(stage: Stage, tabs: Tabs, client: httpx.Client) -> None:
    kept = client.get("/admin/replay").json()["records"]
    versions = {row["name"]: row["version"] for row in client.get("/admin/domains").json()["domains"]}
    rows = tabs.see(PAGES["overview"]).panels["experts"]
    assert [row["expert"] for row in rows] == [SHARED, *DOMAINS]
    for row in rows:
        name = row["expert"]
        assert row["recent_tokens_per_step"] == stage.per_step(expert=name) == speed(stage.of(name))
        assert row["recent_first_step_share"] == recent_share(stage, name)
        # Fewer than 20 requests are the first and the last, so there is nothing to compare.
        assert row["tokens_per_step_change"] is row["first_step_share_change"] is None
        assert row["share"] == len(stage.of(name)) / len(stage.rows)
        assert row["replay_size"] == kept[name]
        assert row["version"] == versions.get(name, 0)


def recent_share(stage: Stage, name: str) -> float | None:
    """Of the expert's own requests, so without what the shared adapter drafted for others."""
    return first_share(drafted_by(stage.of(name), name))


@pytest.mark.parametrize("name", EXPERTS)
def test_one_expert(stage: Stage, tabs: Tabs, client: httpx.Client, name: str) -> None:
    seen, own = tabs.see(f"experts?expert={name}"), stage.of(name)
    figures = seen.figures
    assert figures["recent_tokens_per_step"] == stage.per_step(expert=name) == speed(own)
    assert figures["recent_first_step_share"] == recent_share(stage, name)
    assert seen.texts["recent_first_step_share"] == percent(recent_share(stage, name), 1)
    assert figures["share"] == len(own) / len(stage.rows)
    assert figures["replay_size"] == client.get("/admin/replay").json()["records"][name]
    assert figures["version"] == (PHASES - 1 if name == "python" else 0)
    assert seen.choice == {one: decimal(stage.per_step(expert=one)) for one in EXPERTS}
    check_progress(stage, seen.panels["progress"][::-1], name)
    check_positions(stage, seen, name)
    check_languages(stage, seen, name)
    check_versions(stage, seen.panels["versions"], client, name)


def check_positions(stage: Stage, seen: Seen, name: str) -> None:
    table, scrape = seen.panels["by_position"], stage.scrape
    assert [row["position"] for row in table] == [1, 2, 3]
    places = scrape.labels("spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert places == {"0", "1", "2"}  # counted from 0 there
    for place, row in enumerate(table):
        hits = scrape.spec("accepted_tokens_per_pos", expert=name, position=str(place))
        guesses = sum(
            one.speculation.drafted_at[place]
            for one in drafted_by(stage.rows, name)
            if len(one.speculation.drafted_at) > place
        )
        assert (row["draft_tokens"], row["accepted_tokens"]) == (guesses, hits)
        assert row["acceptance_rate"] == hits / guesses
        assert f"{math.floor(100 * hits / guesses + 0.5)} %" in seen.drawn["by_position"]
    assert sum(row["draft_tokens"] for row in table) == scrape.spec("draft_tokens", expert=name)
    assert sum(row["accepted_tokens"] for row in table) == scrape.spec("accepted_tokens", expert=name)


def check_languages(stage: Stage, seen: Seen, name: str) -> None:
    table, scrape = seen.panels["by_language"], stage.scrape
    requests = Counter(one.lang for one in stage.of(name))
    assert {row["lang"]: row["requests"] for row in table} == requests
    assert [row["requests"] for row in table] == sorted(requests.values(), reverse=True)
    for row in table:
        place = {"expert": name, "lang": row["lang"]}
        assert row["steps"] == scrape.total("target_steps_total", **place)
        assert row["tokens_per_step"] == stage.per_step(**place)
        assert row["first_guesses"] == scrape.total("first_guesses_total", **place)
        assert row["first_step_share"] == stage.first_share(**place)
        assert row["lang"] in seen.drawn["by_language"]


def check_versions(stage: Stage, table: list[Row], client: httpx.Client, name: str) -> None:
    versions = stage.found.system.store.registry.versions(name)[::-1]
    listed = client.get("/admin/adapters").json()["adapters"]
    assert [one.version for one in versions] == [
        one["version"] for one in listed[::-1] if one["domain"] == name
    ]
    assert len(table) == len(versions) == (PHASES - 1 if name == "python" else 0)
    for row, version in zip(table, versions, strict=True):
        own = [one for one in stage.of(name) if one.adapter_version == version.version]
        assert row == {
            "version": version.version,
            "state": version.state,
            "created_at": version.created_at,
            "parent": version.parent,
            "held_out_acceptance": 0.5 + version.version / 16,
            "requests": len(own),
            "tokens_per_step": speed(own),
            "first_step_share": first_share(drafted_by(own, name)),
        }


def test_router(stage: Stage, tabs: Tabs, client: httpx.Client) -> None:
    seen, routed = tabs.see(PAGES["router"]), stage.routed
    assert len(routed) == sum(one.answers for one in stage.told if one.routed)
    assert seen.figures["routed"] == len(routed)
    strange = [row for row in routed if row.expert == SHARED]
    assert seen.figures["unknown"] == len(strange) / len(routed)
    assert seen.figures["confidence"] == pytest.approx(sureness(routed))
    assert seen.texts["confidence"] == percent(sureness(routed))
    assert seen.figures["domains"] == len(DOMAINS)
    check_shares(stage, seen.panels["shares"][::-1])
    check_unknown(stage, seen.panels["unknown"][::-1])
    counts = Counter(row.expert for row in routed)
    assert seen.legends["shares"] == {name: percent(counts[name] / len(routed)) for name in EXPERTS}
    for place, row in enumerate(seen.panels["confidences"]):
        low, high = place / 10, (place + 1) / 10 if place < 9 else math.inf
        own = [one for one in routed if low <= (one.confidence or 0) < high]
        lost = sum(one.expert == SHARED for one in own)
        assert row == {
            "from": low,
            "to": (place + 1) / 10,
            "to_an_expert": len(own) - lost,
            "fits_none": lost,
        }


def test_the_router_says_the_same_again(stage: Stage, client: httpx.Client) -> None:
    """The confidence in the store is that of the prompt: asked alone, the router answers as in the stream."""
    asked = [one for one in stage.told if one.routed]
    texts = [one.body["prompt"] for one in asked]
    routes = client.post("/admin/route", json={"texts": texts}).json()["routes"]
    assert [route["domain"] for route in routes] == [one.expert for one in asked]
    kept = sorted(row.confidence or 0 for row in stage.routed)
    # Embedded with other texts beside it, a text comes out a little different: matrix products round.
    assert kept == pytest.approx(sorted(route["confidence"] for route in routes), abs=5e-3)


def test_a_hostile_prompt_tried(stage: Stage, tabs: Tabs, client: httpx.Client) -> None:
    page = tabs.page(PAGES["router"])
    page.locator("textarea").fill(ATTACK)
    page.get_by_text("Ask the router").click()
    expect(page.locator('[data-figure="route"]')).to_be_visible()
    (route,) = client.post("/admin/route", json={"texts": [ATTACK]}).json()["routes"]
    assert Seen.on(page).figures["route"] == route["domain"]
    bars = page.locator("[data-probability]").evaluate_all(
        "all => all.map(one => [one.dataset.probability, one.dataset.value])"
    )
    assert {name: float(text) for name, text in bars} == pytest.approx(route["probabilities"], rel=1e-3)
    assert page.evaluate("window.hacked") is None


def test_learning(stage: Stage, tabs: Tabs, client: httpx.Client) -> None:
    seen, updates = tabs.see(PAGES["learning"]), stage.updates
    state = client.get("/admin/learning").json()
    assert seen.figures["updates"] == len(updates) == stage.scrape.total("trainer_updates") == PHASES - 1
    assert seen.figures["seconds"] == sum(one["seconds"] for one in updates)
    gains = [one["acceptance_after"] - one["acceptance_before"] for one in updates]
    assert seen.figures["gain"] is None  # there is no gate
    assert seen.figures["restarts"] == state["restarts"] == stage.scrape.total("trainer_restarts") == 0
    expect(tabs.page("learning").locator('[data-figure="trainer_state"]')).to_have_text(f"{state['waits']}.")
    table = seen.panels["updates"][::-1]
    told, ungated = set(updates[0]) - {"created_at"}, dict.fromkeys(UNGATED)
    assert [{key: row[key] for key in told} for row in table] == [
        {key: one[key] for key in told} for one in updates
    ]
    assert [{key: row[key] for key in UNGATED} for row in table] == [ungated] * len(updates)
    assert set(table[0]) == {*told, *UNGATED, "at", "gain", "decision"}
    assert [(row["at"], row["gain"]) for row in table] == [
        (one["created_at"], gain) for one, gain in zip(updates, gains, strict=True)
    ]
    (spent,) = seen.panels["updates_by_expert"]
    assert spent == {
        "expert": "python",
        "updates": len(updates),
        "seconds": seen.figures["seconds"],
        "mean_gain": pytest.approx(sum(gains) / len(gains)),
    }


# -- files ---------------------------------------------------------------------------------------

Check = Callable[[Stage, list[Row]], None]
MOVING: dict[str, Check] = {  # tables whose steps go with the clock
    "throughput": check_throughput,
    "sources": check_sources,
    "tokens_per_step": check_per_step,
    "progress": lambda stage, table: check_progress(stage, table, "python"),
    "shares": check_shares,
    "unknown": check_unknown,
}
FILES = {
    "overview": ("throughput", "sources", "tokens_per_step", "experts"),
    "experts": ("progress", "by_position", "by_language", "versions"),
    "router": ("confidences", "shares", "unknown"),
    "learning": ("updates", "updates_by_expert"),
}


def download(page: Page, panel: str) -> list[Row]:
    with page.expect_download() as download:
        page.locator(f'[data-panel="{panel}"] a.csv').first.click()
    assert download.value.suggested_filename == f"moedraft-{panel}-all.csv"
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert SECRET not in text
    return [{key: _cell(key, cell) for key, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


def _cell(key: str, text: str) -> Any:
    return datetime.fromisoformat(text).timestamp() if key in ("at", "created_at") else value(text)


@pytest.mark.parametrize("name", PAGES)
def test_files_say_the_same(stage: Stage, tabs: Tabs, name: str) -> None:
    page, shown = tabs.page(PAGES[name]), tabs.see(PAGES[name]).panels
    assert set(shown) - {"state", "try", "suggestions"} == set(FILES[name])
    for panel in FILES[name]:
        written = download(page, panel)
        assert written
        if panel in MOVING:
            MOVING[panel](stage, written)
        elif panel == "experts":
            check_experts_file(stage, written, shown[panel])
        else:
            newest_first = panel == "updates"
            assert [blurred(row) for row in written] == shown[panel][:: -1 if newest_first else 1]


def blurred(row: Row) -> Row:
    """Times as files have them: to the millisecond."""
    return {key: pytest.approx(v, abs=2e-3) if key in ("at", "created_at") else v for key, v in row.items()}


def check_experts_file(stage: Stage, written: list[Row], shown: list[Row]) -> None:
    scrape = stage.scrape
    for row, on_page in zip(written, shown, strict=True):
        name, own = row["expert"], stage.of(row["expert"])
        assert {key: row[key] for key in on_page} == on_page
        assert row["requests"] == row["all_requests"] == len(own)
        assert row["acceptance_rate"] == stage.acceptance(expert=name)
        assert row["tokens_per_step"] == row["recent_tokens_per_step"] == stage.per_step(expert=name)
        assert row["first_step_share"] == stage.first_share(expert=name)
        assert row["updates"] == sum(update["expert"] == name for update in stage.updates)
        assert row["all_tokens"] == scrape.total("generation_tokens_total", expert=name)
        assert row["all_steps"] == scrape.total("target_steps_total", expert=name)
        assert row["all_first_guesses"] == scrape.total("first_guesses_total", expert=name)
        assert row["all_drafts"] == scrape.spec("drafts", expert=name)
        assert row["all_draft_tokens"] == scrape.spec("draft_tokens", expert=name)
        assert row["all_accepted_tokens"] == scrape.spec("accepted_tokens", expert=name)


# -- nothing runs, nothing leaves ------------------------------------------------------------------


def test_what_is_hostile_stays_text(stage: Stage, tabs: Tabs) -> None:
    """The trainer's words are shown as they are; descriptions and prompts are shown nowhere."""
    paths = [*PAGES.values(), f"experts?expert={BAD}", f"experts?expert={quote(HOSTILE)}"]
    for path in paths:
        page = tabs.page(path)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert SECRET not in page.content()
        assert page.get_by_text(HOSTILE).count() == (path in (PAGES["overview"], PAGES["learning"]))
    expect(tabs.page(paths[-1]).get_by_text("There is no such expert")).to_be_visible()
    assert SECRET not in stage.scrape.text
    assert "img" not in stage.scrape.text


@pytest.mark.slow  # for people to look at; the tests beside it look at the same pages
def test_pictures_are_kept(stage: Stage, tabs: Tabs) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name, path in PAGES.items():
        page, file = tabs.page(path), SHOTS / f"stream-{name}.png"
        page.locator(".chart:visible svg").first.wait_for()
        file.unlink(missing_ok=True)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=file, full_page=True)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_nothing_left_this_host(stage: Stage, tabs: Tabs) -> None:
    """After all that the tests before did, and every page."""
    for path in PAGES.values():
        tabs.page(path)
    assert tabs.hosts == {urlsplit(stage.found.url).netloc}
    assert tabs.faults == []
