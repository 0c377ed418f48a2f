"""One sample of one request while it is being generated: ids, log-probabilities, text, and its end.

Pure host bookkeeping, no jax: a decode step's numbers go in, text that may be shown comes out.

Data flow: (token, logprob) of a step → `push` → new text → `completion` once `finished`.

Worked example: max_new_tokens 3, end-of-text id 2, tokens 17, 2: after the second, finish_reason is STOP, the
text is that of token 17, and token_ids are (17, 2).
"""

from collections.abc import Sequence

from inference_engine.detokenizer import TextStream
from inference_engine.request import Completion, FinishReason, Request
from inference_engine.tokenizer import Tokenizer


class SampleStream:
    """Collects one sample.

    Attributes:
      index, sample: which prompt, which of its samples.
      finish_reason: None while it goes on.
    """

    def __init__(self, request: Request, index: int, sample: int, tokenizer: Tokenizer) -> None:
        self.request, self.index, self.sample = request, index, sample
        self.finish_reason: FinishReason | None = None
        self._stream = TextStream(tokenizer, request.params.stop_strings, continues=True)
        self._stop_ids = {*request.params.stop_ids, *tokenizer.end_ids}
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._text: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None

    def push(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> str:
        """Takes one step's token; returns the text that may be shown now."""
        if token < 0:
            return self.finish(FinishReason.ERROR)
        self._ids.append(token)
        self._logprobs.append(logprob)
        if self.request.params.logprobs is not None:
            self._top.append(tuple(top)[: self.request.params.logprobs])
        if token in self._stop_ids:
            return self.finish(FinishReason.STOP)
        text = self._stream.push(token)
        self._text.append(text)
        if self._stream.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
            return text
        if len(self._ids) >= self.request.params.max_new_tokens:
            return text + self.finish(FinishReason.LENGTH)
        return text

    def finish(self, reason: FinishReason) -> str:
        """Ends the sample; returns the text that was held back."""
        text = self._stream.flush()
        self._text.append(text)
        # What was held back may complete a stop string only now.
        self.finish_reason = FinishReason.STOP if self._stream.stopped_by is not None else reason
        return text

    def completion(self) -> Completion:
        """The outcome of a finished sample."""
        assert self.finish_reason is not None
        return Completion(
            index=self.index,
            sample=self.sample,
            prompt=self.request.prompt,
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.token_ids),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top),
        )
