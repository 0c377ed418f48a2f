"""Shapes and choices of one decoder language model, as data.

`HParams` says everything the arithmetic of a model depends on and nothing about where it runs: no
mesh, no dtype of weights, no jax. Every other module reads the model's form from here, so that one
transformer serves PaLM, its open reproductions and the serial-block families alike.

Data flow: a checkpoint's own config → `HParams` → shapes of the neutral state → `Params` → steps.

Worked example: PaLM 8B is `HParams(layers=32, embed=4096, ff=16384, heads=16, kv_heads=1, qkv=256,
vocab=256128)`. A layer has one norm gain (4096), q (4096·16·256), k and v (2·4096·256), W0 and W1
(2·4096·16384), and Wo (16·256·4096 + 16384·4096); with the tied embedding that is 8.63 billion.
"""

import dataclasses
import enum
import math


class Block(enum.Enum):
    """How attention and the feed-forward part meet the residual."""

    PARALLEL = "parallel"  # x + attn(n) + mlp(n)
    SERIAL = "serial"  # x + attn(norm(x)), then x + mlp(norm2(x))


class NormPlacement(enum.Enum):
    """Norms per block."""

    SHARED = "shared"  # one norm feeds attention and mlp (parallel block only)
    TWO = "two"  # one before attention, one before the mlp
    PRE_AND_POST = "pre_and_post"  # two before, and one after each branch, before its residual add


class Norm(enum.Enum):
    """Kind of normalisation."""

    RMS = "rms"  # x / sqrt(mean(x²) + eps)
    LAYER = "layer"  # (x − mean) / sqrt(var + eps)


class RopePairing(enum.Enum):
    """Which two dims of a head rotate together."""

    HALF = "half"  # (i, i + rotary_dims/2)
    INTERLEAVED = "interleaved"  # (2i, 2i + 1)


class Activation(enum.Enum):
    """Feed-forward non-linearity; the gated ones compute act(n W0) * (n W1)."""

    SWISH_GATED = "swish_gated"
    GELU_TANH_GATED = "gelu_tanh_gated"
    GELU_ERF_GATED = "gelu_erf_gated"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"

    @property
    def gated(self) -> bool:
        """Whether there is a W1."""
        return self.value.endswith("_gated")


