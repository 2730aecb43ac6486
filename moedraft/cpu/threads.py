"""How many threads PyTorch uses on the CPU. The plain way is PyTorch's own choice: one for each core."""

from __future__ import annotations

import torch

from moedraft import cpu


def set_threads(wanted: int, target: cpu.SizedModel) -> None:
    """Set the number of PyTorch's CPU threads for the whole process; 0: one for a small target.

    A step of a small model is a hundred tiny operations. A second thread gains little on an idle machine, and
    makes a step several times as long where another process uses the second core, because the first thread
    waits for it after each operation.
    """
    if wanted or cpu.suits(target):
        torch.set_num_threads(wanted or 1)
