"""Laws of what a run shares: tokens that are alike, never a prompt's last, and room for all that is not."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.config import EngineConfig, SharedRoom
from inference_engine.request import Request
from inference_engine.sampling_params import SamplingParams
from inference_engine.sharing import SHORTEST, SharingPlan, plan_sharing

CONFIG = EngineConfig(slots=2, max_context=600, prefill_chunk=64)


def _request(ids: tuple[int, ...], samples: int = 1, new: int = 100) -> Request:
    params = SamplingParams(num_samples=samples, max_new_tokens=new, temperature=1.0, seed=0)
    return Request("", ids, params)


IDS = st.lists(st.integers(0, 3), max_size=30).map(tuple)
TAIL = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 9))
DRAWN = given(IDS, st.lists(TAIL, min_size=1, max_size=5))


def _requests(shared: tuple[int, ...], tails: list) -> list[Request]:
    """Prompts that begin alike; made outside the strategies, in which run-time type checks may not draw."""
    return [_request(shared + tuple(tail), samples, new) for tail, samples, new in tails]


@DRAWN
def test_what_is_shared_is_in_every_prompt_that_shares_it(shared: tuple[int, ...], tails: list) -> None:
    requests = _requests(shared, tails)
    plan = plan_sharing(requests)
    for index, request in enumerate(requests):
        held = plan.common + plan.rest_of(index)
        assert request.token_ids[: len(held)] == held
        assert len(held) < len(request.token_ids), "the last token is fed by decoding"


@DRAWN
def test_a_slot_has_room_for_what_is_not_shared(shared: tuple[int, ...], tails: list) -> None:
    requests = _requests(shared, tails)
    plan = plan_sharing(requests)
    for index, request in enumerate(requests):
        whole = len(request.token_ids) + request.params.max_new_tokens
        assert whole - len(plan.common) - len(plan.rest_of(index)) <= plan.own_context


@DRAWN
def test_nothing_is_shared_that_is_short_or_used_once(shared: tuple[int, ...], tails: list) -> None:
    requests = _requests(shared, tails)
    plan = plan_sharing(requests)
    texts = sum(request.params.num_samples for request in requests)
    assert not plan.common or (len(plan.common) >= SHORTEST and texts > 1)
    for index, request in enumerate(requests):
        rest = plan.rest_of(index)
        assert not rest or (len(rest) >= SHORTEST and request.params.num_samples > 1)


def test_the_worked_example() -> None:
    system = tuple(range(400))
    prompts = [_request((*system, first, *range(length - 401))) for first, length in ((1, 440), (3, 460))]
    prompts.insert(1, _request((*system, 2, *range(49)), samples=4))
    plan = plan_sharing(prompts)
    assert (plan.common, list(map(len, plan.rests)), plan.own_context) == (system, [0, 49, 0], 160)
    sized = plan.sized(CONFIG)
    assert (sized.shared_sizes, sized.cache_time) == (((1, 448), (1, 64)), 192)
    assert sized.prefill_time == 448


def test_without_anything_in_common_the_engine_is_as_it_was() -> None:
    plan = plan_sharing([_request((1, 2, 3)), _request((2, 2, 3))])
    assert plan.sized(CONFIG) is CONFIG
    assert plan_sharing([_request(tuple(range(50)))]).sized(CONFIG) is CONFIG


def test_an_engine_made_for_less_is_refused() -> None:
    plan = SharingPlan(tuple(range(20)), (), own_context=30)
    plan.check_engine(plan.sized(CONFIG))
    for smaller in ({"shared": ()}, {"shared": (SharedRoom(1, 19),)}, {"own_context": 29}):
        with pytest.raises(ValueError, match="sharing needs"):
            plan.check_engine(dataclasses.replace(plan.sized(CONFIG), **smaller))
