"""Who holds which entry of the shared pool during a run: host bookkeeping over the engine's verb `hold`.

Data flow: `SharingPlan` → `lengths_of` before a prompt is prefilled (what it shares is held by then) →
`release` when a sample of it ends.

Worked example: entry 0 holds what all prompts begin with. The samples of a prompt share entry 2; when the
last of them ends, the entry is free for the samples of another prompt.
"""

from inference_engine.decode_state import SharedPool
from inference_engine.engine import Engine
from inference_engine.request import Request
from inference_engine.sharing import SharingPlan


class PrefixHolder:
    """The pool of one run.

    Attributes:
      pool: to be read by prefill and decoding; None where nothing is shared.
      computed_tokens: tokens prefilled into the pool so far.
    """

    def __init__(self, engine: Engine, plan: SharingPlan) -> None:
        self._engine, self._plan = engine, plan
        self._entries = engine.config.shared_prefixes
        self.pool: SharedPool | None = engine.empty_pool() if self._entries else None
        self.computed_tokens = 0
        self._common = (len(plan.common),) if plan.common else ()
        self._free = list(range(len(self._common), self._entries))
        self._held: dict[int, int] = {}  # a prompt's entry
        self._users: dict[int, int] = {}  # samples of a prompt that have not ended
        if plan.common:
            self._hold(0, plan.common, ())

    def lengths_of(self, index: int, request: Request) -> tuple[int, ...] | None:
        """Keys of each entry that a prompt shares, held now; None while every entry is another prompt's."""
        rest = self._plan.rest_of(index)
        if not rest:
            return self._common
        if not self._free:
            return None
        entry = self._held[index] = self._free.pop()
        self._users[index] = request.params.num_samples
        self._hold(entry, rest, self._common)
        return self._common + tuple(
            len(rest) if at == entry else 0 for at in range(len(self._common), self._entries)
        )

    def release(self, index: int) -> None:
        """A sample of a prompt has ended."""
        if index not in self._users:
            return
        self._users[index] -= 1
        if not self._users[index]:
            del self._users[index]
            self._free.append(self._held.pop(index))

    def _hold(self, entry: int, tokens: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        assert self.pool is not None  # a plan that shares has an engine with entries
        self.pool = self._engine.hold(self.pool, entry, tokens, lengths)
        self.computed_tokens += len(tokens)
