"""Foreign tensor names and layouts as data, and the one function that applies them.

A reader is a table of `Rule`s. A rule says which foreign tensor it means and how that is laid out:
its leading dim is a concatenation of parts, each with a key of the neutral form and the names of the
dims that its rows run over; a second dim, if any, has names too. How to slice, split and transpose
then follows from the names of the neutral form's dims, so no transform is written by hand.

Every foreign tensor is used by exactly one rule or listed as ignored; all else is an error that names
it. The shapes are checked before anything is read, and the result is made of lazy views.

Worked example, 4 heads of 16, embed 48, ff 192:

    Rule("layers.{i}.fn.fused_attn_ff_proj.weight",
         (Part("q", "heads qkv"), Part("k", "kv_heads qkv"), Part("v", "kv_heads qkv"),
          Part("w1", "ff"), Part("w0", "ff")), inputs="embed")

says [64 + 16 + 16 + 192 + 192, 48]. `layer_2/q` is rows 0–63 of `layers.2…`, split into [4, 16, 48]
and transposed to the neutral [48, 4, 16].
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable

import numpy as np

from checkpoints.lazy import ArrayLike, merged, sliced, split_dim, transposed
from checkpoints.named_arrays import NamedArrays, closest
from checkpoints.state import CheckpointState, TensorSpec, state_tensors, validate_state
from layers.errors import UserError
from layers.hparams import HParams

_CHECK_ELEMENTS = 1 << 24
_GROUPED = "heads_per_kv"


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive rows of a foreign tensor that are one tensor of the neutral form.

    Attributes:
      name: the neutral key, without its layer prefix.
      rows: names of the dims that the rows run over, outermost first, separated by spaces.
      convert: what remains to be done to the array of those dims, if anything.
    """

    name: str
    rows: str
    convert: Callable[[ArrayLike, HParams], ArrayLike] | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """One foreign tensor, or one for each layer where the pattern holds `{i}`.

    Attributes:
      pattern: the foreign name.
      parts: what its leading dim is made of, in order.
      inputs: names of the dims that its second dim runs over; empty for a vector.
      groups: name of a dim that the leading dim runs over outermost, where every group has all the parts:
        `kv_heads` where each kv head's queries, key and value stand together.
    """

    pattern: str
    parts: tuple[Part, ...]
    inputs: str = ""
    groups: str = ""


