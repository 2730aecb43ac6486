"""The dashboard in a real browser: its figures are the store's, what it is told stays text, and it is alone.

Without Chromium only the tests that need no browser run.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
import torch
from candidates import candidate
from dashboard_fakes import (
    HOSTILE,
    IDLE,
    SERVING,
    WAITING,
    FakeWorker,
    Site,
    fill,
    invented,
    record,
    site,
    tried,
)
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from moedraft.core import SHARED, AdapterVersion, Domain, UpdateRecord
from moedraft.insight.change import change_of_tokens_per_step, first_step_share, tokens_per_step
from moedraft.insight.observe import Observer
from moedraft.insight.tables.spans import SPANS
from moedraft.insight.tables.table import Column, Table
from moedraft.insight.views import RouterView
from moedraft.learning_state import LearningKind, LearningState, paused, waiting
from moedraft.selecting.prior.confusion import Mistake
from moedraft.serve.dashboard import markup
from moedraft.serve.dashboard.overview import MOST_CHARTS
from moedraft.serve.dashboard.pages import SCRIPT
from moedraft.serve.dashboard.router import _mistake, _strip
from moedraft.serve.dashboard.standings import shown
from moedraft.serve.dashboard.suggestions import groups_of, merges_of
from moedraft.serve.dashboard.words import COVERAGE, FIRST_GUESS
from moedraft.speculation import SpeculationStats
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store
from moedraft.system.domains.suggest import Suggestion, Suggestions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
SHOTS = Path(__file__).resolve().parents[2] / "runs" / "dashboard"  # kept, for people to look at
PAGES = ("", "experts", "router", "learning")
SLOW = 20_000  # ms; a machine may be busy with other things
ALL = SPANS["all"]

Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to look at the dashboard with")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Some hundred requests of five experts, to be read only."""
    store = Store.open(tmp_path_factory.mktemp("served"))
    fill(store, rows=600)
    yield store
    store.close()


@pytest.fixture
def served(filled: Store) -> Iterator[Site]:
    """Over `filled`. One site at a time: NiceGUI lives once in a process, and in one event loop."""
    now = time.time()  # stands still, so that the page and the test see the same steps
    with site(filled, clock=lambda: now) as found:
        yield found


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Site]:
    """Nothing was served here yet."""
    store = Store.open(tmp_path / "home")
    with site(store, FakeWorker(IDLE)) as found:
        yield found
    store.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens a page of a site and waits for its figures. Fails where the page asked any other host."""
    contexts, hosts, own = dict[tuple[int, str], BrowserContext](), set[str](), set[str]()

    def visit(at: Site, path: str = "", *, width: int = 1280, scheme: Any = "light") -> Page:
        if (width, scheme) not in contexts:
            size = {"width": width, "height": 900}
            contexts[width, scheme] = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page = contexts[width, scheme].new_page()
        page.set_default_timeout(SLOW)
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).netloc))
        page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
        own.add(urlsplit(at.url).netloc)
        page.goto(f"{at.url}/dashboard/{path}")
        page.locator(".page:not([aria-busy])").wait_for()
        return page

    yield visit
    for context in contexts.values():
        context.close()
    assert hosts == own


def figure(page: Page, key: str) -> str:
    """The exact value behind a figure in large type."""
    return page.locator(f'[data-figure="{key}"]').get_attribute("data-value") or ""


def table(page: Page, panel: str) -> list[list[str | None]]:
    """The exact values of a panel's numbers, row by row from the top."""
    return page.locator(f'[data-panel="{panel}"] tbody').first.evaluate(
        "body => [...body.rows].map(row => [...row.cells].map(cell => cell.getAttribute('data-value')))"
    )


def exact(rows: Any) -> list[list[str | None]]:
    return [[cell if cell is None or isinstance(cell, str) else repr(cell) for cell in row] for row in rows]


# -- figures -------------------------------------------------------------------------------------


