"""Has the C library give freed memory back to the system while a model is loaded.

Loading frees buffers of some megabytes layer by layer, which glibc keeps for later, up to a tenth of a
checkpoint's size. Blocks above a threshold it maps one by one and unmaps when they are freed; the threshold
starts at 128 KiB and follows the largest block freed, up to 32 MiB. So it is held low during a load, and put
to where large blocks would have led it afterwards, since a step of a model frees what it soon wants again.
Elsewhere nothing is done.

Worked example: inside `with large_blocks_returned():` a buffer of 4 MB that is freed is gone at once.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LOW = 1 << 18
_HIGH = 1 << 25  # the largest that glibc allows; it keeps twice as much at the heap's end


def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc, None elsewhere."""
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return None  # another library's mallopt has other parameters
        found: Callable[..., int] = getattr(library, name)
    except (OSError, AttributeError, TypeError):
        return None
    return found


@contextlib.contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Freed blocks of 256 KiB and above go back to the system at once, where the C library can."""
    mallopt, trim = _function("mallopt"), _function("malloc_trim")
    if mallopt is None or trim is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LOW)
    trim(0)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _HIGH)
        mallopt(_TRIM_THRESHOLD, 2 * _HIGH)
        trim(0)
