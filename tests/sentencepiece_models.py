"""Small sentencepiece models for tests, one per way of treating spaces at the start of a text."""

import enum
from pathlib import Path

import sentencepiece

LINES = (
    "the cat sat on the mat and the dog sat on the log",
    "a man, a plan, a canal",
    "to be, or not to be, that is the question",
    "the rain in Spain stays mainly in the plain",
)


class Spaces(enum.Enum):
    """(a space is put before the text, runs of spaces are merged and trimmed)."""

    KEPT = (False, False)
    ONE_BEFORE = (True, False)
    MERGED = (False, True)
    ONE_BEFORE_AND_MERGED = (True, True)


def write_model(
    path: Path, spaces: Spaces, byte_fallback: bool = True, normalization: str = "identity"
) -> Path:
    """Train on `LINES` and write the model to `path`."""
    before, merged = spaces.value
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES * 4),
            model_writer=stream,
            vocab_size=300 if byte_fallback else 44,
            hard_vocab_limit=False,
            byte_fallback=byte_fallback,
            add_dummy_prefix=before,
            remove_extra_whitespaces=merged,
            normalization_rule_name=normalization,
            user_defined_symbols=["\n"],
            num_threads=1,
            minloglevel=2,
        )
    return path
