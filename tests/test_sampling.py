"""Laws of sampling on one device, against the sort-based twin.

Idea: options are data, so one compiled program draws for every mixture of requests; each law draws many
tokens from it at once, a slot each. Data flow: logits and `Case`s → `draw` → tokens → a law.

Worked example: 4,096 slots with the same logits and seeds 0 to 4,095 give 4,096 draws, whose counts are
compared with the twin's probabilities by a chi-square.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from inference_engine import sampling
from inference_engine.sampling import exponential_noise, sample, slot_keys, top_logprobs
from inference_engine.sampling_state import count_tokens, init_sampling_state, sampling_row, set_slot
from inference_engine.vocab_shard import vocab_shard
from tests.sampling_twin import (
    MIXTURE,
    VOCAB,
    WIDTH,
    adjusted,
    distribution,
    draw,
    draws,
    one_device,
    padded,
    positions_of,
    request,
    state_of,
    tied_logits,
)

MANY = 4096
"""Slots of a statistical test: one program, one shape."""

SURE = 1e-4
"""Least p-value of a chi-square; the seeds are fixed, so a law holds or it does not."""


def test_top_1_is_greedy(rng: np.random.Generator) -> None:
    """Also where the largest logits tie, at any temperature and next to any other option."""
    logits = tied_logits(rng, 64, scale=0.5)
    ties = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1)
    assert (ties > 1).sum() > 10
    options = {"temperature": 3.0, "top_k": 1, "top_p": 0.9, "min_p": 0.1}
    tokens, _ = draw(logits, [request(seed=i, **options) for i in range(64)])
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(tokens, draw(logits, [request()] * 64)[0])


def test_the_two_zeros_tie(rng: np.random.Generator) -> None:
    logits = np.full((64, VOCAB), -1.0, np.float32)
    logits[:, 9], logits[:, 30] = -0.0, 0.0
    for options in ({}, {"temperature": 1.0, "top_k": 1}):
        assert set(draw(logits, [request(**options)] * 64)[0]) == {9}


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a_vanishing_temperature_is_greedy_and_finite(temperature: float, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 100, (64, VOCAB)).astype(np.float32)
    tokens, logprobs = draw(logits, [request(temperature=temperature, seed=i) for i in range(64)])
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    assert np.isfinite(logprobs).all()


FITTED = {
    "temperature": {"temperature": 0.7},
    "high temperature": {"temperature": 50.0},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_k off": {"temperature": 1.0, "top_k": -1},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "all three": {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0, "prompt": (1, 2), "output": (3, 3, 5), "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.7,
    },
    "bias": {"temperature": 1.0, "logit_bias": {7: 2.0, 0: -math.inf, 9: -1.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", FITTED)
def test_empirical_frequencies_fit_the_distribution(name: str, rng: np.random.Generator) -> None:
    case, logits = request(**FITTED[name]), tied_logits(rng, 1)[0]
    expected = distribution(logits, case) * MANY
    counts = np.bincount(draws(logits, case, MANY), minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token was drawn that the options exclude"
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert scipy.stats.chi2.sf(statistic, len(wanted) - 1) > SURE


def test_top_p_comes_after_temperature() -> None:
    """0.6 of [0.64, 0.16, …] is one token; at temperature 2 the same needs more."""
    logits = np.log(np.array([0.64, 0.16] + [0.2 / (VOCAB - 2)] * (VOCAB - 2), np.float32))
    assert set(draws(logits, request(temperature=1.0, top_p=0.6), MANY)) == {0}
    assert set(draws(logits, request(temperature=2.0, top_p=0.6), MANY)) > {0, 1}
    assert set(draws(logits, request(temperature=2.0, top_p=0.15), MANY)) == {0}


def test_top_k_minus_1_is_off_and_not_greedy(rng: np.random.Generator) -> None:
    logits = np.zeros(VOCAB, np.float32)
    assert set(draws(logits, request(temperature=1.0), MANY)) == set(range(VOCAB))


def test_each_option_of_a_mixture_keeps_to_its_own_request(rng: np.random.Generator) -> None:
    """Every token drawn in mixed company is one that the twin allows that request."""
    for seed in range(20):
        logits = tied_logits(np.random.default_rng(seed), len(MIXTURE))
        tokens, _ = draw(logits, MIXTURE)
        for row, case, token in zip(logits, MIXTURE, tokens, strict=True):
            assert distribution(row, case)[token] > 0


def test_penalties_and_bias_shift_exactly_the_tokens_they_name(rng: np.random.Generator) -> None:
    """Arg-maxes under a constant bias search out each adjusted logit: it is the twin's to float32."""
    case = request((1, 2), (3, 3, 5), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25,
                   logit_bias={2: 0.5, 40: -1.0})  # fmt: skip
    logits = tied_logits(rng, 1)
    shard = vocab_shard(VOCAB, WIDTH)
    values = sampling._penalised(padded(logits), state_of([case]), jnp.ones(1, jnp.bool_), shard)
    shifted = np.asarray(values)[0, :VOCAB] - logits[0]
    np.testing.assert_allclose(shifted, adjusted(logits[0], case) - logits[0], atol=1e-6)
    assert set(np.nonzero(shifted)[0]) == {1, 2, 3, 5, 40}


