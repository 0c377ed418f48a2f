"""What a run prints: text as it is generated, or one JSON object a text.

Idea: many texts are generated together and printed one after the other, in the order of the prompts. The
first unfinished one is shown live; what others generate meanwhile waits for its turn. So nothing is
interleaved, and the output does not depend on which text ended first.

Data flow: `TextPiece`s and `Completion`s → `InOrder` → a printer → stdout.

Worked example: two prompts. While the first runs, its pieces are shown as they come; the second ends after
30 tokens and waits. When the first ends, the second is printed at once under its header.
"""

import collections
import json
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from inference_engine.cli.prompts import Prompt
from inference_engine.cli.terminal import Output, Stream, styled, visible
from inference_engine.generate import TextPiece
from inference_engine.request import Completion
from inference_engine.tokenizer import Tokenizer

Key = tuple[int, int]
"""Which prompt of the run and which of its samples."""


@runtime_checkable
class Printer(Protocol):
    """Prints one text after another."""

    def begin(self, key: Key) -> None:
        """A text's turn has come."""

    def text(self, piece: str) -> None:
        """More of the text whose turn it is."""

    def end(self, completion: Completion | None) -> None:
        """The text's end; None if it was interrupted."""


class InOrder:
    """Hands pieces and completions to a printer, each text in its turn."""

    def __init__(self, prompts: Sequence[Prompt], printer: Printer) -> None:
        keys = [(i, n) for i, prompt in enumerate(prompts) for n in range(prompt.params.num_samples)]
        self._keys = collections.deque(keys)
        self._printer = printer
        self._waiting: dict[Key, list[str]] = collections.defaultdict(list)
        self._done: dict[Key, Completion] = {}
        self._begun = False

    def take(self, event: TextPiece | Completion) -> None:
        """Prints what is due after this event."""
        key = (event.index, event.sample)
        if isinstance(event, Completion):
            self._done[key] = event
        else:
            self._waiting[key].append(event.text)
        self._advance()

    def interrupted(self) -> None:
        """Prints all that there is of the texts that have begun."""
        while self._keys:
            key = self._keys[0]
            if self._begun or key in self._done or key in self._waiting:
                self._show(key)
                self._end(key)
            else:
                self._keys.popleft()

    def _advance(self) -> None:
        while self._keys:
            key = self._keys[0]
            self._show(key)
            if key not in self._done:
                return
            self._end(key)

    def _show(self, key: Key) -> None:
        if not self._begun:
            self._begun = True
            self._printer.begin(key)
        pieces = self._waiting.pop(key, None)
        if pieces:
            self._printer.text("".join(pieces))

    def _end(self, key: Key) -> None:
        self._printer.end(self._done.pop(key, None))
        self._keys.popleft()
        self._begun = False


class TextPrinter:
    """Prompt and text as one; a header before each where there are several."""

    def __init__(self, prompts: Sequence[Prompt], output: Output) -> None:
        self._prompts, self._output = prompts, output
        self._several = sum(prompt.params.num_samples for prompt in prompts) > 1
        self._last = "\n"
        self._first = True

    def begin(self, key: Key) -> None:
        """Prints the header and the prompt."""
        prompt = self._prompts[key[0]]
        if self._several:
            break_before = "" if self._first else "\n"
            self._write(break_before + styled(self._header(key, prompt), "dim", Stream.OUT) + "\n")
        self._first = False
        text = prompt.text if prompt.chat is None else prompt.text + "\n"
        shown = visible(text) if self._output.terminal else text
        self._write(styled(shown, "bold", Stream.OUT), shown)

    def text(self, piece: str) -> None:
        """Prints more of the text."""
        self._write(visible(piece) if self._output.terminal else piece)

    def end(self, completion: Completion | None) -> None:
        """Ends the line."""
        del completion
        if self._last != "\n":
            self._write("\n")

    def _header(self, key: Key, prompt: Prompt) -> str:
        parts = [f"prompt {key[0] + 1} of {len(self._prompts)}"] if len(self._prompts) > 1 else []
        if prompt.params.num_samples > 1:
            parts.append(f"sample {key[1] + 1} of {prompt.params.num_samples}")
        return f"--- {', '.join(parts)} ---"

    def _write(self, written: str, plain: str = "") -> None:
        self._output.write(written)
        self._last = (plain or written)[-1:] or self._last


class JsonPrinter:
    """One object a line, complete ones only; ASCII, so that any locale and any line reader takes it."""

    def __init__(self, prompts: Sequence[Prompt], output: Output, tokenizer: Tokenizer) -> None:
        self._prompts, self._output, self._tokenizer = prompts, output, tokenizer

    def begin(self, key: Key) -> None:
        """An object is printed at its end."""

    def text(self, piece: str) -> None:
        """An object is printed at its end."""

    def end(self, completion: Completion | None) -> None:
        """Prints the object of a text that was not interrupted."""
        if completion is not None:
            line = json.dumps(self._object(completion), allow_nan=False)
            self._output.write(line + "\n")

    def _object(self, completion: Completion) -> dict[str, Any]:
        prompt = self._prompts[completion.index]
        fields = {
            "index": prompt.index,
            "sample": completion.sample,
            "prompt": prompt.text,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason.value,
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
        }
        if prompt.params.logprobs is not None:
            fields["logprobs"] = self._logprobs(completion)
        return fields

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        chosen = zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True)
        return [
            {**self._token(token, value), "top": [self._token(*pair) for pair in top]}
            for token, value, top in chosen
        ]

    def _token(self, token: int, value: float) -> dict[str, Any]:
        known = token < self._tokenizer.vocab_size
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if known else ""
        return {
            "token_id": token,
            "token": text,
            "logprob": round(value, 6) if math.isfinite(value) else None,
        }
