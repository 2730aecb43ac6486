"""What lies under deploy/ asks only for metrics that the server has, and these say what happened."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import yaml
from dashboard_fakes import FakeSupervisor, FakeWorker
from sqlalchemy import delete

from moedraft.core import Domain, GateDecision, StorageError, UpdateRecord
from moedraft.serve.metrics.counters import PrometheusMetrics
from moedraft.serve.supervisor.follower import TrainerBeside
from moedraft.storage.store import Store
from moedraft.storage.tables import updates
from moedraft.storage.updates import Decided

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERIES = re.compile(r"\bmoedraft_\w+")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8")))


def offered() -> set[str]:
    """Every series that a scrape can hold."""
    log = SimpleNamespace(count=lambda: 0, decisions=lambda *_: {}, recent=list)
    worker: Any = FakeWorker()
    registry = SimpleNamespace(domain_names=list)
    worker.system = SimpleNamespace(store=SimpleNamespace(updates=log, registry=registry))
    metrics = PrometheusMetrics("mini", worker, cast(Any, FakeSupervisor()))
    names = set[str]()
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_decisions_are_counted_whoever_learns(store: Store) -> None:
    """A server without a trainer of its own publishes what one that follows it hands over."""

    def update(decision: GateDecision) -> None:
        store.updates.add(replace(UpdateRecord("code", 1, 1, 1, 1.0, 1.0, None, None), decision=decision))

    update("withdraw")
    worker: Any = FakeWorker()
    worker.system = SimpleNamespace(store=store)
    metrics = PrometheusMetrics("mini", worker, TrainerBeside(store.home.path, store.registry))
    assert counted(metrics)["withdraw"] == 0  # before this server's start
    for decision in ("withdraw", "promote", "withdraw"):
        update(decision)
    assert (counted(metrics)["withdraw"], counted(metrics)["promote"]) == (2, 1)
    with store.home.write() as connection:
        connection.execute(delete(updates).where(updates.c.decision == "withdraw"))  # as the log's bound does
    update("promote")
    assert (counted(metrics)["withdraw"], counted(metrics)["promote"]) == (2, 2), "a counter never falls"


def test_a_scrape_has_what_the_newest_candidate_of_each_expert_gains(store: Store) -> None:
    kept = UpdateRecord("code", 1, 1, 1, 1.0, 1.0, None, None, decision="keep")
    for gain, low in ((0.1, -0.1), (0.2, None)):
        store.updates.add(replace(kept, gain=gain, gain_low=low, gain_high=0.3))
    store.updates.add(kept)  # one on which no gate decided
    store.updates.add(replace(kept, decision="withdraw", gain=-0.5))  # of a version, by later requests
    store.updates.add(replace(kept, expert="law"))
    store.updates.add(replace(kept, expert="removed", gain=0.4))
    for name in ("code", "law"):
        store.registry.add_domain(Domain(name, "", ("example",) * 2, 0.0))
    worker: Any = FakeWorker()
    worker.system = SimpleNamespace(store=store)
    metrics = PrometheusMetrics("mini", worker, TrainerBeside(store.home.path, store.registry))
    [found] = [one for one in metrics.registry.collect() if one.name == "moedraft_gate_gain_tokens"]
    assert {(s.labels["expert"], s.labels["bound"]): s.value for s in found.samples} == {
        ("code", "estimate"): 0.2,
        ("code", "high"): 0.3,
    }


def test_a_home_that_fails_for_a_moment_loses_no_decision() -> None:
    found = iter([{"promote": 1}, StorageError("busy."), {"keep": 2}])

    def decisions(after: int, until: int) -> dict[str, int]:
        asked.append((after, until))
        one = next(found)
        if isinstance(one, StorageError):
            raise one
        return one

    asked: list[tuple[int, int]] = []
    numbers = iter([0, 1, 2, 3])
    decided = Decided(cast(Any, SimpleNamespace(count=lambda: next(numbers), decisions=decisions)))
    assert decided.counts() == {"promote": 1}
    with pytest.raises(StorageError):
        decided.counts()
    assert decided.counts() == {"promote": 1, "keep": 2}
    assert asked == [(0, 1), (1, 2), (1, 3)]


def counted(metrics: PrometheusMetrics) -> dict[str, float]:
    """The gate's decisions as a scrape has them."""
    [found] = [one for one in metrics.registry.collect() if one.name == "moedraft_gate_decisions"]
    return {sample.labels["decision"]: sample.value for sample in found.samples}


def asked(board: dict[str, Any]) -> set[str]:
    return set(SERIES.findall(json.dumps([board["panels"], board["templating"]])))


def test_grafana_asks_for_what_there_is(board: dict[str, Any]) -> None:
    assert len(asked(board)) > 12
    assert asked(board) <= offered()


def test_a_metric_that_is_not_there_would_be_found(board: dict[str, Any]) -> None:
    wrong = {
        **board,
        "panels": [*board["panels"], {"targets": [{"expr": "rate(moedraft_nothing_total[1m])"}]}],
    }
    assert asked(wrong) - offered() == {"moedraft_nothing_total"}


def test_the_board_is_one_that_grafana_takes(board: dict[str, Any]) -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


LABELS = re.compile(r"\{([^}]*)\}")
MATCH = re.compile(r'(\w+)(?:=~?)"([^"]*)"')


def test_alerts_ask_for_what_there_is() -> None:
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert len(rules) == len(group["rules"]) > 4
    values = {"kind": {"v1"}, "decision": set(get_args(GateDecision)), "job": {"moedraft"}}
    for rule in rules.values():
        assert set(SERIES.findall(rule["expr"])) <= offered(), rule
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("critical", "warning")
        for matched in LABELS.findall(rule["expr"]):
            for label, value in MATCH.findall(matched):
                assert value in values.get(label, {value}), rule
                assert label in {*values, "status"}, rule


def test_prometheus_reads_the_alerts_and_people_find_what_to_do() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    assert scraped["rule_files"] == ["alerts.yml"]
    assert [one["job_name"] for one in scraped["scrape_configs"]] == ["moedraft"]
    text = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    assert all(f"`{rule['alert']}`" in text for rule in rules)


def test_prometheus_scrapes_the_metrics_path() -> None:
    text = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
    assert "metrics_path: /metrics" in text
    assert "127.0.0.1:8000" in text


def test_the_unit_of_systemd_outlives_the_trainer_and_keeps_secrets() -> None:
    """By itself systemd stops a service one of whose processes ran out of memory."""
    unit = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8").partition("[Service]")[2]
    lines = {line.strip() for line in unit.partition("[Install]")[0].splitlines()}
    assert {"OOMPolicy=continue", "LimitCORE=0", "UMask=0077", "Restart=on-failure"} <= lines
