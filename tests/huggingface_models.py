"""Tiny models of transformers' own making, with its logits: the other side of the Hugging Face readers.

Idea: a folder of `tests/oracles/huggingface` was written by transformers (`save_pretrained`), and holds
beside the weights what transformers computes with them in float32. So the tests need no torch; where it is
installed, the same models are made anew with other weights and compared live.

Weights are drawn with power (sharp attention, strong branches, no trivial gain or bias); a seed is taken
whose 32 greedy tokens are decided by a clear gap and are no short cycle.

Data flow: `CASES` → `build` → `save` → folder. To write all folders again, with the extra `oracles`:

    python -m tests.huggingface_models

Worked example: `llama_nine_heads` has SmolLM2's head counts, 9 query and 3 kv heads, of width 8.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "oracles" / "huggingface"
EXPECTED = "expected.npz"
PROMPT, NEW_TOKENS = 8, 32
IDS_SHAPE = (2, 21)

_EMBED, _LAYERS, _VOCAB, _FF, _HEADS = 32, 2, 72, 48, 4
_SIZES = {
    "hidden_size": _EMBED, "num_hidden_layers": _LAYERS, "vocab_size": _VOCAB, "intermediate_size": _FF,
    "num_attention_heads": _HEADS, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 16}
_FALCON = {key: value for key, value in _SIZES.items() if key != "intermediate_size"} | {
    "parallel_attn": True, "alibi": False, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: transformers' name for the family, and its config."""

    family: str
    config: Mapping[str, Any]
    dtype: str = "float16"
    shard_size: str | None = None


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | fields}


CASES: dict[str, Case] = {
    "cohere": Case("Cohere", _GROUPED | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere_multiquery_qk_norm": Case(
        "Cohere", _SIZES | {"num_key_value_heads": 1, "use_qk_norm": True, "attention_bias": True}
    ),
    "falcon_7b": Case("Falcon", _FALCON | {"multi_query": True, "bias": False}),
    "falcon_40b": Case("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_11b": Case(
        "Falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "bfloat16",
    ),
    "falcon_serial_biases": Case(
        "Falcon", _FALCON | {"multi_query": False, "bias": True, "parallel_attn": False}
    ),
    "gptj": Case(
        "GPTJ",
        {"vocab_size": _VOCAB, "n_positions": 64, "n_embd": _EMBED, "n_layer": _LAYERS, "n_head": _HEADS,
         "rotary_dim": 4, "n_inner": _FF, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": Case("GPTNeoX", _SIZES | _rope(partial_rotary_factor=0.25) | {"use_parallel_residual": True}),
    "gpt_neox_serial": Case(
        "GPTNeoX",
        _SIZES | _rope(partial_rotary_factor=0.5) | {"use_parallel_residual": False, "attention_bias": False},
    ),
    "llama": Case(
        "Llama", _WIDE | {"rms_norm_eps": 1e-5, "rope_parameters": _LLAMA3_ROPE}, "bfloat16", "20KB"
    ),
    "llama_biases_linear": Case(
        "Llama",
        _SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | _rope(rope_type="linear", factor=4.0),
    ),
    "llama_nine_heads": Case(
        "Llama", _SIZES | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}, "float16"
    ),
    "mistral": Case("Mistral", _WIDE | {"sliding_window": 5}),
    "gemma": Case("Gemma", _SIZES | {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": Case(
        "Gemma2",
        _WIDE | {"num_hidden_layers": 2, "sliding_window": 4, "attn_logit_softcapping": 4.0,
                 "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 24},
    ),
    "qwen2": Case(
        "Qwen2",
        _GROUPED | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6,
                    "max_window_layers": 1},
    ),
    "qwen3": Case("Qwen3", _WIDE | {"tie_word_embeddings": False}, "float32"),
    "phi": Case("Phi", _SIZES | _rope(partial_rotary_factor=0.5)),
    "stablelm": Case("StableLm", _GROUPED | _rope(partial_rotary_factor=0.25) | {"use_qkv_bias": True}),
    "stablelm_parallel": Case(
        "StableLm", _GROUPED | _rope(partial_rotary_factor=0.25) | {"use_parallel_residual": True}
    ),
}  # fmt: skip


def build(case: Case, seed: int) -> Any:
    """transformers' model with weights of power, of the case's dtype held in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    offset = 1.0 if case.family.startswith("Gemma") else 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, offset)
            parameter.copy_(parameter.to(getattr(torch, case.dtype)))
        model.tie_weights()
    return model


def _draw(name: str, parameter: Any, offset: float) -> None:
    """Random values: gains near one, biases that show, matrices that are strong."""
    is_norm = parameter.ndim == 1 or "norm" in name
    if name.endswith("bias"):
        parameter.normal_(0, 0.3)
    elif is_norm:
        parameter.uniform_(0.6, 1.4).sub_(offset)
    else:
        embedding = any(word in name for word in ("embed_tokens", "embed_in", "wte", "word_embed"))
        strength = 1.7 if not embedding else 0.2 if offset else 0.7  # Gemma multiplies embedded tokens
        parameter.normal_(0, strength / math.sqrt(parameter.shape[-1]))


def reference(forward: Callable[[np.ndarray], np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """An implementation's float32 logits of two texts, and what it continues the first one's start with.

    `forward` gives the logits [batch, time, vocab] of ids [batch, time].
    """
    ids = np.random.default_rng(seed).integers(3, _VOCAB, IDS_SHAPE)
    row, gaps = ids[:1, :PROMPT], []
    for _ in range(NEW_TOKENS):
        last = forward(row)[0, -1]
        second, best = np.argsort(last)[-2:]
        gaps.append(float((last[best] - last[second]) / np.max(np.abs(last))))
        row = np.append(row, [[best]], 1)
    return {"ids": ids, "logits": forward(ids), "greedy": row[0, PROMPT:], "gap": np.float64(min(gaps))}


def _forward(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A model of transformers as a function of ids."""
    import torch

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor(ids)).logits.float().numpy()
        return logits

    return forward


def decided(expected: Mapping[str, np.ndarray]) -> bool:
    """Whether the greedy tokens are decided by a clear gap, and neither repeat nor cycle."""
    greedy = expected["greedy"]
    repeats = float(np.mean(greedy[1:] == greedy[:-1]))
    return bool(expected["gap"] > 2e-3) and repeats < 0.1 and len(set(greedy[-16:].tolist())) > 8


def choose(case: Case, first_seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """A model whose greedy tokens are decided, and what is expected of it."""
    for seed in range(first_seed, first_seed + 400):
        model = build(case, seed)
        expected = reference(_forward(model), seed)
        if decided(expected):
            return model, expected
    raise AssertionError(f"no seed gives a decided text for {case}")


def save(case: Case, model: Any, expected: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes the folder as transformers does, and the expectation beside it."""
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    size = {} if case.shard_size is None else {"max_shard_size": case.shard_size}
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, **size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / EXPECTED, **{key: expected[key] for key in ("ids", "logits", "greedy")})


def main() -> None:
    """Writes every folder again."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, case in CASES.items():
        model, expected = choose(case, first_seed=0)
        save(case, model, expected, FOLDER / name)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(json.dumps({"case": name, "bytes": size, "gap": round(float(expected["gap"]), 5)}))


if __name__ == "__main__":
    main()
