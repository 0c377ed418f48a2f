"""Mistakes that inference code makes, each as a change to a form, to its weights or to the restatement.

A comparison with the restatement is worth what it can catch. Each entry of `MISTAKES` says which forms
it concerns and how to plant it; `test_reference_power.py` measures that the logits of every one of those
forms move by more than `floor` of their largest.

Worked example: `window_one_larger` concerns the forms with windows and plants `windows=(6, 6)` for
`(5, 5)`; the logits of a form with two layers then move by some percent.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layers.hparams import Activation, Bias, Block, HParams, Norm, NormPlacement, Rope, RopePairing
from tests import reference_model

Arrays = Mapping[str, np.ndarray]
Plant = Callable[[HParams, Arrays], tuple[HParams, Arrays]]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What to plant, and where it matters.

    Attributes:
      concerns: whether a model of this form would compute something else.
      plant: the form and the weights with the mistake.
      patches: functions of `reference_model` to exchange.
      floor: by how much of the largest logit the logits move at least.
    """

    concerns: Callable[[HParams], Any]
    plant: Plant = lambda hparams, weights: (hparams, weights)
    patches: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    floor: float = 1e-3


def _always(hparams: HParams) -> bool:
    return True


def _form(**changes: Callable[[HParams], Any]) -> Plant:
    """Fields of HParams, each as a function of the right ones."""
    return lambda hparams, weights: (
        dataclasses.replace(hparams, **{field: change(hparams) for field, change in changes.items()}),
        weights,
    )


def _rope(change: Callable[[Rope], Rope]) -> Plant:
    """Another rotary embedding, as a function of the right one."""
    return _form(rope=lambda h: None if h.rope is None else change(h.rope))


def _edit(*names: str, change: Callable[[HParams, np.ndarray], np.ndarray]) -> Plant:
    """The arrays of these names in every layer, and in none."""
    return lambda hparams, weights: (
        hparams,
        {k: change(hparams, w) if k.rpartition("/")[2] in names else w for k, w in weights.items()},
    )


def _rename(renamed: Mapping[str, str]) -> Plant:
    """The array of one name under another; `{"a": "b", "b": "a"}` exchanges two."""

    def plant(hparams: HParams, weights: Arrays) -> tuple[HParams, Arrays]:
        planted = dict(weights)
        for key, weight in weights.items():
            prefix, slash, name = key.rpartition("/")
            if name in renamed:
                planted[prefix + slash + renamed[name]] = weight
        return hparams, planted

    return plant


_NORM2_FROM_NORM = {"norm_gain": "norm2_gain", "norm_bias": "norm2_bias"}


def _other_block(hparams: HParams, weights: Arrays) -> tuple[HParams, Arrays]:
    """Parallel for serial and serial for parallel; a shared norm becomes two equal ones."""
    if hparams.block is Block.SERIAL:
        return dataclasses.replace(hparams, block=Block.PARALLEL), weights
    if hparams.norm_placement is not NormPlacement.SHARED:
        return dataclasses.replace(hparams, block=Block.SERIAL), weights
    two = dataclasses.replace(hparams, block=Block.SERIAL, norm_placement=NormPlacement.TWO)
    return _rename(_NORM2_FROM_NORM)(two, weights)


def _other_norm(kind: Norm | None) -> Norm:
    return Norm.RMS if kind is Norm.LAYER else Norm.LAYER


def _other_scaling(rope: Rope) -> Rope:
    kinds = {"linear": "llama3", "llama3": "linear"}
    scaling = rope.scaling and dataclasses.replace(rope.scaling, kind=kinds[rope.scaling.kind])
    return dataclasses.replace(rope, scaling=scaling)


def _other_pairing(rope: Rope) -> Rope:
    return dataclasses.replace(rope, pairing=next(p for p in RopePairing if p is not rope.pairing))


def _without_xpos(rope: Rope) -> Rope:
    return dataclasses.replace(rope, xpos_scale_base=None)


def _interleaved_groups(hparams: HParams, weights: Arrays) -> tuple[HParams, Arrays]:
    """Query head h reads kv head h % kv_heads."""
    order = np.argsort(np.arange(hparams.heads) % hparams.kv_heads, kind="stable")
    hparams, weights = _edit("q", change=lambda h, w: w[:, order])(hparams, weights)
    return _edit("o", "q_bias", "q_norm_gain", change=lambda h, w: w[order])(hparams, weights)


def _exchanged_layers(hparams: HParams, weights: Arrays) -> tuple[HParams, Arrays]:
    first, last = "layer_0/", f"layer_{hparams.layers - 1}/"
    names = [key.removeprefix(first) for key in weights if key.startswith(first)]
    exchanged = {first + name: weights[last + name] for name in names}
    return hparams, {**weights, **exchanged, **{last + name: weights[first + name] for name in names}}


_rotate = reference_model.rotate
_model_norm = reference_model.model_norm


def _eps_outside_the_root(kind: Norm, x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True) if kind is Norm.LAYER else x
    return centred / (np.sqrt((centred**2).mean(-1, keepdims=True)) + eps)


