"""Laws of padding and ordering heads over a mesh."""

import dataclasses
import itertools

import pytest

from configs.models import palm_540b
from layers.head_order import kv_slots, padded_batch, padded_heads
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


@pytest.mark.parametrize(("mesh", "heads"), list(itertools.product(MESHES, HEADS)))
def test_chips_of_every_split_find_their_kv_heads_in_one_slice(
    mesh: tuple[int, int, int], heads: tuple[int, int]
) -> None:
    x, y, z = mesh
    model, padded = _model(*heads), padded_heads(_model(*heads), *mesh)
    chunk = padded.heads // (x * y * z)
    # Undo the storage order: logical blocks over x, then y, then z.
    stored = {
        (i, j, k): padded.order[((j * z + k) * x + i) * chunk :][:chunk]
        for i, j, k in itertools.product(range(x), range(y), range(z))
    }
    logical = [h for place in sorted(stored) for h in stored[place]]
    for parts in {x * y * z, x * y, x, 1}:
        size, slots = padded.heads // parts, kv_slots(padded.kv_heads, parts) // parts
        for part in range(parts):
            first = part * slots if padded.kv_heads % parts == 0 else part * padded.kv_heads // parts
            group = size // slots
            for place, head in enumerate(logical[part * size : (part + 1) * size]):
                if head >= 0:
                    assert padded.kv_order[first + place // group] == head // model.heads_per_kv


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


@pytest.mark.parametrize(("batch", "shards", "rows"), [(1, 8, 8), (8, 8, 8), (9, 8, 16), (3, 1, 3)])
def test_batches_are_padded_up(batch: int, shards: int, rows: int) -> None:
    assert padded_batch(batch, shards) == rows
