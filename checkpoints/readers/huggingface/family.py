"""A family of Hugging Face models: how its config becomes `HParams`, and what its tensors are called.

Data flow: config and names → `read` (config first, then shapes; no weight before both fit) → neutral state.

Worked example: a Llama folder whose config says rope scaling "yarn" is refused with that word, before its
tensors' names are looked at.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from checkpoints.key_table import apply_table, identical
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.huggingface.config_fields import ConfigFields
from checkpoints.readers.huggingface.decoder_table import DecoderNames, decoder_table
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import HParams


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      name: what people call it.
      model_type: the value of its config's `model_type`.
      architecture: the one of its classes that is a language model.
      form: keyword arguments of `HParams` from the config's fields.
      names: its tensors' names, for a model of this form.
    """

    name: str
    model_type: str
    architecture: str
    form: Callable[[ConfigFields], dict[str, Any]]
    names: Callable[[HParams], DecoderNames]

    def hparams(self, named: NamedArrays) -> HParams:
        """The form that the config says; tied as far as the config knows.

        Raises UserError naming the field that is missing, unknown, impossible or unsupported.
        """
        said = named.config.get("architectures")
        if isinstance(said, list) and said and self.architecture not in said:
            raise UserError(
                f"{named.source}: architecture {str(said[0])[:60]!r} is not supported; "
                f"allowed: {self.architecture}"
            )
        fields = ConfigFields(named.source, self.name, named.config)
        if fields.get("quantization_config") is not None:
            method = named.config["quantization_config"]
            kind = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
            raise UserError(
                f"{named.source}: quantized weights ({str(kind)[:60]}) are not supported; allowed: "
                "float32, bfloat16 or float16 weights, and --weights int8"
            )
        try:
            hparams = HParams(**self.form(fields))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{named.source}: the config is impossible: {error}") from None
        fields.finish()
        return hparams

    def read(self, named: NamedArrays, options: ReaderOptions) -> CheckpointState:
        """The neutral state, as lazy views.

        Raises UserError for a form that is unsupported, for tensors that are missing, unknown or of another
        shape, and for options that do not apply.
        """
        hparams = self.hparams(named)
        if options.gamma_offset not in (None, hparams.norm_gain_offset):
            raise UserError(
                f"{named.source}: {self.name} has norm gains of one kind; gamma_offset can only be "
                f"{hparams.norm_gain_offset}"
            )
        names = self.names(hparams)
        if names.other_head is not None and f"{names.other_head}.weight" in named.arrays:
            names = dataclasses.replace(names, head=names.other_head)
        hparams = dataclasses.replace(hparams, tied=_is_tied(named, names, hparams))
        return apply_table(decoder_table(names, hparams), named, hparams)


def _is_tied(named: NamedArrays, names: DecoderNames, hparams: HParams) -> bool:
    """Whether the output projection is the embedding: the config says so and no other one is stored.

    A stored copy is compared with the embedding; both are read.
    """
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    if not hparams.tied or head not in named.arrays or embedding not in named.arrays:
        return hparams.tied
    return identical(named.arrays[embedding], named.arrays[head])
