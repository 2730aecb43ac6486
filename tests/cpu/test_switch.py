"""Who may use the fast paths for small models on a CPU, and that one setting turns all of them off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moedraft import cpu
from moedraft.config import load_settings
from moedraft.core import SamplingParams
from moedraft.cpu.groups import Grouped
from moedraft.cpu.products import PackedLinear, pays
from moedraft.cpu.threads import set_threads
from moedraft.drafting.experts.adapter import Adapter
from moedraft.routing import embedder as embedder_module
from moedraft.routing.embedder import Embedder
from moedraft.system.build import System, opened

PROMPT = "SELECT name FROM users WHERE"


@dataclass
class Fake:
    """A model as far as the decision looks at it."""

    where: str = "cpu"
    num_parameters: int = 1_000_000
    cpu_fast_paths: bool = True

    @property
    def device(self) -> torch.device:
        return torch.device(self.where)


@pytest.mark.parametrize(
    ("model", "allows", "suits"),
    [
        (Fake(), True, True),
        (Fake(num_parameters=cpu.SMALL), True, True),
        (Fake(num_parameters=cpu.SMALL + 1), True, False),
        (Fake("cuda"), False, False),
        (Fake("cuda:1", cpu.SMALL + 1), False, False),
        (Fake("meta"), False, False),
        (Fake(cpu_fast_paths=False), False, False),
    ],
    ids=str,
)
def test_by_device_size_and_setting(model: Fake, allows: bool, suits: bool) -> None:
    assert (cpu.allows(model), cpu.suits(model)) == (allows, suits)


@pytest.mark.parametrize(
    ("wanted", "model", "set_to"),
    [
        (0, Fake(), [1]),
        (3, Fake(), [3]),
        (3, Fake("cuda"), [3]),
        (0, Fake("cuda"), []),
        (0, Fake(num_parameters=cpu.SMALL + 1), []),
        (0, Fake(cpu_fast_paths=False), []),
    ],
    ids=str,
)
def test_threads(wanted: int, model: Fake, set_to: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    set_threads(wanted, model)
    assert found == set_to


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().cpu_fast_paths
    monkeypatch.setenv("MOEDRAFT_CPU_FAST_PATHS", "false")
    assert not load_settings().cpu_fast_paths


def two_experts(system: System) -> None:
    """Put experts "a" and "b" into the bank; they change the draft's output layer a little."""
    weight = system.bank.layers["lm_head"].base_weight()
    for name in "ab":
        low = 1e-3 * torch.randn(4, weight.shape[1]), 1e-3 * torch.randn(weight.shape[0], 4)
        system.bank.publish(name, Adapter(1, {"lm_head": low}))


@pytest.mark.parametrize("on", [True, False])
def test_the_shipped_pair_gives_the_targets_answer_either_way(on: bool, tmp_path: Path) -> None:
    """And without the fast paths neither model nor bank nor loader uses anything of them."""
    with opened(load_settings(home=tmp_path, threads=1, cpu_fast_paths=on, adaptive_budget=False)) as system:
        assert (system.target.lean is not None, system.draft.lean is not None) == (on, on)
        assert (system.target.ragged, system.bank.grouped, system.loader.tend_memory) == (on, on, on)
        two_experts(system)
        system.bank.select(["a", "b"])
        head = system.bank.layers["lm_head"]
        assert isinstance(head.product, Grouped) == on
        assert (head.with_weight(head.base_weight()).blocked is not None) == (on and pays(torch.ones(1)))
        [output] = system.engine.generate([PROMPT], SamplingParams(max_tokens=24))
        ids = torch.tensor([system.target.tokenizer(PROMPT)["input_ids"]])
        wanted = system.target.hf.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert output.token_ids == wanted.tolist()[: len(output.token_ids)]
        assert output.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("on", [True, False])
def test_the_router_embeds_without_packed_layers(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder_module, "multiplies_bfloat16", lambda: False)
    made = SimpleNamespace(model=nn.Sequential(nn.Linear(8, 8)))
    monkeypatch.setattr(embedder_module, "_load", lambda *_: made.model)
    found = Embedder("minilm", cpu_fast_paths=on)._ready()
    assert isinstance(found[0], PackedLinear) == (on and pays(torch.ones(1)))
    monkeypatch.setattr(embedder_module, "multiplies_bfloat16", lambda: True)
    assert Embedder("minilm", cpu_fast_paths=on).half == on
