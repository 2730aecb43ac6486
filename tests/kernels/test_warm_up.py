"""Nothing is compiled within a request: after `warm_up` no launch has arguments of a kind that is new.

The kinds are those that Triton's own launcher tells apart; the kernels themselves are not run here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from moedraft import kernels, sampling
from moedraft.core import SamplingParams
from moedraft.drafting import drawing
from moedraft.drafting.drafter import NoDrafter, NoExperts
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.model import ModelDrafter
from moedraft.engine import verification, warming
from moedraft.engine.engine import Engine
from moedraft.engine.warming import warm_up
from moedraft.kernels import (
    block,
    block_kernels,
    coupled,
    coupled_kernels,
    cut_kernels,
    fused_cut,
    team_kernels,
    verify,
    verify_kernels,
)
from moedraft.routing.selector import FixedSelector

from random_features import draft_for
from random_models import random_model
from tiny import NumberTokenizer, TinyLM, random_table

LAUNCHED = {
    verify: ("sweep", "resolve"),
    block: ("judge",),
    coupled: ("sweep_coupled", "choose"),
    fused_cut: ("survey", "aim", "narrow", "cut"),
}
CALLED = {
    verification: ("verify_chain", "verify_block", "verify_coupled"),
    drawing: ("sample_draft", "sample_coupled"),
    sampling: ("find_cuts",),
}
KERNELS = {
    verify_kernels: LAUNCHED[verify],
    block_kernels: LAUNCHED[block],
    coupled_kernels: LAUNCHED[coupled],
    team_kernels: ("survey", "aim", "narrow"),
    cut_kernels: ("cut",),
}
FLAGS = (
    "HAS_DRAFT", "HAS_LSE", "HAS_COUNTS", "PACKED", "BOTH", "SKIP_GREEDY_SUM", "WANT_LSE", "PURPOSE"
)  # fmt: skip
COMPILED = Path(__file__).with_name("compiled.json")
Variant = tuple[str, str, str]


class Launcher:
    """Stands in a kernel's place, and writes down what Triton would compile for the arguments it gets."""

    def __init__(self, name: str, kernel: Any, variants: set[Variant]) -> None:
        self.name, self.variants = name, variants
        compiled = kernel
        if not isinstance(kernel, JITFunction):  # the interpreter's
            compiled = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs.get("do_not_specialize"))
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(compiled.signature, compiled.params, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, **constants: Any) -> None:
        _, kinds, options = self.bind(*arguments, **constants)
        self.variants.add((self.name, repr(kinds), repr(sorted(options.items()))))


def both(name: str, *arguments: Any, **named: Any) -> Any:
    """The launches of a function, and the reference's result."""
    function = getattr(kernels, name)
    function(*arguments, **named, backend="triton")
    return function(*arguments, **named, backend="reference")


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """What would have been compiled so far. Programs get more chunks where a GPU's would, with few rows.

    Rows of sixteen entries count as long ones, which several programs search for what filters leave.
    """
    found: set[Variant] = set()
    for module, names in LAUNCHED.items():
        for name in names:
            monkeypatch.setattr(module, name, Launcher(name, getattr(module, name), found))
    monkeypatch.setattr(fused_cut, "LONG", 12)
    for module in (verify, block, coupled, fused_cut):
        per = lambda rows, chunks: 1 if rows <= 8 else 2 if rows <= 32 else 4  # noqa: E731
        monkeypatch.setattr(module, "chunks_per_program", per)
    for module, names in CALLED.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(both, name))
    monkeypatch.setattr(sampling, "_fused", lambda device: True)
    if torch.cuda.is_available():
        monkeypatch.setattr(kernels, "use_triton", lambda backend, logits: backend == "triton")
    return found


def engine_of(rule: str, vocab: int = 16) -> Engine:
    target = TinyLM(random_table(vocab, 1))
    drafter = ModelDrafter(TinyLM(random_table(vocab, 2)), NoExperts(), 8, vocab)
    return Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=8,
        verification=rule,  # type: ignore[arg-type]
    )  # fmt: skip


def engine_with_features(rule: str) -> Engine:
    """With a feature drafter, which guesses from a list of tokens."""
    target = random_model("llama", 0)
    drafter = FeatureDrafter(draft_for(target), NoExperts(), 8, target.vocab_size)
    return Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=8,
        verification=rule,  # type: ignore[arg-type]
    )  # fmt: skip


