"""Memory that a training step frees, kept for the next step.

glibc maps every large block anew and gives it back when it is freed, so that each step has the system clear the same
pages again. Told to take large blocks from the heap and never to shrink it, it hands the old pages out again.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt, as malloc.h numbers them."""


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, up to its peak; False where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    # A threshold of -1 is the largest there is: the heap never shrinks.
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, -1))
