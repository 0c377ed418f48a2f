"""Small engines that the tests share; each is compiled once a session."""

import dataclasses
import functools
from collections.abc import Sequence

from checkpoints.load import LoadOptions, load_params
from checkpoints.synthetic import synthetic_state
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.generate import Generator
from inference_engine.model import OneDeviceModel
from inference_engine.request import Completion, Request
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import ByteTokenizer
from layers.hparams import HParams

SMALL = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=1, qkv=16, vocab=258)
CONFIG = EngineConfig(slots=3, max_context=48, prefill_chunk=8, top_logprobs=2)


@functools.cache
def engine(config: EngineConfig = CONFIG, *, stacked: bool = True) -> Engine:
    """An engine of the small synthetic model."""
    params = load_params(synthetic_state(SMALL), LoadOptions(stacked=stacked))
    return Engine(OneDeviceModel(SMALL), params, config)


def request(which: int, length: int, **settings: object) -> Request:
    """A request of `length` tokens that depend on `which`."""
    ids = tuple((which * 37 + i * i * 11 + i) % 256 for i in range(length))
    return Request(f"prompt {which}", ids, SamplingParams(**({"max_new_tokens": 12} | settings)))


def complete(requests: Sequence[Request], runs_on: Engine | None = None) -> dict[tuple[int, int], Completion]:
    """All completions by (prompt, sample)."""
    events = Generator(runs_on or engine(), ByteTokenizer()).run(requests)
    done = [event for event in events if isinstance(event, Completion)]
    return {(completion.index, completion.sample): completion for completion in done}


def alone(one: Request, runs_on: Engine | None = None) -> Completion:
    """The completion of a request that runs by itself."""
    single = dataclasses.replace(one, params=dataclasses.replace(one.params, num_samples=1))
    return complete([single], runs_on)[0, 0]
