"""All cases of the kernel benchmark, ordered by value, and the trial of other block sizes.

What the trainer runs comes first, then what every step of the engine runs, then the rest: a run that is
broken off has lost the least. `bench_kernels.py` goes through them in passes.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import torch
from kernel_case import BEGUN, Case, reported
from kernel_filter_cases import drawn_case, filter_case, filtered_case
from kernel_inputs import MIN_P, TOP_K
from kernel_loss_cases import (
    dense_case,
    linear_dense_case,
    linear_topk_case,
    step,
    topk_case,
    topk_of,
)
from kernel_peers import Loss
from kernel_timing import Bench, Data, measured
from kernel_verify_cases import greedy_case, rule_case, sample_case, sample_coupled_case, verify_case

from moedraft import kernels
from moedraft.kernels import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
DECAY = 0.8  # by which base training multiplies the loss of a drafter's second step
# Entries of a block, warps, and stages: 3 is work on one block while the next two are copied. The first ones
# leave room for one or two rows on a multiprocessor, so that a row's second reading can come from the cache.
TILES = (
    *((8192, 32, 3), (8192, 16, 3), (4096, 16, 3), (4096, 8, 3), (4096, 16, 2), (4096, 16, 1)),
    *((2048, 8, 3), (2048, 8, 4), (2048, 8, 2), (2048, 8, 1), (2048, 4, 3), (1024, 4, 3)),
)


def cases(bench: Bench) -> list[Case]:
    """All cases, those first that say most about what serves and what trains."""
    ends = list(dict.fromkeys((bench.batches[0], bench.batches[-1])))
    one, many, between = bench.batches[0], bench.batches[-1], bench.batches[1:-1]
    chain, block, coupled = kernels.verify_chain, kernels.verify_block, kernels.verify_coupled
    found = [
        topk_case(bench, "fkl", bench.vocab, bench.rows, plain=True),
        *(verify_case(bench, batch, bench.vocab) for batch in ends),
        *(filtered_case(bench, chain, many, top_k) for top_k in (0, TOP_K)),
        *(filter_case(bench, many, top_k) for top_k in (0, TOP_K)),
        *(drawn_case(bench, kernels.sample_draft, many, top_k) for top_k in (0, TOP_K)),
        filter_case(bench, one),
        linear_topk_case(bench, bench.rows // 4, 2048),
        topk_case(bench, "fkl", 32_000, bench.rows, divided=True, dtype=torch.float32),  # of features
        linear_dense_case(bench, bench.rows // 4, 2048),
        dense_case(bench, "fkl"),
        *(sample_case(bench, batch) for batch in ends),
        *(verify_case(bench, batch, bench.vocab) for batch in between),
        *(filter_case(bench, batch) for batch in between),
        *(filtered_case(bench, chain, batch) for batch in (one, *between)),
        *(rule_case(bench, rule, batch) for rule in (block, coupled) for batch in ends),
        *(filtered_case(bench, rule, many, top_k) for rule in (block, coupled) for top_k in (TOP_K, 0)),
        *(sample_coupled_case(bench, batch) for batch in ends),
        *(drawn_case(bench, kernels.sample_coupled, many, top_k) for top_k in (TOP_K, 0)),
        *(verify_case(bench, many, vocab, many_peers=False) for vocab in bench.vocabs),
        *(topk_case(bench, "fkl", vocab, bench.rows) for vocab in bench.vocabs),
        *(greedy_case(bench, batch) for batch in ends),
        *(topk_case(bench, kind, bench.vocab, bench.rows) for kind in KINDS if kind != "fkl"),
        *(dense_case(bench, kind) for kind in KINDS if kind != "fkl"),
        dense_case(bench, "fkl", DECAY),
        filter_case(bench, one, TOP_K),
        filter_case(bench, many, top_p=1.0, min_p=MIN_P),
        *(verify_case(bench, batch, bench.vocab, with_lse=False) for batch in bench.batches),
        linear_topk_case(bench, bench.rows, 4096),  # for the memory that it takes
        *least(bench, one, between),
    ]
    return list({case.key: case for case in found}.values())


def least(bench: Bench, one: int, between: tuple[int, ...]) -> list[Case]:
    """The same operations at the other sizes of a batch."""
    choosers = (kernels.sample_draft, kernels.sample_coupled)
    rules = (kernels.verify_chain, kernels.verify_block, kernels.verify_coupled)
    return [
        *(filtered_case(bench, rule, one, TOP_K) for rule in rules),
        *(drawn_case(bench, choose, one, TOP_K) for choose in choosers),
        *(sample_case(bench, batch) for batch in between),
        *(rule_case(bench, rule, batch) for rule in rules[1:] for batch in between),
        *(sample_coupled_case(bench, batch) for batch in between),
        *(greedy_case(bench, batch) for batch in between),
    ]


Tile = tuple[str, int, int, int]  # a loss, entries of a block, warps, stages


def tuned(bench: Bench, known: set[Tile]) -> Iterator[dict[str, Any]]:
    """Times of the divergences with other block sizes, numbers of warps and of stages than the usual ones.

    Those that are known already are left out; one that a device cannot run is named. Each comes twice: when
    it is begun, and when it has returned.
    """
    fused: Any = importlib.import_module("moedraft.kernels.fused_divergence")
    data, table = Data(bench), fused.tile
    student, teacher = (data.normal(bench.rows, bench.vocab) for _ in range(2))
    ids, logprobs = topk_of(teacher, bench.top_k)
    losses: dict[str, Loss] = {
        "topk fkl": lambda s, _: kernels.divergence(s, teacher_topk=(ids, logprobs)),
        **{kind: lambda s, t, k=kind: kernels.divergence(s, t, kind=k) for kind in KINDS},  # type: ignore[misc]
    }
    for (block, warps, stages), (name, loss) in itertools.product(TILES, losses.items()):
        if (name, block, warps, stages) in known:
            continue
        most = max(64, block // (4 * warps))  # registers of a thread: eight for each of its entries
        changes = {"BLOCK": block, "num_warps": warps, "STAGES": stages, "maxnreg": most}
        entry: dict[str, Any] = {"loss": name, "block": block, "warps": warps, "stages": stages}
        yield entry | {"status": BEGUN}
        fused.tile = lambda vocab, changes=changes: {**table(vocab), **changes}
        try:
            with reported(entry):
                entry |= measured([step(loss, student, teacher)], bench)
        finally:
            fused.tile = table
        yield entry
