"""Laws of two layouts over one copy: no weight is moved or copied between prefill and decoding."""

import jax
import numpy as np
import pytest

from checkpoints.load import LoadOptions, MeshPlacement, load_params
from checkpoints.synthetic import synthetic_state
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.layout_choice import LayoutRequest, Workload, choose_layouts
from inference_engine.model import OneDeviceModel
from inference_engine.request import Request
from inference_engine.sampling_params import SamplingParams
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.hparams import HParams
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.transformer import MeshModel

MODEL = HParams(layers=2, embed=48, ff=96, heads=8, kv_heads=4, qkv=8, vocab=71)
CUBE = MeshShape(2, 2, 2)
CONFIG = EngineConfig(slots=3, max_context=32, prefill_chunk=16, prefill_rows=2)
PROMPT = tuple(range(3, 24))
THROUGHPUT = CollectiveConfig(CollectiveMode.THROUGHPUT)
PAIRS = [
    (Layout.WEIGHT_GATHERED_XYZ, ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZX)),
    (Layout.WEIGHT_GATHERED_XY_TIME, ShardingConfig(Layout.WEIGHT_STATIONARY_2D_BATCH_Z)),
    (Layout.WEIGHT_STATIONARY_2D_TIME_Z, ShardingConfig(Layout.WEIGHT_GATHERED_X, collectives=THROUGHPUT)),
]


def _tokens(engine: Engine, steps: int = 6) -> list[int]:
    """Greedy tokens of one prompt in slot 1."""
    request = Request("", PROMPT, SamplingParams(max_new_tokens=steps, temperature=0.0))
    state = engine.insert(engine.prefill([PROMPT]), 0, engine.init_decode_state(), 1, request)
    found = []
    for _ in range(steps):
        state, result = engine.generate(state)
        found.append(int(np.asarray(result.packed)[1, 0]))
    return found


@pytest.fixture(scope="module")
def one_device() -> list[int]:
    return _tokens(Engine(OneDeviceModel(MODEL), load_params(synthetic_state(MODEL)), CONFIG))


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=lambda each: getattr(each, "layout", each).value)
def test_prefill_and_decoding_read_the_same_buffers(
    prefill: Layout, decode: ShardingConfig, one_device: list[int]
) -> None:
    mesh = make_mesh(CUBE)
    placement = MeshPlacement(decode.layout.form.storage, CUBE, mesh)
    params = load_params(synthetic_state(MODEL), LoadOptions(placement=placement))
    before = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    ]
    models = [MeshModel(MODEL, CUBE, mesh, sharding) for sharding in (decode, decode.for_prefill(prefill))]
    engine = Engine(models[0], params, CONFIG, models[1])
    live = {id(array) for array in jax.live_arrays()}
    assert _tokens(engine) == one_device
    after = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(engine.params)
        for shard in leaf.addressable_shards
    ]
    assert after == before
    largest = max(leaf.size for leaf in jax.tree.leaves(params.layers))
    made = [array for array in jax.live_arrays() if id(array) not in live and array.size >= largest]
    assert not made, "no array of a weight's size is left behind"


WORK = Workload(slots=8, prefill_rows=8, prefill_chunk=4096)


def test_auto_takes_the_layout_that_moves_fewest_bytes_and_says_so() -> None:
    open_request = LayoutRequest(prefill=None, decode=Layout.WEIGHT_STATIONARY_2D)
    small = choose_layouts(open_request, MODEL, CUBE, Workload(8, 1, 8))
    large = choose_layouts(open_request, MODEL, CUBE, WORK)
    assert small.prefill.layout is Layout.WEIGHT_STATIONARY_2D
    assert large.prefill.layout is Layout.WEIGHT_GATHERED_XYZ
    (reason,) = large.reasons
    assert reason.startswith("prefill layout gathered_xyz: for 8 × 4096 tokens it moves")


def test_auto_never_pairs_layouts_that_need_two_copies() -> None:
    for slots in (1, 8, 256):
        chosen = choose_layouts(LayoutRequest(None, None), MODEL, CUBE, Workload(slots, 8, 4096))
        assert chosen.prefill.layout.form.storage is chosen.decode.layout.form.storage


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            LayoutRequest(Layout.WEIGHT_STATIONARY_1D),
            "one copy of them on mesh 2,2,2; allowed for prefill: 2d",
        ),
        (
            LayoutRequest(decode=Layout.WEIGHT_GATHERED_X_TIME),
            "one token a row; allowed: .*nearest: gathered_x$",
        ),
        (
            LayoutRequest(decode=Layout.WEIGHT_GATHERED_XY, attn_all_to_all=AttnAllToAll.AXES_YZ),
            "does not split over x, y; allowed: none, z; nearest: z",
        ),
        (
            LayoutRequest(decode=Layout.WEIGHT_GATHERED_XYZ, attn_all_to_all=AttnAllToAll.AXES_YZ),
            "does not split over x, y, z; nearest: attn_all_to_all=none$",
        ),
        (
            LayoutRequest(Layout.WEIGHT_GATHERED_XY_TIME, prefill_context=ContextSplit.YZ),
            "^context_parallel=yz is not how layout gathered_xy_time splits time, .*nearest: xy$",
        ),
        (
            LayoutRequest(attn_all_to_all=AttnAllToAll.AXES_YZ, decode_context=ContextSplit.XY),
            "^attn_all_to_all=yz trades heads where decode_context_parallel=xy deals .*nearest: z$",
        ),
    ],
    ids=["storage", "time", "trade", "no trade", "context", "context and trade"],
)
def test_what_cannot_run_is_refused_with_the_reason(request_: LayoutRequest, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_layouts(request_, MODEL, CUBE, WORK)


def test_an_open_request_is_refused_for_what_was_asked() -> None:
    request_ = LayoutRequest(None, None, prefill_context=ContextSplit.XY, decode_context=ContextSplit.XY)
    with pytest.raises(
        UserError, match=r"with context_parallel=xy splits time .*multiples of 4; nearest: 32"
    ):
        choose_layouts(request_, MODEL, CUBE, Workload(8, 1, 30))


def test_texts_that_are_only_read_have_one_layout() -> None:
    request_ = LayoutRequest(
        attn_all_to_all=AttnAllToAll.AXES_YZX, prefill_context=ContextSplit.Z, decodes=False
    )
    with pytest.raises(UserError, match=r"^attn_all_to_all=yzx trades heads where context_parallel=z deals"):
        choose_layouts(request_, MODEL, CUBE, WORK)
    chosen = choose_layouts(LayoutRequest(None, decodes=False), MODEL, CUBE, WORK)
    assert chosen.prefill is chosen.decode
    assert chosen.prefill.layout is Layout.WEIGHT_GATHERED_XYZ
    assert len(chosen.reasons) == 1


def test_a_chunk_that_time_cannot_be_split_into_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="multiples of 8; nearest: 64"):
        choose_layouts(LayoutRequest(Layout.WEIGHT_GATHERED_XYZ_TIME), MODEL, CUBE, Workload(8, 1, 63))
