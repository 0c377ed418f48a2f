"""Laws of the sharding tables: what cannot be split is refused, and memory a chip is the table's sum."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.synthetic import synthetic_state
from configs.models import palm_540b
from layers.errors import UserError
from layers.head_order import KVFactors, padded_form
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import AttnAllToAll, ShardingConfig, WeightStorage
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.partitioning import cache_specs, check_model, partition_spec, rules
from layers.transformer import MeshModel

MODEL = HParams(layers=2, embed=48, ff=96, heads=8, kv_heads=1, qkv=16, vocab=72)
CUBE = MeshShape(2, 2, 2)
FLOAT32, BFLOAT16 = 4, 2


def test_two_dims_on_one_axis_are_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match=r"dims heads and embed .* mesh axis y"):
        partition_spec(("heads", "embed"), {"heads": ("y", "z"), "embed": ("x", "y")})


def test_dims_without_a_rule_are_not_split() -> None:
    assert partition_spec(("batch", None, "embed"), {"embed": ("x",)}) == P(None, None, "x")


def test_tables_split_the_embedding_over_every_chip_once() -> None:
    for storage in WeightStorage:
        assert partition_spec(("vocab", "embed"), rules(storage)) == P(("y", "z"), ("x",))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"embed": 44}, ("embed=44", "mesh 2,2,2", "1, 2, 4 chips", "nearest: 4")),
        ({"ff": 90}, ("ff=90", "mesh 2,2,2", "1, 2, 3, 6 chips", "nearest: 6")),
    ],
    ids=["embed", "ff"],
)
def test_sizes_that_do_not_divide_are_refused_with_the_legal_ones(
    sizes: dict[str, int], words: tuple[str, ...]
) -> None:
    fields = {"layers": 1, "embed": 48, "ff": 96, "heads": 4, "kv_heads": 1, "qkv": 16, "vocab": 72} | sizes
    with pytest.raises(UserError) as error:
        check_model(HParams(**fields), CUBE)
    for word in words:
        assert word in str(error.value)


def test_heads_vocabulary_and_batch_that_do_not_divide_are_not_refused() -> None:
    check_model(HParams(layers=1, embed=48, ff=96, heads=9, kv_heads=3, qkv=8, vocab=71), CUBE)


def _matrix_elements(hparams: HParams) -> tuple[int, int]:
    """q, o, W0, W1, W2 of all layers with the embedding, and k, v: all that is split over every chip."""
    attention = 2 * hparams.embed * hparams.heads * hparams.qkv
    kv = 2 * hparams.embed * hparams.kv_heads * hparams.qkv
    mlp = 3 * hparams.embed * hparams.ff
    return hparams.layers * (attention + mlp) + hparams.vocab * hparams.embed, hparams.layers * kv


def _bytes_of_chips(tree: object) -> set[int]:
    """Bytes that each chip holds of a pytree of placed arrays, as a set."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("storage", WeightStorage, ids=lambda storage: storage.value)
def test_memory_of_weights_a_chip_is_the_tables_sum(storage: WeightStorage) -> None:
    options = LoadOptions(placement=MeshPlacement(storage, CUBE, make_mesh(CUBE)))
    params = load_params(synthetic_state(MODEL), options)
    split, kv = _matrix_elements(MODEL)
    vectors = MODEL.embed  # gains are folded, but the one before the tied embedding
    assert _bytes_of_chips(params) == {FLOAT32 * ((split + kv) // CUBE.size + vectors)}


def test_memory_of_int8_weights_a_chip_is_the_tables_sum() -> None:
    placement = MeshPlacement(WeightStorage.TWO_D, CUBE, make_mesh(CUBE))
    params = load_params(synthetic_state(MODEL), LoadOptions(WeightsDtype.INT8, placement=placement))
    split, kv = _matrix_elements(MODEL)
    embedding = MODEL.vocab * MODEL.embed
    columns = MODEL.heads * MODEL.qkv + 2 * MODEL.ff + 2 * MODEL.kv_heads * MODEL.qkv + MODEL.embed
    gains = (MODEL.layers + 1) * MODEL.embed  # kept at run time
    on_every_chip = FLOAT32 * (MODEL.layers * columns + gains)
    whole = (split - embedding) + kv + FLOAT32 * embedding
    assert _bytes_of_chips(params) == {whole // CUBE.size + on_every_chip}


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("setting", AttnAllToAll, ids=lambda setting: setting.value)
def test_memory_of_the_cache_a_chip_is_the_tables_sum(setting: AttnAllToAll, kv_heads: int) -> None:
    rows, time = 8, 16
    hparams = HParams(layers=2, embed=48, ff=96, heads=8, kv_heads=kv_heads, qkv=16, vocab=72)
    model = MeshModel(hparams, CUBE, make_mesh(CUBE), ShardingConfig(attn_all_to_all=setting))
    cache = KVCache.zeros(model.cache_shape(rows, time), jnp.dtype("float32"), stacked=True)
    placed = jax.device_put(cache, model.placed(model.cache_specs(cache)))
    batch_shards = {"none": 1, "z": 2, "yz": 4, "yzx": 8}[setting.value]
    heads_here = max(1, kv_heads * batch_shards // CUBE.size)
    per_chip = 2 * hparams.layers * (rows // batch_shards) * heads_here * time * hparams.qkv
    assert _bytes_of_chips(placed) == {FLOAT32 * per_chip}
    assert math.prod(model.cache_shape(rows, time)) * 2 * FLOAT32 == FLOAT32 * per_chip * CUBE.size


TABLE_1 = [
    (AttnAllToAll.NONE, 128, 660), (AttnAllToAll.NONE, 512, 165),
    (AttnAllToAll.AXES_YZX, 128, 43_000), (AttnAllToAll.AXES_YZX, 512, 10_700),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "batch", "published"), TABLE_1)
def test_540b_cache_capacity_is_the_published_one(setting: AttnAllToAll, batch: int, published: int) -> None:
    """Context that 30 % of 32 GiB hold on 64 chips in bfloat16 (Pope et al., 2022, table 1), within 3 %."""
    hparams, mesh = palm_540b(), MeshShape(4, 4, 4)
    sharding, time = ShardingConfig(attn_all_to_all=setting), 1024
    padded = padded_form(hparams, mesh)
    heads = sharding.attention.heads
    kv_heads = KVFactors.of(padded.kv_heads, *mesh.sizes).on_a_chip(heads) * mesh.over(heads)
    shape = (hparams.layers, sharding.cache_rows(batch, mesh), kv_heads, time, hparams.qkv)
    cache = KVCache(*(jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16")) for _ in range(2)))
    chips = jax.sharding.AbstractMesh(mesh.sizes, ("x", "y", "z"))
    here = NamedSharding(chips, cache_specs(cache, sharding.attention).k).shard_shape(shape)
    per_token = 2 * math.prod(here) * BFLOAT16 / time
    assert 0.30 * 32 * 2**30 / per_token == pytest.approx(published, rel=0.03)
