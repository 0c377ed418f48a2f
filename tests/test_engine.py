"""Laws of the engine: what a request returns depends on it alone; nothing compiles; nothing is copied."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from inference_engine.config import EngineConfig
from inference_engine.generate import Generator, TextPiece
from inference_engine.request import Completion, FinishReason
from inference_engine.tokenizer import ByteTokenizer
from layers.errors import UserError
from tests.engines import CONFIG, SMALL, alone, complete, engine, request

SAMPLED = {"temperature": 1.0, "seed": 7}


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_generation_ignores_batch_packing(settings: dict) -> None:
    requests = [request(seed, length, **settings) for seed, length in enumerate((1, 9, 8, 20, 3))]
    together = complete(requests)
    for index, one in enumerate(requests):
        assert together[index, 0].token_ids == alone(one).token_ids


def test_generation_ignores_the_slot() -> None:
    one, runs_on = request(3, 11, **SAMPLED), engine()
    texts = []
    for slot in range(CONFIG.slots):
        state = runs_on.init_decode_state()
        state = runs_on.insert(runs_on.prefill([one.token_ids]), 0, state, slot, one)
        tokens = []
        for _ in range(8):
            state, result = runs_on.generate(state)
            tokens.append(int(np.asarray(result.packed)[slot, 0]))
        texts.append(tokens)
    assert texts[0] == texts[1] == texts[2]


def test_a_reused_slot_remembers_nothing() -> None:
    short = request(5, 2)
    after_long = complete([request(1, 30), request(2, 30), request(4, 30), short])
    assert after_long[3, 0].token_ids == alone(short).token_ids


def test_samples_of_one_seed_differ_and_each_is_its_own() -> None:
    three = complete([request(2, 6, num_samples=3, **SAMPLED)])
    texts = {three[0, sample].token_ids for sample in range(3)}
    assert len(texts) == 3
    assert three[0, 0].token_ids == alone(request(2, 6, **SAMPLED)).token_ids


def test_seeds_change_the_text() -> None:
    first, second = (alone(request(2, 6, temperature=1.0, seed=seed)).token_ids for seed in (1, 2))
    assert first != second


def test_a_prompt_in_pieces_equals_the_whole() -> None:
    prompt = request(6, 29)
    whole = engine(dataclasses.replace(CONFIG, prefill_chunk=48))
    assert alone(prompt).token_ids == alone(prompt, whole).token_ids


def test_several_prefill_rows_equal_one() -> None:
    requests = [request(seed, length, **SAMPLED) for seed, length in enumerate((4, 17, 9, 1))]
    rows = complete(requests, engine(dataclasses.replace(CONFIG, prefill_rows=2)))
    one = complete(requests)
    assert {key: c.token_ids for key, c in rows.items()} == {key: c.token_ids for key, c in one.items()}


def test_unrolled_layers_equal_stacked_ones() -> None:
    requests = [request(seed, 10, **SAMPLED) for seed in range(3)]
    unrolled = complete(requests, engine(stacked=False))
    assert all(unrolled[key].token_ids == c.token_ids for key, c in complete(requests).items())


def test_nothing_compiles_after_warm_up(compilations: Callable) -> None:
    runs_on = engine()
    with compilations() as counted:
        complete([request(seed, 1 + 5 * seed, **SAMPLED) for seed in range(5)], runs_on)
    assert counted.count == 0
    with compilations() as counted:
        jax.jit(lambda x: x * 3 + 0.12345)(np.float32(1))
    assert counted.count == 1, "the counter must see a compilation"


def test_the_cache_is_donated() -> None:
    runs_on, one = engine(), request(1, 9)
    prefix, state = runs_on.prefill([one.token_ids]), runs_on.init_decode_state()
    inserted = runs_on.insert(prefix, 0, state, 0, one)
    assert state.cache.k.is_deleted() and not prefix.cache.k.is_deleted()
    runs_on.generate(inserted)
    assert inserted.cache.k.is_deleted() and inserted.cache.v.is_deleted()


def test_the_context_can_be_filled_to_its_last_position() -> None:
    full = alone(request(8, 40, max_new_tokens=8))
    assert full.finish_reason is FinishReason.LENGTH and full.completion_tokens == 8


@pytest.mark.parametrize(
    ("length", "settings", "message"),
    [
        (0, {}, "prompt 2: the prompt is empty"),
        (48, {}, "has 48 tokens; allowed: at most 47 with a context of 48"),
        (40, {"max_new_tokens": 9}, "exceed the context of 48; nearest: max_new_tokens=8"),
        (4, {"logprobs": 3}, "logprobs=3 alternatives asked of an engine that reports 2"),
        (4, {"top_k": 259}, "at most the vocabulary, 258"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_any_runs(
    length: int, settings: dict, message: str
) -> None:
    generator = Generator(engine(), ByteTokenizer())
    with pytest.raises(UserError, match=message):
        generator.run([request(0, 4), request(1, length, **settings)])


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    bad = dataclasses.replace(request(0, 4), token_ids=(1, 300))
    with pytest.raises(UserError, match="token 300 is outside the vocabulary, 0 to 257"):
        Generator(engine(), ByteTokenizer()).run([bad])


def test_stop_ids_end_a_text() -> None:
    free = alone(request(8, 40, max_new_tokens=8))
    stopped = alone(request(8, 40, max_new_tokens=8, stop_ids=(free.token_ids[1],)))
    first = free.token_ids.index(free.token_ids[1])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: first + 1]


def test_logprobs_are_the_models_own() -> None:
    greedy = alone(request(3, 7, logprobs=2))
    for token, logprob, top in zip(greedy.token_ids, greedy.logprobs, greedy.top_logprobs, strict=True):
        assert top[0][0] == token and top[0][1] == pytest.approx(logprob)
        assert top[0][1] >= top[1][1]


def test_streamed_pieces_are_the_text() -> None:
    requests = [request(seed, 5, **SAMPLED) for seed in range(4)]
    pieces: dict[int, str] = dict.fromkeys(range(4), "")
    for event in Generator(engine(), ByteTokenizer()).run(requests):
        if isinstance(event, TextPiece):
            pieces[event.index] += event.text
        elif isinstance(event, Completion):
            assert pieces[event.index] == event.text


def test_statistics_count_what_ran() -> None:
    generator = Generator(engine(), ByteTokenizer())
    done = [e for e in generator.run([request(0, 9), request(1, 4)]) if isinstance(e, Completion)]
    assert generator.stats.prefill_tokens == 8 + 3
    assert generator.stats.decode_tokens == sum(c.completion_tokens for c in done)
    assert generator.stats.decode_rate > 0 and generator.stats.prefill_rate > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_cache_bytes_are_those_of_the_state(kv_cache_dtype: str) -> None:
    runs_on = engine(dataclasses.replace(CONFIG, kv_cache_dtype=kv_cache_dtype))
    assert runs_on.cache_bytes == runs_on.init_decode_state().cache.nbytes
    assert runs_on.cache_bytes == runs_on.config.cache_token_bytes(SMALL) * CONFIG.slots * CONFIG.cache_time


def test_an_int8_cache_keeps_the_laws_of_packing_and_chunks() -> None:
    config = dataclasses.replace(CONFIG, kv_cache_dtype="int8")
    requests = [request(seed, length, **SAMPLED) for seed, length in enumerate((1, 9, 8, 20, 3))]
    together = complete(requests, engine(config))
    for index, one in enumerate(requests):
        assert together[index, 0].token_ids == alone(one, engine(config)).token_ids
    exact, rounded = (alone(request(2, 9), engine(c)) for c in (CONFIG, config))
    assert exact.logprobs != rounded.logprobs
    np.testing.assert_allclose(exact.logprobs[:1], rounded.logprobs[:1], rtol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots=0 is not allowed"),
        ({"max_context": 1}, "leaves no room"),
        ({"activation_dtype": "float16"}, "allowed: float32, bfloat16"),
        ({"kv_cache_dtype": "int4"}, "allowed: auto, int8"),
    ],
)
def test_engine_settings_are_checked(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(**change)


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    limited = dataclasses.replace(SMALL, max_positions=32)
    with pytest.raises(UserError, match="max_context=48 is beyond this model's 32 positions; nearest: 32"):
        CONFIG.check_model(limited)