def serve(engine: Engine) -> None:
    """Requests of all kinds, alone and together; drafts that are drawn and looked up, of every length."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1}, {"temperature": 1.0, "top_k": 6, "top_p": 0.9, "seed": 4},
    ]  # fmt: skip
    repeating = [3, 1, 7, 5, 3, 1, 7, 5, 3, 1]
    for batch in (1, 3, 8):
        for kind in kinds:
            params = SamplingParams(max_tokens=24, **kind)
            engine.generate([repeating if row % 2 else [row] for row in range(batch)], params)
    engine.generate(
        [repeating] * 6, [SamplingParams(max_tokens=20 + i, **kind) for i, kind in enumerate(kinds)]
    )
    for length in range(engine.chooser.longest + 1):
        with engine.chooser.using(fixed_length=length):
            for kind in kinds[:3]:
                engine.generate([[row] for row in range(7)], SamplingParams(max_tokens=12, **kind))


@pytest.mark.parametrize(("rule", "vocab"), [("chain", 11), ("block", 16), ("coupled", 16)])
def test_after_it_nothing_new_is_compiled(rule: str, vocab: int, variants: set[Variant]) -> None:
    engine = engine_of(rule, vocab)
    warm_up(engine, compiles=True)
    expected = {"chain": {"resolve"}, "block": {"judge", "resolve"}, "coupled": {"choose"}}[rule]
    expected |= {"cut", "survey", "aim", "narrow"} if vocab == 16 else {"cut"}
    assert expected <= {name for name, _, _ in variants}
    known = set(variants)
    serve(engine)
    assert variants - known == set()
    assert len(known) < 80  # a second each, or more


@pytest.mark.parametrize("rule", ["chain", "block", "coupled"])
def test_nor_is_it_with_a_feature_drafter(rule: str, variants: set[Variant]) -> None:
    engine = engine_with_features(rule)
    warm_up(engine, compiles=True)
    known = set(variants)
    assert "cut" in {name for name, _, _ in known}
    serve(engine)
    assert variants - known == set()


def essence(name: str, constants: dict[str, Any]) -> str:
    """The part of a variant that changes a kernel's code: its flags, and which of its arguments are None.

    Lengths, widths and types are left out.
    """
    flags = [f"{flag} {constants[flag]}" for flag in FLAGS if flag in constants]
    return f"{name} {' '.join(flags)} without {constants.get('WITHOUT', 'nothing')}"


def launched(variants: set[Variant]) -> set[str]:
    """The `essence` of what was recorded."""
    kernels = {name: getattr(module, name) for module, names in KERNELS.items() for name in names}
    found = set()
    for name, kinds, _ in variants:
        values = dict(zip(kernels[name].arg_names, ast.literal_eval(kinds), strict=True))
        constants = {arg: value for arg, (kind, value) in values.items() if kind == "constexpr"}
        absent = sorted(arg for arg, value in constants.items() if value is None)
        found.add(essence(name, constants | ({"WITHOUT": " ".join(absent)} if absent else {})))
    return found


@pytest.mark.parametrize("rule", ["chain", "block", "coupled"])
def test_what_an_engine_launches_is_compiled_offline(rule: str, variants: set[Variant]) -> None:
    """For each version of Triton, so that its registers and accesses are known without a GPU."""
    serve(engine_of(rule))
    serve(engine_with_features(rule))
    for version, stored in json.loads(COMPILED.read_text()).items():
        known = {essence(n, ast.literal_eval(c)) for n, c in (k.split(" ", 1) for k in stored["kernels"])}
        assert launched(variants) - known == set(), version


def lengths_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many tokens its rows draft while it is warmed up."""
    found, run = set(), warming._run

    def watched(engine: Engine, rows: int, length: int, *rest: Any, **named: Any) -> None:
        found.add(length)
        run(engine, rows, length, *rest, **named)

    monkeypatch.setattr(warming, "_run", watched)
    warm_up(engine, compiles=True)
    return found


def test_without_a_draft_model_plain_rounds_are_all(
    variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TinyLM(random_table(11, 1))
    engine = Engine(target, NumberTokenizer(), NoDrafter(), FixedSelector(), max_batch_size=8)
    assert engine.chooser.longest > 0
    assert lengths_of(engine, monkeypatch) == {0}
    known = set(variants)
    assert known
    serve(engine)
    assert variants - known == set()


def test_control_with_one_there_are_others(variants: set[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("chain", 11)
    assert lengths_of(engine, monkeypatch) == set(range(engine.chooser.longest + 1))


@pytest.mark.parametrize("kind", ["FILTERED", "SAMPLED"])
def test_control_what_was_left_out_is_noticed(
    kind: str, variants: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, kind, warming.GREEDY)
    engine = engine_of("chain")
    warm_up(engine, compiles=True)
    known = set(variants)
    serve(engine)
    assert variants - known


def test_nothing_is_left_of_it(variants: set[Variant]) -> None:
    engine = engine_of("chain")
    before = engine.chooser.budget, engine.chooser.limits, engine.chooser.source, engine.chooser.lookup
    warm_up(engine, compiles=True)
    assert before == (
        engine.chooser.budget, engine.chooser.limits, engine.chooser.source, engine.chooser.lookup
    )  # fmt: skip
    assert not engine.has_work
    assert not engine.chooser.budget.acceptance
    assert engine.chooser.budget.speedup is None


def test_without_a_gpu_there_is_nothing_to_compile(variants: set[Variant]) -> None:
    warm_up(engine_of("chain"))
    assert not variants


def test_a_fault_is_survived(variants: set[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("chain")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(verification, "verify_chain", broken)
    warm_up(engine, compiles=True)
    assert not engine.has_work
