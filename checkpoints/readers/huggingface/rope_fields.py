"""Rotary embedding of a `config.json`, whose fields moved over the years.

Older configs have `rope_theta`, `rope_scaling` and `partial_rotary_factor`; newer ones hold all of it in
`rope_parameters`, where a value wins over one outside. Scalings are applied where `RopeScaling` has them and
refused by name elsewhere.

Worked example: {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
"high_freq_factor": 4, "original_max_position_embeddings": 8192}} is
`Rope(theta=5e5, scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))`.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints.readers.huggingface.config_fields import ConfigFields
from layers.errors import UserError
from layers.hparams import Rope, RopePairing, RopeScaling

_PLAIN = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rope(
    fields: ConfigFields,
    qkv: int,
    theta: float = 10000.0,
    rotary_fraction: float = 1.0,
    pairing: RopePairing = RopePairing.HALF,
) -> Rope:
    """The rotary embedding that a config asks for.

    Args:
      fields: the config.
      qkv: width of a head.
      theta, rotary_fraction: the family's values where the config has none.
      pairing: the family's.

    Raises UserError for a scaling that is not supported and for parameters that its kind does not have.
    """
    outer_theta = fields.number("rope_theta", theta)
    outer_fraction = fields.number("partial_rotary_factor", rotary_fraction)
    nested, name = _nested(fields)
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in _OF_KIND:
        raise UserError(
            f"{fields.source}: rope scaling {str(kind)[:60]!r} is not supported; "
            f"allowed: {', '.join(_OF_KIND)}"
        )
    unknown = [key for key in nested if key not in _PLAIN + _OF_KIND[kind]]
    if unknown:
        raise UserError(f"{fields.source}: {name} has {unknown[0][:60]!r}, which {kind!r} does not have")
    inner = ConfigFields(f"{fields.source}: {name}", "rotary embedding", nested)
    fraction = inner.number("partial_rotary_factor", outer_fraction)
    dims = int(qkv * fraction)
    return Rope(
        pairing=pairing,
        theta=inner.number("rope_theta", outer_theta),
        rotary_dims=None if dims == qkv else dims,
        scaling=None if kind == "default" else _scaling(inner, kind),
    )


def _nested(fields: ConfigFields) -> tuple[Mapping[str, Any], str]:
    """The object that holds rotary parameters, and its name."""
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    name = "rope_parameters" if scaling is None else "rope_scaling"
    nested: Any = next((value for value in (scaling, parameters) if value is not None), {})
    if not isinstance(nested, Mapping):
        raise fields.refusal(name, "expected an object")
    return nested, name


def _scaling(inner: ConfigFields, kind: str) -> RopeScaling:
    missing = [key for key in _OF_KIND[kind] if inner.get(key) is None]
    if missing:
        raise UserError(f"{inner.source} has no {missing[0]}, which {kind!r} needs")
    try:
        if kind == "linear":
            return RopeScaling(kind, inner.number("factor", 1.0))
        return RopeScaling(
            kind,
            inner.number("factor", 1.0),
            inner.number("low_freq_factor", 1.0),
            inner.number("high_freq_factor", 4.0),
            inner.size("original_max_position_embeddings"),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{inner.source}: {error}") from None
