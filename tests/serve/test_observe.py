"""What can be seen of a home: the figures are those of the store, whatever way they are asked for."""

from __future__ import annotations

import csv
import io
import math
import random
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from candidates import candidate
from dashboard_fakes import HOSTILE, fill, invented, record
from numpy.typing import NDArray

from moedraft.core import (
    SHARED,
    Domain,
    InvalidRequest,
    ReplayRecord,
    RequestStats,
    StorageError,
    UpdateRecord,
)
from moedraft.insight import inventory, observe
from moedraft.insight.columns import NUMBERS, RequestReader
from moedraft.insight.coverage import NEWEST, Coverage
from moedraft.insight.observe import Observer
from moedraft.insight.tables import figures
from moedraft.insight.tables.spans import MOST_STEPS, SPANS, find_span, grid_of
from moedraft.insight.tables.table import Column, Table
from moedraft.speculation import SpeculationStats
from moedraft.storage.store import GENERAL_LIST, Store
from moedraft.system.build import general_list

ALL = SPANS["all"]
HOUR = SPANS["1h"]
RNG = random.Random(3)


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store, rows=400)
    return store


def now_and(*ages: float) -> tuple[float, list[float]]:
    now = time.time()
    return now, [now - age for age in ages]


# -- spans ---------------------------------------------------------------------------------------


def test_every_span_has_few_whole_steps() -> None:
    now = 1_700_000_123.4
    for first in (None, now - 30, now - 3600, now - 86400 * 3, now - 86400 * 900):
        for span in SPANS.values():
            grid = grid_of(span, now, first)
            assert grid.count <= MOST_STEPS + 1
            assert grid.start % grid.width == 0
            assert grid.start <= now - (span.seconds or 0)
            assert grid.end - grid.width <= now < grid.end
            assert grid.lengths[-1] == pytest.approx(max(1.0, now - grid.starts[-1]))


def test_an_unknown_span_is_refused() -> None:
    assert find_span(None) is HOUR
    with pytest.raises(InvalidRequest, match="15m, 1h"):
        find_span("2h")


# -- figures -------------------------------------------------------------------------------------


def test_totals_are_those_of_the_store(filled: Store) -> None:
    view = Observer(filled).overview(ALL)
    rows, sums = filled.requests.rows(), filled.requests.summary()
    assert view.requests == len(rows) == 400
    assert view.tokens == sum(row.num_tokens for row in rows)
    drafted, accepted = (
        sum(getattr(row.speculation, f"num_{n}_tokens") for row in rows) for n in ("draft", "accepted")
    )
    assert view.acceptance == accepted / drafted
    assert view.tokens_per_step == view.tokens / sum(row.speculation.num_steps for row in rows)
    right, made = (sum(getattr(row.speculation, f"{n}first_guesses") for row in rows) for n in ("right_", ""))
    assert 0 < right < made
    assert view.first_step_share == right / made
    assert view.mean_acceptance_length == 1 + accepted / sum(row.speculation.num_drafts for row in rows)
    assert sum(int(n or 0) for n in view.throughput.column("requests")) == 400
    assert sum(int(n or 0) for n in view.throughput.column("tokens")) == view.tokens
    parts = [sum(int(n or 0) for n in view.sources.column(f"from_{key}")) for key in figures.SOURCES]
    found = sum(row.speculation.num_accepted_lookup_tokens for row in rows)
    earlier = sum(row.speculation.num_accepted_earlier_tokens for row in rows)
    assert 0 < earlier < found
    assert parts == [accepted, found - earlier, earlier, view.tokens - accepted - found]
    assert all(sum(row[5:]) == pytest.approx(1) for row in view.sources.rows if row[5] is not None)
    assert sum(expert.share or 0 for expert in view.experts) == pytest.approx(1)
    for expert in view.experts:
        assert expert.stats == sums[expert.name]
        assert expert.acceptance == sums[expert.name].acceptance_rate
        assert expert.tokens_per_step == sums[expert.name].tokens_per_step
        assert expert.first_step_share == sums[expert.name].first_step_share
        assert expert.replay_size == filled.replay.count(expert.name)
    assert view.by_figures.column("all_accepted_tokens") == [
        sums[e.name].accepted_tokens for e in view.experts
    ]


