"""Rotary position embedding (Su et al., 2021), with partial rotation, scaling and xPos.

A head's first `rotary_dims` dims are split into pairs; pair i turns by position · θ_i. Phases depend on
the absolute position of a token alone, are computed once per step in float32 and serve every layer;
there is no table, so no position runs past its end.

xPos (Sun et al., 2022) also stretches q by ζ_i^(p/base) and shrinks k by the same, so that scores carry
ζ_i^((p_q − p_k)/base). The fixed centre is position 0; any other cancels in the product. Far from it the
factors leave float32, hence `XPOS_MAX_POSITION`. An int8 cache keeps keys rotated and not yet shrunk.

Worked example: theta 10000, 4 rotary dims: θ = (1, 0.01). At position 3 the half-split pairs (0, 2) and
(1, 3) turn by 3 and by 0.03 radians.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layers.hparams import HParams, Rope, RopePairing, RopeScaling

# With ζ_0 = 0.2857 and base 512, ζ_0^(p/512) falls below 1e-32 here; float32 ends at 1e-38.
XPOS_MAX_POSITION = 30_000


@flax.struct.dataclass
class RopePhases:
    """cos and sin of every token's angles, and xPos's stretch where the model has it.

    All are `[batch, time, 1, rotary_dims/2]` in float32; the 1 stands where heads will.
    """

    cos: Float[Array, "batch time 1 half"]
    sin: Float[Array, "batch time 1 half"]
    stretch: Float[Array, "batch time 1 half"] | None = None


def _scaled(frequencies: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    """Frequencies after `RopeScaling`."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: 0 where the wavelength is long (divide), 1 where it is short (keep), linear between.
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def frequencies(rope: Rope, rotary_dims: int) -> np.ndarray:
    """Angle per position of each pair, `[rotary_dims/2]`, float64."""
    exponents = np.arange(0, rotary_dims, 2, dtype=np.float64) / rotary_dims
    return _scaled(rope.theta**-exponents, rope.scaling)


def rope_phases(hparams: HParams, positions: Int[Array, "batch time"]) -> RopePhases | None:
    """Phases at int32 absolute positions; None for a model without RoPE."""
    rope, dims = hparams.rope, hparams.rotary_dims
    if rope is None:
        return None
    at = positions.astype(jnp.float32)[:, :, None, None]
    angles = at * frequencies(rope, dims).astype(np.float32).reshape(1, 1, 1, -1)
    stretch = None
    if rope.xpos_scale_base is not None:
        stretch = jnp.exp(at / rope.xpos_scale_base * _log_zeta(dims).reshape(1, 1, 1, -1))
    return RopePhases(jnp.cos(angles), jnp.sin(angles), stretch)


def unstretched(phases: RopePhases | None) -> RopePhases | None:
    """The same rotation without xPos."""
    return None if phases is None else RopePhases(phases.cos, phases.sin)


def xpos_key_rates(hparams: HParams) -> np.ndarray | None:
    """`[qkv]` such that xPos multiplies a rotated key at position p by exp(p · rates); None without xPos."""
    rope, dims = hparams.rope, hparams.rotary_dims
    if rope is None or rope.xpos_scale_base is None:
        return None
    half = -_log_zeta(dims) / np.float32(rope.xpos_scale_base)
    pairs = np.tile(half, 2) if rope.pairing is RopePairing.HALF else np.repeat(half, 2)
    return np.concatenate([pairs, np.zeros(hparams.qkv - dims, np.float32)])


def _log_zeta(rotary_dims: int) -> np.ndarray:
    """log ζ_i of each pair, float32 `[rotary_dims/2]`."""
    zeta = (np.arange(0, rotary_dims, 2) + 0.4 * rotary_dims) / (1.4 * rotary_dims)
    return np.log(zeta).astype(np.float32)


def _rotate(
    x: Float[Array, "batch time heads qkv"], cos: jax.Array, sin: jax.Array, pairing: RopePairing
) -> Float[Array, "batch time heads qkv"]:
    dims = 2 * cos.shape[-1]
    turned, kept = x[..., :dims].astype(jnp.float32), x[..., dims:]
    if pairing is RopePairing.HALF:
        a, b = jnp.split(turned, 2, axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    first, second = a * cos - b * sin, a * sin + b * cos
    if pairing is RopePairing.HALF:
        turned = jnp.concatenate([first, second], axis=-1)
    else:
        turned = jnp.stack([first, second], axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), kept], axis=-1)


def apply_rope_to_queries(
    q: Float[Array, "batch time heads qkv"], phases: RopePhases | None, rope: Rope | None
) -> Float[Array, "batch time heads qkv"]:
    """Rotates q, stretched by xPos where the model has it; q itself without RoPE."""
    if phases is None or rope is None:
        return q
    stretch = 1.0 if phases.stretch is None else phases.stretch
    return _rotate(q, phases.cos * stretch, phases.sin * stretch, rope.pairing)


def apply_rope_to_keys(
    k: Float[Array, "batch time kv_heads qkv"], phases: RopePhases | None, rope: Rope | None
) -> Float[Array, "batch time kv_heads qkv"]:
    """Rotates k, shrunk by xPos where the model has it; k itself without RoPE."""
    if phases is None or rope is None:
        return k
    stretch = 1.0 if phases.stretch is None else phases.stretch
    return _rotate(k, phases.cos / stretch, phases.sin / stretch, rope.pairing)
