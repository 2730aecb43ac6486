"""`draft train` and `draft export` on a tiny target, end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from cli_fakes import Pair, Run, write_rows
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM

from moedraft.cli.draft import Loss
from moedraft.core import InvalidRequest
from moedraft.drafting.base import features_of, first_guesses, load_feature_base
from moedraft.feature.training import session, trainer
from moedraft.feature.training.trainer import FeatureTrainer
from moedraft.kernels import Kind
from moedraft.loading.hashes import hash_files
from moedraft.models import LanguageModel, load_model

from gguf_files import tiny_llama, write_gguf

TRAIN = ("draft", "train", "--vocabulary", 40, "--layers", "0,1,2", "--max-tokens", 8)


def test_a_base_is_trained_and_a_second_run_goes_on(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(24)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--out", tmp_path / "base", "--home", home]
    result = run(*options, "--minutes", 0.02, "--json")
    assert result.code == 0, result.err
    assert len(result.data["acceptance"]) == 5
    first = result.data["steps"]
    config = json.loads((Path(result.data["folder"]) / "config.json").read_text())
    note = json.loads((Path(result.data["folder"]) / "target.json").read_text())
    assert note == {"name": pair[1], "weights_hash": hash_files(Path(pair[1]))}
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 40)
    answers = (tmp_path / "base-training" / "texts.jsonl").read_text()
    assert len(answers.splitlines()) == 24
    result = run(*options, "--minutes", 0.03)
    assert result.code == 0
    assert "by depth" in result.out
    assert int(result.out.split(" steps")[0].split()[-1]) > first
    assert (tmp_path / "base-training" / "texts.jsonl").read_text() == answers


def test_an_interrupted_training_goes_on_from_there(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(24)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home]
    step = FeatureTrainer.step

    def interrupted(trainer: FeatureTrainer, share: float) -> float:
        if trainer.steps == 3:
            raise KeyboardInterrupt
        return step(trainer, share)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureTrainer, "step", interrupted)
        assert run(*options, "--minutes", 1).code == 130
    assert not (home / "draft-base").exists()
    assert "3 steps" in run(*options, "--minutes", 0.00001).out  # it has had its time


@pytest.mark.parametrize("kind", [None, *get_args(Loss)])
def test_the_kind_of_loss_is_chosen(
    kind: str | None, run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward KL unless another one is asked for; a training that is gone on with keeps its own."""
    assert get_args(Loss) == get_args(Kind)
    seen, loss_of = [], trainer.loss_of

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(arguments[-1])
        return loss_of(*arguments)

    monkeypatch.setattr(trainer, "loss_of", watched)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--minutes", 0.0001]
    assert run(*options, *(["--kind", kind] if kind else [])).code == 0
    assert set(seen) == {kind or "fkl"}
    other = "jsd" if kind == "tvd" else "tvd"
    assert "a training with another loss" in run(*options, "--kind", other).err
    assert "--kind" in run(*options, "--kind", "nothing").err
    (home / "draft-base-training" / "training.safetensors").unlink()  # as that message advises
    assert run(*options, "--kind", other).code == 0  # the answers are still good


