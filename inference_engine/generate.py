"""Offline generation: many prompts through the slots of one engine, streamed as they come.

Free slots are filled as soon as there are any; a request's prompt is prefilled once for all of its samples.
While the device runs step k + 1, the host turns step k's tokens into text; so a sample that ends is decoded
for one step more, whose token is dropped. At most two steps are in flight.

Where a plan says so, what prompts and samples have in common is held once and attended by all of them.

Data flow: requests → prefill → ready samples → slots → steps → `TextPiece`s and `Completion`s.

Worked example: 5 requests on 4 slots: four are prefilled and decode together; when one ends, the fifth is
prefilled and takes its slot, and no one's text depends on that.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from inference_engine.decode_state import DecodeState, Prefix, StepResult
from inference_engine.engine import Engine
from inference_engine.prefix_holder import PrefixHolder
from inference_engine.request import Completion, FinishReason, Request, check_request
from inference_engine.sample_stream import SampleStream
from inference_engine.sharing import NOTHING_SHARED, SharingPlan, plan_sharing
from inference_engine.tokenizer import Tokenizer

STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """New text of one sample."""

    index: int
    sample: int
    text: str


@dataclasses.dataclass
class RunStats:
    """What a run did, and how long it took in seconds."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    inserts: int = 0
    insert_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def insert_milliseconds(self) -> float:
        """Mean time of putting a prefilled prompt into its slot."""
        return 1e3 * self.insert_seconds / self.inserts if self.inserts else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, over all slots."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def step_milliseconds(self) -> float:
        """Mean time of a decode step, which is the time per output token (TPOT) of every sample in it."""
        return 1e3 * self.decode_seconds / self.decode_steps if self.decode_steps else 0.0


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A sample whose prompt is prefilled, after what it shares."""

    stream: SampleStream
    prefix: Prefix
    row: int
    lengths: tuple[int, ...]


class Generator:
    """Runs requests on an engine; one run at a time.

    Attributes:
      shares: whether prefixes are shared, in an engine that is `sized` for it.
      stats: of the latest run.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer, self.stats = engine, tokenizer, RunStats()
        self.shares = engine.config.shared_prefixes > 0

    def run(self, requests: Sequence[Request]) -> Iterator[TextPiece | Completion]:
        """Yields text as it comes and one `Completion` a sample; requests are checked before any runs.

        Raises UserError, naming the prompt by its number from 1, for a request that does not fit.
        """
        for number, request in enumerate(requests, 1):
            check_request(request, self.engine.config, self.engine.hparams.vocab, f"prompt {number}")
        plan = NOTHING_SHARED
        if self.shares:
            plan = plan_sharing(requests)
            plan.check_engine(self.engine.config)
        return self._run(requests, plan)

    def _run(self, requests: Sequence[Request], plan: SharingPlan) -> Iterator[TextPiece | Completion]:
        self.stats = RunStats()
        holder = self._holder(plan)
        waiting, ready = deque(enumerate(requests)), deque[_Ready]()
        slots: list[SampleStream | None] = [None] * self.engine.config.slots
        state = self.engine.init_decode_state()
        flying: deque[tuple[StepResult, list[SampleStream | None]]] = deque()
        clock = time.perf_counter()
        while waiting or ready or flying or any(slots):
            state, spent = self._fill(state, slots, waiting, ready, holder)
            clock += spent  # prefill has a clock of its own
            if any(slots):
                state, result = self.engine.generate(state, holder.pool)
                flying.append((result, list(slots)))
            if len(flying) >= STEPS_IN_FLIGHT or not any(slots):
                result, served = flying.popleft()
                yield from self._take(result, served)
                for slot, stream in enumerate(slots):
                    if stream is not None and stream.finished:
                        slots[slot], state = None, self.engine.release(state, slot)
                        holder.release(stream.index)
                        yield stream.completion()
            now = time.perf_counter()
            self.stats.decode_seconds += now - clock
            clock = now

    def _fill(
        self,
        state: DecodeState,
        slots: list[SampleStream | None],
        waiting: deque[tuple[int, Request]],
        ready: deque[_Ready],
        holder: PrefixHolder,
    ) -> tuple[DecodeState, float]:
        """Puts samples into the free slots, prefilling as needed; also returns the seconds it took."""
        began = time.perf_counter()
        for slot, stream in enumerate(slots):
            if stream is not None:
                continue
            if not ready and waiting:
                ready.extend(self._prefill(waiting, holder))
            if not ready:
                break
            sample = ready.popleft()
            inserting = time.perf_counter()
            state = self.engine.insert(
                sample.prefix,
                sample.row,
                state,
                slot,
                sample.stream.request,
                sample.stream.sample,
                sample.lengths,
            )
            jax.block_until_ready(state.lengths)
            self.stats.inserts += 1
            self.stats.insert_seconds += time.perf_counter() - inserting
            slots[slot] = sample.stream
        return state, time.perf_counter() - began

    def _prefill(self, waiting: deque[tuple[int, Request]], holder: PrefixHolder) -> list[_Ready]:
        """Takes as many requests as a step prefills, or as find room for what their samples share."""
        began, computed = time.perf_counter(), holder.computed_tokens
        batch: list[tuple[int, Request]] = []
        shared: list[tuple[int, ...]] = []
        while waiting and len(batch) < self.engine.config.prefill_rows:
            lengths = holder.lengths_of(*waiting[0])
            if lengths is None:
                break
            batch.append(waiting.popleft())
            shared.append(lengths)
        if not batch:
            return []
        prefix = self.engine.prefill([request.token_ids for _, request in batch], holder.pool, shared)
        jax.block_until_ready(prefix)
        self.stats.prefill_seconds += time.perf_counter() - began
        # The last token of a prompt is fed by decode.
        own = (len(r.token_ids) - 1 - sum(seen) for (_, r), seen in zip(batch, shared, strict=True))
        self.stats.prefill_tokens += sum(own) + holder.computed_tokens - computed
        return [
            _Ready(SampleStream(request, index, sample, self.tokenizer), prefix, row, shared[row])
            for row, (index, request) in enumerate(batch)
            for sample in range(request.params.num_samples)
        ]

    def _holder(self, plan: SharingPlan) -> PrefixHolder:
        """The run's pool, with what all prompts begin with in it."""
        began = time.perf_counter()
        holder = PrefixHolder(self.engine, plan)
        jax.block_until_ready(holder.pool)
        self.stats.prefill_seconds += time.perf_counter() - began
        self.stats.prefill_tokens += holder.computed_tokens
        return holder

    def _take(self, result: StepResult, served: Sequence[SampleStream | None]) -> Iterator[TextPiece]:
        """Hands one step's tokens to the samples that were in the slots when it was started."""
        packed, logprobs = np.asarray(result.packed), np.asarray(result.logprobs)
        top_ids, top_logprobs = np.asarray(result.top_ids), np.asarray(result.top_logprobs)
        self.stats.decode_steps += 1
        for slot, stream in enumerate(served):
            if stream is None or stream.finished:
                continue
            top = zip(top_ids[slot].tolist(), top_logprobs[slot].tolist(), strict=True)
            text = stream.push(int(packed[slot, 0]), float(logprobs[slot]), tuple(top))
            self.stats.decode_tokens += stream.finish_reason is not FinishReason.ERROR
            if text:
                yield TextPiece(stream.index, stream.sample, text)