def test_one_expert(filled: Store) -> None:
    view = Observer(filled).expert("python", ALL)
    assert view is not None
    rows = filled.requests.rows(expert="python")
    assert sum(int(n or 0) for n in view.progress.column("requests")) == len(rows)
    assert sum(int(n or 0) for n in view.progress.column("accepted_tokens")) == sum(
        row.speculation.num_accepted_tokens for row in rows
    )
    assert sum(int(n or 0) for n in view.progress.column("steps")) == sum(
        row.speculation.num_steps for row in rows
    )
    assert sum(int(n or 0) for n in view.progress.column("right_first_guesses")) == sum(
        row.speculation.right_first_guesses for row in rows
    )
    for place, drafted, accepted, rate in view.by_position.rows:
        at = int(place or 0) - 1
        assert drafted == sum(row.speculation.drafted_at[at] for row in rows)
        assert accepted == sum(row.speculation.accepted_at[at] for row in rows)
        assert rate == int(accepted or 0) / int(drafted or 1)
    assert {lang: n for lang, n, *_ in view.by_language.rows} == {
        lang: sum(row.lang == lang for row in rows) for lang in ("latin", "cyrillic")
    }
    made = filled.registry.versions("python")
    assert view.versions.column("version") == [version.version for version in reversed(made)]
    assert view.versions.column("state")[0] == "live"
    served = [row for row in rows if row.adapter_version == made[-1].version]
    assert view.versions.column("requests")[0] == len(served)
    assert view.expert.replay_oldest is not None
    assert view.expert.replay_newest is not None
    assert view.expert.replay_oldest < view.expert.replay_newest


def test_an_expert_that_is_not_there(filled: Store) -> None:
    assert Observer(filled).expert("nobody", ALL) is None


def test_only_the_span_counts(store: Store) -> None:
    _, (old, recent) = now_and(3 * 3600, 600)
    store.requests.add([invented(SHARED, old, 0.9, RNG), invented(SHARED, recent, 0.2, RNG)])
    observer = Observer(store)
    assert observer.overview(HOUR).requests == 1
    assert observer.overview(ALL).requests == 2
    assert observer.overview(SPANS["15m"]).requests == 1
    assert observer.overview(SPANS["24h"]).requests == 2


def test_nothing_at_all(store: Store) -> None:
    observer = Observer(store)
    for span in SPANS.values():
        view = observer.overview(span)
        assert (view.requests, view.tokens, view.acceptance, view.time_to_first_token) == (0, 0, None, None)
        assert [expert.name for expert in view.experts] == [SHARED]
        assert view.experts[0].share is None
        seen = observer.expert(SHARED, span)
        assert seen is not None
        assert (seen.by_position.rows, seen.by_language.rows, seen.versions.rows) == ((), (), ())
        assert observer.router(span).confidence is None
        assert observer.router(span).histogram.rows == ()
        assert observer.learning(span).updates.rows == ()


def test_a_request_that_drafted_nothing(store: Store) -> None:
    plain = replace(
        invented(SHARED, time.time(), 0.5, RNG),
        speculation=SpeculationStats(),
        confidence=None,
        time_to_first_token=None,
    )
    store.requests.add([plain])
    view = Observer(store).overview(HOUR)
    assert (view.requests, view.acceptance, view.mean_acceptance_length) == (1, None, None)
    assert Observer(store).router(HOUR).routed == 0