def test_overview_shows_what_the_store_holds(served: Site, visit: Visit) -> None:
    page = visit(served, "?range=all")
    rows, sums = served.store.requests.rows(), served.store.requests.summary()
    assert figure(page, "requests") == str(len(rows))
    tokens, steps, guesses, right = (
        sum(getattr(one, name) for one in sums.values())
        for name in ("tokens", "steps", "first_guesses", "right_first_guesses")
    )
    assert figure(page, "tokens_per_step") == repr(tokens / steps)
    assert figure(page, "first_step_share") == repr(right / guesses)
    assert figure(page, "tokens_per_second") == repr(SERVING.tokens_per_second)
    assert figure(page, "speedup") == repr(SERVING.speedup)
    assert figure(page, "running") == repr(SERVING.running)
    assert page.locator('[data-figure="speedup"]').inner_text() == "1.42×"
    for name, stats in sums.items():
        cells = page.locator(f'[data-table="experts"] tr[data-expert="{name}"]')
        change = change_of_tokens_per_step(stats)
        assert change is not None
        for key, now in (
            ("recent_tokens_per_step", tokens_per_step(stats.recent_window)),
            ("recent_first_step_share", first_step_share(stats.recent_window)),
            ("tokens_per_step_change", change.difference),
        ):
            assert cells.locator(f'[data-key="{key}"]').get_attribute("data-value") == repr(now)
        tone = {1: "up", 0: "same", -1: "down"}[change.direction]
        expect(cells.locator('[data-key="tokens_per_step_change"]')).to_have_class(f"num {tone}")
        size = cells.locator('[data-key="replay_size"]').get_attribute("data-value")
        assert size == repr(served.store.replay.count(name))
    throughput = Observer(served.store, served.clock).overview(ALL).throughput
    assert table(page, "throughput") == exact(throughput.rows[::-1])


@pytest.mark.parametrize("name", ["python", SHARED])
def test_one_expert_as_the_store_has_it(served: Site, visit: Visit, name: str) -> None:
    page = visit(served, f"experts?range=all&expert={name}")
    stats = served.store.requests.summary()[name]
    assert figure(page, "recent_tokens_per_step") == repr(tokens_per_step(stats.recent_window))
    assert figure(page, "recent_first_step_share") == repr(first_step_share(stats.recent_window))
    assert figure(page, "replay_size") == repr(served.store.replay.count(name))
    live = served.store.registry.live(name)
    assert live is not None
    assert figure(page, "version") == repr(live.version)
    view = Observer(served.store, served.clock).expert(name, ALL)
    assert view is not None
    assert table(page, "progress") == exact(view.progress.rows[::-1])
    assert table(page, "by_position") == exact(view.by_position.rows)
    assert table(page, "by_language") == exact(view.by_language.rows)
    assert table(page, "versions") == exact(view.versions.rows)


def test_the_router_as_the_store_has_it(served: Site, visit: Visit) -> None:
    page = visit(served, "router?range=all")
    routed = [row for row in served.store.requests.rows() if row.confidence is not None]
    unknown = sum(row.expert == SHARED for row in routed)
    assert figure(page, "routed") == repr(len(routed))
    assert figure(page, "unknown") == repr(unknown / len(routed))
    view = Observer(served.store, served.clock).router(ALL)
    assert table(page, "shares") == exact(view.shares.rows[::-1])
    assert table(page, "confidences") == exact(view.histogram.rows)


def test_learning_as_the_store_has_it(served: Site, visit: Visit) -> None:
    page = visit(served, "learning?range=all")
    updates = served.store.updates.recent(limit=1000)
    assert figure(page, "updates") == repr(len(updates))
    assert float(figure(page, "seconds")) == pytest.approx(sum(update.seconds for update in updates))
    assert table(page, "updates") == exact(
        Observer(served.store, served.clock).learning(ALL).updates.rows[::-1]
    )
    expect(page.locator('[data-figure="trainer_state"]')).to_contain_text(WAITING.learning.waits_for or "?")


def test_marks_stand_where_versions_changed(served: Site, visit: Visit) -> None:
    page = visit(served, "experts?range=all&expert=sql")
    view = Observer(served.store, served.clock).expert("sql", ALL)
    assert view is not None
    marks = [mark.label for mark in view.progress.marks][-6:]
    assert marks
    chart = page.locator('[data-panel="progress"] .chart svg').first
    for label in marks:
        expect(chart.get_by_text(label, exact=True)).to_be_visible()


def test_figures_move_by_themselves(fresh: Site, visit: Visit) -> None:
    page = visit(fresh, "?range=15m")
    expect(page.get_by_text("Ready for the first request")).to_be_visible()
    row = invented(SHARED, time.time() - 5, 0.7, Random(1))
    fresh.store.requests.add([row])
    fresh.worker.now = replace(SERVING, tokens_per_second=77.5)
    rate = repr(row.num_tokens / row.speculation.num_steps)
    expect(page.locator('[data-figure="tokens_per_step"]')).to_have_attribute(
        "data-value", rate, timeout=SLOW
    )
    expect(page.locator('[data-figure="tokens_per_second"]')).to_have_attribute(
        "data-value", "77.5", timeout=SLOW
    )
    expect(page.get_by_text("Ready for the first request")).to_have_count(0)