def test_a_training_from_before_there_were_other_kinds_goes_on(
    run: Run, home: Path, pair: Pair, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--minutes", 0.0001]
    assert run(*options).code == 0
    file = home / "draft-base-training" / "training.json"
    facts = json.loads(file.read_text())
    assert facts.pop("loss") == "fkl"
    file.write_text(json.dumps(facts))
    assert "a training with another loss" in run(*options, "--kind", "rkl").err
    assert run(*options).code == 0


def test_given_answers_are_read_in_place_of_the_targets(
    run: Run, home: Path, pair: Pair, tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": f"{i} 1", "reference": f"{i} 2 3 4"}) for i in range(4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    options = [*TRAIN, "--prompts", tmp_path / "texts.jsonl", "--texts", *pair[:2], "--home", home]
    assert run(*options, "--minutes", 0.001).code == 0
    assert (home / "draft-base" / "model.safetensors").exists()


def test_texts_and_own_answers_can_be_mixed(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    """Rows without a reference are answered; acceptance is measured on these."""
    rows: list[dict[str, str]] = [{"prompt": f"{i} 1", "reference": f"{i} 2 3 4"} for i in range(4)]
    prompts = write_rows(tmp_path / "prompts.jsonl", [*rows, {"prompt": "7 8"}])
    options = [*TRAIN, "--prompts", prompts, "--texts", *pair[:2], "--home", home]
    assert run(*options, "--minutes", 0.001).code == 0
    assert len((home / "draft-base-training" / "texts.jsonl").read_text().splitlines()) == 1


def test_the_target_is_loaded_as_the_settings_say(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hello"}, {"prompt": "he"}])
    for name, value in {"CACHE_DIR": tmp_path / "cache", "THREADS": 2, "CPU_FAST_PATHS": False}.items():
        monkeypatch.setenv(f"MOEDRAFT_{name}", str(value))
    seen: list[tuple[LanguageModel, int]] = []

    def watched(model: LanguageModel, *_: object) -> None:
        seen.append((model, torch.get_num_threads()))
        raise InvalidRequest("enough was seen.")

    monkeypatch.setattr(session, "collect", watched)
    options = ["draft", "train", "--vocabulary", 40, "--layers", "0,1", "--max-tokens", 4, "--home", home]
    result = run(*options, "--target", file, "--prompts", prompts, "--minutes", 0.001)
    assert "Error: enough was seen." in result.err
    [(model, threads)] = seen
    assert threads == 2
    assert not model.cpu_fast_paths
    assert model.lean is None
    assert model.folder is not None
    assert model.folder.is_relative_to(tmp_path / "cache" / "models")


def test_what_is_written_says_its_target_and_has_the_rows(
    run: Run, home: Path, pair: Pair, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--out", tmp_path / "base"]
    assert run(*options, "--minutes", 0.001).code == 0
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": pair[1], "architectures": ["LlamaForCausalLM"]}
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    words = tensors["d2t"] + torch.arange(40)
    target = load_file(Path(pair[1]) / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target["lm_head.weight"][words].half())
    assert run(*options, "--minutes", 0.001, "--no-rows").code == 0
    assert "lm_head.weight" not in load_file(tmp_path / "base" / "model.safetensors")


@pytest.mark.filterwarnings("default")
def test_the_real_package_loads_what_the_command_writes(
    run: Run, home: Path, pair: Pair, tmp_path: Path
) -> None:
    """By itself: target and rows are found by what stands in the folder."""
    speculators = pytest.importorskip("speculators", reason="the package speculators is not installed")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(8)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--out", tmp_path / "base"]
    assert run(*options, "--minutes", 0.005).code == 0
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "base")
    written = load_file(tmp_path / "base" / "model.safetensors")
    found = dict(theirs.state_dict())
    for name in ("fc.weight", "lm_head.weight", "layers.0.self_attn.q_proj.weight", "d2t", "t2d"):
        assert torch.equal(found[name].to(written[name].dtype), written[name]), name


def test_only_a_drafter_is_ever_replaced(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else DIR is, it is refused before the target is loaded, and left as it was."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("kept")
    shutil.copytree(pair[1], tmp_path / "model", ignore=shutil.ignore_patterns("*token*", "generation*"))
    (tmp_path / "base-training").write_text("kept")
    monkeypatch.chdir(tmp_path / "mine")
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    options = [*TRAIN, "--prompts", prompts, "--home", home, "--target", tmp_path / "nowhere"]
    for out, why in {
        "../mine": "holds other things, letter.txt",
        ".": "holds other things, letter.txt",
        "..": "holds other things, ",
        "/": "holds other things, ",
        "../model": "is no drafter",
        "letter.txt": "is a file",
        "letter.txt/base": "letter.txt is no folder",
        "../base": "base-training is a file",
    }.items():
        result = run(*options, "--out", out)
        assert result.code == 2, out
        assert why in result.err, out
        assert result.err.count("\n") == 1, out
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_an_empty_folder_and_an_earlier_drafter_are_replaced(
    run: Run, home: Path, pair: Pair, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    (tmp_path / "base").mkdir()
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--out", tmp_path / "base"]
    assert run(*options, "--minutes", 0.001).code == 0
    first = (tmp_path / "base" / "model.safetensors").stat().st_ino
    assert run(*options, "--minutes", 0.002).code == 0
    assert (tmp_path / "base" / "model.safetensors").stat().st_ino != first
    assert {path.name for path in tmp_path.iterdir()} >= {"base", "base-training"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_further_prompts_are_refused_before_the_target_answers_them(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{i} {i + 1}"} for i in range(4)]
    options = [*TRAIN, "--prompts", tmp_path / "prompts.jsonl", *pair[:2], "--home", home]
    write_rows(tmp_path / "prompts.jsonl", rows)
    assert run(*options, "--minutes", 0.001).code == 0
    write_rows(tmp_path / "prompts.jsonl", [*rows, {"prompt": "9 9 9"}])
    monkeypatch.setattr(session, "answered", lambda *_: pytest.fail("the target was asked"))
    result = run(*options, "--minutes", 0.002)
    assert result.code == 2
    assert "draft-base-training holds a training on other prompts" in result.err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--layers", "1,2,0"], "layers"),
        (["--max-tokens", 9], "max_tokens"),
        (["--target", "other"], "target"),
    ],
)
def test_a_training_does_not_go_on_as_another(
    run: Run,
    home: Path,
    pair: Pair,
    tmp_path: Path,
    change: list[Any],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another target has answered, and learned weights, would be passed off as this one's."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home]
    assert run(*options, "--minutes", 0.001).code == 0
    before = (home / "draft-base-training" / "training.safetensors").read_bytes()
    if what == "target":
        shutil.copytree(pair[1], tmp_path / "other")
        file = tmp_path / "other" / "model.safetensors"
        save_file({name: value * 1.5 for name, value in load_file(file).items()}, file)
        change = ["--target", tmp_path / "other"]
    monkeypatch.setattr(session, "answered", lambda *_: pytest.fail("the target was asked"))
    result = run(*options, *change, "--minutes", 0.01)
    assert result.code == 2
    assert f"draft-base-training holds a training with another {what}; name another folder" in result.err
    assert (home / "draft-base-training" / "training.safetensors").read_bytes() == before


def test_what_was_not_begun_may_begin_otherwise(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an answer nor a step is there yet. Given answers have a length of their own."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session, "answered", interrupted)
        assert run(*options, "--minutes", 0.001).code == 130
    assert run(*options, "--max-tokens", 9, "--minutes", 0.001).code == 0
    rows = [json.dumps({"prompt": f"{i} 1", "reference": f"{i} 2 3 4"}) for i in range(4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    given = [*TRAIN, "--prompts", tmp_path / "texts.jsonl", "--texts", *pair[:2], "--out", tmp_path / "given"]
    assert run(*given, "--home", home, "--minutes", 0.001).code == 0
    assert run(*given, "--home", home, "--max-tokens", 9, "--minutes", 0.001).code == 0


@pytest.mark.parametrize("left", ["", "5", "{}"])
def test_a_training_that_does_not_tell_what_it_is_of_is_refused(
    run: Run, home: Path, pair: Pair, tmp_path: Path, left: str
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(4)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home]
    assert run(*options, "--minutes", 0.001).code == 0
    note = home / "draft-base-training" / "training.json"
    note.write_text(left) if left else note.unlink()
    result = run(*options, "--minutes", 0.001)
    assert result.code == 2
    assert "does not tell what its training began with" in result.err


def test_a_target_that_cannot_be_learned_from_is_refused_before_it_answers(
    run: Run, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair[1], tmp_path / "narrow")  # with the tokenizer
    size = json.loads((tmp_path / "narrow" / "config.json").read_text())["vocab_size"]
    narrow = OPTConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=16, pad_token_id=0,
    )  # fmt: skip
    OPTForCausalLM(narrow).save_pretrained(tmp_path / "narrow")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1 2"}, {"prompt": "3 4"}])
    monkeypatch.setattr(session, "answered", lambda *_: pytest.fail("the target was asked"))
    result = run(*TRAIN, "--prompts", prompts, "--target", tmp_path / "narrow", "--home", home)
    assert result.code == 2
    assert "opt: no drafter can be trained for this target" in result.err


def test_bad_input_gets_one_sentence(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1 2"}, {"prompt": "3 4"}])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home]
    result = run(*options, "--texts")
    assert (result.code, result.err) == (2, f"Error: {prompts}: no row has a 'reference'.\n")
    half = write_rows(
        tmp_path / "half.jsonl", [{"prompt": "1 2", "reference": "3"}, {"prompt": "3", "reference": 4}]
    )
    result = run(*TRAIN, "--prompts", half, *pair[:2], "--home", home, "--texts")
    assert (result.code, "line 2: 'reference' must be" in result.err) == (2, True), result.err
    for minutes in ("0", "-1", "nan", "inf"):
        assert f"--minutes must be above 0, not {minutes}." in run(*options, f"--minutes={minutes}").err
    assert "such as 2,15,27" in run(*options, "--layers", "two").err
    for wrong in ("0,1,9", "-1,0,1"):
        assert "a drafter reads layers 0 to " in run(*options, f"--layers={wrong}").err
    assert "must be different ones, not [1, 1]" in run(*options, "--layers", "1,1").err
    alone = write_rows(tmp_path / "one.jsonl", [{"prompt": "1 2"}])
    assert "at least two texts" in run(*TRAIN, "--prompts", alone, *pair[:2], "--home", home).err
    assert not home.exists()


@pytest.fixture
def trained(run: Run, home: Path, pair: Pair, tmp_path: Path) -> Path:
    """A drafter in the home, without output rows."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(8)])
    options = [*TRAIN, "--prompts", prompts, *pair[:2], "--home", home, "--no-rows"]
    assert run(*options, "--minutes", 0.005).code == 0
    return home / "draft-base"


def test_an_exported_drafter_has_the_targets_rows_and_guesses_the_same(
    run: Run, home: Path, pair: Pair, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # a large target in bfloat16 would have rounded rows
        patch.setattr("moedraft.models.count_parameters", lambda *of: pytest.fail("it may be rounded"))
        result = run("draft", "export", out, *pair[:2], "--home", home, "--json")
    assert result.code == 0, result.err
    assert result.data == {"folder": str(out), "draft": str(trained)}
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, out))
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    words = after["d2t"] + torch.arange(40)
    rows = load_file(Path(pair[1]) / "model.safetensors")["lm_head.weight"][words]
    assert torch.equal(after["lm_head.weight"], rows.half())
    for name in ("config.json", "target.json"):
        assert (out / name).read_text() == (trained / name).read_text()
    target, ids = load_model(pair[1], "target"), [(5 * i * i + 3) % 97 for i in range(40)]
    bases = [load_feature_base(folder, target) for folder in (trained, out)]
    guesses = [first_guesses(base, ids, features_of(base, target, ids)) for base in bases]
    assert guesses[0] == guesses[1]
    assert len(set(guesses[0])) > 2
    assert run("generate", "1 2 3", *pair[:2], "--draft", out, "--home", tmp_path / "other").code == 0


def test_an_export_replaces_a_drafter_and_nothing_else(
    run: Run, home: Path, pair: Pair, trained: Path, tmp_path: Path
) -> None:
    """Nor one that is served, since experts belong to its very weights."""
    options = ["draft", "export", *pair[:2], "--home", home]
    for folder in ("out", "copy"):
        assert run(*options, tmp_path / folder).code == 0
    result = run(*options, tmp_path / "out")
    assert (result.code, result.out.count("with its output rows")) == (0, 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("kept")
    copy = ("--draft", tmp_path / "copy")
    for out, more, why in (
        (tmp_path / "mine", (), "holds other things, letter.txt"),
        (trained, (), "is where drafters are served from"),
        (trained, copy, "is where drafters are served from"),
        (tmp_path / "copy", copy, "is where drafters are served from"),
        (tmp_path / "new", pair[2:], f"the draft {pair[3]} is no feature drafter; only those are exported."),
    ):
        before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
        result = run(*options, out, *more)
        assert result.code == 2, out
        assert why in result.err
        assert result.err.count("\n") == 1
        assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_precision_and_length_of_drafts_are_exported_as_they_were(
    run: Run, home: Path, pair: Pair, trained: Path, tmp_path: Path
) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5
    (trained / "config.json").write_text(json.dumps(config))
    tensors = load_file(trained / "model.safetensors")
    wide = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(wide, trained / "model.safetensors")
    for steps in (5, 3):
        assert run("draft", "export", tmp_path / "out", *pair[:2], "--home", home).code == 0
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        [method] = written["speculators_config"]["proposal_methods"]
        assert (written["dtype"], method["speculative_tokens"]) == ("float32", steps)
        assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == torch.float32
        del config["speculators_config"]["proposal_methods"]
        (trained / "config.json").write_text(json.dumps(config))
        config["speculators_config"]["proposal_methods"] = None
