"""The NumPy restatement agrees with what other implementations computed, and obeys a model's laws.

`tests/oracles/*.npz` hold tiny random checkpoints, token ids and logits that three independent programs
made in float32. Their weights are mapped to the neutral names by hand here, so that nothing of the
project but HParams takes part.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from layers.hparams import (
    Activation,
    Bias,
    Block,
    HParams,
    Norm,
    NormPlacement,
    Rope,
    RopePairing,
)  # fmt: skip
from tests import reference_model
from tests.model_forms import FORMS, random_ids, random_weights
from tests.reference_model import reference_logits, rotate_key, rotate_query

ORACLES = Path(__file__).parent / "oracles"
TOLERANCE = 1e-4

Arrays = dict[str, np.ndarray]


class Oracle(NamedTuple):
    hparams: HParams
    weights: Arrays
    ids: np.ndarray
    logits: np.ndarray
    meta: dict[str, Any]


# What the three have in common; the rest is PaLM's.
SIZES = HParams(layers=3, embed=48, ff=192, heads=4, kv_heads=1, qkv=16, vocab=256, logit_scale=1.0)


def _load(name: str) -> tuple[Arrays, np.ndarray, np.ndarray, dict[str, Any]]:
    """Weights without their `w::`, ids, logits and the parsed meta of one file."""
    with np.load(ORACLES / name) as file:
        arrays = dict(file)
    weights = {key.removeprefix("w::"): w for key, w in arrays.items() if key.startswith("w::")}
    return weights, arrays["ids"], arrays["logits"], json.loads(str(arrays["meta"]))


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> Arrays:
    """q, k, v [heads·qkv, embed] and o [embed, heads·qkv], as torch's Linear keeps them."""
    return {
        "q": q.T.reshape(48, 4, 16),
        "k": k.T.reshape(48, 1, 16),
        "v": v.T.reshape(48, 1, 16),
        "o": o.T.reshape(4, 16, 48),
    }


def _palm(name: str, first_layer: int, layer_prefix: str, ends: tuple[str, str, str]) -> Oracle:
    """PaLM-pytorch and PaLM-rlhf-pytorch: one fused input matrix with rows q | k | v | value | gate."""
    source, ids, logits, meta = _load(name)
    embedding, final_norm, ff_out = ends
    weights = {"embedding": source[embedding], "final_norm_gain": source[final_norm]}
    for layer in range(3):
        own = f"{layer_prefix}{first_layer + layer}.fn."
        q, k, v, value, gate = np.split(source[own + "fused_attn_ff_proj.weight"], [64, 80, 96, 288])
        parts = _attention(q, k, v, source[own + "attn_out.weight"])
        parts |= {"w0": gate.T, "w1": value.T, "w2": source[own + ff_out].T}
        parts["norm_gain"] = source[own + "norm.gamma"]
        weights |= {f"layer_{layer}/{key}": w for key, w in parts.items()}
    rope = Rope(xpos_scale_base=512.0 if meta["xpos"] else None)
    hparams = dataclasses.replace(SIZES, norm=Norm.LAYER, norm_eps=meta["eps"], rope=rope)
    return Oracle(hparams, weights, ids, logits, meta)


def _palm_pytorch() -> Oracle:
    return _palm("palm_pytorch_0.2.2.npz", 1, "", ("0.weight", "4.gamma", "ff_out.1.weight"))


def _palm_rlhf() -> Oracle:
    ends = ("token_emb.weight", "norm.gamma", "ff_out.2.weight")
    return _palm("palm_rlhf_0.2.1.npz", 0, "layers.", ends)


def _cohere() -> Oracle:
    source, ids, logits, meta = _load("cohere_rms_mqa_ls1.000.npz")
    weights = {
        "embedding": source["model.embed_tokens.weight"],
        "final_norm_gain": source["model.norm.weight"],
    }
    for layer in range(3):
        own = f"model.layers.{layer}."
        parts = _attention(*(source[f"{own}self_attn.{name}_proj.weight"] for name in "qkvo"))
        for neutral, name in (("w0", "gate"), ("w1", "up"), ("w2", "down")):
            parts[neutral] = source[f"{own}mlp.{name}_proj.weight"].T
        parts["norm_gain"] = source[own + "input_layernorm.weight"]
        weights |= {f"layer_{layer}/{key}": w for key, w in parts.items()}
    hparams = dataclasses.replace(SIZES, rope=Rope(RopePairing.INTERLEAVED), logit_scale=meta["logit_scale"])
    return Oracle(hparams, weights, ids, logits, meta)


def _error(a: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(a - reference)) / np.max(np.abs(reference)))


@pytest.mark.parametrize("oracle", [_palm_pytorch, _palm_rlhf, _cohere])
def test_logits_agree_with_independent_implementations(oracle: Any) -> None:
    hparams, weights, ids, logits, _ = oracle()
    assert _error(reference_logits(hparams, weights, ids), logits) < TOLERANCE


