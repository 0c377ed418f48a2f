"""A request and its outcome, without jax.

Data flow: text → `Request` → engine → `Completion`.

Worked example: the prompt "ROMEO:" is the token ids (1, 812, 77); with max_new_tokens 2 the completion has
two token ids, finish_reason "length" and their text.
"""

import dataclasses
import enum

from inference_engine.config import EngineConfig
from inference_engine.sampling_params import SamplingParams
from layers.errors import UserError


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # end of text, a stop id or a stop string
    LENGTH = "length"  # max_new_tokens; a request that would outgrow the context is refused
    ERROR = "error"  # the model's logits were not finite


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: the text, for the record.
      token_ids: the prompt's tokens, at least one.
      params: how to sample.
    """

    prompt: str
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample of one request.

    Attributes:
      index, sample: which prompt and which of its samples.
      text: what was generated, without the stop string and what follows it.
      token_ids: generated ids, the one that ended it included.
      logprobs: of each token under the model's own distribution.
      top_logprobs: for each token the most likely ones as (id, log-probability); empty unless asked for.
    """

    index: int
    sample: int
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def completion_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)


def check_request(request: Request, config: EngineConfig, vocab: int, name: str) -> None:
    """Refuses a prompt or settings that this engine cannot serve whole; nothing is truncated.

    Raises UserError that starts with `name` and says what was found and what would fit.
    """
    count, limit = len(request.token_ids), config.max_context
    if count == 0:
        raise UserError(f"{name}: the prompt is empty; it needs at least one token")
    outside = [token for token in request.token_ids if not 0 <= token < vocab]
    if outside:
        raise UserError(f"{name}: token {outside[0]} is outside the vocabulary, 0 to {vocab - 1}")
    if count >= limit:
        raise UserError(
            f"{name}: the prompt has {count} tokens; allowed: at most {limit - 1} with a context of {limit}"
        )
    wanted = request.params.max_new_tokens
    if count + wanted > limit:
        raise UserError(
            f"{name}: {count} prompt tokens and max_new_tokens={wanted} exceed the context of {limit}; "
            f"nearest: max_new_tokens={limit - count}"
        )
    request.params.validate_for(vocab)
    alternatives = request.params.logprobs or 0
    if alternatives > config.top_logprobs:
        raise UserError(
            f"{name}: logprobs={alternatives} alternatives asked of an engine that reports "
            f"{config.top_logprobs}; nearest: {config.top_logprobs}"
        )
