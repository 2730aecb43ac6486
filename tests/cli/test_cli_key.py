"""`key`: shown once, kept as a digest, worthless when revoked; and what `serve` refuses to do without one."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import Run

from moedraft.core import StorageError
from moedraft.serve.auth.keyring import Keyring
from moedraft.storage.keys import KEYS_FILE, Key, KeyFile


def test_a_key_is_made_listed_and_revoked(run: Run, home: Path) -> None:
    made = run(
        "key", "create", "--scope", "admin", "--scope", "infer", "--name", "team", "--home", home, "--json"
    ).data
    assert made["scopes"] == ["infer", "admin"]
    assert made["key"] not in (home / KEYS_FILE).read_text()
    assert stat.S_IMODE((home / KEYS_FILE).stat().st_mode) == 0o600
    shown = run("key", "create", "--scope", "metrics", "--home", home)
    assert shown.out.startswith("moedraft-")
    assert len(shown.out.splitlines()) == 1
    (first, second) = run("key", "list", "--home", home, "--json").data["keys"]
    assert (first["id"], first["name"], second["scopes"]) == (made["id"], "team", ["metrics"])
    assert "key" not in first
    assert "team" in run("key", "list", "--home", home).out
    assert run("key", "revoke", made["id"], "--home", home, "--json").data == {"revoked": made["id"]}
    assert [key["id"] for key in run("key", "list", "--home", home, "--json").data["keys"]] == [second["id"]]
    assert run("key", "revoke", made["id"], "--home", home).code == 2
    other = home.parent / "other"
    assert run("key", "revoke", made["id"], "--home", other).code == 2
    assert not other.exists(), "what is refused makes no home"


@pytest.mark.parametrize(
    "options",
    [("--scope", "root"), (), ("--scope", "infer", "--name", "a\nb"), ("--scope", "infer", "--name", "é")],
)
def test_a_bad_key_is_not_made(run: Run, home: Path, options: tuple[str, ...]) -> None:
    result = run("key", "create", *options, "--home", home)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert not (home / KEYS_FILE).exists()


def test_a_damaged_key_file_is_left_alone(run: Run, home: Path) -> None:
    home.mkdir()
    (home / KEYS_FILE).write_text("{")
    assert "damaged" in run("key", "list", "--home", home).err
    assert run("key", "create", "--scope", "infer", "--home", home).code == 2
    assert (home / KEYS_FILE).read_text() == "{"


def test_a_public_server_needs_a_key(run: Run, home: Path) -> None:
    result = run("serve", "--host", "0.0.0.0", "--home", home)
    assert result.code == 2
    assert "moedraft key create" in result.err
    assert not (home / "moedraft.db").exists()


@pytest.mark.parametrize("options", [("--port", "70000"), ("--port", "x"), ("--max-batch-size", "0")])
def test_bad_server_options_make_no_home(run: Run, home: Path, options: tuple[str, ...]) -> None:
    assert run("serve", *options, "--home", home).code == 2
    assert not home.exists()


def test_an_unreadable_key_file_is_read_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server that runs: too many open files, or a file that was root's."""
    file = KeyFile(home)
    key, secret = file.create(["infer"])
    ring, read = Keyring(file, open_without_keys=True), KeyFile.keys

    def unreadable(self: KeyFile) -> list[Key]:
        raise StorageError("It cannot be read.")

    monkeypatch.setattr(KeyFile, "keys", unreadable)
    assert ring.find(secret) is None
    assert not ring.is_open
    monkeypatch.setattr(KeyFile, "keys", read)
    assert ring.find(secret) == key


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("others", [0, 1])
def test_a_key_that_could_not_be_shown_is_none(run: Run, home: Path, others: int) -> None:
    if others:
        assert run("key", "create", "--scope", "infer", "--home", home).code == 0
    code = "import sys; from moedraft.cli import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", code, "key", "create", "--scope", "infer", "--home", str(home)],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.startswith("Error: ")
    assert "moedraft-" not in ran.stderr
    assert (home / KEYS_FILE).exists() == bool(others)  # with an empty file a server lets nobody in
    assert len(KeyFile(home).keys()) == others
