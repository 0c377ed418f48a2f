"""Settings of an engine, as data: how many requests at once, how long, in which pieces.

Data flow: flags → `EngineConfig` → shapes of the compiled steps.

Worked example: 4 slots of 512 positions with prefill chunks of 64 tokens: a prompt of 130 tokens is prefilled
as the chunks at 0, 64 and 128, the last one padded; generation may go on to position 511.
"""

import dataclasses

from layers.errors import UserError
from layers.hparams import HParams

AUTO = "auto"
KV_CACHE_DTYPES = (AUTO, "int8")
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class SharedRoom:
    """Room for a number of prefixes of at most `context` positions each, held at once."""

    prefixes: int
    context: int


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that the compiled steps are made for.

    Attributes:
      slots: requests that decode together; every decode step runs all of them.
      max_context: positions a slot holds, prompt and output together.
      prefill_chunk: tokens a prefill step takes; chunks start at its multiples.
      prefill_rows: prompts that a prefill step takes at once.
      top_logprobs: alternatives that each step reports for every token; 0 for none.
      activation_dtype: dtype of activations.
      kv_cache_dtype: int8, with a scale for each kv head and position, or auto: that of activations.
      shared: room for prefixes that slots share; () for none.
      own_context: positions that a slot holds beside what it shares; 0 for max_context.
    """

    slots: int = 4
    max_context: int = 512
    prefill_chunk: int = 64
    prefill_rows: int = 1
    top_logprobs: int = 0
    activation_dtype: str = "float32"
    kv_cache_dtype: str = AUTO
    shared: tuple[SharedRoom, ...] = ()
    own_context: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "max_context", "prefill_chunk", "prefill_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}={value!r} is not allowed; allowed: an integer from 1; nearest: 1")
        if self.max_context < 2:
            raise UserError(
                f"max_context={self.max_context} leaves no room for a prompt and a token; nearest: 2"
            )
        if self.activation_dtype not in ("float32", "bfloat16"):
            raise UserError(
                f"activation_dtype={self.activation_dtype!r} is not known; allowed: float32, bfloat16"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UserError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not known; allowed: {', '.join(KV_CACHE_DTYPES)}"
            )

    @property
    def cache_dtype(self) -> str:
        """The dtype of keys and values."""
        return self.activation_dtype if self.kv_cache_dtype == AUTO else self.kv_cache_dtype

    @property
    def cache_time(self) -> int:
        """Positions of a slot's cache row: its context rounded up to whole prefill chunks."""
        return self._whole_chunks(self.own_context or self.max_context)

    @property
    def shared_sizes(self) -> tuple[tuple[int, int], ...]:
        """Prefixes and positions of each room, in whole prefill chunks."""
        return tuple((room.prefixes, self._whole_chunks(room.context)) for room in self.shared)

    @property
    def shared_prefixes(self) -> int:
        """Prefixes that can be held at once."""
        return sum(room.prefixes for room in self.shared)

    @property
    def prefill_time(self) -> int:
        """Positions of a row that is being prefilled, for a slot or to be held."""
        return max(self.cache_time, *(time for _, time in self.shared_sizes), 0)

    def _whole_chunks(self, positions: int) -> int:
        return -(-positions // self.prefill_chunk) * self.prefill_chunk

    def cache_token_bytes(self, hparams: HParams) -> int:
        """Bytes of a row's keys and values at one position, all layers and kv heads, nothing padded."""
        scale = _SCALE_BYTES if self.cache_dtype == "int8" else 0
        a_head = hparams.qkv * _BYTES[self.cache_dtype] + scale
        return 2 * hparams.layers * hparams.kv_heads * a_head

    def check_model(self, hparams: HParams) -> None:
        """Refuses a context beyond what the model's positions allow."""
        limit = hparams.max_positions
        if limit is not None and self.max_context > limit:
            raise UserError(
                f"max_context={self.max_context} is beyond this model's {limit} positions; nearest: {limit}"
            )