def _no_final_norm(hparams: HParams, weights: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x if name == "final_norm" else _model_norm(hparams, weights, name, x)


def _sees_one_ahead(positions: np.ndarray, window: int | None) -> np.ndarray:
    distance = positions[:, None] - positions[None, :]
    return (distance >= -1) & (distance < (window or len(positions)))


def _has_rope(hparams: HParams) -> bool:
    return hparams.rope is not None


def _has_xpos(hparams: HParams) -> bool:
    return hparams.rope is not None and hparams.rope.xpos_scale_base is not None


def _has_scaling(hparams: HParams) -> bool:
    return hparams.rope is not None and hparams.rope.scaling is not None


_NORM_MISTAKES = {
    "norm_of_the_other_kind": Mistake(_always, _form(norm=lambda h: _other_norm(h.norm))),
    "norm_eps_lost": Mistake(lambda h: h.norm_eps >= 1e-3, _form(norm_eps=lambda h: 1e-6)),
    "norm_eps_outside_the_root": Mistake(
        lambda h: h.norm_eps >= 1e-3, patches={"normalise": _eps_outside_the_root}
    ),
    "gain_offset_flipped": Mistake(_always, _form(norm_gain_offset=lambda h: 1 - h.norm_gain_offset)),
    "norm_bias_lost": Mistake(lambda h: h.norm_bias, _form(norm_bias=lambda h: False)),
    "final_norm_lost": Mistake(_always, patches={"model_norm": _no_final_norm}),
    "mlp_reads_the_attention_norm": Mistake(
        lambda h: h.norm_placement is not NormPlacement.SHARED, _rename(_NORM2_FROM_NORM)
    ),
    "post_norms_lost": Mistake(
        lambda h: h.norm_placement is NormPlacement.PRE_AND_POST,
        _form(norm_placement=lambda h: NormPlacement.TWO),
    ),
    "qk_norm_lost": Mistake(lambda h: h.qk_norm is not None, _form(qk_norm=lambda h: None)),
    "qk_norm_of_the_other_kind": Mistake(
        lambda h: h.qk_norm is not None, _form(qk_norm=lambda h: _other_norm(h.qk_norm))
    ),
    "qk_norm_eps_lost": Mistake(
        lambda h: h.qk_norm is not None and h.qk_norm_eps >= 0.1, _form(qk_norm_eps=lambda h: 1e-6)
    ),
    "qk_norm_takes_the_gain_offset": Mistake(
        lambda h: h.qk_norm is not None and h.norm_gain_offset == 1,
        _edit("q_norm_gain", "k_norm_gain", change=lambda h, w: w + 1),
    ),
    "qk_norm_gain_of_one_head": Mistake(
        lambda h: h.qk_norm is not None,
        _edit("q_norm_gain", change=lambda h, w: np.tile(w[:1], (h.heads, 1))),
    ),
}  # fmt: skip

_ROPE_MISTAKES = {
    "rope_lost": Mistake(_has_rope, _form(rope=lambda h: None)),
    "rope_pairs_of_the_other_kind": Mistake(
        lambda h: _has_rope(h) and h.rotary_dims > 2,
        _rope(_other_pairing),
    ),
    "rope_theta_of_another_model": Mistake(
        _has_rope, _rope(lambda rope: dataclasses.replace(rope, theta=rope.theta * 50))
    ),
    "rope_turns_the_whole_head": Mistake(
        lambda h: _has_rope(h) and h.rotary_dims < h.qkv,
        _rope(lambda rope: dataclasses.replace(rope, rotary_dims=None)),
    ),
    "rope_queries_off_by_one": Mistake(
        _has_rope, patches={"rotate_query": lambda rope, q, at: _rotate(rope, q, at + 1, xpos_sign=1)}
    ),
    "rope_keys_not_turned": Mistake(_has_rope, patches={"rotate_key": lambda rope, k, at: k}),
    "rope_turns_backwards": Mistake(
        lambda h: _has_rope(h) and not _has_xpos(h),
        patches={"rotate": lambda rope, x, at, xpos_sign: _rotate(rope, x, -at, xpos_sign)},
    ),
    "xpos_lost": Mistake(_has_xpos, _rope(_without_xpos)),
    "xpos_upside_down": Mistake(
        _has_xpos, patches={"rotate": lambda rope, x, at, xpos_sign: _rotate(rope, x, at, -xpos_sign)}
    ),
    "xpos_on_queries_only": Mistake(
        _has_xpos,
        patches={
            "rotate_key": lambda rope, k, at: _rotate(_without_xpos(rope), k, at, xpos_sign=-1),
        },
    ),
    "rope_scaling_lost": Mistake(_has_scaling, _rope(lambda rope: dataclasses.replace(rope, scaling=None))),
    "rope_scaling_of_the_other_kind": Mistake(
        _has_scaling,
        _rope(_other_scaling),
    ),
}  # fmt: skip

_ATTENTION_MISTAKES = {
    "attention_lost": Mistake(_always, _edit("o", change=lambda h, w: 0 * w)),
    "softmax_scale_lost": Mistake(_always, _form(attn_scale=lambda h: 1.0)),
    "softmax_scale_from_the_width": Mistake(
        lambda h: h.attn_scale is not None, _form(attn_scale=lambda h: None)
    ),
    "attention_soft_cap_lost": Mistake(lambda h: h.attn_softcap, _form(attn_softcap=lambda h: None)),
    "attention_soft_cap_before_the_scale": Mistake(
        lambda h: h.attn_softcap, _form(attn_softcap=lambda h: (h.attn_softcap or 0.0) * h.softmax_scale)
    ),
    "next_key_visible": Mistake(_always, patches={"visible": _sees_one_ahead}),
    "window_lost": Mistake(lambda h: h.windows, _form(windows=lambda h: ())),
    "window_one_larger": Mistake(
        lambda h: h.windows, _form(windows=lambda h: tuple(w and w + 1 for w in h.windows))
    ),
    "window_one_smaller": Mistake(
        lambda h: h.windows, _form(windows=lambda h: tuple(w and max(w - 1, 1) for w in h.windows))
    ),
    "window_of_another_layer": Mistake(
        lambda h: len(set(h.windows)) > 1, _form(windows=lambda h: h.windows[1:] + h.windows[:1])
    ),
    "kv_heads_exchanged": Mistake(
        lambda h: h.kv_heads > 1, _edit("k", "v", change=lambda h, w: np.roll(w, 1, axis=1))
    ),
    "query_heads_dealt_round_robin": Mistake(
        lambda h: 1 < h.kv_heads < h.heads, _interleaved_groups
    ),
    "output_heads_reversed": Mistake(lambda h: h.heads > 1, _edit("o", change=lambda h, w: w[::-1])),
    "k_and_v_exchanged": Mistake(_always, _rename({"k": "v", "v": "k"})),
}  # fmt: skip

_MLP_MISTAKES = {
    "mlp_lost": Mistake(_always, _edit("w2", change=lambda h, w: 0 * w)),
    "gate_and_value_exchanged": Mistake(lambda h: h.act.gated, _rename({"w0": "w1", "w1": "w0"})),
    "swish_of_twice_its_argument": Mistake(
        lambda h: h.act is Activation.SWISH_GATED,
        patches={"nonlinearity": lambda act, y: y * (np.tanh(y) + 1)},
    ),
    # The two differ by 5e-4 at most, so that logits cannot differ by much more.
    "gelu_of_the_other_kind": Mistake(
        lambda h: h.act is not Activation.SWISH_GATED,
        _form(act=lambda h: next(
            a for a in Activation if a is not h.act and "gelu" in a.value and a.gated == h.act.gated
        )),
        floor=5e-5,
    ),
    "block_of_the_other_kind": Mistake(_always, _other_block),
    "first_and_last_layer_exchanged": Mistake(lambda h: h.layers > 1, _exchanged_layers),
    "last_layer_lost": Mistake(
        lambda h: h.layers > 1,
        _form(layers=lambda h: h.layers - 1, windows=lambda h: h.windows[:-1]),
    ),
}  # fmt: skip

_OUTPUT_MISTAKES = {
    "embed_scale_lost": Mistake(lambda h: h.embed_scale != 1, _form(embed_scale=lambda h: 1.0)),
    "logit_scale_lost": Mistake(
        lambda h: h.logits_multiplier != 1, _form(logit_scale=lambda h: 1.0)
    ),
    "logit_scale_of_palm": Mistake(
        lambda h: h.logit_scale is not None, _form(logit_scale=lambda h: None)
    ),
    "logit_soft_cap_lost": Mistake(lambda h: h.logit_softcap, _form(logit_softcap=lambda h: None)),
    "logit_soft_cap_before_the_scale": Mistake(
        lambda h: h.logit_softcap and h.logits_multiplier != 1,
        _form(logit_softcap=lambda h: (h.logit_softcap or 0.0) * h.logits_multiplier),
    ),
    "lm_head_is_the_embedding": Mistake(
        lambda h: not h.tied, lambda h, w: (h, {**w, "lm_head": w["embedding"].T})
    ),
    "lm_head_bias_not_scaled": Mistake(
        lambda h: Bias.LM_HEAD in h.biases and h.logits_multiplier != 1,
        _edit("lm_head_bias", change=lambda h, w: w / np.float32(h.logits_multiplier)),
    ),
}  # fmt: skip


def _bias_lost(bias: Bias) -> Mistake:
    return Mistake(lambda h: bias in h.biases, _form(biases=lambda h: h.biases - {bias}))


MISTAKES: dict[str, Mistake] = {
    **_NORM_MISTAKES,
    **_ROPE_MISTAKES,
    **_ATTENTION_MISTAKES,
    **_MLP_MISTAKES,
    **_OUTPUT_MISTAKES,
    **{f"{bias.value}_bias_lost": _bias_lost(bias) for bias in Bias},
}
