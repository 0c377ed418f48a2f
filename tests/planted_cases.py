"""Models and settings for planted mistakes: small, synthetic, each with what its mistakes need to show.

Worked example: a wrong scale of int8 shows in `INT8`, a row of another shard in `TRADED`.
"""

import dataclasses

from inference_engine.checking.cases import Case
from layers.collectives.mode import CollectiveMode
from layers.hparams import Bias, Block, HParams, NormPlacement, Rope
from layers.layout import AttnAllToAll, ContextSplit, Layout
from layers.mesh_shape import MeshShape

CUBE = MeshShape(2, 2, 2)
GROUPED = HParams(
    layers=2, embed=48, ff=96, heads=8, kv_heads=4, qkv=8, vocab=71, windows=(3, None),
    biases=frozenset(Bias) - {Bias.LM_HEAD},
)  # fmt: skip
MULTIQUERY = dataclasses.replace(GROUPED, kv_heads=1, windows=(), biases=frozenset())
XPOS = dataclasses.replace(GROUPED, rope=Rope(xpos_scale_base=2.0))
SERIAL = dataclasses.replace(GROUPED, block=Block.SERIAL, norm_placement=NormPlacement.TWO)

ONE_D, TWO_D = Layout.WEIGHT_STATIONARY_1D, Layout.WEIGHT_STATIONARY_2D
_CASE = Case(
    Layout.WEIGHT_STATIONARY_2D, Layout.WEIGHT_STATIONARY_2D, AttnAllToAll.AXES_YZX,
    ContextSplit.NONE, ContextSplit.NONE, CollectiveMode.REFERENCE,
    "float32", "float32", "float32", "auto", "own", batch=8, prompt_tokens=5,
)  # fmt: skip
TRADED = _CASE
BY_HEADS = dataclasses.replace(
    _CASE, layout=ONE_D, prefill_layout=ONE_D, attn_all_to_all=AttnAllToAll.NONE, batch=3
)
SHARED = dataclasses.replace(_CASE, prefixes="shared", prompt_tokens=8)
INT8_CACHE = dataclasses.replace(_CASE, kv_cache_dtype="int8")
INT8 = dataclasses.replace(_CASE, weights="int8", attn_all_to_all=AttnAllToAll.AXES_YZ)
GATHERED_XY = dataclasses.replace(
    _CASE, layout=Layout.WEIGHT_GATHERED_XY, prefill_layout=Layout.WEIGHT_GATHERED_XY,
    attn_all_to_all=AttnAllToAll.AXIS_Z, collectives=CollectiveMode.THROUGHPUT,
)  # fmt: skip
GATHERED_INT8 = dataclasses.replace(GATHERED_XY, weights="int8")
LONG_PROMPT = dataclasses.replace(BY_HEADS, layout=TWO_D, prefill_layout=Layout.WEIGHT_GATHERED_XYZ_TIME)
TWO_LAYOUTS = dataclasses.replace(BY_HEADS, layout=TWO_D, prefill_layout=Layout.WEIGHT_GATHERED_XY)
BATCH_Z = dataclasses.replace(
    _CASE, layout=Layout.WEIGHT_STATIONARY_2D_BATCH_Z, prefill_layout=Layout.WEIGHT_STATIONARY_2D_TIME_Z
)
DEALT = dataclasses.replace(
    BY_HEADS, layout=TWO_D, prefill_layout=TWO_D, context=ContextSplit.XY, prefill_context=ContextSplit.XY,
    prompt_tokens=6,
)  # fmt: skip
DEALT_ANEW = dataclasses.replace(TRADED, prefill_context=ContextSplit.XZ)