class Bias(enum.Enum):
    """Projections that may carry an additive bias."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the field's name for the attention output projection
    FF_IN = "ff_in"  # W0 and W1
    FF_OUT = "ff_out"
    LM_HEAD = "lm_head"


MOST_LAYERS = 10_000  # a file that claims more is damaged; its tables would fill the memory
_MOST_EPS = 1.0  # an epsilon keeps a norm from dividing by zero; a larger one is another unit


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies for contexts beyond the trained one.

    `linear` divides every frequency by `factor`. `llama3` divides those with a wavelength above
    `original_positions / low_freq_factor`, keeps those below `original_positions /
    high_freq_factor` and interpolates between (Llama 3.1 model card).
    """

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope scaling kind {self.kind!r} is not known; allowed: linear, llama3")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor must be > 0, got {self.factor}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"low_freq_factor={low} must be > 0 and below high_freq_factor={high}")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of q and k.

    Attributes:
      pairing: which dims rotate together.
      theta: base of the frequencies θ_i = theta^(−2i/rotary_dims).
      rotary_dims: leading dims of a head that rotate; None for all of them.
      xpos_scale_base: with a value, q is multiplied and k divided by ζ_i^(position/base), where
        ζ_i = (2i + 0.4·rotary_dims) / (1.4·rotary_dims) ("xPos", Sun et al., 2022); None for plain.
      scaling: see `RopeScaling`.
    """

    pairing: RopePairing = RopePairing.HALF
    theta: float = 10000.0
    rotary_dims: int | None = None
    xpos_scale_base: float | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ValueError(f"rope theta must be > 0, got {self.theta}")


@dataclasses.dataclass(frozen=True)
class HParams:
    """One model's shapes and form. The defaults are PaLM's.

    Attributes:
      layers, embed, ff, heads, kv_heads, qkv, vocab: sizes; `qkv` is the width of one head.
      block, norm_placement, norm, norm_eps: see the enums.
      norm_gain_offset: 0 for plain gains, 1 where the stored gain g acts as 1 + g (Gemma).
      norm_bias: whether norms add a learned bias.
      rope: rotary embedding, None for a model without.
      act: feed-forward non-linearity.
      windows: for each layer the number of keys a query sees, itself included, or None for all of
        them; an empty tuple means that no layer has a window.
      attn_scale: multiplies q·k; None is 1/√qkv.
      attn_softcap, logit_softcap: cap·tanh(s/cap) on attention scores and on logits; None for off.
      qk_norm: norm of each head's q and k before RoPE, None for off; qk_norm_eps its epsilon.
      logit_scale, embed_scale: multiply the logits and the embedded tokens. PaLM's logit_scale is
        1/√embed: `None` says that.
      tied: whether the output projection is the embedding.
      biases: the projections that carry a bias.
      max_positions: longest context that the model's positions allow; None for no limit.
    """

    layers: int
    embed: int
    ff: int
    heads: int
    kv_heads: int
    qkv: int
    vocab: int
    block: Block = Block.PARALLEL
    norm_placement: NormPlacement = NormPlacement.SHARED
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-6
    norm_gain_offset: int = 0
    norm_bias: bool = False
    rope: Rope | None = Rope()
    act: Activation = Activation.SWISH_GATED
    windows: tuple[int | None, ...] = ()
    attn_scale: float | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    qk_norm: Norm | None = None
    qk_norm_eps: float = 1e-6
    logit_scale: float | None = None
    embed_scale: float = 1.0
    tied: bool = True
    biases: frozenset[Bias] = frozenset()
    max_positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "ff", "heads", "kv_heads", "qkv", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"HParams.{name} must be a positive integer, got {value!r}")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"HParams.layers must be at most {MOST_LAYERS:,}, got {self.layers:,}")
        for name in ("norm_eps", "qk_norm_eps"):
            if not 0 <= getattr(self, name) <= _MOST_EPS:
                raise ValueError(f"{name} must be between 0 and {_MOST_EPS}, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            legal = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"nearest legal: {min(legal, key=lambda k: abs(k - self.kv_heads))} of {legal}"
            )
        if self.norm_placement is NormPlacement.SHARED and self.block is Block.SERIAL:
            raise ValueError("a serial block has at least two norms; allowed: two, pre_and_post")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.layers} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"a window counts the query's own key and is at least 1, got {self.windows}")
        if self.norm_gain_offset not in (0, 1):
            raise ValueError(f"norm_gain_offset must be 0 or 1, got {self.norm_gain_offset}")
        if self.rope is not None and (self.rotary_dims % 2 or not 0 < self.rotary_dims <= self.qkv):
            raise ValueError(f"rotary_dims={self.rotary_dims} must be even and between 2 and qkv={self.qkv}")
        if self.tied and Bias.LM_HEAD in self.biases:
            raise ValueError("a tied output projection has no bias of its own")

    @property
    def rotary_dims(self) -> int:
        """Dims of a head that rotate; 0 without RoPE."""
        if self.rope is None:
            return 0
        return self.qkv if self.rope.rotary_dims is None else self.rope.rotary_dims

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def fused(self) -> bool:
        """Whether one matmul can compute q, W0 and W1, and one more the block's whole output."""
        return self.block is Block.PARALLEL and self.norm_placement is NormPlacement.SHARED

    @property
    def softmax_scale(self) -> float:
        """What multiplies q·k."""
        return 1.0 / math.sqrt(self.qkv) if self.attn_scale is None else self.attn_scale

    @property
    def logits_multiplier(self) -> float:
        """What multiplies the output projection."""
        return 1.0 / math.sqrt(self.embed) if self.logit_scale is None else self.logit_scale

    def window(self, layer: int) -> int | None:
        """The window of one layer, None for unbounded."""
        return self.windows[layer] if self.windows else None

    @property
    def param_count(self) -> int:
        """Parameters of the model, norms and biases included."""
        e, f, hd, kd = self.embed, self.ff, self.heads * self.qkv, self.kv_heads * self.qkv
        norms = {NormPlacement.SHARED: 1, NormPlacement.TWO: 2, NormPlacement.PRE_AND_POST: 4}
        per_norm = e * (2 if self.norm_bias else 1)
        ff_in = 2 if self.act.gated else 1
        bias_sizes = {
            Bias.Q: hd, Bias.K: kd, Bias.V: kd, Bias.O: e, Bias.FF_IN: ff_in * f, Bias.FF_OUT: e,
        }  # fmt: skip
        layer = (
            e * (hd + 2 * kd + ff_in * f)
            + (hd + f) * e
            + norms[self.norm_placement] * per_norm
            + sum(size for bias, size in bias_sizes.items() if bias in self.biases)
            + (hd + kd if self.qk_norm is not None else 0)
        )
        head = 0 if self.tied else e * self.vocab
        head += self.vocab if Bias.LM_HEAD in self.biases else 0
        return self.layers * layer + self.vocab * e + head + per_norm
