"""The engine's verbs over slots: prefill → insert → generate, each one compiled program.

Nothing here decides who runs when (generate.py, and a server later, do); nothing here knows text.

Data flow: prompt ids → `prefill` (all but the last token, in chunks at fixed absolute positions) → `Prefix`
→ `insert` into a slot → `generate`, which feeds every slot's newest token and samples the next.

Worked example: with chunks of 64 a prompt of 130 tokens is prefilled as 129 tokens in the chunks that start
at 0, 64 and 128; the last token is fed by the first `generate`, so that what a request returns never depends
on how its prompt was cut or on which program sampled it.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState, Prefix, StepResult
from inference_engine.model import Model
from inference_engine.request import Request
from inference_engine.sampling_state import sampling_row
from inference_engine.steps import Models, Steps, build_steps
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

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Keys and values of up to `prefill_rows` prompts, all tokens but each one's last.

        A row's chunks start at multiples of `prefill_chunk` whatever its length; padding is written beyond
        the prompt, where decoding overwrites it before any query can see it.
        """
        rows, chunk = self.config.prefill_rows, self.config.prefill_chunk
        if not 1 <= len(prompts) <= rows:
            raise ValueError(f"prefill takes 1 to {rows} prompts, got {len(prompts)}")
        longest = max(len(prompt) for prompt in prompts) - 1
        if longest >= self.config.max_context:
            raise ValueError(f"a prompt of {longest + 1} tokens exceeds {self.config.max_context}")
        padded = np.full((rows, -(-longest // chunk) * chunk), PAD_TOKEN, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt) - 1] = prompt[:-1]
        prefix = self._steps.empty_prefix()
        for start in range(0, padded.shape[1], chunk):
            piece = np.ascontiguousarray(padded[:, start : start + chunk])
            prefix = self._steps.prefill(self.params, prefix, piece, np.int32(start))
        return prefix

    def insert(
        self, prefix: Prefix, row: int, state: DecodeState, slot: int, request: Request, sample: int = 0
    ) -> DecodeState:
        """Puts a prefilled prompt into a slot; the prefix stays usable for further samples."""
        if not 0 <= slot < self.config.slots:
            raise ValueError(f"slot {slot} is not one of 0 to {self.config.slots - 1}")
        settings = sampling_row(request.params, request.token_ids, self.model.padded_vocab, sample)
        last, length = request.token_ids[-1], len(request.token_ids) - 1
        numbers = (np.int32(value) for value in (row, slot, last, length))
        return self._steps.insert(state, prefix, *numbers, settings)

    def generate(self, state: DecodeState) -> tuple[DecodeState, StepResult]:
        """One token for every slot; the given state is donated."""
        return self._steps.generate(self.params, state)

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
        """Bytes of the decode state's KV cache, over all chips."""
        shape = self.model.cache_shape(self.config.slots, self.config.cache_time)
        return 2 * math.prod(shape) * (2 if self.config.activation_dtype == "bfloat16" else 4)
