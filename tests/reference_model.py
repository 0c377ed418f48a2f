"""The model's arithmetic in plain NumPy: the definition that every fast path is compared with.

Everything here is the textbook form in float64: softmax in base e, no constant folded into a weight,
no weights fused, no cache, the whole time × time score matrix of one head at a time. It shares no
code with the package; from `layers.hparams` it takes the fields and the enums, not the derived
properties. Slow and plain on purpose.

Data flow: ids → embedding · embed_scale → blocks → final norm → output projection → logits.
Weights are the neutral state's: flat keys (`embedding`, `layer_0/q`, …), one array per projection.

    parallel   x ← x + attention(norm(x)) + mlp(norm'(x))
    serial     x ← x + attention(norm(x));  x ← x + mlp(norm2(x))

where norm' is the shared norm, or norm2 where a block has two; with PRE_AND_POST each branch's output
passes a norm of its own (post_norm, post_norm2) before it is added.

Worked example: embed 2, RMS norm without eps, gain (1, 1), x = (3, 4): the mean square is 12.5, so
norm(x) = (3, 4)/3.5355 = (0.8485, 1.1314). A head of width 2 at position 1 rotates its single pair
(a, b) by 1 radian: (1, 0) → (cos 1, sin 1) = (0.5403, 0.8415). A query at position 2 with a window of
2 sees the keys at positions 1 and 2.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import erf

from layers.hparams import Activation, Bias, Block, HParams, Norm, NormPlacement, Rope, RopePairing

Weights = Mapping[str, np.ndarray]
GATED = (Activation.SWISH_GATED, Activation.GELU_TANH_GATED, Activation.GELU_ERF_GATED)


def reference_logits(
    hparams: HParams, weights: Weights, ids: Int[np.ndarray, "batch time"]
) -> Float[np.ndarray, "batch time vocab"]:
    """Float64 logits after every token; token t of a row sits at position t."""
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = hparams.embed_scale * weights["embedding"][ids]
    for layer in range(hparams.layers):
        prefix = f"layer_{layer}/"
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = block(hparams, own, x, hparams.windows[layer] if hparams.windows else None)
    return output_logits(hparams, weights, model_norm(hparams, weights, "final_norm", x))


def output_logits(
    hparams: HParams, weights: Weights, x: Float[np.ndarray, "batch time embed"]
) -> Float[np.ndarray, "batch time vocab"]:
    """The output projection with its bias, then the logit scale, then the soft cap."""
    logits = x @ (weights["embedding"].T if hparams.tied else weights["lm_head"])
    if Bias.LM_HEAD in hparams.biases:
        logits = logits + weights["lm_head_bias"]
    scale = hparams.embed**-0.5 if hparams.logit_scale is None else hparams.logit_scale
    return soft_cap(scale * logits, hparams.logit_softcap)


def block(
    hparams: HParams, own: Weights, x: Float[np.ndarray, "batch time embed"], window: int | None
) -> Float[np.ndarray, "batch time embed"]:
    """One layer: attention and mlp, side by side or one after the other. `own`: this layer's weights."""
    mlp_norm = "norm" if hparams.norm_placement is NormPlacement.SHARED else "norm2"

    def attention_branch(x: np.ndarray) -> np.ndarray:
        y = attention(hparams, own, model_norm(hparams, own, "norm", x), window)
        return branch_norm(hparams, own, "post_norm", y)

    def mlp_branch(x: np.ndarray) -> np.ndarray:
        y = mlp(hparams, own, model_norm(hparams, own, mlp_norm, x))
        return branch_norm(hparams, own, "post_norm2", y)

    if hparams.block is Block.PARALLEL:
        return x + attention_branch(x) + mlp_branch(x)
    x = x + attention_branch(x)
    return x + mlp_branch(x)


def normalise(kind: Norm, x: Float[np.ndarray, "*dims width"], eps: float) -> np.ndarray:
    """x / √(mean x² + eps) over the last dim; the layer norm takes the mean off first."""
    if kind is Norm.LAYER:
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def model_norm(
    hparams: HParams, weights: Weights, name: str, x: Float[np.ndarray, "batch time embed"]
) -> Float[np.ndarray, "batch time embed"]:
    """A norm over embed with its gain, to which the model's gain offset is added, and its bias."""
    y = normalise(hparams.norm, x, hparams.norm_eps)
    y = y * (hparams.norm_gain_offset + weights[f"{name}_gain"])
    return y + weights[f"{name}_bias"] if hparams.norm_bias else y


def branch_norm(
    hparams: HParams, own: Weights, name: str, y: Float[np.ndarray, "batch time embed"]
) -> Float[np.ndarray, "batch time embed"]:
    """The norm of a branch's output in PRE_AND_POST; elsewhere the output itself."""
    if hparams.norm_placement is NormPlacement.PRE_AND_POST:
        return model_norm(hparams, own, name, y)
    return y


def project(
    hparams: HParams, own: Weights, name: str, bias: Bias, x: Float[np.ndarray, "batch time embed"]
) -> np.ndarray:
    """x times a matrix [embed, ...] plus its bias [...], where the model has that one."""
    y = np.tensordot(x, own[name], axes=1)
    return y + own[f"{name}_bias"] if bias in hparams.biases else y