def stand_in(at: float) -> RequestStats:
    """A request of `sql` that the shared adapter drafted for in three of eight rounds."""
    return replace(
        invented("sql", at, 0.5, RNG, 2),
        num_tokens=20,
        speculation=SpeculationStats(
            num_steps=10,
            num_drafts=8,
            num_draft_tokens=14,
            num_accepted_tokens=9,
            drafted_at=[8, 6],
            accepted_at=[6, 3],
            shared_drafted_at=[3, 2],
            shared_accepted_at=[1, 0],
            first_guesses=8,
            right_first_guesses=6,
        ),
    )


def test_drafts_count_for_whoever_made_them(store: Store) -> None:
    now = time.time()
    plain = invented(SHARED, now - 30, 0.5, RNG)
    looked_at = replace(
        stand_in(now - 20).speculation,
        first_guesses=3,
        right_first_guesses=1,
        shared_first_guesses=3,
        shared_right_first_guesses=1,
    )
    store.requests.add([stand_in(now - 40), plain, replace(stand_in(now - 20), speculation=looked_at)])
    observer = Observer(store)
    sql, shared = observer.expert("sql", HOUR), observer.expert(SHARED, HOUR)
    assert sql is not None
    assert shared is not None
    assert (sql.expert.tokens_per_step, sql.expert.first_step_share) == (2.0, 6 / 8)
    assert sql.expert.acceptance == 8 / 9
    assert [row[:3] for row in sql.by_position.rows] == [(1, 10, 10), (2, 8, 6)]
    made, right = plain.speculation.first_guesses, plain.speculation.right_first_guesses
    assert shared.expert.requests == 1
    assert shared.expert.tokens_per_step == plain.num_tokens / plain.speculation.num_steps
    assert shared.expert.first_step_share == (right + 1) / (made + 3)
    assert sum(int(n or 0) for n in shared.progress.column("first_guesses")) == made + 3
    assert sum(int(n or 0) for n in shared.progress.column("requests")) == 1
    overview = observer.overview(HOUR)
    assert overview.first_step_share == (right + 7) / (made + 11)
    assert {e.name: e.first_step_share for e in overview.experts} == {
        name: one.first_step_share for name, one in store.requests.summary().items()
    }


def test_requests_from_before_first_guesses_were_counted(store: Store) -> None:
    old = SpeculationStats(num_steps=5, num_drafts=4, num_draft_tokens=9, num_accepted_tokens=3)
    store.requests.add([replace(invented("sql", time.time() - 9, 0.5, RNG), num_tokens=8, speculation=old)])
    view = Observer(store).overview(HOUR)
    assert (view.tokens_per_step, view.first_step_share, view.acceptance) == (8 / 5, None, 3 / 9)


def test_the_router(filled: Store) -> None:
    view = Observer(filled).router(ALL)
    routed = [row for row in filled.requests.rows() if row.confidence is not None]
    unknown = [row for row in routed if row.expert == SHARED]
    assert 0 < len(routed) < 400
    assert (view.routed, view.unknown) == (len(routed), len(unknown))
    assert view.confidence == pytest.approx(sum(row.confidence or 0 for row in routed) / len(routed))
    assert view.shares.columns[-1].label == SHARED
    for row in view.shares.rows:
        if row[1]:
            assert sum(float(share or 0) for share in row[2:]) == pytest.approx(1)
    bins = [row[2:] for row in view.histogram.rows]
    assert sum(int(none or 0) for _, none in bins) == len(unknown)
    assert bins[9][0] == sum(row.expert != SHARED and (row.confidence or 0) >= 0.9 for row in routed)
    assert sum(int(n or 0) for n in view.unknown_share.column("unknown")) == len(unknown)


