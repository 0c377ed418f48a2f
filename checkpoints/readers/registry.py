"""All readers, in one list, and the choice among them by names and config.

Data flow: `NamedArrays` → the first reader whose `matches` is true → `CheckpointState`.

Worked example: names `token_emb.weight` and `layers.0.fn.fused_attn_ff_proj.weight` are
PaLM-rlhf-pytorch's. A config with model_type 'gpt2' is nobody's and is refused by that name.
"""

import dataclasses
from collections.abc import Callable

from checkpoints.named_arrays import NamedArrays
from checkpoints.readers import cohere, palm_pytorch, palm_rlhf
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
    """

    name: str
    model_type: str | None
    matches: Callable[[NamedArrays], bool]
    read: Callable[[NamedArrays, ReaderOptions], CheckpointState]


READERS: tuple[Reader, ...] = (
    Reader("PaLM-pytorch", None, palm_pytorch.matches, palm_pytorch.read),
    Reader("PaLM-rlhf-pytorch", None, palm_rlhf.matches, palm_rlhf.read),
    Reader("Cohere", "cohere", cohere.matches, cohere.read),
)


def find_reader(named: NamedArrays) -> Reader:
    """The reader of a checkpoint's family: by the config's model type where it has one, else by names.

    Raises UserError that names what is there and the families that are supported.
    """
    supported = ", ".join(reader.name for reader in READERS)
    model_type = named.config.get("model_type")
    for reader in READERS:
        if reader.matches(named) if model_type is None else reader.model_type == model_type:
            return reader
    if model_type is not None:
        raise UserError(
            f"{named.source}: model type {str(model_type)[:60]!r} is not supported; supported: {supported}"
        )
    names = ", ".join(str(key)[:60] for key in list(named.arrays)[:3]) or "no tensors"
    raise UserError(f"{named.source}: no known model has tensors named {names}; supported: {supported}")