def attention(
    hparams: HParams, own: Weights, n: Float[np.ndarray, "batch time embed"], window: int | None
) -> Float[np.ndarray, "batch time embed"]:
    """Causal self-attention; query head h reads kv head h // (heads / kv_heads)."""
    q = project(hparams, own, "q", Bias.Q, n)  # [batch, time, heads, qkv]
    k = project(hparams, own, "k", Bias.K, n)  # [batch, time, kv_heads, qkv]
    v = project(hparams, own, "v", Bias.V, n)
    if hparams.qk_norm is not None:  # the norms' gain offset is not for these
        q = normalise(hparams.qk_norm, q, hparams.qk_norm_eps) * own["q_norm_gain"]
        k = normalise(hparams.qk_norm, k, hparams.qk_norm_eps) * own["k_norm_gain"]
    positions = np.arange(n.shape[1])
    if hparams.rope is not None:
        q = rotate_query(hparams.rope, q, positions)
        k = rotate_key(hparams.rope, k, positions)

    scale = hparams.qkv**-0.5 if hparams.attn_scale is None else hparams.attn_scale
    mask = visible(positions, window)
    out = np.zeros(n.shape)
    for head in range(hparams.heads):
        kv_head = head // (hparams.heads // hparams.kv_heads)
        scores = scale * q[:, :, head] @ k[:, :, kv_head].swapaxes(1, 2)  # [batch, query, key]
        scores = soft_cap(scores, hparams.attn_softcap)
        out += softmax(np.where(mask, scores, -np.inf)) @ v[:, :, kv_head] @ own["o"][head]
    return out + own["o_bias"] if Bias.O in hparams.biases else out


def visible(positions: Int[np.ndarray, " time"], window: int | None) -> Bool[np.ndarray, "time time"]:
    """Whether query (row) sees key (column): no later key, and of the others the `window` last ones.

    A window counts the query's own key: 1 means that a token sees only itself.
    """
    distance = positions[:, None] - positions[None, :]
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


def softmax(scores: Float[np.ndarray, "*dims keys"]) -> Float[np.ndarray, "*dims keys"]:
    """exp(s) / Σ exp(s) over the last dim."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def soft_cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    """cap · tanh(x / cap), or x where there is no cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def rotate_query(
    rope: Rope, q: Float[np.ndarray, "batch time heads qkv"], positions: Int[np.ndarray, " time"]
) -> Float[np.ndarray, "batch time heads qkv"]:
    """Rotary embedding of queries; with xpos they are multiplied by ζ^(position/base)."""
    return rotate(rope, q, positions, xpos_sign=1)


def rotate_key(
    rope: Rope, k: Float[np.ndarray, "batch time kv_heads qkv"], positions: Int[np.ndarray, " time"]
) -> Float[np.ndarray, "batch time kv_heads qkv"]:
    """Rotary embedding of keys; with xpos they are divided by ζ^(position/base)."""
    return rotate(rope, k, positions, xpos_sign=-1)


def rotate(
    rope: Rope, x: Float[np.ndarray, "batch time heads qkv"], positions: np.ndarray, xpos_sign: int
) -> Float[np.ndarray, "batch time heads qkv"]:
    """Turn pair i of every head by position · θ_i; dims beyond rotary_dims stay as they are."""
    rotary_dims = x.shape[-1] if rope.rotary_dims is None else rope.rotary_dims
    pair = np.arange(rotary_dims // 2)
    if rope.pairing is RopePairing.HALF:
        first, second = pair, pair + rotary_dims // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    phase = positions[:, None] * frequencies(rope, rotary_dims)  # [time, pair]
    size = np.ones(phase.shape)
    if rope.xpos_scale_base is not None:
        zeta = (2 * pair + 0.4 * rotary_dims) / (1.4 * rotary_dims)
        size = zeta ** (xpos_sign * positions[:, None] / rope.xpos_scale_base)
    cos, sin = ((size * f(phase))[:, None, :] for f in (np.cos, np.sin))  # [time, 1, pair]
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def frequencies(rope: Rope, rotary_dims: int) -> Float[np.ndarray, " pair"]:
    """Radians per position of each pair: theta^(−2i/rotary_dims), stretched as the scaling says."""
    plain = rope.theta ** (-np.arange(0, rotary_dims, 2) / rotary_dims)
    scaling = rope.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    # llama3: by the turns that a pair makes in the original context. Few turns: divide; many: keep;
    # between: go from one to the other linearly in the turns.
    turns = scaling.original_positions * plain / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def mlp(
    hparams: HParams, own: Weights, n: Float[np.ndarray, "batch time embed"]
) -> Float[np.ndarray, "batch time embed"]:
    """(act(n W0) * (n W1)) W2; without the factor n W1 where the activation is not gated."""
    hidden = nonlinearity(hparams.act, project(hparams, own, "w0", Bias.FF_IN, n))
    if hparams.act in GATED:
        hidden = hidden * project(hparams, own, "w1", Bias.FF_IN, n)
    return project(hparams, own, "w2", Bias.FF_OUT, hidden)


def nonlinearity(act: Activation, y: np.ndarray) -> np.ndarray:
    """swish(y) = y / (1 + e^−y); gelu(y) = y Φ(y), by erf or by its tanh approximation."""
    if act is Activation.SWISH_GATED:
        return y / (1 + np.exp(-y))
    if act in (Activation.GELU_ERF, Activation.GELU_ERF_GATED):
        return y * (1 + erf(y / np.sqrt(2))) / 2
    return y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
