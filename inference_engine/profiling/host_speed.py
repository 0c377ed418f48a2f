"""What the machine can do: how fast two threads read memory and how fast matmuls run.

Both are the bounds that benchmarks compare with, so they are measured in the same process, in the same
rounds, and the best counts: a bound that was measured on a busy machine would flatter everything.

Data flow: an array far larger than the caches → one half a thread, read once → bytes/s.

Worked example: 512 MB read in 25 ms by the two threads together are 20.5 GB/s; a model of 426 MB of weights
cannot decode a token in less than 20.8 ms there.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

THREADS = 2
STREAM_BYTES = 512 * 2**20
MATMUL_SIZE = 2048


def _largest(part: np.ndarray) -> None:
    np.max(part)


def _square_sum(part: np.ndarray) -> None:
    values = part.view(np.float32)
    np.dot(values, values)


_READERS: tuple[Callable[[np.ndarray], None], ...] = (_largest, _square_sum)


class MemorySpeed:
    """Reads one large array with two threads; `best` is the fastest read so far in bytes/s."""

    def __init__(self) -> None:
        self._parts = np.array_split(np.ones(STREAM_BYTES // 4, np.int32), THREADS)
        self._pool = ThreadPoolExecutor(THREADS)
        self.best = 0.0

    def sample(self) -> float:
        """Reads the array once with each kind of reduction; returns the faster in bytes/s."""
        speed = 0.0
        for reader in _READERS:
            began = time.perf_counter()
            list(self._pool.map(reader, self._parts))
            speed = max(speed, STREAM_BYTES / (time.perf_counter() - began))
        self.best = max(self.best, speed)
        return speed


class MatmulSpeed:
    """A matmul of large squares; `best` is the fastest so far in FLOP/s."""

    def __init__(self, dtype: str = "float32") -> None:
        self._matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), jnp.dtype(dtype))
        self._multiply = jax.jit(jnp.matmul).lower(self._matrix, self._matrix).compile()
        self.best = 0.0

    def sample(self) -> float:
        """One product; returns FLOP/s."""
        began = time.perf_counter()
        self._multiply(self._matrix, self._matrix).block_until_ready()
        speed = 2 * MATMUL_SIZE**3 / (time.perf_counter() - began)
        self.best = max(self.best, speed)
        return speed
