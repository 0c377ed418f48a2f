"""What loading a checkpoint takes: anonymous memory above the process's baseline, and time.

    python -m benchmarks.load_memory [FOLDER [LAYERS]]

A Hugging Face folder of about 1 GB (Falcon's form, float32, random, 13 layers) is written to FOLDER or to a
temporary one and loaded onto 2×2×2 host devices. Pages of the mapped file are not anonymous and can be
dropped, so they do not count. Reading the file's bytes once is timed beside.

Worked example: a file of 1.03 GB that peaks at 1.24 GB of anonymous memory prints a ratio of 1.20.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

EMBED, FF, VOCAB = 1024, 8192, 8192
_STATUS = Path("/proc/self/status")


def main(folder: Path, layers: int = 13) -> None:
    """Measures and prints one line."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from checkpoints.formats import open_checkpoint
    from checkpoints.load import LoadOptions, MeshPlacement, load_params
    from layers.layout import Layout
    from layers.mesh import make_mesh
    from layers.mesh_shape import MeshShape

    file = folder / "model.safetensors"
    if not file.exists():
        write(folder, layers)
    size, began = file.stat().st_size, time.perf_counter()
    with file.open("rb") as stream:
        while stream.read(1 << 24):
            pass
    reading = time.perf_counter() - began
    shape = MeshShape(2, 2, 2)
    placement = MeshPlacement(Layout.WEIGHT_STATIONARY_2D.form.storage, shape, make_mesh(shape))
    state = open_checkpoint(folder).state
    jax.block_until_ready(jax.numpy.zeros(1))
    watch = Watch()
    began = time.perf_counter()
    params = jax.block_until_ready(load_params(state, LoadOptions(placement=placement)))
    loading, peak = time.perf_counter() - began, watch.stop()
    held = sum(part.data.nbytes for leaf in jax.tree.leaves(params) for part in leaf.addressable_shards)
    print(
        f"file {size / 1e9:.2f} GB, on devices {held / 1e9:.2f} GB, peak {peak / size:.2f} × the file; "
        f"loading {loading:.1f} s, reading the file once (cached) {reading:.1f} s"
    )


class Watch:
    """The largest anonymous memory above what there was at the beginning, sampled every 10 ms."""

    def __init__(self) -> None:
        self._base = self._peak = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self._peak = max(self._peak, anonymous_bytes())

    def stop(self) -> int:
        """Ends sampling; returns the peak above the baseline."""
        self._over.set()
        self._thread.join()
        return self._peak - self._base


def anonymous_bytes() -> int:
    """This process's resident anonymous memory (Linux)."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write(folder: Path, layers: int) -> None:
    """A Falcon of 77 MB a layer."""
    from safetensors.numpy import save_file

    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    tensors = {"transformer.word_embeddings.weight": np.resize(block, (VOCAB, EMBED))}
    matrices = {
        "self_attention.query_key_value": (EMBED + 256, EMBED), "self_attention.dense": (EMBED, EMBED),
        "mlp.dense_h_to_4h": (FF, EMBED), "mlp.dense_4h_to_h": (EMBED, FF),
    }  # fmt: skip
    norms = ["transformer.ln_f"]
    for layer in range(layers):
        prefix = f"transformer.h.{layer}."
        norms.append(f"{prefix}input_layernorm")
        tensors |= {f"{prefix}{name}.weight": np.resize(block, shape) for name, shape in matrices.items()}
    for name in norms:
        tensors[f"{name}.weight"] = np.ones(EMBED, np.float32)
        tensors[f"{name}.bias"] = np.zeros(EMBED, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "falcon", "hidden_size": EMBED, "num_hidden_layers": layers, "num_attention_heads": 8,
        "vocab_size": VOCAB, "ffn_hidden_size": FF, "bias": False, "multi_query": True,
        "parallel_attn": True, "new_decoder_architecture": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
