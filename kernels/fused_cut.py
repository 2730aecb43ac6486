"""What top-k, top-p and min-p leave of each row, in Triton, without sorting and without writing logits.

A short row is read by one program, in one launch: once for its largest logit, two to four times for each of
top-k and top-p (bfloat16; float32 up to twice as often), and once more at most where top-p ends among equal
logits. min-p takes no reading of its own.

A long row is shared by several programs, launch after launch, since none may wait for another:

    survey    one reading: the maxima and masses of its chunks
    aim       a sixteenth of it: where to look
    narrow    one reading each, until the cut is known: usually one, and another where top-p ends among equal
              logits. Rows that are done are left out
    cut       one program a row, for those that are not done by then; hardly ever is one

Nothing is read by the host between them. `reference_cut.py` is the specification.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .cut_kernels import cut
from .cuts import Cuts
from .team_kernels import aim, narrow, survey
from .verify import chunk_width, chunks_per_program

BINS, WIDEST = 256, 2048
ZEROS = {torch.bfloat16: 16, torch.float16: 13}  # with which the bits of such numbers end as float32
LONG = 8192  # rows with more entries are shared
SHARE, TEAM_BINS = 4096, 512  # a chunk of a shared row, and the intervals into which a reading divides keys
READINGS, FLOAT32_READINGS = 3, 6  # launches of `narrow`


class Room(NamedTuple):
    """What the launches for shared rows tell each other: for N rows, of C chunks each."""

    peaks: Tensor  # float32 [N, C]: the largest logit of each chunk
    masses: Tensor  # float32 [N, C]: of whole chunks, then of what is above the keys that are looked at
    numbers: Tensor  # int32 [N, C]: logits above them, or equal to the cut
    tables: Tensor  # int32 [N, 512]: logits in each interval
    arrivals: Tensor  # int32 [N]: programs that are done with a reading
    stages: Tensor  # int32 [N]: what is to be found next
    spans: (
        Tensor  # int64 [N, 5]: the highest and lowest key looked at, the bounds of both, and which equal one
    )
    goals: Tensor  # float64 [N]: the rank or the mass that the cut must reach
    tops: Tensor  # float32 [N]: the largest logits

    @classmethod
    def of(cls, rows: int, chunks: int, device: torch.device) -> Room:
        def new(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty((rows, *size), dtype=dtype, device=device)

        return cls(
            new(torch.float32, chunks), new(torch.float32, chunks), new(torch.int32, chunks),
            new(torch.int32, TEAM_BINS), new(torch.int32), new(torch.int32), new(torch.int64, 5),
            new(torch.float64), new(torch.float32),
        )  # fmt: skip


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
    found = Cuts(value, last)
    if not value.numel():
        return found
    wide = logits.detach() if logits.dim() == 3 else logits.detach()[:, None]
    limits = [None if limit is None else limit.contiguous() for limit in (temperature, top_k, top_p, min_p)]
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        stages = _shared(wide, limits, found) if wide.shape[-1] > LONG else None
        cut[(value.numel(),)](
            wide, *wide.stride(), *limits, stages, *found, wide.shape[-1], wide.shape[1],
            SHIFT=ZEROS.get(logits.dtype, 0), BINS=BINS, **tile(wide.shape[-1]),
        )  # fmt: skip
    return found


def _shared(wide: Tensor, limits: list[Tensor | None], found: Cuts) -> Tensor:
    """Cuts of long rows, and int32 [rows]: 0 where that is done."""
    batch, length, vocab = wide.shape
    rows, chunks = batch * length, triton.cdiv(vocab, SHARE)
    room, per = Room.of(rows, chunks, wide.device), chunks_per_program(rows, chunks)
    grid, inputs = (rows, triton.cdiv(chunks, per)), (wide, *wide.stride(), *limits)
    shape = team_tile(vocab) | {"SHIFT": ZEROS.get(wide.dtype, 0)}
    each = {name: shape[name] for name in ("CHUNK", "num_warps", "enable_fp_fusion")}
    survey[grid](*inputs, room.peaks, room.masses, vocab, length, chunks, PER=per, **each)
    aim[(rows,)](*inputs, *room[:2], *room[3:], *found, vocab, length, chunks, **shape)
    for _ in range(READINGS if wide.dtype in ZEROS else FLOAT32_READINGS):
        narrow[grid](*inputs, *room[1:], *found, vocab, length, chunks, PER=per, **shape)
    return room.stages


def team_tile(vocab: int) -> dict[str, Any]:
    """Chunks and intervals of shared rows. Sums are rounded in one way, however many programs there are."""
    chunks = max(2, triton.next_power_of_2(triton.cdiv(vocab, SHARE)))
    return {"CHUNK": SHARE, "NCP": chunks, "BINS": TEAM_BINS, "num_warps": 8, "enable_fp_fusion": False}


def tile(vocab: int) -> dict[str, Any]:
    """Chunk and warps. Of long rows two chunks are copied while one is worked on."""
    width = chunk_width(vocab)
    if width > WIDEST:
        return {"CHUNK": WIDEST, "STAGES": 3, "num_warps": 8}
    return {"CHUNK": width, "STAGES": 1, "num_warps": 4, "maxnreg": 128}
