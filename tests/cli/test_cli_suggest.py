"""`domain suggest` and `domain list --overlap` on a home of this machine."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Pair, Run, numbers, write_rows

from moedraft.cli.suggest import _write
from moedraft.core import DOMAIN_NAME, SHARED, InvalidRequest, ReplayRecord, RequestStats
from moedraft.distill.judging.trial import TriedExpert
from moedraft.speculation import SpeculationStats
from moedraft.storage.last_target import VOCABULARY
from moedraft.storage.store import Store
from moedraft.system.domains.suggest import names_of

HIGH = [[60 + (i + step * k) % 8 for k in range(6)] for step in (1, 3) for i in range(6)]


def record(prompt: list[int], at: float, **changes: Any) -> ReplayRecord:
    fields: dict[str, Any] = {
        "domain": SHARED,
        "expert": SHARED,
        "adapter_version": 0,
        "target_id": "t",
        "token_ids": [*prompt, 1],
        "num_prompt_tokens": len(prompt),
        "topk_ids": [[1, 2]],
        "topk_logprobs": [[-0.1, -3.0]],
        "rejected": [],
        "drafted": 4,
        "accepted": 1,
        "created_at": at,
    }
    return ReplayRecord(**{**fields, **changes})


def request(expert: str, at: float) -> RequestStats:
    return RequestStats("r", expert, 0, "en", 6, 1, SpeculationStats(), 0.1, "stop", at, confidence=0.2)


@pytest.fixture
def traffic(store: Store) -> None:
    """Twelve prompts of no domain, one of them twice; one that was pinned; three of a domain."""
    asked = [record(prompt, 10.0 + i) for i, prompt in enumerate([*HIGH, HIGH[0]])]
    pinned = record([1, 2, 3], 40.0, pinned=True)
    kept = record([5, 6, 7], 41.0, domain="sql", expert="sql")
    lost = [record([*range(60, 66), 66 + i], 42.0 + i, domain="sql") for i in range(2)]
    store.replay.add([*asked, pinned, kept, *lost])
    store.requests.add([request(SHARED, 10.0 + i) for i in range(13)] + [request("sql", 50.0)] * 17)
    store.close()


@pytest.mark.usefixtures("traffic")
def test_prompts_without_an_expert_are_suggested(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    found = run("domain", "suggest", "--home", home, *pair[:2], "--json")
    assert found.code == 0, found.err
    assert found.data["looked_at"] == 13, "neither the pinned one nor those of a domain"
    assert found.data["unknown_share"] == pytest.approx(13 / 30)
    (group,) = found.data["suggestions"]
    assert (group["size"], group["requests"]) == (12, 13)
    assert group["share"] == pytest.approx(13 / 30)
    assert group["acceptance"] == pytest.approx(1 / 4)
    assert len(group["examples"]) == 3
    assert group["command"] == "moedraft domain register new --examples new.jsonl"
    shown = run("domain", "suggest", "--home", home, *pair[:2])
    assert "moedraft domain register new" in shown.out
    assert "--out" in shown.err


@pytest.mark.usefixtures("traffic")
def test_its_command_registers_the_domain(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "of today"
    (group,) = run("domain", "suggest", "--out", out, "--home", home, *pair[:2], "--json").data["suggestions"]
    assert "prompts" not in group
    texts = [json.loads(line)["prompt"] for line in (out / "new.jsonl").read_text().splitlines()]
    assert len(texts) == 12
    assert " ".join(map(str, HIGH[3])) in texts
    assert (out / "new.jsonl").stat().st_mode & 0o777 == 0o600
    again = run("domain", "suggest", "--out", out, "--home", home, *pair[:2])
    assert again.code == 2
    assert "exists already" in again.err
    assert "new" in again.out  # what was found is shown all the same
    command = shlex.split(group["command"])
    assert run(*command[1:], "--home", home).code == 0
    assert "new" in run("domain", "list", "--home", home).out


@pytest.mark.usefixtures("traffic")
def test_without_capture_no_text_is_shown(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    (home / "config.toml").write_text("capture = false\n")
    found = run("domain", "suggest", "--home", home, *pair[:2], "--json").data
    (group,) = found["suggestions"]
    assert (found["capture"], group["examples"], group["size"]) == (False, [], 12)
    assert group["command"] is None  # there is no file that it could name
    shown = run("domain", "suggest", "--home", home, *pair[:2])
    assert "Capture is off" in shown.err
    assert "register" not in shown.out
    refused = run("domain", "suggest", "--out", tmp_path / "x", "--home", home, *pair[:2])
    assert refused.code == 2
    assert "Capture is off" in refused.err
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("traffic")
def test_prompts_of_another_target_are_not_read_as_this_ones(run: Run, home: Path, pair: Pair) -> None:
    with closing(Store.open(home)) as store:
        store.registry.set_meta(VOCABULARY, "other tokens")
    refused = run("domain", "suggest", "--home", home, *pair[:2])
    assert refused.code == 2
    assert "made by another target" in refused.err


@pytest.mark.usefixtures("traffic")
def test_what_a_trial_gains_is_shown(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, int, int]] = []

    class Trials:
        def __init__(self, trainer: Any, depth: int) -> None:
            assert depth == 4

        def __call__(self, name: str, records: list[list[ReplayRecord]]) -> TriedExpert:
            tried.append((name, len(records), sum(map(len, records))))
            return TriedExpert(10, 3, 1.5, 1.75, 0.1, 0.4)

    monkeypatch.setattr("moedraft.distill.assembly.joint_trainer", lambda *options: None)
    monkeypatch.setattr("moedraft.distill.judging.trial.ExpertTrials", Trials)
    asked = ("domain", "suggest", "--trial", "--home", home, *pair[:2])
    (group,) = run(*asked, "--json").data["suggestions"]
    assert tried == [("new", 12, 13)]
    assert group["trial"] == pytest.approx(
        {"learned": 10, "held_out": 3, "before": 1.5, "after": 1.75, "low": 0.1, "high": 0.4, "gain": 0.25}
    )
    assert "1.50 → 1.75 (+0.10 to +0.40)" in run(*asked).out
    monkeypatch.setattr(Trials, "__call__", lambda self, name, records: None)
    assert "not tried" in run(*asked).out


@pytest.mark.usefixtures("traffic")
def test_a_trial_needs_the_home_and_runs_with_an_independent_draft(run: Run, home: Path, pair: Pair) -> None:
    found = run("domain", "suggest", "--trial", "--server", "http://localhost:1", "--home", home)
    assert found.code == 2
    assert "leave out --server" in found.err
    assert "not tried" in run("domain", "suggest", "--trial", "--home", home, *pair).out  # answers too short


def test_nothing_to_suggest(run: Run, home: Path, pair: Pair, store: Store) -> None:
    store.close()
    found = run("domain", "suggest", "--home", home, *pair[:2], "--json").data
    assert found == {"looked_at": 0, "unknown_share": None, "capture": True, "suggestions": []}
    assert "No group" in run("domain", "suggest", "--home", home, *pair[:2]).out
    elsewhere = home.parent / "nowhere"
    assert run("domain", "suggest", "--home", elsewhere, *pair[:2], "--json").data["looked_at"] == 0
    assert not elsewhere.exists()


def test_overlapping_domains_are_told(run: Run, home: Path, low: Path, high: Path, tmp_path: Path) -> None:
    twin = write_rows(tmp_path / "twin.jsonl", numbers(0, 16)[4:])
    for name, path in (("low", low), ("high", high), ("twin", twin)):
        made = run("domain", "register", name, "--examples", path, "--home", home)
        assert made.code == 0
        assert ("low held nearly the same before" in made.err) == (name == "twin")
    before = {path: path.read_bytes() for path in (home / "router").iterdir()}
    first = run("domain", "list", "--overlap", "--home", home, "--json").data["overlaps"][0]
    assert (first["first"], first["second"], first["should_merge"]) == ("low", "twin", True)
    assert first["duplicates"] >= 8
    shown = run("domain", "list", "--overlap", "--home", home)
    assert "merge them" in shown.out
    assert "register one with the examples of both" in shown.err
    assert before == {path: path.read_bytes() for path in (home / "router").iterdir()}


def test_that_no_domains_overlap_is_a_sentence(run: Run, home: Path, low: Path, high: Path) -> None:
    for name, path in (("low", low), ("high", high)):
        run("domain", "register", name, "--examples", path, "--home", home)
    shown = run("domain", "list", "--overlap", "--home", home)
    assert shown.out == "No two domains overlap.\n"
    assert run("domain", "list", "--overlap", "--home", home, "--json").data == {"overlaps": []}


def test_names_tell_groups_apart() -> None:
    law = [f"The court of appeal held clause {i}" for i in range(5)]
    cooking = [f"The oven and the pan, {i} times" for i in range(5)]
    names = names_of([law, cooking, law, ["語"] * 5], {"shared", "court-clause"})
    assert len(set(names)) == 4
    assert names[1] == "and-oven" or "oven" in names[1]
    assert names[3] == "han"
    assert "court-clause" not in names


def test_a_group_is_named_in_whatever_script_it_is_written() -> None:
    japanese, russian, french = ["これは何ですか"] * 5, ["Как дела сегодня"] * 5, ["élève à l'école"] * 5
    names = names_of([japanese, russian, french, ["1 + 1"] * 5, []], {"japanese", "new"})
    assert names == ["japanese-2", "cyrillic", "ecole-eleve", "new-2", "new-3"]
    assert all(DOMAIN_NAME.fullmatch(name) for name in names)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "", "a b; rm -r x", "shared"])
def test_a_servers_names_become_files_only_if_they_are_names(tmp_path: Path, name: str) -> None:
    groups = [{"name": "fine", "prompts": ["a"]}, {"name": name, "prompts": ["b"]}]
    with pytest.raises(InvalidRequest, match="name"):
        _write(tmp_path / "out", {"capture": True, "suggestions": groups})
    assert list(tmp_path.iterdir()) == []
