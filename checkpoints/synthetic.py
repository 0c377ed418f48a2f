"""Random weights on which a mistake shows.

With small random weights a tied model repeats its input token, and removing attention, RoPE or the right
batch row's cache changes no greedy token at all. Here the branches outweigh the embedding, attention is
peaked, biases and gains are not trivial, so that logits depend on every part (`tests` measure it: under a
tenth of greedy tokens equal their input, and 32 tokens don't fall into a cycle).

Data flow: `HParams` and a seed → `CheckpointState` whose arrays are drawn when they are read, each from the
seed and its key alone: a loader may ask for them in any order, on any host.

Worked example: `layer_0/q` of embed 48 is normal with standard deviation 1.5/√48 = 0.217.
"""

import math
import zlib

import numpy as np

from checkpoints.lazy import Box, LazyArray
from checkpoints.state import CheckpointState, state_spec
from layers.hparams import HParams

# Strength of each kernel against 1/√(rows that are summed over).
_STRENGTH = {"q": 1.5, "k": 1.5, "o": 2.0, "w0": 1.5, "w2": 2.0}
_BIAS_STD = 0.4


def synthetic_state(hparams: HParams, seed: int = 0) -> CheckpointState:
    """A model of this form with random float32 weights of power; equal seeds give equal weights."""
    return CheckpointState(
        hparams,
        {key: _lazy(hparams, key, shape, seed) for key, shape in state_spec(hparams).items()},
    )


def _lazy(hparams: HParams, key: str, shape: tuple[int, ...], seed: int) -> LazyArray:
    def fetch(box: Box) -> np.ndarray:
        return _draw(hparams, key, shape, seed)[box]

    return LazyArray(shape, np.dtype(np.float32), fetch)


def _draw(hparams: HParams, key: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    name = key.rpartition("/")[2]
    if name in ("q_norm_gain", "k_norm_gain"):
        return rng.uniform(0.9, 2.1, shape).astype(np.float32)
    if name.endswith("_gain"):
        return rng.uniform(0.6, 1.4, shape).astype(np.float32) - np.float32(hparams.norm_gain_offset)
    return rng.standard_normal(shape, np.float32) * np.float32(_std(hparams, name))


def _std(hparams: HParams, name: str) -> float:
    """Standard deviation of a kernel's or bias's entries."""
    if name.endswith("_bias"):
        return _BIAS_STD
    if name == "embedding":  # scaled up at lookup, it would drown the branches
        return hparams.embed_scale**-0.75 / math.sqrt(hparams.embed)
    rows = {"o": hparams.heads * hparams.qkv, "w2": hparams.ff}.get(name, hparams.embed)
    return _STRENGTH.get(name, 1.0) / math.sqrt(rows)
