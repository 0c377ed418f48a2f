"""The neutral state: its keys and shapes, what is refused, lazy views, and int8 kernels on the host.

Idea: a state is drawn for each model form and then spoiled in one place; the message must name the place.
Views are compared with NumPy on random rectangles, and a recording array says what they really read.

Data flow: `FORMS` → random weights → `validate_state`, `quantize_state`, views.

Worked example: a `layer_0/q` of [48, 4, 15] where [48, 4, 16] belongs is refused with both shapes.
"""

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from checkpoints.int8 import QMAX, dequantize, quantize_state, shared_output_scale
from checkpoints.lazy import Box, LazyArray, merged, repeated, sliced, split_dim, transposed
from checkpoints.state import (
    CheckpointState,
    Entry,
    QuantizedTensor,
    state_spec,
    state_tensors,
    validate_state,
)
from layers.errors import UserError
from tests.model_forms import FORMS, random_weights

PALM = FORMS["palm"]
GPTJ = FORMS["gptj"]


def make_state(name: str = "palm") -> CheckpointState:
    return CheckpointState(FORMS[name], random_weights(FORMS[name], seed=0))


def with_entries(state: CheckpointState, **entries: Entry) -> CheckpointState:
    """The state with some entries replaced; `layer_0__q` stands for `layer_0/q`."""
    replaced = {key.replace("__", "/"): entry for key, entry in entries.items()}
    return dataclasses.replace(state, weights=dict(state.weights) | replaced)


@pytest.mark.parametrize("name", FORMS)
def test_the_spec_counts_every_parameter(name: str) -> None:
    total = sum(math.prod(shape) for shape in state_spec(FORMS[name]).values())
    assert total == FORMS[name].param_count


@pytest.mark.parametrize("name", FORMS)
def test_a_whole_state_is_accepted_in_float_and_int8(name: str) -> None:
    state = make_state(name)
    validate_state(state, "here")
    validate_state(quantize_state(state), "here")


def test_the_spec_of_one_model_in_full() -> None:
    hparams = dataclasses.replace(GPTJ, layers=1)
    assert state_spec(hparams) == {
        "embedding": (72, 48),
        "lm_head": (48, 72),
        "lm_head_bias": (72,),
        "final_norm_gain": (48,),
        "final_norm_bias": (48,),
        "layer_0/q": (48, 4, 16),
        "layer_0/k": (48, 4, 16),
        "layer_0/v": (48, 4, 16),
        "layer_0/o": (4, 16, 48),
        "layer_0/w0": (48, 96),
        "layer_0/w2": (96, 48),
        "layer_0/norm_gain": (48,),
        "layer_0/norm_bias": (48,),
        "layer_0/w0_bias": (96,),
        "layer_0/w2_bias": (48,),
    }


def without(key: str) -> Callable[[CheckpointState], CheckpointState]:
    return lambda state: dataclasses.replace(
        state, weights={k: w for k, w in state.weights.items() if k != key}
    )


def replacing(key: str, entry: Entry) -> Callable[[CheckpointState], CheckpointState]:
    return lambda state: dataclasses.replace(state, weights=dict(state.weights) | {key: entry})


