"""The weights of a model as the engine holds them: folded, fused, one copy.

`Params.layers` is either one `LayerParams` whose leaves carry a leading layers dim (looped: one program
body whatever the depth) or a tuple of them (unrolled: nothing is sliced out of a stack, which on a CPU is
a copy). `layer_params` hides the difference from the layer function.

The matrices are `Weight`s, the rest arrays; the fields are `Any` because the same pytrees also carry shapes,
partition specs and shardings.

Data flow: `checkpoints.preprocess` builds it → `serial` or `transformer` reads it; nobody writes it.

Worked example: PaLM 8B on one device has, per layer, wi [16·256 + 2·256 + 2·16384, 4096] and
wo [4096, 16·256 + 16384].
"""

from typing import Any

import flax.struct
import jax

from layers.norm import NormParams


@flax.struct.dataclass
class LayerParams:
    """One layer (or a stack of them). Matrices are output-major on one device; None where absent.

    wi    [q | k | v | W0 | W1, embed] of a fused block, [q | k | v, embed] otherwise; on a mesh without k, v
    wkv   [embed, k | v] on a mesh, None on one device
    wo    [embed, attention | ff] of a fused block, [embed, attention] otherwise
    wi_ff [W0 | W1, embed], wo_ff [embed, ff]: blocks that are not fused
    b*    the biases, laid out as the outputs of the matrix of that name
    q_norm, k_norm: gains [heads, qkv] and [kv_heads, qkv] of qk-norm
    """

    wi: Any
    wo: Any
    wkv: Any = None
    wi_ff: Any = None
    wo_ff: Any = None
    bi: Any = None
    bkv: Any = None
    bo: Any = None
    bi_ff: Any = None
    bo_ff: Any = None
    norm: Any = NormParams()
    norm2: Any = NormParams()
    post_norm: Any = NormParams()
    post_norm2: Any = NormParams()
    q_norm: Any = NormParams()
    k_norm: Any = NormParams()


@flax.struct.dataclass
class Params:
    """All weights: embedding [vocab, embed], layers, final norm, lm_head [vocab, embed] if untied."""

    embedding: Any
    layers: Any
    final_norm: Any
    lm_head: Any = None
    lm_head_bias: Any = None


def layer_params(layers: LayerParams | tuple[LayerParams, ...], index: int | jax.Array) -> LayerParams:
    """The parameters of one layer; `index` is static for a tuple, traced for a stack."""
    if isinstance(layers, tuple):
        return layers[index]
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)
