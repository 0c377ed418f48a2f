"""What a checkpoint is and what the engine would do with it, from headers alone.

Nothing here reads a weight. Sizes a chip are estimates: padded weights and the cache divided over all chips;
what is replicated, scales of int8 kernels and what the compiler adds is not in them.

Data flow: `OpenedCheckpoint`, dtype, chips → `inspect_checkpoint` → a dict for JSON, or lines of text.

A chip's name stands for the memory of one of its devices; where none is asked for, the report says of every
chip of the table how many it takes.

Worked example: SmolLM2 with 9 heads in groups of 3 on 2,2,2: padded to 16 heads of which a chip has 2.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.hparams_json import hparams_to_json
from checkpoints.load import WeightsDtype
from checkpoints.state import Entry, OpenedCheckpoint, QuantizedTensor
from inference_engine.profiling.chips import CHIPS, ChipSpec
from inference_engine.tokenizer_files import open_chat_template, open_tokenizer
from layers.errors import UserError
from layers.head_order import padded_form
from layers.hparams import HParams
from layers.layout import Layout
from layers.mesh_shape import MeshShape, legal_shapes
from layers.partitioning import check_model

_KERNEL_BYTES = {WeightsDtype.FLOAT32: 4, WeightsDtype.BFLOAT16: 2, WeightsDtype.INT8: 1}
_CACHE_BYTES = 2
_COUNTS = tuple(1 << power for power in range(11))
_PALM = HParams(layers=1, embed=1, ff=1, heads=1, kv_heads=1, qkv=2, vocab=1)


def inspect_checkpoint(
    opened: OpenedCheckpoint, weights: WeightsDtype, chips: int, cache_tokens: int, memory: int | None
) -> dict[str, Any]:
    """Everything that headers say, and what follows from it.

    Args:
      opened: the checkpoint.
      weights: how kernels would be held.
      chips: how many; every mesh of them is listed.
      cache_tokens: positions that the cache has in all, for the sizes.
      memory: bytes of a chip, None where it is not asked whether the model fits: then `fits_from` says of
        every known chip how many hold the model, None where 1024 don't.
    """
    hparams = opened.state.hparams
    fits = {} if memory is not None else {"fits_from": _least_chips(hparams, weights, cache_tokens)}
    return fits | {
        "source": opened.source,
        "family": opened.family,
        "parameters": hparams.param_count,
        "stored": _stored(opened.state.weights),
        "form": hparams_to_json(hparams),
        "differs_from_palm": differences(hparams),
        "tokenizer": _tokenizer(opened),
        "cache_bytes_a_token": _cache_bytes(hparams),
        "weights": weights.value,
        "layouts": [layout.value for layout in Layout],
        "meshes": [_mesh(hparams, weights, shape, cache_tokens, memory) for shape in legal_shapes(chips)],
    }


def differences(hparams: HParams) -> dict[str, Any]:
    """The choices, sizes aside, in which a model differs from PaLM's."""
    palm, own = hparams_to_json(_PALM), hparams_to_json(hparams)
    sizes = ("layers", "embed", "ff", "heads", "kv_heads", "qkv", "vocab")
    return {key: value for key, value in own.items() if key not in sizes and value != palm[key]}


def _stored(weights: Mapping[str, Entry]) -> dict[str, int]:
    """Bytes by dtype."""
    sizes: collections.Counter[str] = collections.Counter()
    for entry in weights.values():
        parts = (entry.qvalue, entry.scale) if isinstance(entry, QuantizedTensor) else (entry,)
        for part in parts:
            sizes[np.dtype(part.dtype).name] += math.prod(part.shape) * np.dtype(part.dtype).itemsize
    return dict(sizes)