def test_learning(filled: Store) -> None:
    judged = {"decision": "keep", "gain": 0.25, "gain_low": -0.5, "gain_high": 1.0, "gate_records": 12}
    judged["witness"] = 0.75
    filled.updates.add(UpdateRecord("sql", 99, 5, 2, 0.5, 2.5, None, 0.9, **judged, reason="In doubt."))
    view = Observer(filled).learning(ALL)
    updates = filled.updates.recent(limit=1000)
    assert view.updates.column("loss") == [update.loss for update in updates]
    assert view.updates.column("gain")[-1] is None
    gate = ("decision", "gate_gain", "gate_least", "gate_most", "gate_witness", "gate_records", "reason")
    found = [view.updates.column(key)[-1] for key in gate]
    assert found == ["keep", 0.25, -0.5, 1.0, 0.75, 12, "In doubt."]
    assert view.seconds == pytest.approx(sum(update.seconds for update in updates))
    assert (view.published, view.gain) == (len(updates) - 1, None)
    for decision, gain in (("promote", 0.5), ("along", 0.1), ("discard", -9.0), ("withdraw", -9.0)):
        filled.updates.add(replace(updates[-1], decision=decision, gain=gain))
    pinned = replace(updates[-1], decision=None, gain=None, version=99, parent=99)
    filled.updates.add(pinned)
    more = Observer(filled).learning(ALL)
    assert (more.published, more.gain) == (view.published + 2, pytest.approx(0.3))
    assert sum(float(s or 0) for s in view.by_expert.column("seconds")) == pytest.approx(view.seconds)
    assert Observer(filled).learning(SPANS["15m"]).updates.column("version")[-1] == 99


def test_all_updates_of_a_span_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "UPDATES", 4)
    now = 1_700_000_000.0
    for place in range(40):
        store.updates.add(UpdateRecord("sql", place, 1, 1, 1.0, 1.0, 0.1, 0.2, now - 300 * (39 - place)))
    observer = Observer(store, lambda: now)
    assert observer.learning(ALL).updates.column("version") == list(range(40))
    assert observer.learning(SPANS["1h"]).updates.column("version") == list(range(27, 40))


# -- marks ---------------------------------------------------------------------------------------


def marks_of(store: Store, *versions: int) -> list[str]:
    """Of requests with these versions, one a step of the hour."""
    now = time.time()
    width = grid_of(HOUR, now, None).width
    first = now - width * len(versions)
    store.requests.add(
        [invented("sql", first + width * i, 0.5, RNG, version) for i, version in enumerate(versions)]
    )
    view = Observer(store).expert("sql", HOUR)
    assert view is not None
    return [mark.label for mark in view.progress.marks]


def test_a_mark_where_the_version_changes(store: Store) -> None:
    assert marks_of(store, 0, 1, 1, 2, 1) == ["v1", "v2", "v1"]


def test_no_mark_without_a_change(store: Store) -> None:
    assert marks_of(store, 3, 3, 3) == []


def test_late_answers_of_the_old_version_make_no_marks(store: Store) -> None:
    now = time.time() // 120 * 120 + 60  # in the middle of a step
    step = [(now - 3, 1), (now - 2, 2), (now - 1, 1), (now, 2)]
    store.requests.add([invented("sql", now - 300, 0.5, RNG, 1)])
    store.requests.add([invented("sql", at, 0.5, RNG, version) for at, version in step])
    view = Observer(store, lambda: now + 1).expert("sql", HOUR)
    assert view is not None
    assert [(mark.at, mark.label) for mark in view.progress.marks] == [(now - 2, "v2")]


# -- reading only what is new ----------------------------------------------------------------------


class CountedRows:
    def __init__(self, store: Store) -> None:
        self.store, self.read = store, 0

    def __call__(self, since: float, until: float | None) -> list[object]:
        rows = self.store.requests.rows(since, until)
        self.read += len(rows)
        return list(rows)


def test_the_log_is_not_read_twice(store: Store) -> None:
    now = time.time()
    store.requests.add([invented(SHARED, now - 1000 + i, 0.5, RNG) for i in range(500)])
    rows = CountedRows(store)
    reader = RequestReader(rows)  # type: ignore[arg-type]
    assert len(reader.read(now - 700)) == 200
    assert len(reader.read(0.0)) == 500
    before = rows.read
    assert len(reader.read(0.0)) == 500
    assert rows.read - before <= 6  # the last seconds only
    store.requests.add([invented("new", now + i, 0.5, RNG) for i in range(3)])
    found = reader.read(now - 10)
    assert len(found) == 503
    assert found.expert_names == (SHARED, "new")
    assert len(found.of("new")) == 3
    assert found["created_at"].tolist() == sorted(row.created_at for row in store.requests.rows())