@dataclasses.dataclass(frozen=True)
class KeyTable:
    """How one family's tensors map to the neutral form.

    Attributes:
      rules: see `Rule`.
      ignored: patterns of tensors that carry nothing: constants and copies.
      zeros: patterns of tensors that are ignored because they are zero, which is checked.
      first_layer: the value of `{i}` for the first layer.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    first_layer: int = 0


def count_layers(named: NamedArrays, pattern: str, first_layer: int = 0) -> int:
    """How many layers there are, from the names that fit a pattern with `{i}`.

    Raises UserError if there is none or if one is missing in between.
    """
    before, after = (re.escape(text) for text in pattern.split("{i}"))
    found = [re.fullmatch(f"{before}(0|[1-9][0-9]*){after}", key) for key in named.arrays]
    layers = sorted(int(match[1]) for match in found if match)
    if not layers:
        raise UserError(f"{named.source}: missing {pattern.format(i=first_layer)}; no layer was found")
    for expected, index in enumerate(layers, first_layer):
        if index != expected:
            raise UserError(
                f"{named.source}: missing {pattern.format(i=expected)}, although there is a layer {index}"
            )
    return len(layers)


def apply_table(table: KeyTable, named: NamedArrays, hparams: HParams) -> CheckpointState:
    """The neutral state of a foreign checkpoint, as lazy views.

    Args:
      table: the family's layout, for a model of this form.
      named: the foreign tensors.
      hparams: the model's form.

    Raises UserError, naming the tensor, with what was expected and found: a tensor that is missing or
    unknown, of a wrong shape or dtype, or expected to be zero and not.
    """
    specs = state_tensors(hparams)
    weights: dict[str, ArrayLike] = {}
    used: set[str] = set()
    for rule in table.rules:
        for layer, key in _expand(rule.pattern, table, hparams):
            prefix = "" if layer is None else f"layer_{layer}/"
            weights |= _apply_rule(rule, key, prefix, named, hparams, specs)
            used.add(key)
    zeros = {key for pattern in table.zeros for _, key in _expand(pattern, table, hparams)}
    ignored = {key for pattern in table.ignored for _, key in _expand(pattern, table, hparams)}
    unknown = [key for key in named.arrays if key not in used | zeros | ignored]
    if unknown:
        shape = list(named.arrays[unknown[0]].shape)
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise UserError(
            f"{named.source}: unexpected {unknown[0]} {shape}{more}{closest(unknown[0], dict.fromkeys(used))}"
        )
    state = CheckpointState(hparams, weights)
    validate_state(state, named.source)
    for key in sorted(zeros & named.arrays.keys()):
        _check_zero(named, key)
    return state


def identical(first: ArrayLike, second: ArrayLike) -> bool:
    """Whether two matrices are equal element for element, compared in blocks of rows.

    This is how a copy of the embedding (tied) is told from an output projection of its own.
    """
    if tuple(first.shape) != tuple(second.shape):
        return False
    blocks = _row_blocks(first)
    return all(np.array_equal(np.asarray(first[rows]), np.asarray(second[rows])) for rows in blocks)


def _row_blocks(array: ArrayLike) -> Iterable[slice]:
    """Slices of the leading dim that hold a bounded number of elements each."""
    rows = max(1, _CHECK_ELEMENTS // max(1, math.prod(array.shape[1:])))
    return (slice(start, start + rows) for start in range(0, array.shape[0], rows))


def _expand(pattern: str, table: KeyTable, hparams: HParams) -> list[tuple[int | None, str]]:
    """The names that a pattern stands for, each with its layer (None outside layers)."""
    if "{i}" not in pattern:
        return [(None, pattern)]
    return [(layer, pattern.format(i=layer + table.first_layer)) for layer in range(hparams.layers)]


def _sizes(dims: str, hparams: HParams) -> tuple[int, ...]:
    return tuple(getattr(hparams, dim) for dim in dims.split())


def _apply_rule(
    rule: Rule, key: str, prefix: str, named: NamedArrays, hparams: HParams, specs: dict[str, TensorSpec]
) -> dict[str, ArrayLike]:
    """The neutral tensors that one foreign tensor holds."""
    counts = [math.prod(_sizes(part.rows, hparams)) for part in rule.parts]
    groups = _sizes(rule.groups, hparams)
    inputs = (math.prod(_sizes(rule.inputs, hparams)),) if rule.inputs else ()
    expected = (math.prod(groups) * sum(counts), *inputs)
    if named.shape(key) != expected:
        raise UserError(
            f"{named.source}: {key} has shape {list(named.shape(key))}, expected {list(expected)}"
        )
    array, axis = named.arrays[key], len(groups)
    if groups:
        array = split_dim(array, 0, (*groups, sum(counts)))
    out, start = {}, 0
    for part, count in zip(rule.parts, counts, strict=True):
        rows = sliced(array, axis, start, start + count)
        start += count
        spec = specs[prefix + part.name]
        out[prefix + part.name] = _arranged(rows, part, rule, spec, hparams)
    return out


def _arranged(array: ArrayLike, part: Part, rule: Rule, spec: TensorSpec, hparams: HParams) -> ArrayLike:
    """Split rows and columns into named dims and bring them into the neutral order."""
    dims = rule.groups.split()
    if rule.inputs:
        array = split_dim(array, len(dims) + 1, _sizes(rule.inputs, hparams))
    array = split_dim(array, len(dims), _sizes(part.rows, hparams))
    if part.convert is not None:
        return part.convert(array, hparams)
    dims += part.rows.split() + rule.inputs.split()
    if _GROUPED in dims:  # kv_heads, heads_per_kv → heads
        at = dims.index(_GROUPED) - 1
        array, dims[at : at + 2] = merged(array, at), ["heads"]
    return transposed(array, tuple(dims.index(dim) for dim in spec.dims))


def _check_zero(named: NamedArrays, key: str) -> None:
    """Refuse a tensor that this family always leaves at zero and that is not."""
    array = named.arrays[key]
    for rows in _row_blocks(array):
        if np.any(np.asarray(array[rows])):
            raise UserError(f"{named.source}: {key} is expected to be zero and is not; this model is unknown")
