"""The flags that say which model, in which form, and with how much room; no jax.

Data flow: flags → `ModelOptions`, `EngineOptions` → `model.open_model`, `model.load_engine`.

Worked example: `--checkpoint PATH --weights int8 --slots 8` gives ModelOptions(PATH, weights="int8") and
EngineOptions(slots=8).
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from checkpoints.readers.options import ReaderOptions
from inference_engine.cli.options import Flags, Group, Kind, Option
from inference_engine.config import KV_CACHE_DTYPES, EngineConfig
from inference_engine.pretrained import PretrainedModel
from layers.errors import UserError

BYTES = "bytes"
"""The value of --tokenizer that asks for one id a byte."""

AUTO = "auto"
WEIGHTS = ("float32", "bfloat16", "int8")
ACTIVATIONS = ("float32", "bfloat16")
READER_OPTIONS = (
    Option(
        "gamma_offset",
        "for PaLM-rlhf-pytorch files: 0 where norms use the stored gain (releases up to 0.2.3), "
        "1 where they add one to it",
        Kind.CHOICE, choices=("0", "1"),
    ),
    Option(
        "dim_head", "for PaLM-jax's leaves: the width of a head", Kind.INTEGER, allowed="1 and above",
        metavar="N",
    ),
)  # fmt: skip
"""The flags that say what a file does not."""


class LayersForm(enum.Enum):
    """How the layers' weights are held, and so whether the step loops over them."""

    AUTO = "auto"
    STACKED = "stacked"
    UNROLLED = "unrolled"


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model.

    Attributes:
      checkpoint: a folder or file; None for the embedded one, or for a pretrained one.
      tokenizer: a file, `BYTES`, or None for the one beside the weights.
      reader: what the file does not say.
      weights: dtype of the kernels; None as stored, but float32 on a CPU.
      layers: see `LayersForm`.
      pretrained: a model that is fetched by its name.
    """

    checkpoint: Path | None = None
    tokenizer: str | None = None
    reader: ReaderOptions = ReaderOptions()
    weights: str | None = None
    layers: LayersForm = LayersForm.AUTO
    pretrained: PretrainedModel | None = None


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How much room; None for what suits model and device.

    Attributes:
      config: the defaults of what is not given.
      slots, max_context, prefill_chunk, activation_dtype, kv_cache_dtype: see `EngineConfig`.
    """

    config: EngineConfig = EngineConfig()
    slots: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    activation_dtype: str | None = None
    kv_cache_dtype: str | None = None

    def resolve(
        self, max_positions: int | None, top_logprobs: int, activation_dtype: str, chunk_multiple: int = 1
    ) -> EngineConfig:
        """The engine's settings for a model of `max_positions` on a device that likes `activation_dtype`.

        A prefill chunk that was not asked for is made of whole `chunk_multiple`s: where chips split its
        time, each has as many tokens of it as one device would.

        Raises UserError: a size below 1.
        """
        limit = max_positions or self.config.max_context
        context = self.max_context or min(self.config.max_context, limit)
        chunk = min(self.config.prefill_chunk * chunk_multiple, context)
        return dataclasses.replace(
            self.config,
            slots=self.slots or self.config.slots,
            max_context=context,
            prefill_chunk=self.prefill_chunk or math.ceil(chunk / chunk_multiple) * chunk_multiple,
            top_logprobs=top_logprobs,
            activation_dtype=self.activation_dtype or activation_dtype,
            kv_cache_dtype=self.kv_cache_dtype or self.config.kv_cache_dtype,
        )


