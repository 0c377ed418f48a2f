"""All readers, in one list, and the choice among them by names and config.

Data flow: `NamedArrays` → the first reader whose `matches` is true → `CheckpointState`.

Worked example: names `token_emb.weight` and `layers.0.fn.fused_attn_ff_proj.weight` are
PaLM-rlhf-pytorch's. A config with model_type 'gpt2' is nobody's and is refused by that name.
"""

import dataclasses
from collections.abc import Callable

from checkpoints.named_arrays import NamedArrays
from checkpoints.readers import cohere, palm_jax, palm_pytorch, palm_rlhf
from checkpoints.readers.huggingface.family import Family
from checkpoints.readers.huggingface.parallel_families import PARALLEL_FAMILIES
from checkpoints.readers.huggingface.serial_families import SERIAL_FAMILIES
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError


@dataclasses.dataclass(frozen=True)
class Reader:
    """One family of checkpoints.

    Attributes:
      name: what people call it.
      model_type: the value of its config's `model_type`, if it has such configs.
      matches: whether the names are this family's; reads no element.
      read: the neutral state of a checkpoint that matches.
      asks_head_width: whether `ReaderOptions.dim_head` applies.
    """

    name: str
    model_type: str | None
    matches: Callable[[NamedArrays], bool]
    read: Callable[[NamedArrays, ReaderOptions], CheckpointState]
    asks_head_width: bool = False


def _no_names(named: NamedArrays) -> bool:
    """Hugging Face families are told by their config alone."""
    del named
    return False


def _reader(family: Family) -> Reader:
    return Reader(family.name, family.model_type, _no_names, family.read)


READERS: tuple[Reader, ...] = (
    Reader("PaLM-pytorch", None, palm_pytorch.matches, palm_pytorch.read),
    Reader("PaLM-rlhf-pytorch", None, palm_rlhf.matches, palm_rlhf.read),
    Reader("PaLM-jax", None, palm_jax.matches, palm_jax.read, asks_head_width=True),
    Reader("Cohere with exchanged norms", None, cohere.matches, cohere.read),
    *map(_reader, SERIAL_FAMILIES + PARALLEL_FAMILIES),
)


def find_reader(named: NamedArrays) -> Reader:
    """The reader of a checkpoint's family: by the config's model type where it has one, else by names.

    Raises UserError that names what is there and the families that are supported.
    """
    model_type = named.config.get("model_type")
    for reader in READERS:
        if reader.matches(named) if model_type is None else reader.model_type == model_type:
            return reader
    if model_type is not None:
        supported = ", ".join(reader.name for reader in READERS if reader.model_type is not None)
        said = named.config.get("architectures")
        classes = f" ({str(said[0])[:60]})" if isinstance(said, list) and said else ""
        raise UserError(
            f"{named.source}: model type {str(model_type)[:60]!r}{classes} is not supported; "
            f"supported: {supported}"
        )
    supported = ", ".join(reader.name for reader in READERS if reader.model_type is None)
    names = ", ".join(str(key)[:60] for key in list(named.arrays)[:3]) or "no tensors"
    raise UserError(
        f"{named.source}: no config says which model this is, and no known one has tensors named {names}; "
        f"known by their names: {supported}"
    )
