"""Bad input: exit code 2, one sentence on stderr, nothing on stdout, nothing changed. And how a run ends."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_fakes import Pair, Result, Run, numbers, save_tokenizer, write_rows

from moedraft import __version__
from moedraft.cli import app, main
from moedraft.core import RequestOutput
from moedraft.engine.engine import Engine
from moedraft.storage.store import Store

from random_models import random_model


def refused(result: Result, *parts: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["domain", "register", "sql", "--examples", "{tmp}/none.jsonl"], "No such file"),
        (["domain", "register", "sql", "--examples", "{tmp}"], "directory"),
        (["domain", "register", "sql", "--examples", "{tmp}/broken.jsonl"], "line 1: not valid JSON"),
        (["domain", "register", "sql", "--examples", "{tmp}/few.jsonl"], "at least 8"),
        (["domain", "register", "sql", "--examples", "{tmp}/long.jsonl"], "has 100001 letters"),
        (
            ["domain", "register", "sql", "--examples", "{tmp}/good.jsonl", "--description", "x" * 4001],
            "at most 4000 letters",
        ),
        (["domain", "register", "SQL!", "--examples", "{tmp}/good.jsonl"], "must be 1-64"),
        (["domain", "register", "shared", "--examples", "{tmp}/good.jsonl"], "shared adapter"),
        (
            ["domain", "register", "sql", "--examples", "{tmp}/good.jsonl", "--warm-start", "0"],
            "--warm-start",
        ),
        (["domain", "show", "sql"], "no domain named 'sql'"),
        (["domain", "show", "\udcff"], "no domain named"),
        (["domain", "remove", "sql"], "no moedraft home"),
        (["adapter", "promote", "sql", "1"], "no moedraft home"),
        (["adapter", "rollback", "sql"], "no moedraft home"),
        (["adapter", "list", "sql"], "no domain named"),
        (["adapter", "export", "sql", "--out", "{tmp}/x"], "no domain named"),
        (["adapter", "export", "shared", "--out", "{tmp}/x"], "never trained"),
        (["distill"], "no moedraft home"),
        (["route", " "], "the text is empty"),
        (["generate"], "either prompts or --prompts-file"),
        (["generate", "a", "--prompts-file", "x"], "either prompts or --prompts-file"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "a", "\n"], "prompt 2 is empty"),
        (["generate", "a\udcff"], "not valid UTF-8"),
        (["generate", "a", "--stop", ""], "stop string"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens must be >= 1"),
        (["generate", "a", "--temperature", "-1"], "temperature must be"),
        (["generate", "a", "--temperature", "nan"], "temperature must be"),
        (["generate", "a", "--top-p", "0"], "top_p must"),
        (["generate", "a", "--seed", "-1"], "seed must"),
        (["generate", "a", "--domain", "sql"], "no domain named 'sql'"),
        (["generate", "--prompts-file", "{tmp}/prompts.jsonl"], "line 2: There is no domain"),
        (["generate", "a", "--dtype", "int8"], "setting 'dtype':"),
        (["adapter", "list", "sql", "--domain", "code"], "name one expert"),
        (["stats", "--range", "1h"], "name its file with --plot"),
        (["generate", "a", "--target", "{tmp}/none"], "cannot be loaded"),
        (["generate", "a", "--temperature", "warm"], "'--temperature'"),
        (["generate", "a", "--top-q", "1"], "generate --help"),
        (["domain"], "Missing command. See `moedraft domain --help`"),
        (["dance"], "No such command 'dance'"),
    ],
)
def test_bad_input_is_refused_and_makes_no_home(
    run: Run, tmp_path: Path, home: Path, arguments: list[str], complaint: str
) -> None:
    rows = numbers(0)
    write_rows(tmp_path / "good.jsonl", rows)
    write_rows(tmp_path / "few.jsonl", rows[:7] + rows[:7])
    write_rows(tmp_path / "long.jsonl", [*rows, {"prompt": "x" * 100_001}])
    (tmp_path / "broken.jsonl").write_text((tmp_path / "good.jsonl").read_text().replace("}", "", 1))
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1"}, {"prompt": "2", "domain": "sql"}])
    refused(run("--home", home, *(part.format(tmp=tmp_path) for part in arguments)), complaint)
    assert not (home / "adapters").exists()
    if "none" not in " ".join(arguments):
        assert not home.exists()


def test_a_taken_name_changes_nothing(run: Run, home: Path, store: Store, low: Path) -> None:
    store.close()
    refused(run("domain", "register", "sql", "--examples", low, "--home", home), "exists already")
    assert run("domain", "show", "sql", "--home", home, "--json").data["examples"][0] == "SELECT 0"


def test_a_home_in_use_can_only_be_read(run: Run, home: Path, store: Store, pair: Pair) -> None:
    for command in (["generate", "1", *pair], ["distill"], ["adapter", "rollback", "sql"]):
        refused(run(*command, "--home", home), "being written by another process")
    for command in (
        ["stats"],
        ["domain", "list"],
        ["domain", "show", "sql"],
        ["adapter", "list"],
        ["route", "a"],
    ):
        assert run(*command, "--json", "--home", home).code == 0


def test_a_newer_home_is_refused(run: Run, home: Path, store: Store, pair: Pair) -> None:
    store.close()
    with sqlite3.connect(home / "moedraft.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for command in (["stats"], ["generate", "1", *pair], ["domain", "list"]):
        refused(run(*command, "--home", home), "newer moedraft")


def test_a_file_as_home_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(run("stats", "--home", tmp_path / "file"), "no moedraft home")


@pytest.mark.parametrize(("text", "part"), [("colour = 3", "'colour'"), ("topk = ", "config.toml")])
def test_a_bad_settings_file_is_refused(run: Run, home: Path, text: str, part: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(text)
    refused(run("stats", "--home", home), part)


def test_different_tokenizers_are_refused(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    random_model("llama", 2, 1).hf.save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other", 50)
    refused(run("generate", "1", *pair[:3], tmp_path / "other", "--home", home), "same tokenizer", "97", "50")


def test_a_prompt_too_long_is_refused_with_its_line(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1"}, {"prompt": "2 " * 200}])
    result = run("generate", "--prompts-file", rows, *pair, "--home", home, "--json")
    refused(result, "line 2: ", "200 tokens", "127")
    assert run("stats", "--json", "--home", home).data["experts"]["shared"]["requests"] == 0


# -- how a run ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupt_gives_the_home_back(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    """In mid-answer, some prompts decoding and some still waiting."""
    real, steps = Engine.step, 0

    def step(engine: Engine) -> list[RequestOutput]:
        nonlocal steps
        if steps == after:
            raise KeyboardInterrupt
        steps += 1
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} 2 3"} for i in range(12)])
    result = run("generate", "--prompts-file", path, *pair, "--home", home, "--json")
    assert (result.code, result.out) == (130, "")
    assert result.err.count("\n") == 1
    assert "interrupted" in result.err
    Store.open(home).close()  # the lock was given back


def test_a_fault_of_ours_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("moedraft.config.load_settings", broken)
    with pytest.raises(ZeroDivisionError):
        main(["stats"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError, SystemExit(1)])
def test_an_early_end_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Any
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(typer.Typer, "__call__", ends)
    assert main(["stats"]) == (130 if error is KeyboardInterrupt else 1)
    assert ("interrupted" in capsys.readouterr().err) == (error is KeyboardInterrupt)


def moedraft(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    code = "import sys; from moedraft.cli import main; sys.exit(main())"
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, env=environment, **options)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, moedraft.cli; print([m for m in ('torch', 'sklearn', 'sqlalchemy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_closed_pipe_ends_quietly() -> None:
    process = moedraft("--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()


def test_a_closed_output_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["stats"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_a_table_can_be_shown_in_any_encoding(home: Path, store: Store) -> None:
    del store  # the home is there
    ran = subprocess.run(
        [sys.executable, "-m", "moedraft", "stats", "--home", str(home)], capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "\\u2013" in ran.stdout


def test_a_key_is_never_shown_in_an_error(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("MOEDRAFT_API_KEY", "moedraft-SECRET\nx")
    found = run("domain", "list", "--server", "http://127.0.0.1:9")
    assert found.code == 2
    assert "SECRET" not in found.err
    assert "is no key" in found.err


@pytest.mark.parametrize(
    ("arguments", "variables", "word"),
    [
        (["generate", "hi"], {"MOEDRAFT_THREADS": "100000000"}, "threads"),
        (["adapter", "promote", "sql", "9" * 20], {}, "VERSION"),
        (["stats", "--watch", "--every", "inf"], {}, "--every"),
        (["stats"], {"MOEDRAFT_CACHE_DIR": "~nobody-there/a"}, "cache_dir"),
    ],
)
def test_what_is_out_of_all_bounds_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str], word: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = run(*arguments)
    assert found.code == 2
    assert word in found.err


def test_a_folder_in_place_of_the_settings_is_said(run: Run, home: Path) -> None:
    (home / "config.toml").mkdir(parents=True)
    found = run("stats", "--home", home)
    assert found.code == 2
    assert "config.toml cannot be read: it is no file" in found.err


def test_an_interrupt_while_libraries_load_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    ran = subprocess.run(
        [sys.executable, "-m", "moedraft", "stats"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 130
    assert ran.stderr == "Error: interrupted before anything was done.\n"


def test_version_and_help_are_complete(run: Run) -> None:
    assert run("--version").out == f"moedraft {__version__}\n"
    assert run().out == run("--help").out
    shown = run("--help").out
    for command in ("domain", "route", "generate", "distill", "adapter", "stats", "doctor"):
        assert f" {command} " in shown
    assert "--warm-start" in run("domain", "register", "--help").out


def test_the_app_is_what_main_runs() -> None:
    assert isinstance(app, typer.Typer)
