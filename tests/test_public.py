"""The public names are few and pinned; settings come from where they should; core types guard themselves."""

from __future__ import annotations

import inspect
import io
from pathlib import Path

import pytest

import moedraft
from moedraft.cli import main
from moedraft.cli.files import STDIN, read_prompts
from moedraft.config import load_settings
from moedraft.core import InvalidRequest, StorageError
from moedraft.storage.registry import check_domain_name
from moedraft.system.build import build


def test_public_names_are_pinned() -> None:
    assert sorted(moedraft.__all__) == [
        "Engine",
        "InvalidRequest",
        "MoedraftError",
        "RequestOutput",
        "SamplingParams",
        "StorageError",
        "UnsupportedModel",
        "__version__",
        "load",
    ]
    for name in moedraft.__all__:
        assert getattr(moedraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = moedraft.nothing  # type: ignore[attr-defined]


def test_public_signatures_are_pinned() -> None:
    assert list(inspect.signature(moedraft.load).parameters) == ["target", "draft", "home", "settings"]
    methods = ["abort", "add", "close", "generate", "has_work", "step", "stream"]
    assert all(getattr(moedraft.Engine, name).__doc__ for name in methods if name != "has_work")
    assert list(inspect.signature(moedraft.Engine.generate).parameters)[:3] == ["self", "prompts", "params"]


def test_arguments_win_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('max_batch_size = 3\nadapter_rank = 5\ndraft = "file"\n')
    monkeypatch.setenv("MOEDRAFT_ADAPTER_RANK", "6")
    monkeypatch.setenv("MOEDRAFT_HOME", str(tmp_path))
    settings = load_settings(draft="argument")
    assert (settings.max_batch_size, settings.adapter_rank, settings.draft) == (3, 6, "argument")
    assert settings.home == tmp_path.resolve()
    assert load_settings(home=tmp_path / "other").max_batch_size == 8


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nonsense = 1\n", "'nonsense' .in config.toml."),
        ("max_batch_size = 0\n", "'max_batch_size' .in config.toml.: "),
        ("= broken", "config.toml"),
        ('home = "/tmp"\n', "config.toml cannot be read: it lies in its home"),
        ('HOME = "/tmp"\n', "config.toml cannot be read: it lies in its home"),
        ("max_batch_size = true\n", "'max_batch_size' .in config.toml.: Input should not be true or false"),
        (f"{'a' * 500} = 1\n", f"setting '{'a' * 80}' .in config.toml.: "),
        (f"a = {'[' * 5000}{']' * 5000}\n", "config.toml cannot be read: it is too deeply nested"),
    ],
)
def test_a_wrong_settings_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=word):
        load_settings(home=tmp_path)


def test_a_settings_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("max_batch_size = 3\n", encoding="utf-8-sig")
    assert load_settings(home=tmp_path).max_batch_size == 3


@pytest.mark.parametrize("name", ["", " "])
def test_a_home_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="'home': Input should name a folder, but is empty"):
        load_settings(home=name)


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(InvalidRequest, match="speed"):
        load_settings(speed=11)
    with pytest.raises(InvalidRequest, match="dtype"):
        load_settings(dtype="int4")


def test_unknown_variables_are_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEDRAFT_API_KEY", "moedraft-x")
    load_settings(home=tmp_path)
    monkeypatch.setenv("MOEDRAFT_MAX_WAITNG", "9")
    with pytest.raises(InvalidRequest, match="MOEDRAFT_MAX_WAITNG is no setting"):
        load_settings(home=tmp_path)


def test_lists_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEDRAFT_ALLOWED_ORIGINS", '["https://a", "https://b"]')
    assert load_settings(home=tmp_path).allowed_origins == ("https://a", "https://b")
    monkeypatch.setenv("MOEDRAFT_ALLOWED_ORIGINS", "https://a")
    with pytest.raises(InvalidRequest, match="MOEDRAFT_ALLOWED_ORIGINS must be JSON"):
        load_settings(home=tmp_path)


@pytest.mark.parametrize("name", ["", "Upper", "-x", "a/b", "..", "a" * 65, "ümlaut", "shared", "a b", "x\n"])
def test_bad_domain_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_domain_name(name)


@pytest.mark.parametrize("name", ["a", "0", "docs-de", "a" * 64, "x_1"])
def test_good_domain_names_are_taken(name: str) -> None:
    assert check_domain_name(name) == name


def test_an_impossible_home_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        build(load_settings(home=tmp_path / "file"))
    assert main(["stats", "--home", str(tmp_path / "file")]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="'home'"):
        load_settings(home="~nosuchuser/x")
    with pytest.raises(InvalidRequest, match="home"):
        load_settings(home=5)


@pytest.mark.parametrize("closed", [None, "closed"])
def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, closed: str | None) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stdin", stream if closed else None)
    with pytest.raises(InvalidRequest, match="standard input is closed"):
        read_prompts(STDIN)


@pytest.mark.parametrize(
    ("option", "word"),
    [(("--top-k", "99999999999999999999"), "top_k"), (("--home", "~nosuchuser/x"), "home")],
)
def test_hostile_options_exit_with_two(
    option: tuple[str, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a", *option]) == 2
    assert word in capsys.readouterr().err
