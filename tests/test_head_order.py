"""Laws of padding and ordering heads over a mesh."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from configs.models import palm_540b
from layers.head_order import KVFactors, padded_heads
from layers.hparams import HParams

MESHES = ((1, 1, 1), (2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 1, 3), (4, 4, 1), (3, 2, 1))
HEADS = ((4, 1), (9, 3), (8, 2), (8, 8), (6, 3), (5, 1), (16, 4), (1, 1))


def _model(heads: int, kv_heads: int) -> HParams:
    return HParams(layers=1, embed=48, ff=96, heads=heads, kv_heads=kv_heads, qkv=8, vocab=16)


@pytest.mark.parametrize(("mesh", "heads"), list(itertools.product(MESHES, HEADS)))
def test_every_head_is_stored_once(mesh: tuple[int, int, int], heads: tuple[int, int]) -> None:
    padded = padded_heads(_model(*heads), *mesh)
    assert sorted(h for h in padded.order if h >= 0) == list(range(heads[0]))
    assert [k for k in padded.kv_order if k >= 0] == list(range(heads[1]))
    assert len(padded.order) == padded.heads == padded.kv_heads * padded.group


SPLITS = [axes for count in range(4) for axes in itertools.combinations("xyz", count)]


@pytest.mark.parametrize(("mesh", "heads"), list(itertools.product(MESHES, HEADS)))
def test_chips_of_every_split_find_their_kv_heads_beside_their_heads(
    mesh: tuple[int, int, int], heads: tuple[int, int]
) -> None:
    """Over whatever axes heads are split, a chip's heads in logical order take its kv heads in order."""
    model, padded = _model(*heads), padded_heads(_model(*heads), *mesh)
    factors = KVFactors.of(padded.kv_heads, *mesh)
    chunk = padded.heads // math.prod(mesh)
    x, y, z = mesh
    chunks = np.array(padded.order).reshape(y, z, x, chunk).transpose(2, 0, 1, 3)  # logical [x, y, z, heads]
    kv = np.array(padded.kv_order).reshape(factors.shape)
    for axes in SPLITS:
        for chip in itertools.product(*map(range, mesh)):
            own = tuple(
                slice(i, i + 1) if axis in axes else slice(None) for axis, i in zip("xyz", chip, strict=True)
            )
            digits = tuple(
                slice(i * count // size, i * count // size + 1) if axis in axes else slice(None)
                for axis, i, count, size in zip("xyz", chip, factors.shape, mesh, strict=False)
            )
            mine, my_kv = chunks[own].ravel(), kv[digits].ravel()
            assert len(my_kv) == factors.on_a_chip(axes)
            for head, kv_head in zip(mine, np.repeat(my_kv, len(mine) // len(my_kv)), strict=True):
                assert head < 0 or kv_head == head // model.heads_per_kv


def test_heads_that_divide_are_not_padded() -> None:
    padded = padded_heads(_model(8, 2), 2, 2, 2)
    assert (padded.heads, padded.kv_heads) == (8, 2)


def test_nine_heads_in_groups_of_three_take_sixteen_on_eight_chips() -> None:
    padded = padded_heads(_model(9, 3), 2, 2, 2)
    assert (padded.kv_heads, padded.group) == (4, 4)


def test_padding_540b_to_64_chips_touches_attention_only() -> None:
    model = palm_540b()
    padded = padded_heads(model, 4, 4, 4)
    assert padded.heads == 64
    wide = dataclasses.replace(model, heads=padded.heads, kv_heads=padded.kv_heads)
    assert wide.ff == model.ff
    assert round(wide.param_count / 1e9, 1) == 558.2
