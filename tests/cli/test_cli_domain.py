"""`domain` and `route`: registering, showing, removing, routing, and the warm start."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from candidates import candidate
from cli_fakes import Pair, Run, numbers, write_rows

from moedraft import learning_state
from moedraft.core import InvalidRequest, ReplayRecord, SamplingParams
from moedraft.distill.loop import DistillLoop
from moedraft.distill.warmstart import split_examples
from moedraft.routing.router import Router
from moedraft.storage import db
from moedraft.storage.db import DATABASE
from moedraft.storage.store import Store

LOW, HIGH = "0 3 6 9 12 15", "60 63 66 69 72 75"


@pytest.fixture
def registered(run: Run, home: Path, low: Path, high: Path, tmp_path: Path) -> None:
    for name, path in (("low", low), ("high", high)):
        run("domain", "register", name, "--examples", path, "--description", f"{name} [/b]", "--home", home)


def test_register_loads_no_language_model(
    run: Run, home: Path, low: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.models.load_model", None)
    result = run("domain", "register", "low", "--examples", low, "--home", home, "--json")
    assert result.code == 0
    assert result.data["examples"] == 12
    assert result.data["warm_start"] is None
    shown = run("domain", "show", "low", "--home", home, "--json").data
    assert shown["examples"][0] == json.loads(low.read_text().splitlines()[0])["prompt"]
    assert (shown["version"], shown["updates"], shown["replay_size"]) == (0, 0, 0)


def test_register_reads_standard_input(
    run: Run, home: Path, low: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with low.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run("domain", "register", "low", "--examples", "-", "--home", home).code == 0


@pytest.mark.usefixtures("registered")
def test_domains_are_listed_shown_and_removed(run: Run, home: Path) -> None:
    listed = run("domain", "list", "--home", home, "--json").data["domains"]
    assert [(one["name"], one["description"]) for one in listed] == [
        ("low", "low [/b]"),
        ("high", "high [/b]"),
    ]
    assert "low [/b]" in run("domain", "list", "--home", home).out
    assert LOW in run("domain", "show", "low", "--home", home).out
    assert run("domain", "remove", "low", "--home", home, "--json").data == {
        "removed": "low",
        "overwritten": True,
        "copies": [],
        "router": True,
    }
    assert "is removed" in run("domain", "remove", "high", "--home", home).out
    assert run("domain", "list", "--home", home, "--json").data == {"domains": []}
    assert run("domain", "remove", "low", "--home", home).code == 2


def test_no_text_reaches_the_terminal_as_a_command(run: Run, home: Path, tmp_path: Path) -> None:
    """An example may come from anybody: it must not set the window's title or turn the line round."""
    hostile = "\x1b]0;owned\x07 \x9b31m \u202eabc \r\x7f\tok"
    rows = [*numbers(0), {"prompt": hostile}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert (
        run("domain", "register", "low", "--examples", path, "--description", hostile, "--home", home).code
        == 0
    )
    texts = [run("domain", *words, "--home", home).out for words in (("show", "low"), ("list",))]
    as_json = run("domain", "show", "low", "--home", home, "--json")
    assert "\\u001b]0;owned\\u0007" in texts[0]
    assert not set("".join([*texts, as_json.out])) & set("\x1b\x07\x9b\u202e\r\x7f")
    assert hostile in as_json.data["examples"]


@pytest.mark.usefixtures("registered")
def test_a_removal_says_what_it_did_not_reach(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "BUSY_SECONDS", 0.5)  # for which it waits for the reader
    (home / f"{DATABASE}.0001").touch()
    with closing(Store.open(home, write=False)) as reader, reader.home.read() as reading:
        reading.exec_driver_sql("SELECT count(*) FROM replay").scalar()
        done = run("domain", "remove", "low", "--home", home)
    assert "Something reads the home" in done.err
    assert f"{DATABASE}.0001" in " ".join(done.err.split())


@pytest.mark.usefixtures("registered")
def test_a_removal_whose_fit_fails_says_that_the_domain_is_gone(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise InvalidRequest("the router's model 'gone' cannot be loaded.")

    with monkeypatch.context() as patch:
        patch.setattr(Router, "fit", fails)
        done = run("domain", "remove", "low", "--home", home)
    assert done.code == 0
    assert "Domain 'low' is removed." in done.out
    assert "the next start fits it without them" in " ".join(done.err.split())
    assert "low" not in run("domain", "list", "--home", home).out


def test_a_registration_fits_the_router_once(
    run: Run, home: Path, low: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it did not match the domains that were there; a BERT takes minutes for each fit."""
    store.close()
    fitted, fit = list[list[str]](), Router.fit
    monkeypatch.setattr(Router, "fit", lambda router, some: (fitted.append(sorted(some)), fit(router, some)))
    assert run("domain", "register", "low", "--examples", low, "--home", home).code == 0
    assert fitted == [["low", "sql"]]
    (home / "router" / "router.safetensors").unlink()
    assert run("domain", "remove", "low", "--home", home).code == 0
    assert fitted[1:] == [["sql"]]


def test_a_missing_home_counts_as_empty(run: Run, home: Path) -> None:
    assert run("domain", "list", "--json", "--home", home).data == {"domains": []}
    result = run("route", "a", "--json", "--home", home)
    assert result.data == {
        "text": "a",
        "domain": "shared",
        "confidence": 0.0,
        "probabilities": {"shared": 1.0},
    }
    assert "no home" in result.err
    assert not home.exists()


@pytest.mark.usefixtures("registered")
def test_route_shows_probabilities(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.models.load_model", None)
    rows = run("route", LOW, HIGH, "--json", "--home", home).rows
    assert [row["text"] for row in rows] == [LOW, HIGH]
    for row, name in zip(rows, ("low", "high"), strict=True):
        likely = {key: p for key, p in row["probabilities"].items() if key != "shared"}
        assert max(likely, key=lambda key: likely[key]) == name
        assert row["confidence"] == likely[name]
        assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert LOW in run("route", LOW + " 1" * 60, "--home", home).out


def test_an_outdated_router_is_mentioned(run: Run, home: Path, store: Store) -> None:
    result = run("route", "SELECT 1", "--json", "--home", home)
    assert result.data["domain"] == "shared"
    assert "does not know all" in result.err


# -- warm start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "count", "answered", "held_out"), [(40, 12, 12, 24), (40, 30, 30, 10)])
def test_warm_start_holds_examples_out(total: int, count: int, answered: int, held_out: int) -> None:
    chosen, rest = split_examples([str(i) for i in range(total)], count)
    assert (len(chosen), len(rest)) == (answered, held_out)
    assert not set(chosen) & set(rest)


@pytest.mark.parametrize(("total", "count", "held_out"), [(40, 40, 10), (40, 37, 10), (8, 8, 4), (8, 5, 4)])
def test_at_least_one_example_is_held_out(total: int, count: int, held_out: int) -> None:
    chosen, rest = split_examples([str(i) for i in range(total)], count)
    assert (len(chosen), len(rest)) == (total - held_out, held_out)


@pytest.fixture
def brief(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps and short answers."""
    home.mkdir()
    (home / "config.toml").write_text("update_tokens = 256\nadapter_rank = 8\nlearning_rate = 0.02\n")
    monkeypatch.setattr("moedraft.distill.warmstart.PARAMS", SamplingParams(max_tokens=24))


@pytest.mark.usefixtures("brief")
def test_warm_start_raises_acceptance(run: Run, home: Path, low: Path, pair: Pair) -> None:
    result = run(
        "domain", "register", "low", "--examples", low, "--warm-start", 8, *pair, "--json", "--home", home
    )
    assert result.code == 0, result.err
    warm = result.data["warm_start"]
    # The gate has one held-out record to go by, and publishes two updates by it.
    assert (warm["answered"], warm["held_out"], warm["updates"], warm["version"]) == (8, 4, 2, 2)
    assert warm["acceptance_before"] is not None
    assert warm["acceptance_after"] > warm["acceptance_before"]
    experts = run("stats", "--json", "--home", home).data["experts"]
    assert experts["low"]["requests"] == 8  # what was measured is not counted
    assert experts["low"]["replay_size"] == 8


@pytest.fixture
def start_worse(
    brief: None, run: Run, home: Path, low: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """A warm start after which drafts of the other examples are accepted less often; what it reports."""
    rates = iter([0.5, 0.4])
    monkeypatch.setattr("moedraft.distill.warmstart._measure", lambda *_: next(rates))
    words = ("domain", "register", "low", "--examples", low, "--warm-start", 8, *pair)
    return lambda: run(*words, "--json", "--home", home).data["warm_start"]  # type: ignore[no-any-return]


def test_a_warm_start_on_trial_is_taken_back_where_it_does_harm(
    start_worse: Callable[[], dict[str, Any]], run: Run, home: Path
) -> None:
    warm = start_worse()
    assert (warm["updates"], warm["version"], warm["acceptance_after"]) == (0, 0, 0.4)
    versions = run("adapter", "list", "low", "--json", "--home", home).data["adapters"]
    assert [version["state"] for version in versions] == ["rolled_back", "rolled_back"]
    log = run("adapter", "list", "low", "--json", "--home", home).data["updates"]
    assert [one["decision"] for one in log] == ["promote", "promote", "keep", "withdraw", "withdraw"]
    assert [one["version"] for one in log[-2:]] == [1, 0]
    assert log[-1]["reason"].startswith("It was on trial")


def test_what_enough_records_speak_for_stays_whatever_the_other_examples_say(
    start_worse: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.distill.warmstart.FEW", 1)
    warm = start_worse()
    assert (warm["updates"], warm["version"], warm["acceptance_after"]) == (2, 2, 0.4)


def test_without_a_gate_nothing_is_taken_back(start_worse: Callable[[], dict[str, Any]], home: Path) -> None:
    with (home / "config.toml").open("a") as config:
        config.write('gate = "off"\n')
    warm = start_worse()
    assert (warm["updates"], warm["version"], warm["acceptance_after"]) == (3, 3, 0.4)


@pytest.mark.usefixtures("brief")
def test_warm_start_is_reported_in_words(run: Run, home: Path, low: Path, pair: Pair) -> None:
    result = run("domain", "register", "low", "--examples", low, "--warm-start", 99, *pair, "--home", home)
    assert "8 examples answered, 2 updates; acceptance on 4 held-out examples" in result.out


def paused(loop: DistillLoop, *_: object, **__: object) -> None:
    loop.state = learning_state.paused("The disk is full.")


def nothing(loop: DistillLoop, *_: object, **__: object) -> None:
    loop.state = learning_state.waiting()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("run_once", "code", "part"),
    [(paused, 2, "The disk is full."), (nothing, 2, "too few"), (interrupted, 130, "was interrupted")],
)
def test_a_warm_start_that_fails_leaves_the_domain(
    run: Run,
    home: Path,
    low: Path,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    run_once: Callable[..., None],
    code: int,
    part: str,
) -> None:
    monkeypatch.setattr(DistillLoop, "run_once", run_once)
    result = run(
        "domain", "register", "low", "--examples", low, "--warm-start", 8, *pair, "--json", "--home", home
    )
    assert (result.code, result.out) == (code, "")
    assert "'low' is registered, but its warm start" in result.err
    assert part in result.err
    assert [row["name"] for row in run("domain", "list", "--json", "--home", home).data["domains"]] == ["low"]


@pytest.mark.usefixtures("brief")
def test_an_example_too_long_fails_the_warm_start(run: Run, home: Path, tmp_path: Path, pair: Pair) -> None:
    path = write_rows(tmp_path / "long.jsonl", [*numbers(0), {"prompt": "1 " * 200}])
    result = run("domain", "register", "low", "--examples", path, "--warm-start", 8, *pair, "--home", home)
    assert result.code == 2
    assert "is registered, but its warm start failed: the prompt has 200 tokens" in result.err


@pytest.mark.usefixtures("registered")
def test_a_domain_tells_what_its_expert_can_guess(run: Run, home: Path) -> None:
    assert "on its list" not in run("domain", "show", "low", "--home", home).out
    with closing(Store.open(home)) as store:
        vocabulary = torch.tensor([3, 4], dtype=torch.int32)
        store.adapters.publish(candidate("low", vocabulary=vocabulary))
        store.replay.add(
            [ReplayRecord("low", "low", 1, "tiny", [7, 3, 5, 4, 4], 1, [[1]] * 4, [[0.0]] * 4, [], 1, 1)]
        )
    shown = run("domain", "show", "low", "--home", home)
    basis = "2 tokens of its own, counted in 1 answer since they were chosen"
    assert f"Of its answers 0.750 is on its list: by {basis}." in " ".join(shown.out.split())
    assert "0.750" in run("domain", "list", "--home", home).out
    listed = run("domain", "list", "--home", home, "--json").data["domains"]
    assert [one["vocabulary"] and one["vocabulary"]["share"] for one in listed] == [0.75, None]
