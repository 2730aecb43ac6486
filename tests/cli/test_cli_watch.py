"""`stats --watch` and `stats --plot`: the same figures again and again, and as a picture."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cli_fakes import Run

from moedraft.core import SHARED, RequestStats, UpdateRecord
from moedraft.distill.pace.governor import Load, write_load
from moedraft.speculation import SpeculationStats
from moedraft.storage.store import Store

PNG = b"\x89PNG\r\n"


def request(expert: str, at: float) -> RequestStats:
    return RequestStats(
        request_id="r",
        expert=expert,
        adapter_version=1,
        lang="latin",
        num_prompt_tokens=3,
        num_tokens=8,
        seconds=0.5,
        finish_reason="stop",
        created_at=at,
        confidence=0.8,
        speculation=SpeculationStats(
            num_steps=4,
            num_drafts=2,
            num_draft_tokens=10,
            num_accepted_tokens=7,
            drafted_at=[6, 4],
            accepted_at=[5, 2],
        ),
    )


@pytest.fixture
def served(store: Store, home: Path) -> Path:
    """Open for writing, as by a server; names that matplotlib or a terminal would take for more than text."""
    now = time.time()
    names = ["sql", SHARED, "_hidden", "$\\frac{$", "[red]x[/red]"]
    store.requests.add([request(name, now - 60 * age) for name in names for age in range(1, 9)])
    store.updates.add(UpdateRecord("sql", 1, 8, 4, 1.5, 3.0, 0.5, 0.6, now - 300))
    write_load(store.registry, Load(0.25, 3, now))
    return home


def stop_after(looks: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Ctrl-C instead of the pause after so many looks; returns the pauses."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("moedraft.cli.stats.sleep", sleep)  # not that of other threads
    return pauses


def test_watch_prints_json_each_time(run: Run, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = stop_after(3, monkeypatch)
    result = run("stats", "--watch", "--every", 7, "--json", "--home", served)
    assert (result.code, result.err, pauses) == (0, "", [7.0, 7.0, 7.0])
    assert [row["experts"]["sql"]["requests"] for row in result.rows] == [8, 8, 8]
    assert result.rows[0]["engine"] == {"idle": 0.25, "waiting": 3}


def test_watch_prints_text_in_a_pipe(run: Run, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch)
    shown = run("stats", "--watch", "--home", served).out
    assert shown.count("Learning:") == shown.count("Server: 25 % idle, 3 waiting") == 2
    assert "[red]x[/red]" in shown


def test_watch_tells_a_terminal_how_to_end(run: Run, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    result = run("stats", "--watch", "--home", served)
    assert result.code == 0
    assert "Ctrl-C ends." in result.out


def test_an_old_load_is_not_shown(run: Run, served: Path, store: Store) -> None:
    write_load(store.registry, Load(0.25, 3, time.time() - 60))
    assert run("stats", "--json", "--home", served).data["engine"] is None
    assert "Server:" not in run("stats", "--home", served).out


@pytest.mark.parametrize("span", ["15m", "1h", "24h", "all"])
def test_plot_draws_a_picture(run: Run, served: Path, tmp_path: Path, span: str) -> None:
    picture = tmp_path / "stats.png"
    result = run("stats", "--plot", picture, "--range", span, "--home", served)
    assert (result.code, result.out) == (0, "")
    assert picture.read_bytes().startswith(PNG)


def test_bad_plot_options_are_refused(
    run: Run, served: Path, store: Store, home: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "stats.png"
    for options, reason in (
        (("--plot", tmp_path / "stats.doc"), "must be a .png, .svg or .pdf"),
        (("--plot", picture, "--range", "2h"), "must be one of 15m"),
        (("--plot", tmp_path / "none" / "stats.png"), "No such file"),
        (("--plot", picture, "--home", home / "none"), "There is no moedraft home"),
    ):
        result = run("stats", "--home", served, *options)
        assert (result.code, result.out) == (2, "")
        assert reason in result.err
    assert not picture.exists()


def test_without_requests_nothing_is_plotted(run: Run, store: Store, home: Path, tmp_path: Path) -> None:
    result = run("stats", "--plot", tmp_path / "stats.png", "--home", home)
    assert result.code == 2
    assert "nothing was served in all time" in result.err