def _tokenizer(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The tokenizer, or why there is none to use."""
    if opened.tokenizer_file is None:
        return {"file": None, "problem": "none in the checkpoint"}
    found: dict[str, Any] = {"file": str(opened.tokenizer_file)}
    try:
        tokenizer = open_tokenizer(opened.tokenizer_file)
        template = open_chat_template(opened.tokenizer_file)
    except UserError as error:
        return found | {"problem": str(error)}
    return found | {
        "ids": tokenizer.vocab_size,
        "begins_with": tokenizer.bos_id,
        "ends_with": sorted(tokenizer.end_ids),
        "chat_template": template is not None,
    }


def _cache_bytes(hparams: HParams) -> int:
    """Keys and values of one position, bfloat16, nothing padded."""
    return 2 * hparams.layers * hparams.kv_heads * hparams.qkv * _CACHE_BYTES


def _mesh(
    hparams: HParams, weights: WeightsDtype, shape: MeshShape, cache_tokens: int, memory: int | None
) -> dict[str, Any]:
    """One mesh: whether it is legal, what is padded, and about how many bytes a chip holds."""
    found: dict[str, Any] = {"mesh": f"{shape.x},{shape.y},{shape.z}"}
    try:
        check_model(hparams, shape)
    except UserError as error:
        return found | {"legal": False, "reason": str(error)}
    padded = padded_form(hparams, shape)
    weight_bytes = _weight_bytes(padded, weights) // shape.size
    cache_bytes = cache_tokens * _cache_bytes(padded) // min(shape.size, cache_tokens)
    found |= {
        "legal": True,
        "heads": [padded.heads, padded.kv_heads],
        "weight_bytes_a_chip": weight_bytes,
        "cache_bytes_a_chip": cache_bytes,
    }
    return found if memory is None else found | {"fits": weight_bytes + cache_bytes <= memory}


def device_memory(chip: ChipSpec) -> int | None:
    """Bytes of one of a chip's devices, None where they are not known."""
    return None if chip.memory_bytes is None else chip.memory_bytes // chip.devices


def _least_chips(hparams: HParams, weights: WeightsDtype, cache_tokens: int) -> dict[str, int | None]:
    """By chip, the smallest power of two of its devices of which a legal mesh holds the model."""
    needs: dict[int, int] = {}
    for count in _COUNTS:
        meshes = [_mesh(hparams, weights, shape, cache_tokens, None) for shape in legal_shapes(count)]
        sizes = [mesh["weight_bytes_a_chip"] + mesh["cache_bytes_a_chip"] for mesh in meshes if mesh["legal"]]
        if sizes:
            needs[count] = min(sizes)
    return {
        name: next((count for count, size in needs.items() if size <= memory), None)
        for name, chip in CHIPS.items()
        if (memory := device_memory(chip)) is not None
    }


def _weight_bytes(hparams: HParams, weights: WeightsDtype) -> int:
    """Bytes of all weights on one device; an embedding stays float."""
    tables = hparams.vocab * hparams.embed * (1 if hparams.tied else 2)
    table_bytes = weights.float_dtype.itemsize
    return (hparams.param_count - tables) * _KERNEL_BYTES[weights] + tables * table_bytes


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a person, a line for each thing."""
    form, tokenizer = report["form"], report["tokenizer"]
    sizes = ("layers", "embed", "ff", "heads", "kv_heads", "qkv", "vocab")
    stored = ", ".join(f"{name} {size:,} bytes" for name, size in report["stored"].items())
    lines = [
        f"{report['source']}: {report['family']}",
        f"parameters  {report['parameters']:,}",
        f"stored      {stored}",
        "sizes       " + ", ".join(f"{name} {form[name]}" for name in sizes),
        "form        " + (_words(report["differs_from_palm"]) or "PaLM's"),
        f"tokenizer   {_words(tokenizer)}",
        f"cache       {report['cache_bytes_a_token']:,} bytes a token in bfloat16",
        f"layouts     {', '.join(report['layouts'])}",
        *_fit_lines(report),
        f"meshes      weights as {report['weights']}; bytes a chip are estimates",
    ]
    return lines + [f"  {_mesh_words(mesh)}" for mesh in report["meshes"]]


def _fit_lines(report: Mapping[str, Any]) -> list[str]:
    """How many of each known chip it takes, where that was asked."""
    if "fits_from" not in report:
        return []
    counts = report["fits_from"]
    words = [f"{count or f'over {_COUNTS[-1]}'} {name}" for name, count in counts.items()]
    return [f"fits from   {', '.join(words)}"]


def _words(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def _mesh_words(mesh: Mapping[str, Any]) -> str:
    if not mesh["legal"]:
        return f"{mesh['mesh']}: {mesh['reason']}"
    words = (
        f"{mesh['mesh']}: {mesh['weight_bytes_a_chip']:,} of weights, "
        f"{mesh['cache_bytes_a_chip']:,} of cache, {mesh['heads'][0]} heads, {mesh['heads'][1]} kv heads"
    )
    return words + ("" if "fits" not in mesh else "; fits" if mesh["fits"] else "; does not fit")