def test_an_option_that_no_slot_uses_is_not_computed(rng: np.random.Generator) -> None:
    """Biases of slots without one, NaN here, are never looked at."""
    cases = [request()] * len(MIXTURE)
    state = state_of(cases)
    state = state.replace(logit_bias=jnp.full_like(state.logit_bias, jnp.nan))
    logits, active = tied_logits(rng, len(cases)), jnp.ones(len(cases), jnp.bool_)
    result = one_device()(padded(logits), state, positions_of(cases), active)
    np.testing.assert_array_equal(result.tokens, logits.argmax(axis=1))


def test_a_prompts_token_is_repeated_but_not_present_in_the_output() -> None:
    """Presence and frequency see the output alone, repetition both."""
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 5], logits[:, 6] = 2.0, 1.9
    output_only = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    cases = [
        request(prompt=(5,), **output_only),
        request(output=(5,), **output_only),
        request(prompt=(5,), repetition_penalty=1.5),
    ]
    assert draw(logits, cases)[0].tolist() == [5, 6, 6]


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty() -> None:
    logits = np.full((1, VOCAB), -9.0, np.float32)
    logits[0, 5], logits[0, 6] = -1.0, -1.5
    assert draw(logits, [request(prompt=(5,), repetition_penalty=2.0)])[0].tolist() == [6]
    assert draw(logits, [request(prompt=(5,), repetition_penalty=1.2)])[0].tolist() == [5]


def test_a_banned_token_is_never_drawn_and_the_rest_keeps_its_shape() -> None:
    logits = np.zeros(VOCAB, np.float32)
    banned = dict.fromkeys(range(0, VOCAB, 2), -math.inf)
    assert set(draws(logits, request(temperature=1.0, logit_bias=banned), MANY)) == set(range(1, VOCAB, 2))


def test_n_samples_of_one_seed_differ(rng: np.random.Generator) -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    tokens, _ = draw(logits, [request(temperature=1.0, seed=5, sample_index=i) for i in range(64)])
    assert len(set(tokens)) > 20


@pytest.mark.parametrize(
    "vary",
    [
        lambda i: {"seed": i},
        lambda i: {"seed": i << 32},
        lambda i: {"position": i},
        lambda i: {"sample_index": i},
    ],
    ids=["low word", "high word", "position", "sample"],
)
def test_everything_that_identifies_a_draw_changes_it(vary: Callable[[int], dict[str, int]]) -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    tokens, _ = draw(logits, [request(temperature=1.0, **vary(i)) for i in range(64)])
    assert len(set(tokens)) > 20