def test_what_came_while_nobody_looked_is_not_missed(store: Store) -> None:
    now = time.time()
    store.requests.add([invented(SHARED, now - 5000, 0.5, RNG)])
    reader = RequestReader(store.requests.rows)
    assert len(reader.read(now - 6000)) == 1
    store.requests.add([invented(SHARED, now - 4000 + i, 0.5, RNG) for i in range(4)])
    assert len(reader.read(now - 100)) == 5
    assert len(reader.read(now - 6000)) == 5


def test_a_date_in_the_future_hides_nothing(store: Store) -> None:
    """Until that date has come, and after it."""
    now, moment = time.time(), 0.0
    reader = RequestReader(store.requests.rows, clock=lambda: now + moment)
    store.requests.add([invented(SHARED, now + 1000, 0.5, RNG)])
    assert len(reader.read()) == 1
    for moment, count in ((50.0, 2), (900.0, 3), (2000.0, 5)):
        ended = [moment - 1] if moment < 2000 else [950.0, 1999.0]  # nobody looked for a while
        store.requests.add([invented(SHARED, now + at, 0.5, RNG) for at in ended])
        assert len(reader.read()) == count


def test_columns_hold_what_the_rows_say(filled: Store) -> None:
    rows = filled.requests.rows()
    found = RequestReader(filled.requests.rows).read()
    for name in NUMBERS:
        for cell, row in zip(found[name].tolist(), rows, strict=True):
            value = getattr(row if hasattr(row, name) else row.speculation, name)
            assert math.isnan(cell) if value is None else cell == value
    assert [found.lang_names[code] for code in found.langs] == [row.lang for row in rows]


def test_at_most_so_many_are_kept(store: Store) -> None:
    now = time.time()
    store.requests.add([invented(SHARED, now - 50 + i, 0.5, RNG) for i in range(50)])
    found = RequestReader(store.requests.rows, capacity=20).read()
    assert len(found) == 20
    assert found["created_at"].min() >= now - 21


def test_a_view_is_fresh_after_a_second(store: Store) -> None:
    clock = [time.time()]
    observer = Observer(store, lambda: clock[0])
    assert observer.overview(HOUR).requests == 0
    store.requests.add([invented(SHARED, clock[0] - 9, 0.5, RNG)])
    clock[0] += 0.5
    assert observer.overview(HOUR).requests == 0
    clock[0] += 0.6
    assert observer.overview(HOUR).requests == 1


def test_a_home_that_is_closed(store: Store) -> None:
    observer = Observer(store)
    store.close()
    with pytest.raises(StorageError):
        observer.overview(HOUR)


# -- hostile names, and CSV ------------------------------------------------------------------------


def test_names_that_are_those_of_columns(store: Store) -> None:
    names = ["at", "requests", "all", HOSTILE, '=1+1,"x"\n']
    now = time.time()
    store.registry.add_domain(Domain("at", "", tuple(map(str, range(8))), now))
    store.requests.add([invented(name, now - 20, 0.2 * i, RNG) for i, name in enumerate(names)])
    observer = Observer(store)
    overview, router = observer.overview(HOUR), observer.router(HOUR)
    assert {expert.name for expert in overview.experts} == {SHARED, *names}
    assert len({column.key for column in overview.by_expert.columns}) == len(names) + 2
    assert {column.label for column in router.shares.columns[2:]} - {SHARED} <= set(names)
    for table in (overview.by_expert, overview.by_figures, router.shares):
        rows = list(csv.reader(io.StringIO(table.to_csv())))
        assert len(rows) == len(table.rows) + 1
        assert {len(row) for row in rows} == {len(table.columns)}
    assert '"\'=1+1,""x""\n"' in overview.by_figures.to_csv()


