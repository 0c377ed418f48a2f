"""A model in Hugging Face form: a folder, or one safetensors file with its config beside it.

    PATH/config.json                                the form
    PATH/model.safetensors                          the weights, or
    PATH/model.safetensors.index.json and shards    the weights in several files
    PATH/pytorch_model.bin, or its index and shards the same as PyTorch files, where there is no safetensors
    PATH/tokenizer.json, or tokenizer.model         the tokenizer, where there is one

Links that lead out of the folder are refused, save those of the hub's own cache.

Data flow: path → config and headers → `NamedArrays`; `formats` finds the reader by the config's model type.

Worked example: of a folder with `pytorch_model.bin` only, the pickle in it is understood without being run
(`torch_pickle`), and refused if it is more than a dict of tensors.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from checkpoints.files import check_inside, read_json_object
from checkpoints.lazy import ArrayLike
from checkpoints.named_arrays import NamedArrays
from checkpoints.safetensors_source import INDEX_SUFFIX, SUFFIX, read_safetensors, read_sharded
from checkpoints.torch_source import read_torch
from layers.errors import UserError

CONFIG = "config.json"
_INDEX, _SINGLE = f"model{INDEX_SUFFIX}", f"model{SUFFIX}"
_TORCH_SINGLE = "pytorch_model.bin"
_TORCH_INDEX = f"{_TORCH_SINGLE}.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclasses.dataclass(frozen=True)
class HuggingFaceFiles:
    """The files of one model.

    Attributes:
      config: the form.
      weights: the index, or the only file.
      tokenizer: None where there is none.
    """

    config: Path
    weights: Path
    tokenizer: Path | None


def find_files(path: Path) -> HuggingFaceFiles:
    """The files of the model at a path: a folder, or a safetensors file in one.

    Raises UserError naming what is missing, and a link that leads out of the folder.
    """
    folder = path if path.is_dir() else path.parent
    weights = _weights(path) if path.is_dir() else path
    config = folder / CONFIG
    if not config.is_file():
        raise UserError(f"{config}: missing; the weights do not say which model they are")
    tokenizer = next((folder / name for name in _TOKENIZERS if (folder / name).is_file()), None)
    for file in (config, weights, tokenizer):
        if file is not None:
            check_inside(file)
    return HuggingFaceFiles(config, weights, tokenizer)


def read_named(files: HuggingFaceFiles, source: str) -> NamedArrays:
    """Config and tensors, lazily. Raises UserError naming the file that is damaged."""
    config = read_json_object(files.config)
    name = files.weights.name
    read_file = _read_torch if name.startswith(_TORCH_SINGLE) else read_safetensors
    sharded = name.endswith((INDEX_SUFFIX, _TORCH_INDEX))
    arrays = read_sharded(files.weights, read_file) if sharded else read_file(files.weights)
    return NamedArrays(source, arrays, config)


def _read_torch(path: Path) -> Mapping[str, ArrayLike]:
    return read_torch(path).arrays


def _weights(folder: Path) -> Path:
    """The index or the only file of a folder."""
    names = sorted(os.listdir(folder))
    for name in (_INDEX, _SINGLE):
        if name in names:
            return folder / name
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(files) == 1:
        return folder / files[0]
    if files:
        raise UserError(
            f"{folder}: {len(files)} safetensors files without {_INDEX}; name one, or add the index"
        )
    for name in (_TORCH_INDEX, _TORCH_SINGLE):
        if name in names:
            return folder / name
    raise UserError(f"{folder}: no weights in it; expected {_SINGLE}, {_INDEX} or {_TORCH_SINGLE}")