def test_seed_words_position_and_sample_do_not_stand_in_for_each_other() -> None:
    """Draws that would be equal if two of the four were added up, or exchanged."""
    cases = [
        {"seed": 1}, {"seed": 1 << 32}, {"sample_index": 1}, {"position": 1},
        {"seed": 2}, {"seed": 1, "position": 1}, {"seed": 1, "sample_index": 1},
        {"position": 1, "sample_index": 1},
    ]  # fmt: skip
    state = state_of([request(temperature=1.0, **c) for c in cases])
    positions = positions_of([request(temperature=1.0, **c) for c in cases])
    words = np.asarray(jax.random.key_data(slot_keys(state, positions)))
    assert len({tuple(word) for word in words}) == len(cases)


def test_a_token_ignores_its_slot_and_the_other_slots(rng: np.random.Generator) -> None:
    """The same request among others, in every slot, beside idle ones: the same token and log-prob."""
    slots = len(MIXTURE)
    logits = tied_logits(rng, slots)
    tokens, logprobs = draw(logits, MIXTURE)
    for shift in range(1, slots):
        order = np.roll(np.arange(slots), shift)
        moved, moved_logprobs = draw(logits[order], [MIXTURE[i] for i in order])
        np.testing.assert_array_equal(moved, tokens[order])
        np.testing.assert_array_equal(moved_logprobs, logprobs[order])
    for slot in range(slots):
        alone = jnp.arange(slots) == slot
        result = one_device()(padded(logits), state_of(MIXTURE), positions_of(MIXTURE), alone)
        assert int(result.tokens[slot]) == tokens[slot]


def test_a_slot_that_is_not_in_use_gets_the_argmax(rng: np.random.Generator) -> None:
    logits = tied_logits(rng, len(MIXTURE))
    idle = jnp.zeros(len(MIXTURE), jnp.bool_)
    result = one_device()(padded(logits), state_of(MIXTURE), positions_of(MIXTURE), idle)
    np.testing.assert_array_equal(result.tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unusable_logits_give_no_token_and_harm_no_other_slot(bad: float, rng: np.random.Generator) -> None:
    """A NaN or +inf anywhere, or nothing but −inf, is −1 in that slot; the rest draws as ever."""
    logits = tied_logits(rng, len(MIXTURE))
    whole, _ = draw(logits, MIXTURE)
    for slot in range(len(MIXTURE)):
        spoilt = logits.copy()
        spoilt[slot, slice(None) if bad == -math.inf else 3] = bad
        tokens, logprobs = draw(spoilt, MIXTURE)
        assert tokens[slot] == sampling.NO_TOKEN
        assert math.isnan(logprobs[slot])
        others = np.arange(len(MIXTURE)) != slot
        np.testing.assert_array_equal(tokens[others], whole[others])
        assert np.isfinite(logprobs[others]).all()


def test_a_ban_of_every_token_gives_no_token() -> None:
    state = state_of([request()])
    state = state.replace(logit_bias=jnp.full((1, WIDTH), -jnp.inf), biased=jnp.ones(1, jnp.bool_))
    result = one_device()(
        padded(np.zeros((1, VOCAB))), state, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.bool_)
    )
    assert int(result.tokens[0]) == sampling.NO_TOKEN


def test_logprobs_are_the_models_own(rng: np.random.Generator) -> None:
    """Whatever temperature, penalties, bias and cuts did to the draw."""
    cases = [*MIXTURE[1:], request(logit_bias={7: 30.0})]
    logits = tied_logits(rng, len(cases))
    tokens, logprobs = draw(logits, cases)
    assert tokens[-1] == 7
    exact = scipy.special.log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(cases)), tokens]
    np.testing.assert_allclose(logprobs, exact, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 5, VOCAB])
def test_top_logprobs_are_the_most_likely_with_ties_by_id(n: int, rng: np.random.Generator) -> None:
    logits = tied_logits(rng, 4)
    values, ids = top_logprobs(padded(logits), vocab_shard(VOCAB, WIDTH), n)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(ids, order)
    exact = np.take_along_axis(scipy.special.log_softmax(logits, axis=1), order, axis=1)
    np.testing.assert_allclose(values, exact, atol=1e-5)