def test_csv() -> None:
    columns = (Column("at", "at", "time"), Column("name", "name", "text"), Column("rate", "rate", "share"))
    rows = ((0.25, "-x", 1 / 3), (60.0, "a, b", None), (60.0, "@f", math.nan))
    assert Table("t", columns, rows).to_csv().split("\r\n") == [
        "at,name,rate",
        "1970-01-01T00:00:00.250+00:00,'-x,0.3333333333333333",
        '1970-01-01T00:01:00.000+00:00,"a, b",',
        "1970-01-01T00:01:00.000+00:00,'@f,",
        "",
    ]


def test_a_step_that_has_only_begun_has_no_speed(store: Store) -> None:
    now = 1_700_000_000 // 120 * 120 + 10.0
    store.requests.add([invented(SHARED, now - 5, 0.5, RNG), invented(SHARED, now - 60, 0.5, RNG)])
    table = Observer(store, lambda: now).overview(HOUR).throughput
    assert table.column("requests")[-2:] == [1, 1]
    assert table.column("tokens_per_second")[-1] is None
    tokens = int(table.column("tokens")[-2] or 0)
    assert table.column("tokens_per_second")[-2] == tokens / 120


def test_gain_needs_both_figures() -> None:
    update = UpdateRecord("sql", 1, 1, 1, 1.0, 1.0, 0.5, 0.75)
    assert figures.gain_of(update) == 0.25
    assert figures.gain_of(replace(update, acceptance_before=None)) is None


def test_replay_age(store: Store) -> None:
    store.replay.add([record(SHARED, 10.0), record(SHARED, 20.0)])
    (shared,) = Observer(store).experts(HOUR)
    assert (shared.replay_size, shared.replay_oldest, shared.replay_newest) == (2, 10.0, 20.0)


def covers(store: Store, name: str, tokens: list[int]) -> None:
    """Publish a version of `name` that guesses these tokens alone."""
    live = store.registry.live(name)
    vocabulary = torch.tensor(tokens, dtype=torch.int32)
    store.adapters.publish(candidate(name, parent=live.version if live else 0, vocabulary=vocabulary))


def base_covers(store: Store, tokens: list[int]) -> None:
    """Open the home with a draft base that guesses these tokens alone."""
    heads = SimpleNamespace(
        general=torch.tensor(tokens), draft=SimpleNamespace(config=SimpleNamespace(vocab_size=99))
    )
    store.registry.set_meta(GENERAL_LIST, general_list(cast(Any, SimpleNamespace(heads=heads))))


def answering(*tokens: int, domain: str = "sql") -> ReplayRecord:
    """A record with this answer to the prompt [7, 2]."""
    rows = [[1]] * len(tokens), [[0.0]] * len(tokens)
    return replace(
        record(domain, 10.0), token_ids=[7, 2, *tokens], topk_ids=rows[0], topk_logprobs=rows[1], rejected=[]
    )


class Seen:
    """The coverage of `sql`, as the pages show it and as the command line does."""

    def __init__(self, store: Store) -> None:
        store.registry.add_domain(Domain("sql", "", ("x",) * 8, 0.0))
        self.store, self.clock = store, Clock()
        self.observer = Observer(store, self.clock)

    def __call__(self) -> Coverage | None:
        self.clock.now += 10
        view, overview = self.observer.expert("sql", HOUR), self.observer.overview(HOUR)
        assert view is not None
        found = view.expert.coverage
        row = overview.by_figures.column("expert").index("sql")
        assert overview.by_figures.column("coverage")[row] == (found.share if found else None)
        listed, shown = inventory.domains(self.store)[0], inventory.domain(self.store, "sql")
        assert listed["vocabulary"] == shown["vocabulary"] == (asdict(found) if found else None)
        return found


