"""What a step cannot do without, and the time that a chip needs for it at the least; no jax.

Work is counted for the model as it is: padded heads and rows, copies of activations and whatever else a
layout adds are the layout's cost, and show as a smaller share of the bound.

Data flow: `HParams`, setting, bytes on a chip → `Work` → with `ChipSpec` → `Bound`.

Worked example: 8 chips that hold 2.7 MB of weights each and share a memory of 20 GB/s: a decode step reads
all of them once, 22 MB, so it takes at least 1.1 ms.
"""

import dataclasses

from inference_engine.profiling.chips import ChipSpec
from layers.hparams import HParams


@dataclasses.dataclass(frozen=True)
class Work:
    """What one chip does at the least: FLOPs, bytes of memory read, bytes sent to other chips."""

    flops: float
    memory_bytes: float
    sent_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds that each resource needs for the work alone; None where the chip's figure is not known."""

    flops: float | None
    memory: float | None
    links: float | None = None

    @property
    def seconds(self) -> float | None:
        """The largest of them."""
        known = [value for value in (self.flops, self.memory, self.links) if value is not None]
        return max(known, default=None)


def bound(work: Work, chip: ChipSpec, dtype: str) -> Bound:
    """The bound of work on one device. Links: all bytes leave by all links at once, in one direction each."""
    flops, memory = chip.flops_of(dtype), chip.device_memory_speed
    links = None if chip.links is None or chip.link_speed is None else chip.links * chip.link_speed
    return Bound(
        flops=None if flops is None else work.flops / flops,
        memory=None if memory is None else work.memory_bytes / memory,
        links=None if links is None else work.sent_bytes / (links / chip.devices),
    )


def _matmul_params(hparams: HParams) -> int:
    """Entries of a layer's matrices."""
    h = hparams
    ff_in = 2 if h.act.gated else 1
    attention = h.embed * (2 * h.heads + 2 * h.kv_heads) * h.qkv
    return attention + (ff_in + 1) * h.embed * h.ff


def _scores(hparams: HParams, layer: int, keys: int) -> int:
    """FLOPs of q·k and of the weighted sum of v for one token that sees at most `keys` keys."""
    window = hparams.window(layer)
    return 4 * hparams.heads * hparams.qkv * (keys if window is None else min(keys, window))


def decode_flops(hparams: HParams, batch: int, context: int) -> float:
    """FLOPs of one token for each of `batch` texts of `context` tokens, over all chips."""
    matrices = hparams.layers * _matmul_params(hparams) + hparams.vocab * hparams.embed
    scores = sum(_scores(hparams, layer, context + 1) for layer in range(hparams.layers))
    return float(batch * (2 * matrices + scores))


def prefill_flops(hparams: HParams, batch: int, context: int) -> float:
    """FLOPs of prefilling `batch` prompts of `context` tokens, over all chips.

    Of the last layer only k and v have a reader, and no logits are computed.
    """
    keys_values = 2 * hparams.embed * hparams.kv_heads * hparams.qkv
    matrices = (hparams.layers - 1) * _matmul_params(hparams) + keys_values
    scores = sum(
        _scores(hparams, layer, position + 1)
        for layer in range(hparams.layers - 1)
        for position in range(context)
    )
    return float(batch * (context * 2 * matrices + scores))