# -- states --------------------------------------------------------------------------------------


def test_nothing_yet(fresh: Site, visit: Visit) -> None:
    for name in ("experts", "learning"):
        page = visit(fresh, name)
        expect(page.locator(".nothing").first).to_be_visible()
        expect(page.locator(".chart:visible")).to_have_count(0)
    assert "curl" in visit(fresh).locator(".welcome pre").inner_text()


def test_a_store_that_cannot_be_read(fresh: Site, visit: Visit) -> None:
    page = visit(fresh, "?range=15m")
    fresh.store.close()
    expect(page.get_by_text("The figures cannot be read now")).to_be_visible(timeout=SLOW)
    assert str(fresh.store.home.path) not in page.content()
    answer = httpx.get(f"{fresh.url}/dashboard/csv/throughput")
    assert (answer.status_code, str(fresh.store.home.path) in answer.text) == (503, False)


def test_how_the_engine_and_the_trainer_are(fresh: Site, visit: Visit) -> None:
    fresh.worker.now = replace(IDLE, failed="the device is gone", learning=paused("the disk is full"))
    fresh.supervisor.now = replace(
        WAITING,
        learning=LearningState(LearningKind.RESTARTING, "in 4 s"),
        pid=None,
        last_error="it was killed",
    )
    page = visit(fresh)
    for sentence in (
        "Failed",
        "the device is gone",
        "the disk is full",
        "starts again in 4 s",
        "It was killed.",
    ):
        expect(page.get_by_text(sentence).first).to_be_visible()
    training = LearningState(LearningKind.TRAINING, expert="sql", step=3, steps=16, loss=1.234)
    fresh.supervisor.now = replace(WAITING, learning=training)
    page = visit(fresh, "learning")
    expect(page.get_by_text("Updating the adapter of sql, step 3 of 16, loss 1.23.")).to_be_visible()


def test_the_share_of_answers_that_an_expert_can_guess(fresh: Site, visit: Visit) -> None:
    store = fresh.store
    name = "sql"
    store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    assert visit(fresh, f"experts?expert={name}").locator('[data-figure="coverage"]').count() == 0
    store.adapters.publish(candidate(name, vocabulary=torch.tensor([3, 9], dtype=torch.int32)))
    store.replay.add([record(name, 10.0)])  # its answer is token 3
    basis = "By 2 tokens of its own, counted in 1 answer since they were chosen."
    page = visit(fresh, f"experts?expert={name}")
    expect(page.get_by_text(basis)).to_be_visible()
    expect(page.get_by_text("On its list")).to_have_attribute("title", COVERAGE)
    assert figure(page, "coverage") == "1.0"
    page = visit(fresh, "")
    table = page.locator('[data-table="experts"]')
    expect(table.get_by_text("on its list")).to_have_attribute("title", COVERAGE)
    cells = {one: table.locator(f'tr[data-expert="{one}"] [data-key="coverage"]') for one in (name, SHARED)}
    assert cells[name].get_attribute("data-value") == "1.0"
    expect(cells[name].get_by_title(basis)).to_have_text("100\u202f%")
    expect(cells[SHARED]).to_have_text("–")


def test_a_draft_that_guesses_every_token_has_no_column_for_it(served: Site, visit: Visit) -> None:
    table = visit(served, "").locator('[data-table="experts"]')
    assert table.get_by_text("on its list").count() == 0
    heads, cells = table.locator("thead th"), table.locator("tbody tr").first.locator("th, td")
    assert heads.count() == cells.count() == 8


def test_it_is_said_which_first_guesses_are_counted(served: Site, visit: Visit) -> None:
    page = visit(served, "?range=all")
    for label in ("First guesses right", "first guesses right"):
        found = page.get_by_text(label, exact=True).and_(page.locator("[title]"))
        expect(found.first).to_have_attribute("title", FIRST_GUESS)


