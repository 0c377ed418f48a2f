"""What the configs of several Hugging Face families have in common."""

from typing import Any

from checkpoints.readers.huggingface.config_fields import ConfigFields
from layers.errors import UserError
from layers.hparams import Activation, Bias, Block, NormPlacement

GATED = {
    "silu": Activation.SWISH_GATED,
    "swish": Activation.SWISH_GATED,
    "gelu": Activation.GELU_ERF_GATED,
    "gelu_new": Activation.GELU_TANH_GATED,
    "gelu_fast": Activation.GELU_TANH_GATED,
    "gelu_pytorch_tanh": Activation.GELU_TANH_GATED,
}
PLAIN = {
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
ATTENTION_BIASES = frozenset({Bias.Q, Bias.K, Bias.V, Bias.O})
QKV_BIASES = ATTENTION_BIASES - {Bias.O}
FF_BIASES = frozenset({Bias.FF_IN, Bias.FF_OUT})
NO_BIASES: frozenset[Bias] = frozenset()
SERIAL = {"block": Block.SERIAL, "norm_placement": NormPlacement.TWO}
SLIDING, FULL = "sliding_attention", "full_attention"


def sizes(fields: ConfigFields, qkv: int | None = None) -> dict[str, Any]:
    """Sizes under the names that most configs use.

    Args:
      fields: the config.
      qkv: the family's head width where the config has none; None for embed / heads.
    """
    embed, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if qkv is None and fields.get("head_dim") is None and embed % heads:
        raise UserError(f"{fields.source}: {heads} heads do not divide hidden_size {embed}")
    return {
        "layers": fields.layers("num_hidden_layers"),
        "embed": embed,
        "ff": fields.size("intermediate_size"),
        "heads": heads,
        "kv_heads": fields.size("num_key_value_heads", heads),
        "qkv": fields.size("head_dim", qkv or embed // heads),
        "vocab": fields.size("vocab_size"),
        "max_positions": fields.optional_size("max_position_embeddings"),
        "logit_scale": 1.0,
    }


def windows(
    fields: ConfigFields, layers: int, window: int | None, default: tuple[str, ...]
) -> tuple[int | None, ...]:
    """The window of each layer, by the config's `layer_types` or by the family's own pattern.

    Args:
      fields: the config.
      layers: how many layers there are.
      window: keys that a sliding layer sees; None if the config switches windows off.
      default: a kind for each layer, where the config lists none.

    Raises UserError for a kind of layer that is neither sliding nor full.
    """
    kinds = fields.get("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
        raise fields.refusal("layer_types", f"expected a list of {layers} kinds")
    odd = next((kind for kind in kinds if kind not in (SLIDING, FULL)), None)
    if odd is not None:
        raise UserError(
            f"{fields.source}: layer type {str(odd)[:60]!r} is not supported; allowed: {SLIDING}, {FULL}"
        )
    if window is None and SLIDING in kinds:
        raise UserError(f"{fields.source}: layer_types has {SLIDING!r}, but the config has no sliding_window")
    found = tuple(window if kind == SLIDING else None for kind in kinds)
    return found if any(found) else ()