def test_looking_at_candidates_first_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cut is among the candidates, at their edge, or beyond them."""
    candidates = 8
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    shard = vocab_shard(VOCAB, WIDTH)
    step = jax.jit(lambda *args: sample(*args, shard))
    options = [
        {"top_k": 1}, {"top_k": candidates}, {"top_k": candidates + 1}, {"top_k": 40, "top_p": 0.7},
        {"top_p": 0.3}, {"top_p": 0.99}, {"min_p": 0.5}, {"min_p": 0.01}, {"top_k": candidates, "top_p": 0.5},
    ]  # fmt: skip
    for seed in range(3):
        for option in options:
            cases = [request(temperature=1.5, seed=seed * 8 + i, **option) for i in range(7)] + [request()]
            logits = tied_logits(np.random.default_rng(seed), 8, scale=1.0)
            tokens, _ = draw(logits, cases)
            result = step(padded(logits), state_of(cases), positions_of(cases), jnp.ones(8, jnp.bool_))
            np.testing.assert_array_equal(result.tokens, tokens, err_msg=str(option))


def test_the_noise_is_exponential_and_fine_near_zero() -> None:
    """By Kolmogorov and Smirnov, in the bulk and among the smallest, which are those that win."""
    keys = slot_keys(state_of([request(seed=3)]), jnp.zeros(1, jnp.int32))
    noise = np.asarray(jax.jit(exponential_noise)(keys, jnp.arange(2**18).reshape(1, -1)))[0]
    assert (noise > 0).all()
    assert np.isfinite(noise).all()
    assert scipy.stats.kstest(noise, "expon").pvalue > SURE
    smallest = np.sort(noise)[:2000]
    assert len(set(smallest)) == len(smallest)
    assert scipy.stats.kstest(smallest / smallest.max(), "uniform").pvalue > SURE


def test_noise_belongs_to_a_token_id_and_not_to_a_column() -> None:
    keys = slot_keys(state_of([request(seed=3)]), jnp.zeros(1, jnp.int32))
    whole = np.asarray(exponential_noise(keys, jnp.arange(40).reshape(1, -1)))
    part = np.asarray(exponential_noise(keys, jnp.array([[33, 7]])))
    np.testing.assert_array_equal(part, whole[:, [33, 7]])


def test_a_set_slot_equals_the_row_and_leaves_the_others_alone() -> None:
    state = init_sampling_state(3, WIDTH)
    cases = [MIXTURE[6], request(), MIXTURE[5]]
    setter = jax.jit(set_slot)
    for slot, case in ((0, cases[0]), (2, cases[2])):
        row = sampling_row(case.params, case.prompt, WIDTH, case.sample_index, case.output)
        state = setter(state, jnp.int32(slot), row)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(cases))
    elsewhere = sampling_row(request(temperature=9.0).params, (), WIDTH)
    for missing in (-1, 3):  # what a chip that does not hold the slot gets
        jax.tree.map(np.testing.assert_array_equal, setter(state, jnp.int32(missing), elsewhere), state)


def test_counting_tokens_resumes_where_a_row_with_its_output_starts() -> None:
    """Counts grown step by step are those of a row made with the same output."""
    output = (3, 3, 46, 0)
    params = request(presence_penalty=1.0).params
    state, shard = state_of([request(), request()]), vocab_shard(VOCAB, WIDTH)
    for token in output:
        tokens = jnp.array([token, token], jnp.int32)
        state = count_tokens(state, tokens, jnp.array([True, False]), shard)
    state = count_tokens(state, jnp.array([-1, -1], jnp.int32), jnp.array([True, True]), shard)
    resumed = sampling_row(params, (), WIDTH, output_ids=output)
    np.testing.assert_array_equal(state.output_counts[0], resumed.output_counts)
    assert not state.output_counts[1].any()


def test_sampling_compiles_once_for_every_mixture_of_requests(
    compilations: Callable[..., object], rng: np.random.Generator
) -> None:
    logits = tied_logits(rng, len(MIXTURE))
    draw(logits, MIXTURE)
    with compilations() as counter:
        draw(logits, [request()] * len(MIXTURE))
        draw(logits, MIXTURE[::-1])
    assert counter.count == 0
