from __future__ import annotations

import pytest
from storage_fakes import stats

from moedraft.storage import ExpertStats, Home, RequestLog


def test_summary_adds_up_requests(home: Home) -> None:
    log = RequestLog(home)
    log.add([])
    assert log.summary() == {}
    log.add([stats(accepted=2), stats("shared", drafted=0, accepted=0)])
    log.add([stats(accepted=8, seconds=1.5, num_lookup_tokens=6, num_accepted_lookup_tokens=4)])
    summary = log.summary()
    assert summary["sql"] == ExpertStats("sql", 2, 16, 8, 4, 20, 10, 2.0, 0.5, 0.5, 0.5, 6, 4)
    assert summary["sql"].tokens_per_step == 16 / 8
    assert summary["sql"].mean_acceptance_length == 1 + 10 / 4
    assert summary["shared"] == ExpertStats("shared", 1, 8, 4, 0, 0, 0, 0.5, None, None, None)
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