def test_an_expert_and_a_page_that_are_not_there(served: Site, visit: Visit) -> None:
    expect(visit(served, "experts?expert=nobody").get_by_text("There is no such expert")).to_be_visible()
    page = visit(served, "nowhere")
    expect(page.get_by_text("There is no such page")).to_be_visible()
    page.get_by_text("Back to the overview").click()
    expect(page.locator('[data-figure="requests"]')).to_be_visible()


# -- the address, and what one can do --------------------------------------------------------------


def test_the_address_says_what_is_shown(served: Site, visit: Visit) -> None:
    page = visit(served, "experts?range=all&expert=python")
    page.locator("nav.ranges").get_by_text("24 hours").click()
    expect(page).to_have_url(re.compile(r"/dashboard/experts\?range=24h&expert=python$"))
    page.locator("nav.choice").get_by_text("sql").click()
    expect(page).to_have_url(re.compile(r"range=24h&expert=sql$"))
    page.reload()
    expect(page.locator("nav.choice a[aria-current]")).to_contain_text("sql")
    expect(page.locator("nav.ranges a[aria-current]")).to_have_text("24 hours")
    page.locator("nav.pages").get_by_text("Router").click()
    expect(page).to_have_url(re.compile(r"/dashboard/router\?range=24h&expert=sql$"))
    page.go_back()
    expect(page.locator("nav.choice a[aria-current]")).to_contain_text("sql")


def test_numbers_stay_open_and_csv_says_the_same(served: Site, visit: Visit) -> None:
    page = visit(served, "router?range=all")
    panel = page.locator('[data-panel="shares"]')
    expect(panel.locator("table")).to_be_hidden()
    panel.get_by_text("As numbers").click()
    expect(panel.locator("table")).to_be_visible()
    with page.expect_download() as download:
        panel.get_by_text("CSV").click()
    assert download.value.suggested_filename == "moedraft-shares-all.csv"
    written = Path(download.value.path()).read_text(encoding="utf-8")
    lines = written.replace("\r\n", "\n").splitlines()
    assert lines == Observer(served.store, served.clock).router(ALL).shares.to_csv().splitlines()
    assert len(lines) == len(table(page, "shares")) + 1


def test_a_prompt_to_try(served: Site, visit: Visit) -> None:
    page = visit(served, "router")
    page.get_by_text("Ask the router").click()
    expect(page.get_by_text("Write a prompt first")).to_be_visible()
    page.locator("textarea").fill("SELECT 1")
    page.get_by_text("Ask the router").click()
    expect(page.locator('[data-figure="route"]')).to_have_text("sql")
    sure = page.locator('[data-probability="sql"]').get_attribute("data-value")
    assert sure == "0.83"
    page.locator("textarea").fill("what is love?")
    page.locator("textarea").press("Control+Enter")
    expect(page.locator('[data-figure="route"]')).to_have_text("Fits no domain")
    assert served.worker.asked[-2:] == ["SELECT 1", "what is love?"]


def test_the_drafts_of_a_tried_answer_are_compared(served: Site, visit: Visit) -> None:
    page = visit(served, "router")
    page.locator("textarea").fill("SELECT 1")
    page.get_by_text("Answer and compare").click()
    expect(page.locator('[data-figure="drafted"]')).to_have_text("python")
    expect(page.locator('[data-figure="route"]')).to_have_text("sql")
    rows = page.locator('[data-table="standings"] tbody tr')
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("the prompt")
    assert rows.nth(1).locator('[data-arm="python"]').get_attribute("data-value") == "0.9"
    assert rows.nth(1).locator('[data-arm="shared"]').get_attribute("data-value") == "0.0"
    page.locator("textarea").fill("what is love?")
    page.get_by_text("Answer and compare").click()
    expect(page.get_by_text("The drafts were not compared")).to_be_visible()


def test_who_has_signed_in_to_the_pages_has_nothing_answered(fresh: Site, browser: Browser) -> None:
    page = sign_in(fresh, browser, "router?range=all")
    page.locator("textarea").fill("SELECT 1")
    page.get_by_text("Answer and compare").click()
    expect(page.get_by_text("No answer from here")).to_be_visible()
    assert fresh.worker.asked == ["SELECT 1"]  # by the router alone


def test_why_drafts_were_not_compared_is_the_engines_own_reason() -> None:
    found = tried("hello", 4)
    assert "trained experts" in shown(found)
    told = shown(replace(found, uncompared="The router was sure."))
    assert "The router was sure." in told
    assert "trained experts" not in told


