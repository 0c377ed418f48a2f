"""Which cuts of a long text are scored, as data; no jax.

A model sees at most a context of tokens. A text that fits is one window. A longer one is read through a
window that slides by `stride` tokens; each window scores the tokens that no window before it has scored. So
every token is scored exactly once, those of the first window after all that stands before them, the others
after at least context − stride tokens and at most context − 1.

Data flow: number of tokens, context, stride → `windows` → `Window`s → scoring.Scorer.

Worked example: 10 tokens, context 6, stride 3: the window of tokens 0 to 5 scores 1 to 5, that of 3 to 8
scores 6 to 8, that of 6 to 9 scores 9. Token 0 has nothing before it and is never scored.
"""

import dataclasses

from layers.errors import UserError


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` − 1 of the text, of which those from `first_scored` on are scored."""

    start: int
    first_scored: int
    end: int


def windows(count: int, context: int, stride: int) -> list[Window]:
    """The windows of a text of `count` tokens, at least 2, in order."""
    check_stride(stride, context)
    found, scored = [], 1
    for start in range(0, count, stride):
        end = min(start + context, count)
        found.append(Window(start, scored, end))
        scored = end
        if end == count:
            break
    return found


def check_stride(stride: int, context: int) -> None:
    """Refuses a stride that would leave tokens without anything before them; raises UserError."""
    if not 1 <= stride < context:
        raise UserError(
            f"stride={stride} is not allowed; allowed: 1 to {context - 1} with a context of {context}; "
            f"nearest: {min(max(stride, 1), context - 1)}"
        )
