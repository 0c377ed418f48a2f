"""T5X trees: PaLM-pytorch's weights, rewritten into that tree, compute what PaLM-pytorch computes.

Idea: the oracle's tensors are fused head by head as the tree has them, written as msgpack whose large leaves
are zarr arrays, and read back. int8 trees equal this project's own quantization of the same float tree.

Data flow: oracle → tree on disk → `open_checkpoint` → reference logits, one device and 2×2×2 → the oracle's.

Worked example: 4 heads of 16 with ff 192: each head's columns are 16 of q, 48 of W0, 48 of W1.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.int8 import quantize_state
from checkpoints.state import CheckpointState, QuantizedTensor
from layers.errors import UserError
from tests.huggingface_runs import run
from tests.reference_model import reference_logits

ORACLE = Path(__file__).parent / "oracles" / "palm_pytorch_0.2.2.npz"
FORM = {"norm": "layer", "norm_eps": 1e-5, "norm_gain_offset": 0, "logit_scale": 1.0}
HEADS, QKV, FF = 4, 16, 192
PLACE = "target.{}"


def oracle_weights() -> dict[str, np.ndarray]:
    return {key: np.asarray(entry) for key, entry in open_checkpoint(ORACLE).state.weights.items()}


def tree_of(weights: dict[str, np.ndarray], dtype: type = np.float32) -> dict[str, np.ndarray]:
    """The fused arrays, by their path below `target`."""

    def stacked(make: Callable[[dict[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        layers = [
            {key.split("/")[1]: w for key, w in weights.items() if key.startswith(f"layer_{i}/")}
            for i in range(3)
        ]
        return np.stack([make(layer) for layer in layers], axis=1)

    def by_head(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(matrix.shape[0], HEADS, -1)

    q_wi = stacked(lambda w: np.concatenate([w["q"], by_head(w["w0"]), by_head(w["w1"])], -1))
    kv = stacked(lambda w: np.concatenate([w["k"], w["v"]], -1))
    o_wo = stacked(lambda w: np.concatenate([w["o"], w["w2"].reshape(HEADS, -1, w["w2"].shape[-1])], 1))
    return {
        "decoder/decoder/q_wi_fused/kernel": q_wi.astype(dtype),
        "decoder/decoder/kv_fused/kernel": kv.astype(dtype),
        "decoder/decoder/o_wo_fused/kernel": o_wo.astype(dtype),
        "decoder/decoder/layer_norm/scale": stacked(lambda w: w["norm_gain"]),
        "decoder/decoder_norm/scale": weights["final_norm_gain"],
        "decoder/token_embedder/embedding": weights["embedding"].astype(dtype),
    }


def write_tree(
    folder: Path, arrays: dict[str, np.ndarray], root: str = "target", form: dict[str, Any] | None = None
) -> Path:
    """Kernels as zarr arrays beside the msgpack, the rest inside it, as T5X does."""
    folder.mkdir(parents=True, exist_ok=True)
    nested: dict[str, Any] = {"state": {"step": np.array(3)}}
    for key, array in arrays.items():
        leaf: Any = np.asarray(array)
        if array.ndim > 2:
            place = PLACE.format(key.replace("/", "."))
            dtype = "bfloat16" if array.dtype == ml_dtypes.bfloat16 else array.dtype.str
            metadata = {"shape": list(array.shape), "chunks": list(array.shape), "dtype": dtype}
            spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / place}/"}}
            ts.open(spec | {"metadata": metadata}, create=True).result().write(array).result()
            leaf = {"driver": "zarr", "kvstore": {"driver": "gfile", "path": place}, "metadata": metadata}
        node = nested
        *parents, last = f"{root}/{key}".split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(nested))
    (folder / "form.json").write_text(json.dumps(FORM if form is None else form))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("t5x") / "palm", tree_of(oracle_weights()))


def error(state: CheckpointState) -> float:
    with np.load(ORACLE) as oracle:
        weights = {key: np.asarray(entry) for key, entry in state.weights.items()}
        return float(
            np.max(np.abs(reference_logits(state.hparams, weights, oracle["ids"]) - oracle["logits"]))
        )


def test_a_tree_computes_what_palm_pytorch_computes(folder: Path) -> None:
    assert detect(folder) is Container.T5X
    state = open_checkpoint(folder).state
    assert (state.hparams.heads, state.hparams.qkv, state.hparams.ff) == (HEADS, QKV, FF)
    assert error(state) < 1e-4


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "2,2,2"])
def test_a_tree_computes_it_on_devices(folder: Path, on_mesh: bool) -> None:
    with np.load(ORACLE) as oracle:
        ids, logits = oracle["ids"], oracle["logits"]
    native = run(open_checkpoint(ORACLE).state, ids, 8, 32, on_mesh=False)
    found = run(open_checkpoint(folder).state, ids, 8, 32, on_mesh=on_mesh)
    assert np.max(np.abs(found.logits - logits)) < 1e-4
    assert found.greedy.tolist() == native.greedy.tolist()


def test_older_trees_stand_below_the_optimizer(tmp_path: Path) -> None:
    old = write_tree(tmp_path / "old", tree_of(oracle_weights()), root="optimizer/target")
    assert error(open_checkpoint(old).state) < 1e-4


def test_bfloat16_kernels_stay_bfloat16(tmp_path: Path) -> None:
    tree = tree_of(oracle_weights(), ml_dtypes.bfloat16)
    state = open_checkpoint(write_tree(tmp_path / "a", tree)).state
    assert state.weights["layer_0/q"].dtype == ml_dtypes.bfloat16
    assert 1e-4 < error(state) < 1e-1


def test_int8_trees_are_values_and_scales(tmp_path: Path) -> None:
    source = quantize_state(open_checkpoint(ORACLE).state)
    values, scales = {}, {}
    for key, entry in source.weights.items():
        is_int8 = isinstance(entry, QuantizedTensor)
        values[key] = np.asarray(entry.qvalue if is_int8 else entry)
        scales[key] = np.asarray(entry.scale) if is_int8 else values[key]
    for i in range(3):
        for name in ("q", "k", "v", "w0", "w1"):
            scales[f"layer_{i}/{name}"] = scales[f"layer_{i}/{name}"][None]
    floats, ints = tree_of(oracle_weights()), tree_of(values)
    scale_tree = tree_of(
        {k: v for k, v in scales.items() if not k.endswith(("/o", "/w2"))}
        | {
            f"layer_{i}/{name}": np.zeros((HEADS, QKV, 48) if name == "o" else (FF, 48))
            for i in range(3)
            for name in ("o", "w2")
        }
    )
    arrays = {key: array for key, array in floats.items() if "fused" not in key}
    for key in (key for key in floats if "fused" in key):
        stem = key.removesuffix("kernel")
        arrays[f"{stem}qkernel"] = ints[key].astype(np.int8)
        arrays[f"{stem}qscale"] = scale_tree[key].astype(ml_dtypes.bfloat16)
    arrays["decoder/decoder/o_wo_fused/qscale"] = np.stack([scales[f"layer_{i}/o"] for i in range(3)])[
        None, :, None
    ].astype(ml_dtypes.bfloat16)
    found = open_checkpoint(write_tree(tmp_path / "a", arrays)).state
    assert found.quantized
    for key, entry in source.weights.items():
        if isinstance(entry, QuantizedTensor):
            np.testing.assert_array_equal(np.asarray(found.weights[key].qvalue), np.asarray(entry.qvalue))
            rounded = np.asarray(entry.scale).astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(found.weights[key].scale), rounded)


def test_without_a_form_the_tree_is_palm(tmp_path: Path) -> None:
    tree = tree_of(oracle_weights())
    del tree["decoder/decoder_norm/scale"]
    state = open_checkpoint(write_tree(tmp_path / "a", tree, form={})).state
    assert state.hparams.norm_gain_offset == 1
    assert state.hparams.logit_scale is None
    assert not np.any(np.asarray(state.weights["final_norm_gain"]))


def change_tree(
    change: Callable[[dict[str, np.ndarray]], object], form: dict[str, Any] | None = None
) -> Callable:
    def make(folder: Path) -> Path:
        tree = tree_of(oracle_weights())
        change(tree)
        return write_tree(folder, tree, form=form)

    return make


def edit_leaf(**fields: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_tree(folder, tree_of(oracle_weights()))
        nested = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
        nested["target"]["decoder"]["decoder"]["kv_fused"]["kernel"] |= fields
        (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(nested))
        return folder

    return make


def cut(size: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_tree(folder, tree_of(oracle_weights()))
        (folder / "checkpoint").write_bytes((folder / "checkpoint").read_bytes()[:size])
        return folder

    return make


KV = "decoder/decoder/kv_fused/kernel"
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (change_tree(lambda t: t.pop(KV)), f"missing {KV}"),
    "unknown": (change_tree(lambda t: t.update(x=np.ones(3))), "unexpected x"),
    "shape": (
        change_tree(lambda t: t.update({KV: t[KV][:-1]})),
        f"{KV} has shape [47, 3, 1, 32], expected [48",
    ),
    "dims": (
        change_tree(lambda t: t.update({KV: t[KV][0]})),
        f"{KV} has shape [3, 1, 32], expected four dims",
    ),
    "form": (
        change_tree(lambda t: None, form={"norm": "batch"}),
        "form.json says norm='batch'; allowed: rms, layer",
    ),
    "form key": (change_tree(lambda t: None, form={"heads": 3}), "form.json has 'heads'; known: norm,"),
    "cut": (cut(2000), "truncated or no T5X checkpoint"),
    "nothing": (cut(0), "truncated or no T5X checkpoint"),
    "driver": (edit_leaf(driver="http"), "expected a zarr array in the folder"),
    "elsewhere": (edit_leaf(kvstore={"driver": "file", "path": "../secret"}), "expected a zarr array in the"),
    "absolute": (
        edit_leaf(kvstore={"driver": "file", "path": "/etc"}),
        "expected a zarr array in the folder",
    ),
    "not there": (
        edit_leaf(kvstore={"driver": "file", "path": "gone"}),
        "gone: target/decoder/decoder/kv_fused",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_a_bad_tree_is_refused_by_name(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    with pytest.raises(UserError) as raised:
        open_checkpoint(path)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert message in text
    assert "\n" not in text
