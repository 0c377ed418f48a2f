"""Tokens to vectors and vectors to logits.

PaLM ties the two: logits = norm(x) · embeddingᵀ / √embed. Families that do not tie have an lm_head
`[embed, vocab]` and perhaps a bias on it.

Worked example: with embed 4, a final vector (1, 1, 1, 1) and an embedding row (2, 0, 0, 2) the logit is
4 / √4 = 2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from layers.hparams import HParams
from layers.norm import apply_norm
from layers.numerics import output_major_product, softcap
from layers.params import Params


def embed(
    hparams: HParams, params: Params, tokens: Int[Array, "batch time"], dtype: jnp.dtype
) -> Float[Array, "batch time embed"]:
    """Rows of the embedding for int32 tokens, scaled by `embed_scale`.

    A token outside the vocabulary gives NaN, never a neighbour's row; the engine refuses it before.
    """
    rows = jnp.take(params.embedding, tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)
    return rows if hparams.embed_scale == 1.0 else rows * jnp.asarray(hparams.embed_scale, dtype)


@jax.named_scope("weights")
def unembed(
    hparams: HParams, params: Params, x: Float[Array, "batch time embed"]
) -> Float[Array, "batch time vocab"]:
    """Float32 logits of final residual vectors, final norm, scale, bias and soft cap included."""
    x = apply_norm(x, params.final_norm, hparams.norm, hparams.norm_eps)
    table = params.embedding if params.lm_head is None else params.lm_head  # [vocab, embed]
    logits = output_major_product(x, table.astype(x.dtype)) * hparams.logits_multiplier
    if params.lm_head_bias is not None:
        # A bias belongs to the projection, so the logit scale multiplies it as well.
        bias = params.lm_head_bias.astype(jnp.float32)[None, None, :]
        logits = logits + bias * hparams.logits_multiplier
    return softcap(logits, hparams.logit_softcap)
