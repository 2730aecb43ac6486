"""What a server does about its memory: short garbage collections, and freed memory given back.

The plain twin is to call none of this. glibc keeps much of what is freed; other C libraries are left alone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc

# Options of glibc: bytes from which on a block gets a mapping of its own, and bytes left free at the top.
M_MMAP_THRESHOLD, OWN_MAPPING = -3, 4_000_000  # below the output layer of the shipped draft, 4.2 MB
M_TRIM_THRESHOLD, FREE_AT_TOP = -1, 16_000_000


def keep_what_is_loaded() -> None:
    """Exempt all objects that exist now from Python's garbage collections.

    A server that has loaded everything has more than half a million of them. A full collection that looks at
    them takes 0.4 s, in which no thread runs. At the end of the process they are looked at again: what the
    collector may not free then, extension modules such as Triton's report as leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def return_large_blocks() -> bool:
    """Have the C library give every freed block of at least OWN_MAPPING bytes back to the system at once.

    glibc raises that limit to the largest block that was freed so far. Replaced weights of adapters then
    leave holes of megabytes in its heaps. Returns False, having changed nothing, with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_MAPPING) and mallopt(M_TRIM_THRESHOLD, FREE_AT_TOP))


def return_free_memory() -> None:
    """Give free memory in the C library's heaps back to the system, such as that of replaced weights.

    Does nothing where the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