@pytest.mark.parametrize(
    ("overruled", "compares", "text"), [(0, False, "–"), (0, True, "0 %"), (5, False, "25 %")]
)
def test_nothing_is_overruled_where_nothing_is_compared(overruled: int, compares: bool, text: str) -> None:
    """A nought would say that evidence always agreed with the router."""
    empty = Table("t", (), ())
    view = RouterView(20, 0, overruled, None, (), (), empty, empty, empty)
    [value] = re.findall(r'data-figure="overruled"[^>]*>([^<]*)<', _strip(view, compares))
    assert value.replace("\u202f", " ") == text


def test_what_the_router_takes_for_what_is_told() -> None:
    told = unescape(_mistake(Mistake("sql", SHARED, 0.75)))
    assert "For many prompts for sql, the shared draft guesses best" in told
    assert "guessed best in probably 75" in told
    assert "The expert sql may need more records." in told
    other = unescape(_mistake(Mistake(SHARED, "python", 0.6)))
    assert "For many prompts that fit no domain, python guesses best" in other
    assert "examples in their wording would teach the router" in other
    assert HOSTILE not in _mistake(Mistake(HOSTILE, HOSTILE, 0.6))


@pytest.mark.parametrize(
    ("gain", "tokens", "text"),
    [
        (0.0, 0, "5 requests that evidence gave to another draft."),
        (
            3.0,
            200,
            "draft; what drafted then guessed 1.5 more of 100 tokens right than the router's",
        ),
        (-3.0, 200, "guessed 1.5 fewer of 100 tokens right"),
    ],
)
def test_what_overruling_gained_is_told_where_it_was_compared(gain: float, tokens: int, text: str) -> None:
    empty = Table("t", (), ())
    view = RouterView(20, 0, 5, None, (), (), empty, empty, empty, tokens, gain)
    assert text in unescape(_strip(view, True))


def test_without_capture_no_prompts_are_promised() -> None:
    """The command that writes them refuses then."""
    found = Suggestions(40, 0.5, False, (Suggestion("new", (), 12, 14, 0.25, 0.5),))
    for texts in (False, True):
        shown = str(groups_of(found, texts=texts))
        assert "--out" not in shown
        assert "Capture is off" in shown
    assert "--out" in str(groups_of(replace(found, capture=True), texts=True))


def test_a_key_that_may_more_does_more_on_the_pages(fresh: Site, browser: Browser) -> None:
    """What a browser that signed in may do is what its key may do."""
    for scopes, answer, name in (
        (["dashboard"], "No answer from here", "A group"),
        (["dashboard", "infer"], "per target step", "A group"),
        (["dashboard", "admin"], "No answer from here", "court-clause"),
    ):
        page = sign_in(fresh, browser, "router?range=all", scopes)
        page.locator("textarea").fill("SELECT 1")
        page.get_by_text("Answer and compare").click()
        expect(page.locator('[data-panel="try"] .answer')).to_contain_text(answer)
        page.get_by_text("Look for domains").click()
        expect(page.locator('[data-figure="suggestion"]')).to_have_text(name)
        shown = page.get_by_text("moedraft domain register court-clause").count()
        assert shown == (name == "court-clause")
        assert page.get_by_text("the scope admin").count() == (name == "A group")
        page.close()


def test_a_button_looks_for_domains(served: Site, visit: Visit) -> None:
    page = visit(served, "router")
    page.get_by_text("Look for domains").click()
    expect(page.locator('[data-figure="suggestion"]')).to_have_text("court-clause")
    expect(page.get_by_text("moedraft domain register court-clause")).to_be_visible()
    expect(page.get_by_text("sql and python.")).to_be_visible()


def test_light_and_dark(served: Site, visit: Visit) -> None:
    def paper(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = paper(visit(served)), paper(visit(served, scheme="dark"))
    assert light != dark
    page = visit(served, scheme="dark")
    page.locator("button.theme").click()
    assert paper(page) == light
    page.reload()
    assert paper(page) == light
    page.locator("button.theme").click()
    assert paper(page) == dark


@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits(served: Site, visit: Visit, width: int) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        scheme = "dark" if name in ("router", "learning") else "light"
        page = visit(served, f"{name}?range=all", width=width, scheme=scheme)
        page.locator(".chart svg").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=SHOTS / f"{name or 'overview'}-{scheme}-{width}.png", full_page=True)


