"""What C code has allocated, as glibc tells it. Imports little: small programs of tests use it too."""

from __future__ import annotations

import ctypes

FIELDS = ("arena", "o", "s", "h", "hblkhd", "u", "f", "uordblks", "fordblks", "keep")


class Mallinfo(ctypes.Structure):
    """What mallinfo2 gives."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def allocated() -> int:
    """Bytes; 0 where the C library is not glibc."""
    if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return 0
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)
