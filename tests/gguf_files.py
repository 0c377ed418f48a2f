"""GGUF files for tests: written by the package `gguf`, from the Hugging Face folders of the oracles.

GGUF's llama files hold the rows of q and k in another order than Hugging Face's: there the two halves of a
head rotate together, here neighbours. So a file made from a folder by that permutation computes its logits.

Worked example: rows 0 … 7 of a head of 8 become 0, 4, 1, 5, 2, 6, 3, 7.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.safetensors_source import read_safetensors
from tests.huggingface_models import CASES, FOLDER

_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama_tensors(name: str) -> dict[str, np.ndarray]:
    """A folder's tensors, float32, under GGUF's names and in its order."""
    config = CASES[name].config
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for key, array in read_safetensors(FOLDER / name / "model.safetensors").items():
        stem, end = key.rsplit(".", 1)
        parts = stem.split(".", 3)
        ours = _ENDS.get(stem) or f"blk.{parts[2]}.{_LAYER[parts[3]]}"
        values = np.asarray(array).astype(np.float32)
        kind = ours.split(".")[-1]
        if kind in heads:
            halves = values.reshape(heads[kind], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[f"{ours}.{end}"] = values
    return tensors


def llama_metadata(name: str) -> dict[str, Any]:
    """What a folder's config says, under GGUF's keys."""
    config = CASES[name].config
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes a file; `kinds` names the encoding of some tensors, the others are float32."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        writer.add_array(key, value) if isinstance(value, list) else add[type(value)](key, value)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
