"""Laws of `SamplingParams`: a value is applied exactly as written or refused in one helpful line.

Idea: one table of values that each field refuses with the value that the message proposes, one of values at
the edges that it takes. Data flow: keyword → `SamplingParams` → the value itself, or `UserError`.

Worked example: top_k=0 is refused with "nearest: -1", and -1 is taken.
"""

import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.sampling_params import MAX_BIAS, MAX_LOGPROBS, SamplingParams
from layers.errors import UserError

NAN, INF = math.nan, math.inf
NUMERIC = [
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "num_samples", "max_new_tokens", "logprobs",
]  # fmt: skip
INTEGERS = ["top_k", "seed", "num_samples", "max_new_tokens", "logprobs"]

# (field, refused value, what the message proposes)
REFUSED = [
    ("temperature", -1, "0.0"), ("temperature", 1e-9, "0.0"), ("temperature", 9e-7, "1e-06"),
    ("temperature", INF, "1000000.0"), ("temperature", -INF, "0.0"), ("temperature", "0.7", "0.0"),
    ("top_k", 0, "-1"), ("top_k", -5, "-1"), ("top_k", 2**31, "2147483647"), ("top_k", 5.0, "5"),
    ("top_k", 2.5, "2"), ("top_k", -INF, "-1"), ("top_k", INF, "2147483647"),
    ("top_p", 0, "1e-06"), ("top_p", -0.5, "1e-06"), ("top_p", 3, "1.0"), ("top_p", INF, "1.0"),
    ("min_p", -0.1, "0.0"), ("min_p", 1.5, "1.0"),
    ("repetition_penalty", 0, "0.0001"), ("repetition_penalty", -1, "0.0001"),
    ("repetition_penalty", 1e9, "10000.0"),
    ("presence_penalty", 2.1, "2.0"), ("presence_penalty", -3, "-2.0"),
    ("frequency_penalty", 2.1, "2.0"), ("frequency_penalty", -INF, "-2.0"),
    ("seed", -1, "0"), ("seed", 2**64, str(2**64 - 1)), ("seed", 1.0, "1"), ("seed", None, "0"),
    ("num_samples", 0, "1"), ("max_new_tokens", 0, "1"), ("max_new_tokens", None, "128"),
    ("logprobs", -1, "0"), ("logprobs", MAX_LOGPROBS + 1, str(MAX_LOGPROBS)),
    ("logit_bias", [1, 2], "{}"), ("logit_bias", {-1: 1.0}, "0"), ("logit_bias", {"5": 1.0}, "0"),
    ("logit_bias", {5: NAN}, "0.0"), ("logit_bias", {5: INF}, "10000.0"),
    ("logit_bias", {5: -2e4}, "-10000.0"), ("logit_bias", {5: True}, "0.0"), ("logit_bias", {True: 1.0}, "0"),
    ("stop_ids", 5, "[5]"), ("stop_ids", [-2], "0"), ("stop_ids", [1.0], "1"), ("stop_ids", [1, True], "0"),
    ("stop_strings", "END", "['END']"), ("stop_strings", [""], "no such entry"),
    ("stop_strings", [b"x"], "no such entry"), ("stop_strings", ["\ud800"], "no such entry"),
]  # fmt: skip

TAKEN = [
    ("temperature", 0), ("temperature", 1e-6), ("temperature", 1e6), ("top_k", -1), ("top_k", 1),
    ("top_k", 2**31 - 1), ("top_p", 1e-9), ("top_p", 1), ("min_p", 0), ("min_p", 1),
    ("repetition_penalty", 1e-4), ("presence_penalty", -2), ("frequency_penalty", 2), ("seed", 0),
    ("seed", 2**64 - 1), ("max_new_tokens", 1), ("logprobs", 0), ("logprobs", MAX_LOGPROBS),
    ("logprobs", None), ("stop_ids", (0, 7)), ("stop_strings", ("\n\n",)),
    ("logit_bias", {3: -INF, 4: MAX_BIAS}),
]  # fmt: skip


