"""Memory of a process that serves: what Python looks through again and again, what the C library keeps.

By itself glibc keeps much of what is freed; other C libraries are left alone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc

# For glibc: bytes from which on a block is mapped by itself, and bytes that may lie free at the top.
M_MMAP_THRESHOLD, OWN_MAPPING = -3, 4_000_000  # below the output layer of the shipped draft, 4.2 MB
M_TRIM_THRESHOLD, FREE_AT_TOP = -1, 16_000_000


def keep_what_is_loaded() -> None:
    """Have Python's garbage collector never look at the objects that there are now again.

    A server that has loaded everything has more than half a million of them; one full collection takes 0.4 s,
    in which no thread runs. At the end of the process the collector looks at them again: what it may not
    free then, extension modules such as Triton's (which transformers loads by way of torch) report as leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def return_large_blocks() -> bool:
    """Have the C library give each freed block of OWN_MAPPING bytes back to the system, where it can.

    By itself glibc raises that limit to the largest block freed so far, and the weights of adapters that come
    and go leave holes of megabytes among what stays. False: the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_MAPPING) and mallopt(M_TRIM_THRESHOLD, FREE_AT_TOP))


def return_free_memory() -> None:
    """Give what lies free in the C library's heaps back to the system, where it can (glibc).

    The weights of versions that were replaced leave holes, which it would keep.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