def test_what_can_be_guessed_of_a_domains_answers(store: Store) -> None:
    seen = Seen(store)
    store.replay.add([answering(3, 4, 5), answering(3, 4, 6)])
    assert seen() is None, "an independent draft model guesses every token"
    covers(store, "sql", [3, 4, 9])
    chosen_by = "2 answers by which they may have been chosen, as no newer one has come"
    assert seen() == Coverage(3, 4 / 6, None, f"3 tokens of its own, counted in {chosen_by}")
    store.replay.add([answering(5, 9)])
    since = "counted in 1 answer since they were chosen"
    assert seen() == Coverage(3, 1 / 2, None, f"3 tokens of its own, {since}")
    covers(store, SHARED, [2, 5, 7])  # tokens of the prompts count for nothing
    covers(store, "sql", [3, 4, 5, 6, 9])
    store.replay.add([answering(3, 5, 3, 8)])
    assert seen() == Coverage(5, 3 / 4, 1 / 4, f"5 tokens of its own, {since}")
    store.adapters.publish(candidate("sql", parent=2))
    assert seen() is None, "it guesses every token"


def test_what_can_be_guessed_before_the_first_version(store: Store) -> None:
    seen = Seen(store)
    base_covers(store, [3, 8])
    assert seen() is None, "without an answer"
    store.replay.add([answering(3, 4, 5, 3), answering(8, 6, 6, 6), answering(3, domain=SHARED)])
    assert seen() == Coverage(2, 3 / 8, None, "2 tokens of the draft base, counted in 2 answers")
    covers(store, SHARED, [3, 6, 8])
    chosen_by = "counted in 2 answers by which they may have been chosen, as no newer one has come"
    assert seen() == Coverage(3, 6 / 8, None, f"3 tokens of the shared draft, {chosen_by}")
    covers(store, "sql", [3, 4, 5])
    store.replay.add([answering(4, 6)])
    own = Coverage(3, 1 / 2, 1 / 2, "3 tokens of its own, counted in 1 answer since they were chosen")
    assert seen() == own
    store.registry.set_unadapted(["sql"])
    assert seen() == Coverage(2, 3 / 10, None, "2 tokens of the draft base, counted in 3 answers")
    store.registry.set_unadapted([])
    store.adapters.publish(candidate("sql", parent=1))  # without a list it has the base's
    assert seen() == Coverage(2, 3 / 10, None, "2 tokens of the draft base, counted in 3 answers")


def test_no_answer_is_counted_twice_for_a_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many domains a page would be slow: only a bounded part of what is new is read."""
    seen, read = Seen(store), list[str]()
    store.registry.add_domain(Domain("python", "", ("x",) * 8, 0.0))
    base_covers(store, [3])
    store.replay.add([answering(3, domain=name) for name in ("sql", "python") for _ in range(70)])
    answers = store.replay.answers

    def counted(domain: str, limit: int, min_id: int = 0) -> list[NDArray[np.int32]]:
        read.append(domain)
        assert limit == NEWEST
        return answers(domain, limit, min_id)

    monkeypatch.setattr(store.replay, "answers", counted)
    seen.observer.overview(HOUR)
    assert sorted(read) == ["python", "sql"]
    seen.clock.now += 10
    seen.observer.overview(HOUR)
    assert len(read) == 2
    store.replay.add([answering(4)])
    seen.clock.now += 10
    experts = {one.name: one.coverage for one in seen.observer.overview(HOUR).experts}
    assert read[2:] == ["sql"]
    assert experts["sql"] == Coverage(1, 63 / 64, None, "1 tokens of the draft base, counted in 64 answers")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_pages_read_no_examples(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain may have ten thousand of them, and a page is drawn every few seconds."""
    monkeypatch.setattr(type(filled.registry), "domains", None)
    observer = Observer(filled)
    assert observer.overview(ALL)
    assert observer.experts(ALL)
    assert observer.router(ALL)
    assert set(inventory.replay(filled)["records"]) >= {SHARED, "sql"}
    assert inventory.experts(filled)["sql"]["requests"]
