"""Whether a model and its cache can fit at all, before anything is loaded.

Idea: a host gives out memory that it does not have, and ends the process without a word when it is written
to. So what is certainly needed, weights and caches, is compared with what there is.

Worked example: PaLM 540B in bfloat16 needs 1.08 TB of weights; a machine of 24 GB refuses it at once.
"""

import os

import jax

from checkpoints.load import WeightsDtype
from inference_engine.cli.report import quantity
from inference_engine.config import EngineConfig
from layers.errors import UserError
from layers.hparams import HParams

_KERNEL_BYTES = {WeightsDtype.FLOAT32: 4, WeightsDtype.BFLOAT16: 2, WeightsDtype.INT8: 1}


def check_memory(
    hparams: HParams,
    weights: WeightsDtype,
    config: EngineConfig,
    available: int | None,
    *,
    generates: bool = True,
) -> None:
    """Refuses what cannot fit into `available` bytes; None where that is not known.

    Raises UserError with the sizes.
    """
    weight_bytes, cache_bytes = needed_bytes(hparams, weights, config, generates=generates)
    if available is None or weight_bytes + cache_bytes <= available:
        return
    remedy = (
        "--slots or --max_context" if cache_bytes > weight_bytes else "--weights, int8 being the smallest"
    )
    raise UserError(
        f"weights of {quantity(weight_bytes)}B and {config.slots} slots of {config.max_context} positions, "
        f"{quantity(cache_bytes)}B, do not fit into {quantity(available)}B of memory; "
        f"nearest: a smaller {remedy}"
    )


def needed_bytes(
    hparams: HParams, weights: WeightsDtype, config: EngineConfig, *, generates: bool = True
) -> tuple[int, int]:
    """Bytes of the weights, and of the caches of slots, of prompts being prefilled and of shared prefixes.

    Scoring (`generates` false) has the slots' rows alone.
    """
    positions = config.slots * config.cache_time
    if generates:
        positions += config.prefill_rows * config.prefill_time
        positions += sum(prefixes * time for prefixes, time in config.shared_sizes)
    return hparams.param_count * _KERNEL_BYTES[weights], config.cache_token_bytes(hparams) * positions


def available_bytes() -> int | None:
    """Memory of the default device, all of it; None where it cannot be asked."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
