"""What top-k, top-p and min-p leave of each row, in Triton: one launch, one program a row, no sorting.

Beside the eight bytes a row that are the result it takes no memory. A row is read once for its largest logit,
two to four times for each of top-k and top-p (bfloat16; float32 up to twice as often), and once more at most
where top-p ends among equal logits. min-p takes no reading of its own. `reference_cut.py` is the
specification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cut_kernels import cut
from .cuts import Cuts
from .verify import chunk_width

BINS, WIDEST = 256, 2048
ZEROS = {torch.bfloat16: 16, torch.float16: 13}  # with which the bits of such numbers end as float32


def find_cuts(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Cuts:
    """See `moedraft.kernels.find_cuts`."""
    rows = logits.shape[:-1]
    value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not value.numel():
        return Cuts(value, last)
    wide = logits.detach() if logits.dim() == 3 else logits.detach()[:, None]
    limits = (None if limit is None else limit.contiguous() for limit in (temperature, top_k, top_p, min_p))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        cut[(value.numel(),)](
            wide, *wide.stride(), *limits, value, last, wide.shape[-1], wide.shape[1],
            SHIFT=ZEROS.get(logits.dtype, 0), BINS=BINS, **tile(wide.shape[-1]),
        )  # fmt: skip
    return Cuts(value, last)


def tile(vocab: int) -> dict[str, Any]:
    """Chunk and warps. Of long rows two chunks are copied while one is worked on."""
    width = chunk_width(vocab)
    if width > WIDEST:
        return {"CHUNK": WIDEST, "STAGES": 3, "num_warps": 8}
    return {"CHUNK": width, "STAGES": 1, "num_warps": 4, "maxnreg": 128}
