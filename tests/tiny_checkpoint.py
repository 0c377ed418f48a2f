"""A checkpoint small enough for tests of the command line, with a token for each byte.

Worked example: two layers of embed 48 and 258 ids (256 bytes, BOS, EOS) are 60,000 parameters.
"""

from pathlib import Path

from checkpoints.orbax_store import save_checkpoint
from checkpoints.synthetic import synthetic_state
from layers.hparams import HParams

TINY = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=1, qkv=16, vocab=258)


def save_tiny(folder: Path, hparams: HParams = TINY, tokenizer_file: Path | None = None) -> Path:
    """Saves it and returns its path."""
    path = folder / "tiny"
    save_checkpoint(path, synthetic_state(hparams), tokenizer_file=tokenizer_file)
    return path
