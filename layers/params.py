"""The weights of a model as the engine holds them: folded, fused, one copy.

`Params.layers` is either one `LayerParams` whose leaves carry a leading layers dim (looped: one program
body whatever the depth) or a tuple of them (unrolled: nothing is sliced out of a stack, which on a CPU is
a copy). `layer_params` hides the difference from the layer function.

Data flow: `checkpoints.preprocess` builds it → `serial` or `transformer` reads it; nobody writes it.

Worked example: PaLM 8B on one device has, per layer, wi [4096, 16·256 + 2·16384], wkv [4096, 512] and
wo [16·256 + 16384, 4096].
"""

import flax.struct
import jax

from layers.norm import NormParams
from layers.quantization import Weight


@flax.struct.dataclass
class LayerParams:
    """One layer (or a stack of them). Columns and rows are on one device; None where absent.

    wi    [embed, q | W0 | W1] of a fused block, [embed, q] otherwise
    wkv   [embed, k | v]
    wo    [attention | ff, embed] of a fused block, [attention, embed] otherwise
    wi_ff [embed, W0 | W1], wo_ff [ff, embed]: blocks that are not fused
    b*    the biases, laid out as the columns of the matrix of that name
    q_norm, k_norm: gains [heads, qkv] and [kv_heads, qkv] of qk-norm
    """

    wi: Weight
    wkv: Weight
    wo: Weight
    wi_ff: Weight | None = None
    wo_ff: Weight | None = None
    bi: jax.Array | None = None
    bkv: jax.Array | None = None
    bo: jax.Array | None = None
    bi_ff: jax.Array | None = None
    bo_ff: jax.Array | None = None
    norm: NormParams = NormParams()
    norm2: NormParams = NormParams()
    post_norm: NormParams = NormParams()
    post_norm2: NormParams = NormParams()
    q_norm: NormParams = NormParams()
    k_norm: NormParams = NormParams()


@flax.struct.dataclass
class Params:
    """All weights: embedding [vocab, embed], layers, final norm, lm_head [embed, vocab] if untied."""

    embedding: jax.Array
    layers: LayerParams | tuple[LayerParams, ...]
    final_norm: NormParams
    lm_head: Weight | None = None
    lm_head_bias: jax.Array | None = None


def layer_params(layers: LayerParams | tuple[LayerParams, ...], index: int | jax.Array) -> LayerParams:
    """The parameters of one layer; `index` is static for a tuple, traced for a stack."""
    if isinstance(layers, tuple):
        return layers[index]
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)