def refusal(**fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize(("name", "value", "nearest"), REFUSED)
def test_a_value_out_of_range_is_refused_with_the_nearest_legal_one(
    name: str, value: object, nearest: str
) -> None:
    message = refusal(**{name: value})
    assert message.startswith(name)
    assert "is not allowed; allowed: " in message
    assert message.endswith(f"; nearest: {nearest}")
    assert "\n" not in message


@pytest.mark.parametrize(("name", "value"), TAKEN)
def test_a_legal_value_is_kept_as_written(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize(
    "value", [NAN, True, False, "1", [1], 1j, b"1", object(), np.bool_(True), Fraction(1)]
)
def test_what_is_not_a_number_is_refused(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    "value",
    ["a\nb", "x" * 500, 10**5000, -(10**5000), ["long"] * 99],
    ids=["lines", "text", "huge", "huge negative", "list"],
)
def test_a_message_is_one_short_line_whatever_was_given(value: object) -> None:
    message = refusal(top_p=value)
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("name", sorted(set(NUMERIC) - {"temperature", "num_samples", "logprobs"}))
def test_what_a_message_proposes_is_legal(name: str) -> None:
    """Every proposal of the table, given back to the field that refused, is taken."""
    kind = int if name in INTEGERS else float
    for field, _, nearest in REFUSED:
        if field == name:
            assert getattr(SamplingParams(**{name: kind(nearest)}), name) == kind(nearest)


def test_the_defaults_are_greedy_and_everything_else_is_off() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (-1, 1.0, 0.0, 1.0)
    assert params.logprobs is None


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(1): np.float64(2)}
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert [(type(k), type(v)) for k, v in params.logit_bias.items()] == [(int, float)]


def test_several_greedy_samples_are_refused_because_they_would_be_equal() -> None:
    assert refusal(num_samples=2).endswith("; nearest: 1")
    assert SamplingParams(num_samples=2, temperature=0.1).num_samples == 2


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_params_do_not_follow_the_callers_containers() -> None:
    bias, stops = {1: 1.0}, [4]
    params = SamplingParams(logit_bias=bias, stop_ids=stops)  # type: ignore[arg-type]
    bias[2], stops[0] = 2.0, 5
    assert params.logit_bias == {1: 1.0}
    assert params.stop_ids == (4,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]


def test_params_survive_copying_pickling_and_hashing() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop_strings=("x",))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=1).logit_bias == {1: 2.0}
    assert dataclasses.asdict(params)["logit_bias"] == {1: 2.0}
    assert len({params, dataclasses.replace(params)}) == 1


@given(st.integers(0, 2**64 - 1))
def test_the_seed_words_hold_all_64_bits(seed: int) -> None:
    low, high = SamplingParams(seed=seed).seed_words
    assert low < 2**32
    assert high < 2**32
    assert high * 2**32 + low == seed


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"top_k": 257}, "256"),
        ({"logit_bias": {256: 1.0}}, "255"),
        ({"stop_ids": (3, 256)}, "255"),
        ({"logit_bias": dict.fromkeys(range(256), -INF)}, "one less"),
    ],
)
def test_what_the_vocabulary_does_not_hold_is_refused(fields: dict[str, Any], nearest: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(UserError, match=f"256.*; nearest: {nearest}$"):
        params.validate_for(256)
    if "one less" not in nearest:
        params.validate_for(257)


def test_no_more_alternatives_than_tokens_can_be_asked_for() -> None:
    SamplingParams(logprobs=8, top_k=8).validate_for(8)
    with pytest.raises(UserError, match=r"logprobs=9 .*nearest: 8"):
        SamplingParams(logprobs=9).validate_for(8)


@given(
    name=st.sampled_from(NUMERIC),
    value=st.one_of(st.floats(), st.integers(), st.text(max_size=5), st.booleans(), st.none()),
)
def test_any_value_is_either_kept_or_refused(name: str, value: object) -> None:
    fields = {"temperature": 1.0, name: value}
    try:
        params = SamplingParams(**fields)
    except UserError:
        return
    assert getattr(params, name) == value
    assert not isinstance(value, bool)


def test_sampling_params_need_no_jax() -> None:
    code = "import sys, inference_engine.sampling_params; sys.exit(bool({'jax', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