INT8_Q = QuantizedTensor(np.zeros((48, 4, 16), np.int8), np.ones((4, 16), np.float32))
SPOILED = {
    "missing": (without("layer_1/w2"), "here: missing layer_1/w2 [96, 48]"),
    "missing many": (
        lambda s: CheckpointState(s.hparams, {}),
        "here: missing embedding [72, 48] (and 25 more)",
    ),
    "extra": (replacing("layer_3/q", np.ones((48, 4, 16))), "here: unexpected layer_3/q [48, 4, 16];"),
    "untied": (replacing("lm_head", np.ones((48, 72))), "here: unexpected lm_head [48, 72];"),
    "shape": (
        replacing("layer_0/q", np.ones((48, 4, 15), np.float32)),
        "here: layer_0/q has shape [48, 4, 15], expected [48, 4, 16]",
    ),
    "rank": (
        replacing("layer_0/q", np.ones((48, 64), np.float32)),
        "here: layer_0/q has shape [48, 64], expected [48, 4, 16]",
    ),
    "dtype": (
        replacing("layer_2/k", np.ones((48, 1, 16), np.int32)),
        "here: layer_2/k has dtype int32, expected float32 or bfloat16 or float16 or float64",
    ),
    "one int8 kernel": (replacing("layer_0/q", INT8_Q), "here: layer_0/k is float32 beside int8 kernels"),
    "int8 embedding": (
        lambda s: replacing(
            "embedding", QuantizedTensor(np.zeros((72, 48), np.int8), np.ones((72,), np.float32))
        )(quantize_state(s)),
        "here: embedding is int8, expected a float dtype; only kernels are quantized",
    ),
    "int8 scale's shape": (
        lambda s: replacing("layer_1/q", QuantizedTensor(INT8_Q.qvalue, np.ones((64,), np.float32)))(
            quantize_state(s)
        ),
        "here: layer_1/q (scale) has shape [64], expected [4, 16]",
    ),
    "int8 value's dtype": (
        lambda s: replacing("layer_1/q", QuantizedTensor(np.zeros((48, 4, 16), np.uint8), INT8_Q.scale))(
            quantize_state(s)
        ),
        "here: layer_1/q (int8 value) has dtype uint8, expected int8",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_state_is_refused_by_key(
    spoil: Callable[[CheckpointState], CheckpointState], message: str
) -> None:
    with pytest.raises(UserError) as error:
        validate_state(spoil(make_state()), "here")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_validation_reads_no_element() -> None:
    def refuse(box: Box) -> np.ndarray:
        raise AssertionError(f"read {box}")

    spec = state_spec(PALM)
    lazy = {key: LazyArray(shape, np.dtype(np.float32), refuse) for key, shape in spec.items()}
    state = CheckpointState(PALM, lazy)
    validate_state(state, "here")
    validate_state(quantize_state(state), "here")


def recording(array: np.ndarray, read: list[int]) -> LazyArray:
    """An array that notes how many elements each read takes."""

    def fetch(box: Box) -> np.ndarray:
        read.append(array[box].size)
        return array[box]

    return LazyArray(array.shape, array.dtype, fetch)


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    starts = [int(rng.integers(0, size)) for size in shape]
    return tuple(
        slice(start, int(rng.integers(start, size + 1))) for start, size in zip(starts, shape, strict=True)
    )


def test_lazy_views_equal_numpy_on_every_rectangle(rng: np.random.Generator) -> None:
    base = rng.normal(size=(30, 8))
    view = transposed(split_dim(sliced(base, 0, 3, 27), 0, (2, 3, 4)), (3, 1, 0, 2))
    expected = base[3:27].reshape(2, 3, 4, 8).transpose(3, 1, 0, 2)
    assert view.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(view), expected)
    for _ in range(100):
        box = random_box(rng, view.shape)
        np.testing.assert_array_equal(view[box], expected[box])


def test_merged_and_repeated_views_equal_numpy_on_every_rectangle(rng: np.random.Generator) -> None:
    base = rng.normal(size=(5, 3, 4, 6))
    views = {
        "merged": (merged(base, 1), base.reshape(5, 12, 6)),
        "first": (merged(base, 0), base.reshape(15, 4, 6)),
        "repeated": (repeated(base[0, 0], 7), np.broadcast_to(base[0, 0], (7, 4, 6))),
    }
    for name, (view, expected) in views.items():
        np.testing.assert_array_equal(np.asarray(view), expected, err_msg=name)
        for _ in range(100):
            box = random_box(rng, view.shape)
            np.testing.assert_array_equal(view[box], expected[box], err_msg=f"{name} {box}")
    with pytest.raises(IndexError):
        merged(base, 3)


def test_a_merged_view_reads_only_the_rows_asked_for(rng: np.random.Generator) -> None:
    read: list[int] = []
    view = merged(recording(rng.normal(size=(8, 4, 6)), read), 0)
    assert view[5:7].shape == (2, 6)
    assert read == [4 * 6]


@pytest.mark.parametrize(
    "index", [np.s_[2], np.s_[-1, ..., 1], np.s_[..., 2:], np.s_[:, None:2], np.s_[1:1], np.s_[4:99]]
)
def test_lazy_arrays_index_as_numpy_does(index: object, rng: np.random.Generator) -> None:
    base = rng.normal(size=(5, 3, 4))
    np.testing.assert_array_equal(recording(base, [])[index], base[index])


@pytest.mark.parametrize("index", [np.s_[5], np.s_[::2], np.s_[0, 0, 0, 0], [0, 1], None, np.s_[-6]])
def test_lazy_arrays_refuse_other_indices(index: object) -> None:
    with pytest.raises(IndexError):
        recording(np.zeros((5, 3, 4)), [])[index]


def test_a_view_reads_only_the_rows_asked_for(rng: np.random.Generator) -> None:
    read: list[int] = []
    proj = recording(rng.normal(size=(96, 48)), read)
    q = transposed(split_dim(sliced(proj, 0, 0, 64), 0, (4, 16)), (2, 0, 1))
    assert q[:, 1:2, :].shape == (48, 1, 16)
    assert q[:24, 1:3, :].shape == (24, 2, 16)
    assert read == [16 * 48, 32 * 24]


def test_a_source_that_returns_another_shape_is_noticed() -> None:
    liar = LazyArray((4, 4), np.dtype(np.float32), lambda box: np.zeros((1, 4), np.float32))
    with pytest.raises(IndexError, match=r"expected \(2, 4\) elements from the source, found \(1, 4\)"):
        liar[:2]


@pytest.mark.parametrize("name", ["palm", "gptj", "gemma2"])
def test_int8_errs_by_at_most_half_a_step(name: str) -> None:
    state = make_state(name)
    quantized = quantize_state(state)
    for key, spec in state_tensors(state.hparams).items():
        entry = quantized.weights[key]
        if not spec.contracted:
            assert entry is state.weights[key]
            continue
        assert isinstance(entry, QuantizedTensor)
        scale = np.asarray(entry.scale)
        error = np.abs(np.asarray(dequantize(entry)) - state.weights[key])
        assert np.all(error <= 0.5001 * scale)
        assert np.max(np.abs(np.asarray(entry.qvalue).astype(int))) == QMAX


def test_int8_scales_are_the_largest_magnitude_of_each_output() -> None:
    state = make_state("gemma2")
    quantized = quantize_state(state)
    for key, axes in {"layer_0/q": (0,), "layer_1/o": (0, 1), "layer_0/w0": (0,), "layer_2/w2": (0,)}.items():
        expected = np.max(np.abs(state.weights[key]), axis=axes) / np.float32(127)
        np.testing.assert_array_equal(np.asarray(quantized.weights[key].scale), expected)


def test_one_matmul_for_o_and_w2_has_one_scale() -> None:
    state = make_state("palm")
    scale = np.asarray(shared_output_scale(quantize_state(state).weights, 1))
    o, w2 = np.abs(state.weights["layer_1/o"]), np.abs(state.weights["layer_1/w2"])
    np.testing.assert_array_equal(scale, np.maximum(o.max((0, 1)), w2.max(0)) / np.float32(127))


def test_different_output_scales_are_refused_where_one_is_needed() -> None:
    weights = dict(quantize_state(make_state("palm")).weights)
    o = weights["layer_1/o"]
    weights["layer_1/o"] = QuantizedTensor(o.qvalue, 2 * np.asarray(o.scale))
    with pytest.raises(UserError, match="layer_1/o and layer_1/w2 have different int8 scales"):
        shared_output_scale(weights, 1)
    weights["layer_1/o"] = QuantizedTensor(o.qvalue, np.asarray(o.scale).copy())
    shared_output_scale(weights, 1)


def test_a_column_of_zeros_has_scale_one() -> None:
    state = make_state()
    w0 = state.weights["layer_0/w0"].copy()
    w0[:, 7] = 0
    entry = quantize_state(with_entries(state, layer_0__w0=w0)).weights["layer_0/w0"]
    assert np.asarray(entry.scale)[7] == 1
    assert not np.any(np.asarray(entry.qvalue)[:, 7])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_key(value: float) -> None:
    state = make_state()
    w2 = state.weights["layer_2/w2"].copy()
    w2[5, 5] = value
    entry = quantize_state(with_entries(state, layer_2__w2=w2)).weights["layer_2/w2"]
    with pytest.raises(UserError, match="layer_2/w2 has values that are not finite"):
        np.asarray(entry.qvalue)


def test_rectangles_of_int8_kernels_equal_the_whole(rng: np.random.Generator) -> None:
    quantized = quantize_state(make_state())
    for key in ("layer_0/q", "layer_0/o", "layer_0/w1"):
        entry = quantized.weights[key]
        whole, values = np.asarray(entry.qvalue), np.asarray(dequantize(entry))
        for _ in range(20):
            box = random_box(rng, entry.shape)
            np.testing.assert_array_equal(entry.qvalue[box], whole[box])
            np.testing.assert_array_equal(dequantize(entry)[box], values[box])


def test_quantizing_in_blocks_of_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.asarray(quantize_state(make_state()).weights["layer_0/o"].qvalue)
    monkeypatch.setattr("checkpoints.int8._BLOCK_ELEMENTS", 1)
    blocks = np.asarray(quantize_state(make_state()).weights["layer_0/o"].qvalue)
    np.testing.assert_array_equal(whole, blocks)


def test_quantizing_twice_changes_nothing() -> None:
    once = quantize_state(make_state())
    assert quantize_state(once) is once
    assert once.quantized
    assert not make_state().quantized


def test_bfloat16_weights_are_quantized_from_their_own_values() -> None:
    state = make_state()
    rounded = {key: w.astype(ml_dtypes.bfloat16) for key, w in state.weights.items()}
    widened = {key: w.astype(np.float32) for key, w in rounded.items()}
    a = quantize_state(CheckpointState(PALM, rounded)).weights["layer_0/w0"]
    b = quantize_state(CheckpointState(PALM, widened)).weights["layer_0/w0"]
    np.testing.assert_array_equal(np.asarray(a.qvalue), np.asarray(b.qvalue))
    np.testing.assert_array_equal(np.asarray(a.scale), np.asarray(b.scale))
