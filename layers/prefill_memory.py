"""What one layer's activations take on a chip in a prefill step, by formula: how large a batch fits.

The largest live set of a gathered layer, for t tokens of a chip's projections and N of n chips gathered
(N = 1 in a stationary layout, whose t counts all rows):

    x and n            t·(E/R + E')       the residual, and what the projections read
    x in float32       t·E'               on its way through the norm
    q, a and m         t·(2·HD + F)·N/n   columns of the chunks that the chip computes
    a group in float32 2·t·X·cols         products and their sum, of X chunks of (HD + 2F)/n columns
    out in float32     t·E'               summed over the groups
    attention          3·rows·heads·256·512 in float32: scores, weights and mask of one pair of blocks
    weights in flight  3 shards of wi

E' is embed as the projections see it, R the parts that the residual's embed has. It is an upper estimate of
the compiler's temporaries, not a measurement; tests/test_prefill_programs.py holds both beside each other.

Worked example: 8B on 4,4,1 gathered over XY, 64 × 1024 tokens: t = 4096, x and n 67 MB, x in float32 67 MB,
q, a and m 201 MB, a group 302 MB, out 67 MB, attention 101 MB, weights 57 MB.
"""

from layers.attention import AttentionBlocks
from layers.hparams import HParams
from layers.layout import ShardingConfig
from layers.mesh_shape import MeshShape

FLOAT32 = 4
BLOCK_ARRAYS = 3
SHARDS_IN_FLIGHT = 3


def activation_bytes(
    hparams: HParams,
    mesh: MeshShape,
    sharding: ShardingConfig,
    rows: int,
    time: int,
    *,
    element_bytes: int = 2,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> int:
    """Bytes of a layer's activations on a chip; `hparams` counts padded heads."""
    form, attention = sharding.layout.form, sharding.attention
    gathered, chips = mesh.over(form.gathered), mesh.size
    tokens = sharding.padded_rows(rows, mesh) * time // gathered
    embed = hparams.embed if gathered > 1 else hparams.embed // mesh.x
    q_width, gates = hparams.heads * hparams.qkv, 2 if hparams.act.gated else 1
    here = gathered / chips
    plain = tokens * (hparams.embed * gathered // chips + embed + (2 * q_width + hparams.ff) * here)
    group = mesh.x * (q_width + gates * hparams.ff) // chips
    wide = tokens * (2 * group + 2 * embed)
    attended = sharding.cache_rows(rows, mesh) // mesh.over(attention.batch)
    heads = hparams.heads // mesh.over(attention.heads)
    pairs = min(blocks.queries, time) * min(blocks.keys, time)
    shard = hparams.embed * (q_width + gates * hparams.ff) // chips if gathered > 1 else 0
    return round(
        plain * element_bytes
        + FLOAT32 * (wide + BLOCK_ARRAYS * attended * heads * pairs)
        + SHARDS_IN_FLIGHT * shard * element_bytes
    )
