"""The engine's verbs over slots: prefill → insert → generate, each one compiled program.

Nothing here decides who runs when (generate.py, and a server later, do); nothing here knows text.

Data flow: prompt ids → `prefill` (all but the last token, in chunks at fixed absolute positions) → `Prefix`
→ `insert` into a slot → `generate`, which feeds every slot's newest token and samples the next.

Worked example: with chunks of 64 a prompt of 130 tokens is prefilled as 129 tokens in the chunks that start
at 0, 64 and 128; the last token is fed by the first `generate`, so that what a request returns never depends
on how its prompt was cut or on which program sampled it.
"""

from collections.abc import Sequence

import jax
import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState, Prefix, SharedPool, StepResult
from inference_engine.model import Model
from inference_engine.request import Request
from inference_engine.sampling_state import sampling_row
from inference_engine.shared_pool import pool_bytes
from inference_engine.steps import Models, Steps, build_steps, cache_bytes
from layers.hparams import HParams
from layers.params import Params

PAD_TOKEN = 0


class Engine:
    """Compiled programs for one model and one `EngineConfig`, and the weights they read.

    Attributes:
      model, params, config: what the programs were compiled for.
      prefill_model: the same model in prefill's layout; `model` where none is given.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig,
        prefill_model: Model | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        """`compiled=False` leaves each program to its first call, for what measures one of them."""
        config.check_model(model.hparams)
        self.model, self.params, self.config = model, params, config
        self.prefill_model = prefill_model or model
        self._steps = build_steps(Models(self.prefill_model, model), config, params)
        if compiled:
            self._steps.compile()

    @property
    def hparams(self) -> HParams:
        """The model's form."""
        return self.model.hparams

    def init_decode_state(self) -> DecodeState:
        """A state with every slot free."""
        return self._steps.empty_state()

    def empty_pool(self) -> SharedPool:
        """A pool that holds no prefix yet; for engines whose config shares some."""
        if self._steps.empty_pool is None:
            raise ValueError("this engine shares no prefixes: its config has no room for any")
        return self._steps.empty_pool()

    def hold(
        self, pool: SharedPool, entry: int, tokens: Sequence[int], lengths: Sequence[int] = ()
    ) -> SharedPool:
        """The pool with the keys and values of `tokens` in an entry; the given one is donated.

        `lengths` are the keys of each entry that stand before the tokens: a nested prefix begins where they
        end.
        """
        rooms = [(number, at) for number, r in enumerate(self.config.shared) for at in range(r.prefixes)]
        if not 0 <= entry < len(rooms):
            raise ValueError(f"entry {entry} is not one of 0 to {len(rooms) - 1}")
        room, place = rooms[entry]
        seen = self._seen([lengths])
        prefix = self._fill([tokens], self.config.shared[room].context, pool, seen)
        numbers = (np.int32(value) for value in (place, entry, seen[0].sum()))
        return self._steps.hold[room](pool, prefix, *numbers)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        pool: SharedPool | None = None,
        lengths: Sequence[Sequence[int]] = (),
    ) -> Prefix:
        """Keys and values of up to `prefill_rows` prompts, all tokens but each one's last.

        A row's chunks start at multiples of `prefill_chunk` whatever its length; padding is written beyond
        the prompt, where decoding overwrites it before any query can see it. Where prompts share prefixes of
        a pool, `lengths` says for each how many keys it sees of each entry; those tokens are not computed
        again, and chunks count from the end of them.
        """
        seen = self._seen(lengths or [()] * len(prompts))
        pieces = [prompt[shared:-1] for prompt, shared in zip(prompts, seen.sum(axis=1), strict=False)]
        return self._fill(pieces, self.config.own_context or self.config.max_context, pool, seen)

    def _seen(self, lengths: Sequence[Sequence[int]]) -> np.ndarray:
        """Lengths of each row as `[prefill_rows, entries]`; what is not given is 0."""
        seen = np.zeros((self.config.prefill_rows, self.config.shared_prefixes), np.int32)
        for row, given in enumerate(lengths):
            seen[row, : len(given)] = given
        return seen

    def _fill(
        self, pieces: Sequence[Sequence[int]], room: int, pool: SharedPool | None, seen: np.ndarray
    ) -> Prefix:
        """Rows with these tokens, chunk by chunk."""
        rows, chunk = self.config.prefill_rows, self.config.prefill_chunk
        if not 1 <= len(pieces) <= rows:
            raise ValueError(f"prefill takes 1 to {rows} prompts, got {len(pieces)}")
        longest = max(map(len, pieces))
        if longest > room:
            raise ValueError(f"{longest} tokens exceed the {room} positions of a row")
        padded = np.full((rows, -(-longest // chunk) * chunk), PAD_TOKEN, np.int32)
        for row, piece in enumerate(pieces):
            padded[row, : len(piece)] = piece
        shared = () if pool is None else (pool, seen)
        prefix = self._steps.empty_prefix()
        for start in range(0, padded.shape[1], chunk):
            tokens = np.ascontiguousarray(padded[:, start : start + chunk])
            prefix = self._steps.prefill(self.params, prefix, tokens, np.int32(start), *shared)
        return prefix

    def insert(
        self,
        prefix: Prefix,
        row: int,
        state: DecodeState,
        slot: int,
        request: Request,
        sample: int = 0,
        lengths: Sequence[int] = (),
    ) -> DecodeState:
        """Puts a prefilled prompt into a slot; the prefix stays usable for further samples.

        `lengths` are the keys of the pool's entries that it was prefilled after.
        """
        if not 0 <= slot < self.config.slots:
            raise ValueError(f"slot {slot} is not one of 0 to {self.config.slots - 1}")
        settings = sampling_row(request.params, request.token_ids, self.model.padded_vocab, sample)
        last, length = request.token_ids[-1], len(request.token_ids) - 1
        numbers = (np.int32(value) for value in (row, slot, last, length))
        shared = (self._seen([lengths])[0],) if self.config.shared_prefixes else ()
        return self._steps.insert(state, prefix, *numbers, settings, *shared)

    def generate(self, state: DecodeState, pool: SharedPool | None = None) -> tuple[DecodeState, StepResult]:
        """One token for every slot; the given state is donated, the pool is not."""
        return self._steps.generate(self.params, state, *(() if pool is None else (pool,)))

    def release(self, state: DecodeState, slot: int) -> DecodeState:
        """Frees a slot."""
        return self._steps.release(state, np.int32(slot))

    @property
    def steps(self) -> Steps:
        """The programs themselves, for what measures them."""
        return self._steps

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, over all chips; what is on every chip counts once."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the slots' and of shared keys and values, over all chips."""
        shared = pool_bytes(self.prefill_model, self.model, self.config)
        return cache_bytes(self.model, self.config) + shared
