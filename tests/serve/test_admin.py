"""The operator's routes: what they change is served at once, and what is wrong changes nothing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import DOMAINS, WordEmbedder
from server import TARGET, FakeSupervisor, Served, check_error, served, slowed
from waiting import wait_for

from moedraft.core import AdapterVersion, ReplayRecord
from moedraft.distill.claim import learning_for
from moedraft.distill.pace.governor import is_paused
from moedraft.learning_state import waiting
from moedraft.routing.router import Router
from moedraft.serve.supervisor.supervisor import TrainerState
from moedraft.storage.db import StorageFull

LAW = [f"the court of appeal held that clause {i}" for i in range(9)]


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor(TrainerState(waiting(""), pid=7))


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: FakeSupervisor) -> Iterator[Served]:
    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: WordEmbedder())
    with served(tmp_path, supervisor=supervisor) as found:
        yield found


@pytest.fixture
def client(found: Served) -> Iterator[httpx.Client]:
    with found.client() as client:
        yield client


def names(client: httpx.Client) -> list[str]:
    return [row["name"] for row in client.get("/admin/domains").json()["domains"]]


def models(client: httpx.Client) -> list[str]:
    return [row["id"] for row in client.get("/v1/models").json()["data"]]


def complete(client: httpx.Client, prompt: str, model: str = TARGET) -> httpx.Response:
    row = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", json=row)


def expert(response: httpx.Response) -> Any:
    return response.json()["metrics"]["speculative_decoding"]["expert"]


# -- what to register, and what to merge ------------------------------------------------------------


def test_prompts_of_no_domain_are_suggested(client: httpx.Client, found: Served) -> None:
    stars = [f"quasar nebula {i} {word}" for i in range(3) for word in ("near", "far", "old", "new")]
    assert {expert(complete(client, text)) for text in stars} == {"shared"}
    answer = client.get("/admin/suggestions").json()
    assert (answer["looked_at"], answer["capture"]) == (12, True)
    (group,) = answer["suggestions"]
    assert group["requests"] == 12
    assert group["share"] == pytest.approx(1)
    assert "prompts" not in group
    assert len(client.get("/admin/suggestions?prompts=true").json()["suggestions"][0]["prompts"]) > 8
    client.post("/admin/replay/purge", json={"domain": None})
    assert client.get("/admin/suggestions").json()["suggestions"] == []


def test_what_is_registered_is_not_suggested_again(client: httpx.Client) -> None:
    """The records stay with the shared draft; whose they would be today is what counts."""
    stars = [f"quasar nebula {i} {word}" for i in range(4) for word in ("near", "far", "old", "new")]
    for text in stars:
        complete(client, text)
    (group,) = client.get("/admin/suggestions?prompts=true").json()["suggestions"]
    row = {"name": group["name"], "examples": group["prompts"][:-2]}
    assert client.post("/admin/domains", json=row).status_code == 201
    rest = client.post("/admin/route", json={"texts": group["prompts"][-2:]}).json()["routes"]
    assert {one["domain"] for one in rest} == {group["name"]}
    again = client.get("/admin/suggestions").json()
    assert again["suggestions"] == []
    assert again["looked_at"] <= 16 - len(group["prompts"])
    assert again["unknown_share"] == pytest.approx(again["looked_at"] / 16)


def test_examples_are_not_suggested_though_the_router_refuses_them(
    client: httpx.Client, found: Served
) -> None:
    stars = [f"quasar nebula {i} {word}" for i in range(4) for word in ("near", "far", "old", "new")]
    for text in stars:
        complete(client, text)
    (group,) = client.get("/admin/suggestions?prompts=true").json()["suggestions"]
    row = {"name": group["name"], "examples": group["prompts"]}
    assert client.post("/admin/domains", json=row).status_code == 201
    found.system.router.threshold = 1.01
    assert client.get("/admin/suggestions").json()["suggestions"] == []


def test_domains_that_overlap_are_told(client: httpx.Client) -> None:
    rows = {"name": "twin", "examples": list(DOMAINS["code"])}
    made = client.post("/admin/domains", json=rows)
    assert (made.status_code, made.json()["coincides_with"]) == (201, ["code"])
    pair = client.get("/admin/overlaps").json()["overlaps"][0]
    assert (pair["first"], pair["second"], pair["should_merge"]) == ("code", "twin", True)


# -- domains -------------------------------------------------------------------------------------


def test_a_domain_serves_as_soon_as_it_is_registered(client: httpx.Client) -> None:
    check_error(complete(client, LAW[0], f"{TARGET}:law"), 404)
    created = client.post("/admin/domains", json={"name": "law", "examples": LAW, "description": "<b>"})
    assert created.status_code == 201
    assert (created.json()["name"], created.json()["examples"]) == ("law", 9)
    assert names(client) == ["code", "prose", "law"]
    assert f"{TARGET}:law" in models(client)
    assert expert(complete(client, LAW[0])) == "law"
    assert expert(complete(client, "7", f"{TARGET}:law")) == "law"
    shown = client.get("/admin/domains/law").json()
    assert (shown["examples"], shown["description"], shown["version"]) == (LAW, "<b>", 0)


def test_a_domain_that_is_removed_is_gone(client: httpx.Client) -> None:
    assert expert(complete(client, DOMAINS["code"][0])) == "code"
    assert client.delete("/admin/domains/code").json() == {
        "removed": "code",
        "overwritten": True,
        "router": True,
        "copies": [],
    }
    assert names(client) == ["prose"]
    assert models(client) == [TARGET, f"{TARGET}:prose"]
    assert expert(complete(client, DOMAINS["code"][0])) != "code"
    check_error(complete(client, "7", f"{TARGET}:code"), 404)
    check_error(client.get("/admin/domains/code"), 404)
    check_error(client.delete("/admin/domains/code"), 404)


@pytest.mark.parametrize(
    "row",
    [
        {"name": "law"},
        {"name": "law", "examples": LAW[:7]},
        {"name": "law", "examples": ["a"] * 50},
        {"name": "law", "examples": [7] * 50},
        {"name": "law", "examples": LAW, "path": "/etc"},
        {"name": "code", "examples": LAW},
        {"name": "shared", "examples": LAW},
        {"name": "", "examples": LAW},
        {"name": "../law", "examples": LAW},
        {"name": "Law", "examples": LAW},
        {"name": "l\x00w", "examples": LAW},
        {"name": "l" * 65, "examples": LAW},
        {"name": "<script>alert(1)</script>", "examples": LAW},
    ],
)
def test_a_bad_registration_changes_nothing(client: httpx.Client, row: dict[str, Any]) -> None:
    check_error(client.post("/admin/domains", json=row), 400)
    assert names(client) == ["code", "prose"]


def test_a_domain_is_gone_though_the_router_cannot_be_fitted_without_it(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageFull("The disk is full.")

    monkeypatch.setattr("moedraft.system.domains.registering.refit", full)
    done = client.delete("/admin/domains/code")
    assert (done.status_code, done.json()["removed"], done.json()["router"]) == (200, "code", False)
    assert names(client) == ["prose"]


def test_a_router_that_fails_leaves_no_domain(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(WordEmbedder):
        def embed(self, texts: Any) -> Any:
            raise RuntimeError("no embedder")

    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: Broken())
    check_error(client.post("/admin/domains", json={"name": "law", "examples": LAW}), 500)
    assert names(client) == ["code", "prose"]
    assert expert(complete(client, DOMAINS["code"][0])) == "code"


def test_serving_goes_on_while_a_domain_is_fitted(
    client: httpx.Client, found: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(WordEmbedder):
        def embed(self, texts: Any) -> Any:
            begun.set()
            assert go_on.wait(10)
            return super().embed(texts)

    monkeypatch.setattr("moedraft.system.build.Embedder", lambda source, **_: Slow())
    results: list[int] = []

    def register(name: str) -> None:
        with found.client() as own:
            row = {"name": name, "examples": [f"{name} {text}" for text in LAW]}
            results.append(own.post("/admin/domains", json=row).status_code)

    threads = [threading.Thread(target=register, args=(name,)) for name in ("law", "tax")]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    assert expert(complete(client, DOMAINS["code"][0])) == "code"
    assert client.get("/ready").status_code == 200
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert results == [201, 201]
    assert {"law", "tax"} <= set(names(client))
    assert found.system.router.domains == ("code", "law", "prose", "tax")


# -- versions ------------------------------------------------------------------------------------


def add_versions(found: Served, count: int = 2) -> None:
    for number in range(1, count + 1):
        base = found.system.bank.base_hash
        version = AdapterVersion(
            "code", number, number - 1, f"adapters/code/{number}", base, 0.5, 1.0, "live"
        )
        found.system.store.registry.add_version(version)


def test_versions(client: httpx.Client, found: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(found.system.store.adapters), "load", lambda *_: None)
    refreshed: list[int] = []
    found.system.loader.refresh = lambda *_, **__: refreshed.append(1)  # type: ignore[method-assign]
    add_versions(found)
    rows = client.get("/admin/adapters").json()["adapters"]
    assert [(row["domain"], row["version"], row["state"]) for row in rows] == [
        ("code", 1, "retired"),
        ("code", 2, "live"),
    ]
    assert not any("path" in row for row in rows)
    assert client.get("/admin/adapters?name=prose").json() == {"adapters": [], "updates": []}
    assert client.post("/admin/adapters/code/promote", json={"version": 1}).json() == {
        "domain": "code",
        "version": 1,
    }
    assert client.post("/admin/adapters/code/promote", json={"version": 2}).json()["version"] == 2
    assert client.post("/admin/adapters/code/rollback").json() == {"domain": "code", "version": 1}
    assert client.post("/admin/adapters/code/promote", json={"version": 0}).json()["version"] == 0
    assert len(refreshed) == 4


def test_a_version_of_another_draft_base_is_not_promoted(client: httpx.Client, found: Served) -> None:
    other = AdapterVersion("code", 1, 0, "adapters/code/1", "another", 0.5, 1.0, "retired")
    found.system.store.registry.add_version(other)
    refused = client.post("/admin/adapters/code/promote", json={"version": 1})
    check_error(refused, 400)
    assert "was trained for another draft base (another)" in refused.text


def test_a_version_without_files_is_not_promoted(client: httpx.Client, found: Served) -> None:
    add_versions(found, 1)
    found.system.store.registry.promote("code", 0)
    response = client.post("/admin/adapters/code/promote", json={"version": 1})
    check_error(response, 503)
    assert str(found.settings.home) not in response.text
    assert found.system.store.registry.live("code") is None


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("/admin/adapters/code/promote", {"version": 9}),
        ("/admin/adapters/code/promote", {"version": -1}),
        ("/admin/adapters/code/promote", {"version": 2**63}),
        ("/admin/adapters/code/promote", {"version": "1"}),
        ("/admin/adapters/code/promote", {}),
        ("/admin/adapters/law/promote", {"version": 1}),
        ("/admin/adapters/law/rollback", None),
        ("/admin/adapters/code/rollback", None),
        ("/admin/adapters/%2e%2e/rollback", None),
    ],
)
def test_versions_that_are_not_there(client: httpx.Client, path: str, row: dict[str, Any] | None) -> None:
    unknown = 400 if "code" in path else 404
    check_error(client.post(path, json=row) if row is not None else client.post(path), unknown)


# -- learning, replay, routes --------------------------------------------------------------------


def test_learning_is_paused_and_resumed(client: httpx.Client, supervisor: FakeSupervisor) -> None:
    assert client.get("/admin/learning").json()["status"] == "waiting"
    assert client.post("/admin/learning/pause").json()["paused"] is True
    assert supervisor.now.paused
    assert client.post("/admin/learning/resume").json()["paused"] is False
    assert "moedraft_trainer_running" in client.get("/metrics").text


def test_a_trainer_that_follows_the_server_is_seen_and_paused(tmp_path: Path) -> None:
    with served(tmp_path) as found, found.client() as client:
        registry = found.system.store.registry
        assert client.get("/admin/learning").json() == {"enabled": False, "paused": False, "follower": None}
        with learning_for(tmp_path):
            assert client.get("/admin/learning").json()["follower"] == os.getpid()
            assert client.post("/admin/learning/pause").json()["paused"] is True
            assert is_paused(registry)
            assert f'moedraft_trainer_running{{model_name="{TARGET}"}} 1.0' in client.get("/metrics").text
        assert client.post("/admin/learning/resume").json() == {
            "enabled": False,
            "paused": False,
            "follower": None,
        }
        assert not is_paused(registry)
        assert "moedraft_trainer_restarts" not in client.get("/metrics").text


def test_replay_is_purged(client: httpx.Client, found: Served) -> None:
    def record(domain: str) -> ReplayRecord:
        return ReplayRecord(domain, domain, 0, "tiny", [1, 2, 3], 1, [[2], [3]], [[0.0], [0.0]], [], 1, 1)

    found.system.store.replay.add([record("code"), record("code"), record("prose")])
    assert client.get("/admin/replay").json()["records"] == {"shared": 0, "code": 2, "prose": 1}
    check_error(client.post("/admin/replay/purge", json={"domain": "law"}), 404)
    check_error(client.post("/admin/replay/purge", json={}), 400)
    assert client.post("/admin/replay/purge", json={"domain": "code"}).json()["purged"] == 2
    assert client.post("/admin/replay/purge", json={"domain": None}).json()["purged"] == 1
    assert found.system.store.replay.count() == 0


def test_a_purge_reaches_the_router(
    client: httpx.Client, found: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, without a thread that learns; where the router cannot be written, the answer says so."""
    store, before = found.system.store, found.system.router._model
    fitted = json.dumps({"labels": {"code": 5}, "last_id": 7})
    store.registry.set_meta("router_refit", fitted)

    def full(*_: Any) -> None:
        raise StorageFull("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("moedraft.system.build.refit", full)
        done = client.post("/admin/replay/purge", json={"domain": "code"})
    assert (done.status_code, done.json()["router"]) == (200, False)
    assert client.post("/admin/replay/purge", json={"domain": None}).json()["router"]
    assert found.system.router._model is not before
    assert store.registry.get_meta("router_refit") is None


def test_a_purge_names_the_copies_that_it_does_not_reach(client: httpx.Client, found: Served) -> None:
    home = found.system.store.home.path
    (home / "moedraft.db.0005").touch()
    done = client.post("/admin/replay/purge", json={"domain": None}).json()
    assert done["copies"] == ["moedraft.db.0005"]


def test_what_was_answered_before_a_purge_or_a_removal_is_not_kept_after(
    client: httpx.Client, found: Served
) -> None:
    """Though it is written down a moment after the answer."""
    row = {"model": f"{TARGET}:code", "prompt": "1 2 3", "max_tokens": 4}
    for _ in range(2):
        assert client.post("/v1/completions", json=row).status_code == 200
    assert client.post("/admin/replay/purge", json={"domain": "code"}).json()["purged"] == 2
    assert client.post("/v1/completions", json=row).status_code == 200
    assert client.delete("/admin/domains/code").status_code == 200
    found.system.recorder.flush()
    assert found.system.store.replay.count() == 0


def test_the_router_is_read_beside_the_engine_and_only_after_a_fit(
    client: httpx.Client, found: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a BERT takes long enough to be felt by every answer."""
    read, threads = Router.load_or_empty, list[str]()

    def noting(router: Router) -> None:
        if router is found.system.router:
            threads.append(threading.current_thread().name)
        read(router)

    monkeypatch.setattr(Router, "load_or_empty", noting)
    for path in ("adapters/code/pin", "adapters/code/unpin"):
        assert client.post(f"/admin/{path}").status_code == 200
    assert client.post("/admin/replay/purge", json={"domain": None}).status_code == 200
    assert threads == []
    assert client.post("/admin/domains", json={"name": "law", "examples": LAW}).status_code == 201
    assert "law" in found.system.router.domains
    assert client.delete("/admin/domains/law").status_code == 200
    assert "law" not in found.system.router.domains
    assert len(threads) == 2
    assert all(name.startswith("admin-changes") for name in threads)


def test_texts_are_routed_beside_the_engine(
    client: httpx.Client, found: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen long texts take seconds, in which every answer would stand still."""
    route, threads = found.system.router.route, list[str]()

    def noting(texts: list[str]) -> Any:
        threads.append(threading.current_thread().name)
        return route(texts)

    monkeypatch.setattr(found.system.router, "route", noting)
    assert client.post("/admin/route", json={"texts": ["zzz"]}).status_code == 200
    assert threads
    assert "moedraft-engine" not in threads


def test_a_text_is_routed(client: httpx.Client, found: Served) -> None:
    slowed(found.system, 0.0)
    texts = [DOMAINS["code"][0], DOMAINS["prose"][0], "zzz"]
    routes = client.post("/admin/route", json={"texts": texts}).json()["routes"]
    assert [route["domain"] for route in routes] == ["code", "prose", "shared"]
    assert sum(routes[0]["probabilities"].values()) == pytest.approx(1)
    for texts in ([], ["a"] * 17, [7]):
        check_error(client.post("/admin/route", json={"texts": texts}), 400)
    wait_for(found.idle)