def test_a_key_opens_it_and_signing_out_closes_it(fresh: Site, browser: Browser) -> None:
    page = sign_in(fresh, browser, "experts?range=24h")
    page.locator('[data-figure="version"]').wait_for()
    page.get_by_text("Sign out").click()
    page.locator("#key").wait_for()
    assert httpx.get(f"{fresh.url}/dashboard/csv/throughput").status_code == 401
    page.close()


def sign_in(
    at: Site,
    browser: Browser | BrowserContext,
    path: str = "?range=15m",
    scopes: Sequence[Any] = ("dashboard",),
) -> Page:
    """A page of `at` that was opened with a new key."""
    _, secret = KeyFile(at.store.home.path).create(scopes)
    page = browser.new_page()
    page.set_default_timeout(SLOW)
    page.goto(f"{at.url}/dashboard/{path}")
    page.locator("#key").fill(secret)
    page.locator("button").click()
    page.locator(".page:not([aria-busy])").wait_for()
    return page


def test_an_open_page_ends_with_its_key(fresh: Site, browser: Browser) -> None:
    page, keys = sign_in(fresh, browser), KeyFile(fresh.store.home.path)
    keys.revoke(keys.keys()[0].id)
    page.wait_for_url(re.compile(r"/login\?next="))
    page.close()


def test_an_open_page_ends_where_another_signs_out(fresh: Site, browser: Browser) -> None:
    context = browser.new_context()
    page, other = sign_in(fresh, context), context.new_page()
    other.goto(f"{fresh.url}/dashboard/?range=all")
    other.get_by_text("Sign out").click()
    page.wait_for_url(re.compile(r"/login\?next="))
    context.close()


def test_the_first_key_closes_pages_that_were_open(fresh: Site, visit: Visit) -> None:
    page = visit(fresh, "router?range=15m")
    KeyFile(fresh.store.home.path).create(["infer"])
    page.wait_for_url(re.compile(r"/login\?next="))


def test_no_prompt_is_tried_without_a_key(fresh: Site, visit: Visit) -> None:
    page = visit(fresh, "router?range=all")  # whose figures are seldom looked for
    page.locator("textarea").fill("SELECT 1")
    KeyFile(fresh.store.home.path).create(["infer"])
    page.get_by_text("Ask the router").click()
    page.wait_for_url(re.compile(r"/login\?next="))
    assert fresh.worker.asked == []


def test_a_server_that_starts_anew_asks_open_pages_for_a_key(tmp_path: Path, browser: Browser) -> None:
    store = Store.open(tmp_path / "home")
    with site(store) as first:
        page = sign_in(first, browser, "experts?range=24h&expert=shared")
    with site(store, port=urlsplit(first.url).port):
        page.wait_for_url(re.compile(r"/login\?next="))
        page.locator("#key").fill(KeyFile(store.home.path).create(["dashboard"])[1])
        page.locator("button").click()
        page.locator(".page:not([aria-busy])").wait_for()
        assert page.url == f"{first.url}/dashboard/experts?range=24h&expert=shared"
        page.close()
    store.close()


def test_the_first_choice_stays(fresh: Site, visit: Visit) -> None:
    def serve(name: str, count: int) -> None:
        fresh.store.requests.add([invented(name, time.time() - 5, 0.6, Random(i)) for i in range(count)])

    for name in ("law", "sql"):
        fresh.store.registry.add_domain(Domain(name, "", (name,) * 8, 1.0))
    serve("sql", 3)
    page = visit(fresh, "experts?range=15m")
    serve("law", 6)
    expect(page.locator('[data-figure="share"]')).to_have_attribute("data-value", repr(3 / 9), timeout=SLOW)
    expect(page.locator("nav.choice a[aria-current]")).to_contain_text("sql")
    assert "expert=sql" in (page.locator('[data-panel="versions"] .csv').get_attribute("href") or "")


def test_what_was_taken_back_is_said_first(fresh: Site, visit: Visit) -> None:
    fresh.store.updates.add(
        UpdateRecord(
            *("sql", 3, 0, 0, 0.0, 0.0, None, None),
            decision="withdraw",
            gain=-0.31,
            gain_low=-0.4,
            gain_high=-0.2,
            witness=0.02,
            gate_records=24,
            parent=4,
            reason="It did worse.",
        )
    )
    page = visit(fresh, "learning?range=all")
    said = page.locator('.banner [data-figure="withdrawn"]')
    expect(said).to_contain_text("The adapter of sql was taken back to version 3")
    expect(said).to_contain_text("on 24 later requests the newer one gave 0.31 tokens per step")
    [row] = table(page, "updates")
    assert row[-7:] == ["withdraw", "-0.31", "-0.4", "-0.2", "0.02", "24", "It did worse."]


