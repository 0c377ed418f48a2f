"""Which prefixes a run holds once, as data; no jax.

Two levels: what all prompts begin with is held for the whole run, and what else a prompt has is held while
its samples run, if there are several. So n samples of one prompt hold its keys and values once, and prompts
after one system prompt hold that once. A slot then keeps only what is its own: its prompt's other tokens and
its text.

Tokens are compared, not text, so that sharing changes no token of a prompt. The last token of a prompt is
never shared: decoding feeds it. A run of fewer than `SHORTEST` tokens is not worth an entry.

Data flow: prompts as ids → `plan_sharing` → `SharingPlan` → `sized` engine, `prefix_holder.PrefixHolder`.

Worked example: three prompts of 440, 450 and 460 tokens begin with the same 400; the second has 4 samples and
each text may take 100 tokens. The 400 are held once. Of the second prompt its other 49 are held once too, and
its slots keep 101 positions each; the longest row is the third prompt's, 160 positions instead of 560.
"""

import dataclasses
from collections.abc import Sequence

from inference_engine.config import EngineConfig, SharedRoom
from inference_engine.request import Request

SHORTEST = 8


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """What a run shares.

    Attributes:
      common: tokens that all prompts begin with, held for the whole run; empty for none.
      rests: for each prompt the tokens after those that its samples share; empty for none.
      own_context: positions that a slot needs for itself.
    """

    common: tuple[int, ...]
    rests: tuple[tuple[int, ...], ...]
    own_context: int

    def rest_of(self, index: int) -> tuple[int, ...]:
        """What the samples of a prompt share beside what all prompts do."""
        return self.rests[index] if self.rests else ()

    @property
    def held_tokens(self) -> int:
        """Tokens held once in place of several times."""
        return len(self.common) + sum(map(len, self.rests))

    def sized(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings for this plan; the given ones where it shares nothing."""
        if not self.held_tokens:
            return config
        return dataclasses.replace(config, shared=self._rooms(config.slots), own_context=self.own_context)

    def _rooms(self, slots: int) -> tuple[SharedRoom, ...]:
        """For what all share, and for what the samples of each prompt in the slots do."""
        rests = [len(rest) for rest in self.rests if rest]
        common = (SharedRoom(1, len(self.common)),) if self.common else ()
        return common + ((SharedRoom(min(len(rests), slots), max(rests)),) if rests else ())

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError where an engine was sized for other runs, which need less room."""
        needed = self._rooms(config.slots)
        fits = len(needed) == len(config.shared) and all(
            need.prefixes <= room.prefixes and need.context <= room.context
            for need, room in zip(needed, config.shared, strict=True)
        )
        if needed and not (fits and self.own_context <= config.own_context):
            raise ValueError(
                f"sharing needs {needed} and {self.own_context} own positions; "
                f"the engine has {config.shared} and {config.own_context}"
            )


NOTHING_SHARED = SharingPlan((), (), 0)


def plan_sharing(requests: Sequence[Request]) -> SharingPlan:
    """What the prompts and samples of these requests have in common."""
    kept = [request.token_ids[:-1] for request in requests]
    texts = sum(request.params.num_samples for request in requests)
    common = _worth_it(_common(kept)) if texts > 1 else ()
    rests = tuple(
        _worth_it(tokens[len(common) :]) if request.params.num_samples > 1 else ()
        for request, tokens in zip(requests, kept, strict=True)
    )
    own = (
        len(request.token_ids) + request.params.max_new_tokens - len(common) - len(rest)
        for request, rest in zip(requests, rests, strict=True)
    )
    return SharingPlan(common, rests, max(own))


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all rows begin with: what the first and the last of them in order do."""
    low, high = min(rows), max(rows)
    differs = (at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(differs, len(low))]


def _worth_it(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens) if len(tokens) >= SHORTEST else ()
