"""Laws of the stored order: where the docstring of `checkpoints.storage` says a number stands, it stands.

Matrices are coded by rank: the entry at (row, column) of part p is p·10⁶ + row·10³ + column, exact in
float32: each stored number says where it came from.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.state import state_spec
from checkpoints.storage import ChunkMajor
from layers.head_order import padded_heads
from layers.hparams import HParams
from layers.layout import WeightStorage
from layers.mesh_shape import MeshShape
from layers.quantization import Int8Weight

MESHES = [MeshShape(2, 2, 2), MeshShape(4, 2, 1), MeshShape(2, 1, 3), MeshShape(1, 1, 1)]
ROWS = 48


def _coded(part: int, rows: int, cols: int) -> np.ndarray:
    return (part * 1e6 + np.arange(rows)[:, None] * 1e3 + np.arange(cols)[None, :]).astype(np.float32)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_input_chunks_hold_their_share_of_every_part(mesh: MeshShape) -> None:
    n, widths = mesh.size, (2, 5)
    parts = [_coded(p, ROWS, n * width) for p, width in enumerate(widths)]
    for order in WeightStorage:
        stored = np.asarray(ChunkMajor(order, mesh).beside([jnp.asarray(part) for part in parts]))
        cut = mesh.x if order is WeightStorage.ONE_D else 1
        assert stored.shape == (n * cut, ROWS // cut, sum(widths))
        for chunk in range(n):
            wanted = np.concatenate(
                [part[:, chunk * w : (chunk + 1) * w] for part, w in zip(parts, widths, strict=True)], axis=1
            )
            for piece in range(cut):
                rows = slice(piece * ROWS // cut, (piece + 1) * ROWS // cut)
                np.testing.assert_array_equal(stored[chunk * cut + piece], wanted[rows])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_output_chunks_hold_their_rows_of_every_part(mesh: MeshShape) -> None:
    n, heights = mesh.size, (3, 4)
    parts = [_coded(p, n * height, ROWS) for p, height in enumerate(heights)]
    for order in WeightStorage:
        stored = np.asarray(ChunkMajor(order, mesh).below([jnp.asarray(part) for part in parts]))
        cut = mesh.x if order is WeightStorage.ONE_D else 1
        assert stored.shape == (n * cut, sum(heights), ROWS // cut)
        for chunk in range(n):
            wanted = np.concatenate(
                [part[chunk * h : (chunk + 1) * h] for part, h in zip(parts, heights, strict=True)]
            )
            for piece in range(cut):
                cols = slice(piece * ROWS // cut, (piece + 1) * ROWS // cut)
                np.testing.assert_array_equal(stored[chunk * cut + piece], wanted[:, cols])


@pytest.mark.parametrize("order", WeightStorage, ids=lambda order: order.value)
def test_int8_scales_stand_beside_the_columns_they_scale(order: WeightStorage) -> None:
    mesh, rng = MeshShape(2, 1, 3), np.random.default_rng(0)
    values = [rng.integers(-127, 128, (ROWS, 6 * width), np.int8) for width in (2, 3)]
    pairs = [
        Int8Weight(jnp.asarray(value), jnp.asarray(rng.uniform(1, 2, value.shape[1]).astype(np.float32)))
        for value in values
    ]
    storage = ChunkMajor(order, mesh)
    stored = storage.beside(pairs)
    floats = [pair.qvalue.astype(jnp.float32) * pair.scale[None, :] for pair in pairs]
    scales = np.repeat(np.asarray(stored.scale), storage.embed_chunks, axis=0)[:, None, :]
    np.testing.assert_array_equal(np.asarray(stored.qvalue) * scales, np.asarray(storage.beside(floats)))


def test_heads_stand_in_their_stored_order_and_padding_is_zero() -> None:
    hparams = HParams(layers=1, embed=48, ff=96, heads=9, kv_heads=3, qkv=8, vocab=72)
    mesh, spec = MeshShape(2, 2, 2), state_spec(hparams)
    leaves = {name: np.zeros(spec[f"layer_0/{name}"], np.float32) for name in ("q", "k", "v", "o")}
    leaves["q"] += np.arange(1, 10).reshape(1, 9, 1).astype(np.float32)
    leaves["o"] += np.arange(1, 10).reshape(9, 1, 1).astype(np.float32)
    leaves["k"] += np.arange(1, 4).reshape(1, 3, 1).astype(np.float32)
    padded, arranged = ChunkMajor(WeightStorage.TWO_D, mesh).arrange_heads(hparams, leaves)
    heads = padded_heads(hparams, *mesh.sizes)
    np.testing.assert_array_equal(np.asarray(arranged["q"])[0, :, 0], np.array(heads.order) + 1)
    np.testing.assert_array_equal(np.asarray(arranged["o"])[:, 0, 0], np.array(heads.order) + 1)
    np.testing.assert_array_equal(np.asarray(arranged["k"])[0, :, 0], np.array(heads.kv_order) + 1)
    assert (padded.heads, padded.kv_heads, padded.ff) == (16, 4, hparams.ff)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_vocabulary_is_padded_with_zeros_to_a_multiple_of_the_chips(mesh: MeshShape) -> None:
    table = jnp.ones((71, 4), jnp.float32)
    padded = np.asarray(ChunkMajor(WeightStorage.ONE_D, mesh).pad_vocab(table))
    assert padded.shape[0] % mesh.size == 0
    assert padded.shape[0] - 71 < mesh.size
    np.testing.assert_array_equal(padded[:71], 1)
    np.testing.assert_array_equal(padded[71:], 0)