def test_who_serves_an_expert_without_a_version_is_said(fresh: Site, visit: Visit) -> None:
    registry = fresh.store.registry
    registry.add_domain(Domain("sql", "", ("sql",) * 8, 1.0))
    words = "The shared draft serves it at present"
    page = visit(fresh, "experts?expert=sql")
    expect(page.get_by_text(words)).to_have_count(0)  # it never had a version
    registry.add_version(AdapterVersion("sql", 1, 0, "adapters/sql/v1", "base", None, 1.0, "live"))
    registry.rollback("sql")
    page = visit(fresh, "experts?expert=sql")
    expect(page.get_by_text(words)).to_be_visible(timeout=SLOW)
    expect(page.get_by_text("or a person chose so")).to_be_visible()


def test_a_domain_that_the_shared_draft_guesses_better_is_said(fresh: Site, visit: Visit) -> None:
    registry = fresh.store.registry
    registry.add_domain(Domain("sql", "", ("sql",) * 8, 1.0))
    registry.add_version(AdapterVersion("sql", 1, 0, "adapters/sql/v1", "base", None, 1.0, "live"))
    words = "The shared draft stood for 75 % of the tokens looked at in this time"
    for tokens, shared in ((30, False), (90, True)):
        speculation = SpeculationStats()
        speculation.saw(20, tokens, shared=shared)
        one = invented("sql", time.time() - 5, 0.6, Random(tokens))
        fresh.store.requests.add([replace(one, speculation=speculation)])
    page = visit(fresh, "experts?range=all&expert=sql")
    expect(page.get_by_text(words)).to_be_visible(timeout=SLOW)


