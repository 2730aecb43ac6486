from __future__ import annotations

from dataclasses import replace

import pytest
from storage_fakes import stats

from moedraft.storage import ExpertStats, Home, RequestLog
from moedraft.storage.requests import FIRST, RECENT, Outcome


def test_summary_adds_up_requests(home: Home) -> None:
    log = RequestLog(home)
    log.add([])
    assert log.summary() == {}
    log.add([stats(accepted=2), stats("shared", drafted=0, accepted=0)])
    looked = {"num_lookup_tokens": 6, "num_accepted_lookup_tokens": 4}
    earlier = {"num_earlier_tokens": 3, "num_accepted_earlier_tokens": 2}
    log.add([stats(accepted=8, seconds=1.5, **looked, **earlier)])
    summary = log.summary()
    seen = (Outcome(8, 4, 0, 0),) * 2
    sql = ExpertStats("sql", 2, 16, 8, 4, 20, 10, 2.0, 0.5, 0.5, 0.5, 6, 4, 3, 2, first_window=seen)
    assert summary["sql"] == sql
    assert summary["sql"].tokens_per_step == 16 / 8
    assert summary["sql"].mean_acceptance_length == 1 + 10 / 4
    shared = ExpertStats("shared", 1, 8, 4, 0, 0, 0, 0.5, None, None, None, first_window=seen[:1])
    assert summary["shared"] == shared
    assert summary["shared"].mean_acceptance_length is None


def test_first_and_recent_rates_skip_undrafted(home: Home) -> None:
    """Requests without a draft say nothing of acceptance and do not fill the windows."""
    log = RequestLog(home)
    log.add([stats(drafted=0, accepted=0)] * 30)
    log.add([stats(accepted=1)] * 15)
    log.add([stats(accepted=3)] * 15)
    log.add([stats(accepted=9)] * 50)
    log.add([stats("python")])
    found = log.summary()["sql"]
    assert found.requests == 110
    assert found.first_acceptance_rate == pytest.approx((15 * 1 + 5 * 3) / 200)
    assert found.recent_acceptance_rate == pytest.approx(0.9)
    assert found.acceptance_rate == pytest.approx((15 + 45 + 450) / 800)


def test_totals_survive_trimming(home: Home) -> None:
    log = RequestLog(home, capacity=3)
    log.add([stats(accepted=number) for number in range(5)])
    log.add([stats(accepted=5), stats("python")])
    found = log.summary()["sql"]
    assert (found.requests, found.accepted_tokens, found.draft_tokens) == (6, 15, 60)
    assert found.first_acceptance_rate == 0.25
    assert log.series("sql", bucket=1) == [(1.0, 4, 10), (1.0, 5, 10)]
    with home.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM requests").scalar() == 3


def test_series_groups_requests_in_buckets(home: Home) -> None:
    log = RequestLog(home)
    log.add([stats(accepted=n, created_at=float(n)) for n in range(1, 6)])
    log.add([stats(drafted=0, accepted=0, created_at=9.0)])
    assert log.series("sql", bucket=2) == [(2.0, 3, 20), (4.0, 7, 20), (5.0, 5, 10)]
    assert log.series("python") == []


def test_first_guesses_add_up(home: Home) -> None:
    log = RequestLog(home)
    assert stats().speculation.first_step_share is None
    log.add([stats(first_guesses=4, right_first_guesses=3), stats(first_guesses=4)])
    log.add([stats(drafted_at=[4, 2], accepted_at=[3, 1]), stats(first_guesses=2, right_first_guesses=1)])
    found = log.summary()["sql"]
    assert (found.first_guesses, found.right_first_guesses) == (10, 4)
    assert found.first_step_share == 0.4


def test_what_the_shared_adapter_drafted_counts_for_it(home: Home) -> None:
    """Its drafts and first guesses only: the tokens and steps stay those of the domain's traffic."""
    log = RequestLog(home)
    drafts = {"num_drafts": 5, "drafted_at": [5, 3], "accepted_at": [4, 1]}
    row = stats(drafted=8, accepted=5, **drafts, shared_drafted_at=[3, 2], shared_accepted_at=[3, 1])
    guesses = {"first_guesses": 5, "right_first_guesses": 4}
    shared = {"shared_first_guesses": 3, "shared_right_first_guesses": 3}
    row = replace(row, speculation=replace(row.speculation, **guesses, **shared))
    log.add([row])
    [sql, shared] = (log.summary()[name] for name in ("sql", "shared"))
    assert (sql.requests, sql.tokens, sql.steps, sql.drafts) == (1, 8, 4, 2)
    assert (sql.draft_tokens, sql.accepted_tokens) == (3, 1)
    assert (sql.first_step_share, sql.first_window) == (1 / 2, (Outcome(8, 4, 2, 1),))
    assert (shared.requests, shared.tokens, shared.steps, shared.drafts) == (0, 0, 0, 3)
    assert (shared.draft_tokens, shared.accepted_tokens) == (5, 4)
    assert (shared.first_step_share, shared.tokens_per_step) == (1.0, None)
    log.add([stats("shared", drafted=4, accepted=1, first_guesses=2, right_first_guesses=1)])
    shared = log.summary()["shared"]
    assert (shared.requests, shared.first_guesses, shared.right_first_guesses) == (1, 5, 4)
    assert log.rows()[0] == row


def test_what_the_shared_adapter_would_have_guessed_counts_without_any_draft(home: Home) -> None:
    log = RequestLog(home)
    plain = stats(drafted=0, accepted=0, first_guesses=16, right_first_guesses=8)
    shared = {"shared_first_guesses": 16, "shared_right_first_guesses": 8}
    log.add([replace(plain, speculation=replace(plain.speculation, **shared))])
    [sql, found] = (log.summary()[name] for name in ("sql", "shared"))
    assert (sql.first_guesses, found.first_guesses, found.first_step_share) == (0, 16, 1 / 2)


def test_requests_that_were_looked_at_can_be_read_alone(home: Home) -> None:
    log = RequestLog(home)
    log.add([stats(created_at=float(n), first_guesses=n % 2) for n in range(6)])
    assert [one.created_at for one in log.rows(limit=2, looked_at=True)] == [3.0, 5.0]


def test_windows_share_no_request(home: Home) -> None:
    log = RequestLog(home, capacity=60)
    log.add([stats(num_tokens=number) for number in range(FIRST - 5)])
    log.add([stats(num_tokens=number) for number in range(FIRST - 5, FIRST + 3)])
    found = log.summary()["sql"]
    assert found.first_window is not None
    assert [one.tokens for one in found.first_window] == list(range(FIRST))
    assert [one.tokens for one in found.recent_window] == [20, 21, 22]
    log.add([stats(num_tokens=number) for number in range(FIRST + 3, 200)])  # the first ones are trimmed
    found = log.summary()["sql"]
    assert found.first_window is not None
    assert [one.tokens for one in found.first_window] == list(range(FIRST))
    assert [one.tokens for one in found.recent_window] == list(range(200 - RECENT, 200))
