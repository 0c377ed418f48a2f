"""What needs no neural network: the bits per byte that xz and a unigram of the tokens reach.

Idea: a validation figure says nothing alone. `xz -9` knows only the text that it compresses; a unigram
knows how often each token came in training and nothing else. A model has to beat both by far.

Worked example: 1,000 bytes that xz writes in 400 bytes are 3.2 bits per byte. 400 tokens of 8 bits each
for the same 1,000 bytes are 3.2 bits per byte too.
"""

import lzma
from collections.abc import Mapping

import numpy as np

XZ_PRESET = 9
BITS_PER_BYTE = 8


def xz_bits_per_byte(works: Mapping[str, str]) -> float:
    """Bits per byte of all works compressed as one `xz -9` stream, headers included."""
    text = "".join(works.values()).encode()
    return BITS_PER_BYTE * len(lzma.compress(text, preset=XZ_PRESET)) / len(text)


def unigram_bits_per_byte(
    train: np.ndarray, validation: np.ndarray, vocab_size: int, num_bytes: int
) -> float:
    """Bits per byte of the validation ids under add-one-smoothed training frequencies.

    Args:
      train: int [time] ids that the frequencies come from.
      validation: int [time] ids that are scored.
      vocab_size: number of ids that can occur.
      num_bytes: UTF-8 bytes of the validation text.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    bits = -np.log2(counts / counts.sum())
    return float(bits[validation].sum() / num_bytes)
