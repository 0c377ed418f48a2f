"""What `score` prints: a line a token and one of totals, or one JSON object.

Worked example: the lines of the text "no" are

     -4.1234  'no'
    1 token, 2 bytes: log-probability -4.12, bits per byte 2.974, perplexity 61.77
"""

import dataclasses
import json
import math
from typing import Any

from inference_engine.text_score import TextScore
from inference_engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ScoreOutput:
    """A score and how it came about.

    Attributes:
      context, stride, windows: see `score_windows`; the stride says something where there are more than one.
    """

    score: TextScore
    tokenizer: Tokenizer
    context: int
    stride: int
    windows: int

    def text(self, *, summary: bool) -> str:
        """Lines for a person."""
        lines = [] if summary else [self._line(*pair) for pair in self._pairs()]
        return "\n".join([*lines, self._totals()]) + "\n"

    def json(self, *, summary: bool) -> str:
        """One object; ASCII, so that any locale and any line reader takes it."""
        score = self.score
        fields: dict[str, Any] = {
            "bytes": score.num_bytes,
            "scored_tokens": len(score.scored),
            "logprob": _finite(score.logprob),
            "bits_per_byte": _finite(score.bits_per_byte),
            "perplexity": _finite(score.perplexity),
            "context": self.context,
            "stride": self.stride,
            "windows": self.windows,
        }
        if not summary:
            fields["tokens"] = [
                {"token_id": token, "token": self._spelled(token), "logprob": _finite(logprob)}
                for token, logprob in self._pairs()
            ]
        return json.dumps(fields, allow_nan=False) + "\n"

    def _pairs(self) -> list[tuple[int, float | None]]:
        return list(zip(self.score.token_ids, self.score.logprobs, strict=True))

    def _spelled(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _line(self, token: int, logprob: float | None) -> str:
        number = "–" if logprob is None else f"{logprob:.4f}"
        return f"{number:>12}  {self._spelled(token)!r}"

    def _totals(self) -> str:
        score = self.score
        window = f", context {self.context}, stride {self.stride}" if self.windows > 1 else ""
        return (
            f"{_count(len(score.scored), 'token')}, {_count(score.num_bytes, 'byte')}{window}: "
            f"log-probability {score.logprob:.2f}, bits per byte {score.bits_per_byte:.3f}, "
            f"perplexity {score.perplexity:.2f}"
        )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _finite(value: float | None) -> float | None:
    """Six digits after the point; None for what JSON cannot say."""
    return round(value, 6) if value is not None and math.isfinite(value) else None
