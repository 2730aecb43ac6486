"""How many threads PyTorch uses on the CPU. The plain way is PyTorch's own choice: one for each core."""

from __future__ import annotations

import threading

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


def compute_alone() -> None:
    """Have PyTorch use no other thread for what the calling thread computes from now on.

    For threads that work beside the engine. GNU's OpenMP keeps a team of its own for each thread that
    computes. As soon as all teams together have more threads than there are cores, none of them waits
    actively for the next operation any more, not the engine's either, and a step of a model takes up to
    1.7 times as long, also while the other thread has nothing to do.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    # This holds for the calling thread, but also for every thread that computes for the first time from now
    # on. A short-lived thread that sets the usual number gives the latter that number back.
    other = threading.Thread(target=torch.set_num_threads, args=(usual,))
    other.start()
    other.join()
