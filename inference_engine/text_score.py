"""How well a model foretells a text, in numbers that depend on the text and not on its tokens.

Bits per byte is the text's information under the model over its UTF-8 bytes: models with other tokenizers
can be compared by it. No jax.

Data flow: ids and log-probabilities (scoring.py) → `TextScore` → cli.score_output.

Worked example: 2 tokens of log-probability −1.386 each (a quarter) for a text of 5 bytes are 4 bits, 0.8 bits
per byte, and a perplexity of 4.
"""

import dataclasses
import math

from inference_engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TextScore:
    """A scored text.

    Attributes:
      token_ids: the text's tokens, without the mark of its beginning.
      logprobs: natural log-probability of each token after all before it; None for a first token that has
        nothing before it; NaN where the model's logits were not finite.
      num_bytes: UTF-8 bytes of what was scored.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    num_bytes: int

    @property
    def scored(self) -> list[float]:
        """The log-probabilities that there are."""
        return [value for value in self.logprobs if value is not None]

    @property
    def logprob(self) -> float:
        """Natural log-probability of the text."""
        return math.fsum(self.scored)

    @property
    def bits_per_byte(self) -> float:
        """−log₂ p of the text over its bytes."""
        return -self.logprob / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the mean of −log p over the tokens; infinite beyond what a float holds."""
        mean = -self.logprob / len(self.scored)
        return math.exp(mean) if not mean > 700 else math.inf

    @property
    def unusable(self) -> int:
        """Tokens whose log-probability is not finite."""
        return sum(not math.isfinite(value) for value in self.scored)


def scored_bytes(text: str, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of a text, less the first token's where no mark of the beginning stands before it."""
    unscored = b"" if tokenizer.bos_id is not None else tokenizer.first_token_bytes(token_ids[0]) or b""
    return len(text.encode()) - len(unscored)
