"""An engine and a trainer over one home, put together by hand so that no file of a model is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moedraft.core import SHARED, Domain, ReplayRecord, SamplingParams, Sequence
from moedraft.distill.loop import DistillLoop
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.single.trainer import Trainer
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.selector import FixedSelector
from moedraft.storage.store import Store
from moedraft.system.recorder import Recorder
from moedraft.system.sources.loader import AdapterLoader

from random_models import VOCAB, prompts_of, random_model
from tiny import NumberTokenizer


def record(number: int, domain: str = "code", target_id: str = "tiny") -> ReplayRecord:
    """Ten prompt tokens that tell `number`, six answer tokens, top-2."""
    digits = [int(digit) for digit in f"{number:010d}"]
    return ReplayRecord(
        domain=domain,
        expert=domain,
        adapter_version=0,
        target_id=target_id,
        token_ids=[*digits, 1, 2, 3, 4, 5, 6],
        num_prompt_tokens=10,
        topk_ids=[[token, 0] for token in range(1, 7)],
        topk_logprobs=[[-0.5, -2.0]] * 6,
        rejected=[],
        drafted=4,
        accepted=2,
    )


class Immediate:
    """A loader that uses a new version at the next step, not at its next look."""

    def __init__(self, loader: AdapterLoader) -> None:
        self.loader = loader

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        self.loader.refresh(running, now=True)


class Rig:
    """Two domains, "code" and "prose", each a corner of the vocabulary; a home that has them goes on."""

    def __init__(self, home: Path, kind: str = "llama", scope: str = "tail") -> None:
        self.store = Store.open(home)
        for name in ("code", "prose") if not self.store.registry.domains() else ():
            self.store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
        self.target = random_model(kind, 0)
        draft = random_model(kind, 1, layers=2)
        self.bank = ExpertBank(draft)
        self.loader = AdapterLoader(self.store, self.bank)
        self.engine = Engine(
            self.target,
            NumberTokenizer(),
            ModelDrafter(draft, self.bank, 8, VOCAB),
            FixedSelector(),
            adapters=Immediate(self.loader),
            topk=12,
            adaptive_budget=False,  # rates are compared at one draft length
        )
        self.recorder = Recorder(self.store, "tiny")
        self.engine.subscribe(self.recorder)
        self.trainer = Trainer(
            random_model(kind, 1, layers=2),
            self.store,
            scope=scope,
            rank=16,
            shared_rank=16,
            learning_rate=1e-2,
            steps=30,
            tokens_per_step=512,
        )
        self.loop = DistillLoop(self.trainer, self.store, HomeOutlet(self.store), every=16)

    def serve(self, expert: str, count: int, seed: int, length: int = 24) -> float:
        """Answer prompts of a "domain" (its own corner of the vocabulary); returns the acceptance rate."""
        low = {"code": 0, "prose": 48, SHARED: 0}[expert]
        prompts = [[low + token % 24 for token in prompt] for prompt in prompts_of(count, seed, 12)]
        outputs = self.engine.generate(prompts, SamplingParams(max_tokens=length), expert=expert, learn=True)
        return sum(o.speculation.num_accepted_tokens for o in outputs) / sum(
            o.speculation.num_draft_tokens for o in outputs
        )
