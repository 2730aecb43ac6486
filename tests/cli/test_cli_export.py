"""What `adapter export` writes does in PEFT what the engine's bank does: the same logits."""

from __future__ import annotations

import re
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from candidates import candidate
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from moedraft.core import SHARED, Domain, InvalidRequest
from moedraft.distill.export import combine, export_adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.experts.modules import adaptable
from moedraft.models import LanguageModel, load_model
from moedraft.storage.store import Store
from moedraft.storage.versions.adapters import LoadedAdapter

from random_models import random_model

EXPERT = "sql"


def publish(
    store: Store, draft: LanguageModel, name: str, scope: str, rank: int, alpha: int, seed: int
) -> None:
    """A random adapter in the form in which the trainer writes one."""
    modules, generator = adaptable(draft, scope), torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        weight: Any = draft.hf.get_submodule(module).weight
        for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
            key = f"base_model.model.{module}.lora_{part}.weight"
            tensors[key] = 0.1 * torch.randn(shape, generator=generator)
    pattern = "|".join(re.escape(module) for module in modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=pattern, base_model_name_or_path="base")
    facts = {"config": config.to_dict(), "tensors": tensors, "rank": rank}
    store.adapters.publish(candidate(name, base_hash=draft.weights_hash(), **facts))


def filled(home: Path, draft: LanguageModel, scope: str, *, shared: bool = True) -> Store:
    store = Store.open(home)
    store.registry.add_domain(Domain(EXPERT, "", ("x",) * 8, 0.0))
    if shared:
        publish(store, draft, SHARED, "full", rank=6, alpha=12, seed=1)
    publish(store, draft, EXPERT, scope, rank=4, alpha=4, seed=2)
    return store


def of_bank(store: Store, draft: LanguageModel, scope: str, expert: str, ids: torch.Tensor) -> torch.Tensor:
    bank = ExpertBank(draft)
    for name in (SHARED, EXPERT):
        found = store.adapters.load_live(name, bank.base_hash)
        if found:
            bank.publish(name, bank.read(found[0].version, found[1].config, found[1].tensors))
    bank.select([expert] * len(ids))
    with torch.inference_mode():
        return draft.hf(input_ids=ids, use_cache=False).logits


def of_peft(base: Path | str, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about tied output layers
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, str(folder)).eval()
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("scope", ["tail", "full"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_peft_gives_the_same_logits(tmp_path: Path, kind: str, scope: str) -> None:
    draft = random_model(kind, 3, 2)
    draft.hf.save_pretrained(tmp_path / "base")
    store = filled(tmp_path / "home", draft, scope)
    combined = export_adapter(store, EXPERT, tmp_path / "combined")
    assert combined.versions == {SHARED: 1, EXPERT: 1}
    assert combined.base_hash == draft.weights_hash()
    export_adapter(store, EXPERT, tmp_path / "alone", expert_only=True)
    assert export_adapter(store, SHARED, tmp_path / "shared").versions == {SHARED: 1}
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))
    expected = of_bank(store, draft, scope, EXPERT, ids)
    torch.testing.assert_close(
        of_peft(tmp_path / "base", tmp_path / "combined", ids), expected, atol=1e-4, rtol=0
    )
    assert (of_peft(tmp_path / "base", tmp_path / "alone", ids) - expected).abs().max() > 0.01
    shared_only = of_bank(store, reload(draft, kind), scope, SHARED, ids)
    torch.testing.assert_close(
        of_peft(tmp_path / "base", tmp_path / "shared", ids), shared_only, atol=1e-4, rtol=0
    )
    store.close()


def reload(draft: LanguageModel, kind: str) -> LanguageModel:
    """The same weights without a bank's layers."""
    fresh = random_model(kind, 3, 2)
    assert type(fresh.hf) is type(draft.hf)
    return fresh


def test_peft_agrees_on_the_bootstrap_draft(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "models" / "bootstrap-draft"
    if not folder.is_dir():
        pytest.skip("the bootstrap models, ../shared/models, are not there")
    draft = load_model(str(folder), "draft")
    store = filled(tmp_path / "home", draft, "tail")
    export_adapter(store, EXPERT, tmp_path / "out")
    ids = torch.randint(draft.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = of_bank(store, draft, "tail", EXPERT, ids)
    torch.testing.assert_close(of_peft(folder, tmp_path / "out", ids), expected, atol=1e-4, rtol=1e-5)
    store.close()


def test_an_expert_exports_without_shared_adapter(tmp_path: Path) -> None:
    draft = random_model("llama", 3, 2)
    with filled(tmp_path / "home", draft, "tail", shared=False).home as home:
        assert home.writable
    store = Store.open(tmp_path / "home", write=False)
    assert export_adapter(store, EXPERT, tmp_path / "out").versions == {EXPERT: 1}
    with pytest.raises(InvalidRequest, match="never trained"):
        export_adapter(store, SHARED, tmp_path / "other")
    store.close()
    with closing(Store.open(tmp_path / "home")) as store:
        store.registry.rollback(EXPERT)
        with pytest.raises(InvalidRequest, match=r"No version of .* is live; `moedraft adapter promote`"):
            export_adapter(store, EXPERT, tmp_path / "other")


def test_an_adapter_without_matrices_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds no LoRA matrices"):
        combine([LoadedAdapter({}, {"other": torch.zeros(2)}, {})])


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    draft = random_model("llama", 3, 2)
    store = filled(tmp_path / "home", draft, "tail")
    out = tmp_path / "deep" / "out"
    export_adapter(store, EXPERT, out)
    before = sorted(path.name for path in out.iterdir())
    assert before == ["adapter_config.json", "adapter_model.safetensors"]
    (tmp_path / "file").write_text("x")
    for taken in (out, tmp_path / "file"):
        with pytest.raises(InvalidRequest, match="not an empty folder"):
            export_adapter(store, EXPERT, taken)
    (tmp_path / "empty").mkdir()
    export_adapter(store, EXPERT, tmp_path / "empty")
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    store.close()


def test_nothing_stays_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "home", random_model("llama", 3, 2), "tail")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moedraft.distill.export.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_adapter(store, EXPERT, tmp_path / "out" / "x")
    assert list((tmp_path / "out").iterdir()) == []
    store.close()