def test_greedy_continuation_agrees_with_the_independent_implementation() -> None:
    hparams, weights, ids, _, meta = _cohere()
    tokens = ids[:1, : meta["prompt_len"]]
    while tokens.shape[1] < len(meta["greedy"]):
        best = reference_logits(hparams, weights, tokens)[:, -1].argmax(-1)
        tokens = np.concatenate([tokens, best[:, None]], axis=1)
    assert tokens[0].tolist() == meta["greedy"]


def _values(field: str) -> set[Any]:
    return {getattr(form, field) for form in FORMS.values()}


def test_forms_cover_every_choice_of_hparams() -> None:
    for field, enum in (
        ("block", Block),
        ("norm", Norm),
        ("norm_placement", NormPlacement),
        ("act", Activation),
    ):
        assert _values(field) == set(enum)
    assert _values("qk_norm") == {None, *Norm}
    assert _values("norm_gain_offset") == {0, 1}
    assert _values("norm_bias") == _values("tied") == {True, False}
    assert frozenset().union(*_values("biases")) == frozenset(Bias)
    for field in ("attn_scale", "attn_softcap", "logit_softcap", "logit_scale", "max_positions", "rope"):
        assert None in _values(field)
        assert len(_values(field)) > 1, field
    ropes = [form.rope for form in FORMS.values() if form.rope is not None]
    for pairing in RopePairing:
        for choice in ("rotary_dims", "xpos_scale_base", "scaling"):
            assert {getattr(rope, choice) is None for rope in ropes if rope.pairing is pairing} == {
                True,
                False,
            }
        kinds = {rope.scaling.kind for rope in ropes if rope.scaling is not None}
        assert kinds == {"linear", "llama3"}
    # Multi-head is one query head to a kv head, multiquery one kv head, grouped-query between.
    assert {(form.heads_per_kv > 1, form.kv_heads > 1) for form in FORMS.values() if form.heads > 1} == {
        (False, True), (True, False), (True, True),
    }  # fmt: skip
    legal = {(b, p) for b in Block for p in NormPlacement} - {(Block.SERIAL, NormPlacement.SHARED)}
    assert {(form.block, form.norm_placement) for form in FORMS.values()} == legal
    assert any(None in form.windows and len(set(form.windows)) > 1 for form in FORMS.values())


@pytest.mark.parametrize("name", FORMS)
def test_later_tokens_and_other_rows_change_nothing(name: str) -> None:
    hparams = FORMS[name]
    weights, ids = random_weights(hparams, seed=1), random_ids(hparams, 2, 10, seed=1)
    logits = reference_logits(hparams, weights, ids)
    other = ids.copy()
    other[0, 6:] = (ids[0, 6:] + 1) % hparams.vocab
    changed = reference_logits(hparams, weights, other)
    np.testing.assert_allclose(changed[0, :6], logits[0, :6], rtol=1e-12)
    np.testing.assert_allclose(changed[1], logits[1], rtol=1e-12)
    assert _error(changed[0, 6:], logits[0, 6:]) > 0.1


@pytest.mark.parametrize("name", FORMS)
def test_unbounded_windows_equal_no_windows(name: str) -> None:
    hparams = FORMS[name]
    weights, ids = random_weights(hparams, seed=2), random_ids(hparams, 1, 9, seed=2)
    wide = dataclasses.replace(hparams, windows=(9,) * hparams.layers)
    none = dataclasses.replace(hparams, windows=())
    np.testing.assert_array_equal(reference_logits(wide, weights, ids), reference_logits(none, weights, ids))


ROPES = {name: form.rope for name, form in FORMS.items() if form.rope is not None}


@pytest.mark.parametrize("name", ROPES)
def test_scores_depend_on_distance_alone(name: str, rng: np.random.Generator) -> None:
    rope, width = ROPES[name], FORMS[name].qkv
    q, k = rng.standard_normal((2, 1, 1, 1, width))

    def score(query_position: int, key_position: int) -> float:
        turned = rotate_query(rope, q, np.array([query_position]))
        return float(np.vdot(turned, rotate_key(rope, k, np.array([key_position]))))

    assert score(7, 3) == pytest.approx(score(107, 103), rel=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_activations_have_their_known_values() -> None:
    # From tables of the logistic function and of the normal distribution at 1.
    expected = {
        Activation.SWISH_GATED: 0.7310585786,
        Activation.GELU_ERF: 0.8413447461,
        Activation.GELU_ERF_GATED: 0.8413447461,
        Activation.GELU_TANH: 0.8411919906,
        Activation.GELU_TANH_GATED: 0.8411919906,
    }
    for act, value in expected.items():
        assert reference_model.nonlinearity(act, np.ones(1))[0] == pytest.approx(value, abs=1e-9)


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    rope = ROPES["llama3"]
    plain = 1000.0 ** (-np.arange(4) / 4)
    # Wavelengths 6.3, 35, 199 and 1117 positions: kept below 64/4, divided above 64/1, between in between.
    turns = 64 * plain[1] / (2 * np.pi)
    share = (turns - 1) / 3
    between = share * plain[1] + (1 - share) * plain[1] / 8
    expected = [plain[0], between, plain[2] / 8, plain[3] / 8]
    np.testing.assert_allclose(reference_model.frequencies(rope, 8), expected, rtol=1e-12)