def test_many_experts(fresh: Site, visit: Visit) -> None:
    names = [f"domain-{place}" for place in range(60)]
    for name in names:
        fresh.store.registry.add_domain(Domain(name, "", (name,) * 8, 1.0))
    rows = [
        invented(name, time.time() - 5, 0.6, Random(7))
        for place, name in enumerate(names)
        for _ in range(1 + place // 40)
    ]
    fresh.store.requests.add(rows)
    page = visit(fresh, "?range=15m")
    panel = page.locator('[data-panel="tokens_per_step"]')
    shown = panel.locator(".small-one a").all_inner_texts()
    assert len(shown) == panel.locator(".chart svg").count() == MOST_CHARTS
    assert shown[0] == "domain-40"
    expect(panel.get_by_text(f"{60 - MOST_CHARTS} more are among the numbers.")).to_be_visible()
    assert panel.locator("thead th").count() == 2 + 60
    page = visit(fresh, "experts?range=15m")
    assert (page.locator("nav.choice").bounding_box() or {})["height"] < 200
    assert page.locator("nav.choice a").count() == 61


def test_moments_of_today_are_those_of_the_readers_today(browser: Browser) -> None:
    page = browser.new_page(timezone_id="Pacific/Kiritimati")  # fourteen hours ahead of UTC
    page.clock.install(time="2026-03-01T12:00:00Z")  # there the second of March has begun
    moments = ("2026-03-01T11:00:00+00:00", "2026-03-01T09:00:00+00:00")
    page.set_content(
        f"<script>{SCRIPT}</script>" + "".join(f'<time datetime="{at}">?</time>' for at in moments)
    )
    expect(page.locator("time")).to_have_text(["01:00:00", "2026-03-01 23:00:00"])
    page.close()


# -- hostile names ---------------------------------------------------------------------------------


def poison(at: Site) -> None:
    """Names, languages and errors that would run or load something where they were taken for HTML."""
    rng, now = Random(5), time.time()
    rows = [
        replace(invented(name, now - 30 * i, 0.6, rng, i % 2), lang=HOSTILE)
        for name in (HOSTILE, ":onload", "{{constructor.constructor('window.hacked=3')()}}")
        for i in range(1, 6)
    ]
    at.store.requests.add(rows)
    at.store.registry.add_domain(Domain("sql", HOSTILE, (HOSTILE,) * 8, 1.0))
    at.store.updates.add(UpdateRecord(HOSTILE, 1, 1, 1, 1.0, 1.0, 0.1, 0.2))
    at.supervisor.now = replace(WAITING, learning=waiting(HOSTILE), last_error=HOSTILE)
    at.worker.now = replace(SERVING, learning=paused(HOSTILE))


def test_hostile_names_stay_text(fresh: Site, visit: Visit) -> None:
    poison(fresh)
    expert = quote(HOSTILE, safe="")
    for path in ("?range=15m", f"experts?expert={expert}", f"router?expert={expert}", "learning"):
        page = visit(fresh, path)
        for chart in page.locator(".chart:visible").all():
            chart.hover()
            page.wait_for_timeout(50)
        assert page.get_by_text(HOSTILE).count() > 0
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
    page = visit(fresh, "router")
    page.locator("textarea").fill(f"</textarea>{HOSTILE}")
    page.get_by_text("Ask the router").click()
    expect(page.locator('[data-figure="route"]')).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_the_hostile_names_would_run(browser: Browser) -> None:
    """The control: as HTML they do what the test above looks for."""
    page = browser.new_page()
    page.set_content(HOSTILE)
    page.wait_for_function("window.hacked === 1", timeout=SLOW)
    page.close()


# -- without a browser -----------------------------------------------------------------------------


def upgrade(at: Site, origin: str | None) -> int:
    """The status of a websocket's handshake."""
    where = urlsplit(at.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
    key = base64.b64encode(os.urandom(16)).decode()
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
        **({"Origin": origin} if origin else {}),
    }
    connection.request("GET", "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=websocket", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_websocket_refuses_other_sites(fresh: Site) -> None:
    assert upgrade(fresh, fresh.url) == 101
    assert upgrade(fresh, "https://evil.example") == 403
    assert upgrade(fresh, "null") == 403
    polling = f"{fresh.url}/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert httpx.get(polling, headers={"origin": "https://evil.example"}).status_code == 403
    assert httpx.get(polling, headers={"origin": fresh.url}).status_code == 200


def test_what_the_browser_is_told(served: Site) -> None:
    answer = httpx.get(f"{served.url}/dashboard", follow_redirects=True)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert answer.headers["referrer-policy"] == "same-origin"
    foreign = set(re.findall(r"(?:https?:)?//([\w.-]+\.[a-z]{2,})", answer.text)) - {"www.w3.org"}
    assert foreign == set()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("throughput?range=all", 200),
        ("versions?expert=sql", 200),
        ("versions?expert=nobody", 404),
        ("versions?expert=" + quote(HOSTILE), 404),
        ("secrets", 404),
        ("throughput?range=1000y", 400),
        ("throughput?range=%0d%0ax: y", 400),
    ],
)
def test_csv_files(served: Site, path: str, status: int) -> None:
    answer = httpx.get(f"{served.url}/dashboard/csv/{path}")
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/csv" if status == 200 else "text/plain")


def test_only_rows_that_are_shown_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], markup.shown
    monkeypatch.setattr(markup, "shown", lambda cell, column: written.append(cell) or write(cell, column))
    rows = tuple((float(at),) for at in range(1000))
    text = markup.numbers(Table("t", (Column("at", "at", "time"),), rows))
    assert written == [float(at) for at in range(999, 999 - markup.MANY_ROWS, -1)]
    assert "800 more rows are in the CSV." in text


# -- what could be a domain ----------------------------------------------------------------------

GROUP = Suggestion("court-clause", ("the <b>court", "a clause"), 12, 14, 0.25, 0.5)


def test_groups_are_shown_with_their_command() -> None:
    found = groups_of(Suggestions(40, 0.5, True, (GROUP,)), texts=True)
    assert "12 prompts" in found
    assert "25" in found
    assert "moedraft domain register court-clause" in found
    assert "the &lt;b&gt;court" in found


def test_a_reader_who_is_no_operator_sees_no_prompt() -> None:
    """Nor the words of the group's name, which come from prompts."""
    found = groups_of(Suggestions(40, 0.5, True, (GROUP,)), texts=False)
    assert "court" not in found
    assert "12 prompts" in found


def test_domains_to_merge_are_shown() -> None:
    pair = {"first": "sql", "second": "<b>", "should_merge": True}
    assert "sql and &lt;b&gt;." in merges_of([pair, pair | {"first": "law", "should_merge": False}])
    assert "law" not in merges_of([pair | {"first": "law", "should_merge": False}])


def test_no_group_is_said() -> None:
    assert "40 prompts" in groups_of(Suggestions(40, 0.5, True, ()), texts=True)
