"""A `config.json`, read strictly: every field is applied, known to change nothing, or refused.

A field that nobody reads may be the one that makes the model another function (a rotary scaling, a window,
a multiplier), so what is left over after a family has read its fields is an error that names it. Fields of
training, generation and bookkeeping are known to change nothing; others are known for the one value under
which they change nothing.

Data flow: config → `ConfigFields` → a family reads what it understands → `finish` refuses the rest.

Worked example: {"model_type": "llama", ..., "residual_multiplier": 0.22} is refused: "the config says
residual_multiplier=0.22, which Llama is not known to have".
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from layers.errors import UserError
from layers.hparams import MOST_LAYERS

T = TypeVar("T")

# Training, generation and bookkeeping: a forward pass does not depend on them.
_NEUTRAL = frozenset(
    {
        "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map",
        "use_cache", "initializer_range", "initializer_factor", "bos_token_id", "eos_token_id",
        "pad_token_id", "sep_token_id", "decoder_start_token_id", "attention_dropout", "hidden_dropout",
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout", "embedding_dropout",
        "gradient_checkpointing", "tokenizer_class", "task_specific_params", "finetuning_task", "prefix",
        "id2label", "label2id", "num_labels", "problem_type", "return_dict", "return_dict_in_generate",
        "output_hidden_states", "output_attentions", "output_scores", "torchscript", "use_bfloat16",
        "is_decoder", "chunk_size_feed_forward", "pretraining_tp", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "cache_implementation", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
        "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
        "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "tf_legacy_loss", "cross_attention_hidden_size",
    }
)  # fmt: skip
# Fields with the values under which they change nothing.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rotary": (True,),
    "scale_attn_weights": (True,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
}


class ConfigFields:
    """The fields of one config, each remembered as it is read.

    A field that is null counts as absent, save where null has a meaning: see `nullable_size`.
    """

    def __init__(self, source: str, family: str, config: Mapping[str, Any]) -> None:
        self.source, self._family = source, family
        self._config = {key: value for key, value in config.items() if value is not None}
        self._nulls = {key for key, value in config.items() if value is None}
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """A field as it is; None where it is absent."""
        self._read.add(name)
        return self._config.get(name)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises UserError if it is none, or absent without a default."""
        value = self.get(name)
        if value is None:
            return self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, "expected a positive integer")
        return value

    def layers(self, name: str) -> int:
        """A number of layers: a positive integer of at most `MOST_LAYERS`, so that tables stay small."""
        count = self.size(name)
        if count > MOST_LAYERS:
            raise self.refusal(name, f"expected at most {MOST_LAYERS:,}")
        return count

    def optional_size(self, name: str) -> int | None:
        """A positive integer, or None where it is absent."""
        return None if self.get(name) is None else self.size(name)

    def number(self, name: str, default: float) -> float:
        """A finite number. Raises UserError if it is none."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refusal(name, "expected a finite number")
        return float(value)

    def nullable_size(self, name: str, default: int) -> int | None:
        """A positive integer, the default where it is absent, or None where it is null."""
        return None if name in self._nulls else self.size(name, default)

    def nullable_number(self, name: str, default: float) -> float | None:
        """A finite number, the default where it is absent, or None where it is null."""
        return None if name in self._nulls else self.number(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises UserError if it is neither."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "expected true or false")
        return value

    def choice(self, name: str, allowed: Mapping[str, T], default: str) -> T:
        """What a text stands for. Raises UserError, with those that are allowed, if it is none."""
        value = self.get(name)
        if value is None:
            return allowed[default]
        if not isinstance(value, str) or value not in allowed:
            raise UserError(
                f"{self.source}: {name} {str(value)[:60]!r} is not supported; allowed: {', '.join(allowed)}"
            )
        return allowed[value]

    def only(self, name: str, value: Any) -> None:
        """Refuse a field that has any value but this one."""
        if self.get(name) not in (None, value):
            raise self.refusal(name, f"{self._family} is supported with {value!r} only")

    def finish(self) -> None:
        """Refuse the first field that was not read and may change the model."""
        for name, value in self._config.items():
            known = name in self._read or name in _NEUTRAL or name.startswith("_")
            if not known and value not in _NEUTRAL_VALUES.get(name, ()):
                allowed = " or ".join(repr(one) for one in _NEUTRAL_VALUES.get(name, ()))
                reason = f"supported: {allowed}" if allowed else f"which {self._family} is not known to have"
                raise self.refusal(name, reason)

    def refusal(self, name: str, reason: str) -> UserError:
        """A refusal of a field's value."""
        return UserError(f"{self.source}: the config says {name}={self._config[name]!r:.80}, {reason}")

    def _required(self, name: str, default: int | None) -> int:
        if default is None:
            raise UserError(f"{self.source}: the config has no {name}")
        return default