def model_group(pretrained: Mapping[str, PretrainedModel] = MappingProxyType({})) -> Group:
    """The flags that say which model; `pretrained` are those that can be fetched by name."""
    fetched = Option(
        "model", "a known model by its name, fetched once and kept", Kind.CHOICE, choices=tuple(pretrained)
    )
    return Group(
        "Model",
        (
            *((fetched,) if pretrained else ()),
            Option(
                "checkpoint", "folder or file to load", metavar="PATH",
                shown_default="the embedded Shakespeare model",
            ),
            Option(
                "tokenizer",
                f"sentencepiece model, tokenizer.json or GGUF file, or {BYTES} for one id a byte",
                metavar="PATH",
                shown_default="the one in the checkpoint",
            ),
            Option(
                "weights",
                "how kernels are held",
                Kind.CHOICE,
                choices=WEIGHTS,
                shown_default="as stored; float32 on a CPU",
            ),
            Option(
                "layers", "loop over stacked layers, or one program text a layer", Kind.CHOICE,
                choices=tuple(form.value for form in LayersForm), default=AUTO,
                shown_default="auto: unrolled on a CPU without mesh, else stacked",
            ),
            *READER_OPTIONS,
        ),
    )  # fmt: skip


def reader_options(flags: Flags) -> ReaderOptions:
    """What the flags of `READER_OPTIONS` say; raises UserError for a width that is none."""
    offset, width = flags["gamma_offset"], flags["dim_head"]
    if width is not None and width < 1:
        raise UserError(f"--dim_head={width} is not allowed; allowed: 1 and above; nearest: 1")
    return ReaderOptions(None if offset is None else int(offset), width)


def engine_group(config: EngineConfig) -> Group:
    """The flags that say how much room there is."""
    return Group(
        "Engine",
        (
            Option("slots", "texts that are generated together", Kind.INTEGER, config.slots,
                   allowed="1 and above", metavar="N"),
            Option("max_context", "tokens of prompt and text together", Kind.INTEGER, metavar="N",
                   allowed="2 and above",
                   shown_default=f"{config.max_context}, or what the model allows"),
            Option("prefill_chunk", "prompt tokens in one step", Kind.INTEGER, config.prefill_chunk,
                   allowed="1 and above", metavar="N"),
            Option("activation_dtype", "dtype of activations", Kind.CHOICE, choices=ACTIVATIONS,
                   shown_default="float32 on a CPU or with float32 weights, else bfloat16"),
            kv_cache_option(config.kv_cache_dtype),
        ),
    )  # fmt: skip


def kv_cache_option(shown_default: str) -> Option:
    """The flag that says how keys and values are held."""
    return Option(
        "kv_cache_dtype", "keys and values in int8 with scales, or auto: in the dtype of activations",
        Kind.CHOICE, choices=KV_CACHE_DTYPES, shown_default=shown_default,
    )  # fmt: skip


def model_options(
    flags: Flags, pretrained: Mapping[str, PretrainedModel] = MappingProxyType({})
) -> ModelOptions:
    """What the flags of `model_group` ask for; raises UserError for an empty path and for two models."""
    for name in ("checkpoint", "tokenizer"):
        if flags[name] == "":
            raise UserError(f"--{name} is empty; it needs a path")
    model = pretrained[flags["model"]] if pretrained and flags["model"] is not None else None
    if model is not None and flags["checkpoint"] is not None:
        raise UserError("--model and --checkpoint are two models; allowed: one of them")
    return ModelOptions(
        checkpoint=None if flags["checkpoint"] is None else Path(flags["checkpoint"]),
        tokenizer=flags["tokenizer"],
        reader=reader_options(flags),
        weights=flags["weights"],
        layers=LayersForm(flags["layers"]),
        pretrained=model,
    )


def engine_options(flags: Flags, config: EngineConfig) -> EngineOptions:
    """What the flags of `engine_group` ask for; raises UserError for a size that is none."""
    names = ("slots", "max_context", "prefill_chunk", "activation_dtype", "kv_cache_dtype")
    typed = {name: flags[name] for name in names if name in flags.given}
    try:
        dataclasses.replace(config, **typed)
    except UserError as error:
        raise UserError(f"--{error}") from None
    return EngineOptions(config, **typed)
