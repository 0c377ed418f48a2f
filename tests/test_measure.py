"""A cell is timed on the engine's own programs, from one state in every round, and counts its own work."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints.int8 import quantize_state
from checkpoints.synthetic import synthetic_state
from inference_engine.engine import Engine
from inference_engine.profiling import measure
from inference_engine.profiling.bounds import decode_flops, prefill_flops
from inference_engine.profiling.measure import Weights, chip_bytes, engine_config, prepare
from inference_engine.profiling.settings import Method, Setting, Step
from layers.communication import ElementBytes, layer_terms, moved_bytes
from layers.errors import UserError
from layers.head_order import padded_form
from layers.layout import AttnAllToAll, Layout, check_chunk, check_pair
from layers.mesh_shape import MeshShape
from tests.sweep_rows import SETTING
from tests.tiny_checkpoint import TINY

METHOD = Method(rounds=7, steps=3)
DECODE = dataclasses.replace(SETTING, batch=3, context=20, attn_all_to_all=AttnAllToAll.AXES_YZ)
PREFILL = dataclasses.replace(DECODE, step=Step.PREFILL)
Counting = Callable[[], contextlib.AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights(synthetic_state(TINY))


@pytest.mark.parametrize("setting", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_the_program_is_the_one_that_serves(weights: Weights, setting: Setting) -> None:
    """The same text as the program of an engine that was made to serve."""
    subject = prepare(weights, setting, METHOD)
    models = weights.models(setting)
    params = weights.load(models.decode, "float32")
    engine = Engine(models.decode, params, engine_config(setting, METHOD), models.prefill, compiled=False)
    serving = {Step.DECODE: engine.steps.generate, Step.PREFILL: engine.steps.prefill}[setting.step]
    ours, theirs = (
        [line for line in re.sub(r", metadata={[^}]*}", "", text).splitlines() if " = " in line]
        for text in (subject.program.executable.as_text(), serving.executable.as_text())
    )
    assert len(ours) > 100
    assert ours == theirs


@pytest.mark.parametrize("setting", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_nothing_compiles_in_a_round(weights: Weights, setting: Setting, compilations: Counting) -> None:
    subject = prepare(weights, setting, METHOD)
    subject.run()
    with compilations() as counter:
        assert subject.run() > 0
        subject.run()
    assert counter.count == 0
    assert subject.compile_seconds > 0


def test_an_engine_that_is_not_compiled_compiles_what_it_runs(
    weights: Weights, compilations: Counting
) -> None:
    models = weights.models(DECODE)
    params = weights.load(models.decode, "float32")
    with compilations() as counter:
        engine = Engine(models.decode, params, engine_config(DECODE, METHOD), models.prefill, compiled=False)
        assert counter.count == 0
        state = engine.init_decode_state()
        assert counter.count == 1
        engine.generate(state)
        assert counter.count == 2


def test_every_decode_round_starts_from_the_same_state(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(engine: Engine, state: Any, steps: int) -> Any:
        seen.append(jax.device_get((state.tokens, state.lengths, state.active)))
        return real(engine, state, steps)

    real = measure._decode
    monkeypatch.setattr(measure, "_decode", spy)
    subject = prepare(weights, DECODE, METHOD)
    for _ in range(3):
        subject.run()
    tokens, lengths, active = seen[0]
    assert lengths.tolist() == [20] * 3
    assert active.all()
    for other in seen[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(seen[0], other, strict=True))
    assert len(set(tokens.tolist())) > 1


def test_a_decode_cell_counts_its_work(weights: Weights) -> None:
    subject = prepare(weights, DECODE, METHOD)
    params = weights.load(weights.models(DECODE).decode, "float32")
    config = engine_config(DECODE, METHOD)
    assert subject.tokens == 3
    assert subject.weight_bytes == chip_bytes(params)
    # 3 rows on 4 batch shards: one a chip, of one kv head, for each of 2 layers, keys and values, float32
    assert subject.cache_bytes == 2 * 2 * config.cache_time * TINY.qkv * 4
    assert subject.work.flops == decode_flops(TINY, 3, 20) / 8
    seen = subject.cache_bytes * 20 / config.cache_time
    assert subject.work.memory_bytes == subject.weight_bytes + seen
    terms = layer_terms(padded_form(TINY, DECODE.mesh), DECODE.mesh, DECODE.sharding, 3, 1)
    assert subject.work.sent_bytes == TINY.layers * moved_bytes(terms, ElementBytes(4, 4, 4))
    assert subject.work.sent_bytes > 0


def test_a_prefill_cell_counts_its_work(weights: Weights) -> None:
    subject = prepare(weights, PREFILL, METHOD)
    params = weights.load(weights.models(PREFILL).decode, "float32")
    assert subject.tokens == 3 * 20
    assert subject.work.flops == prefill_flops(TINY, 3, 20) / 8
    assert subject.work.memory_bytes == chip_bytes(params.layers)  # one chunk of 20 tokens


def test_a_chip_holds_its_part_of_what_is_split_and_all_of_what_is_not() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in (("x",), ()))
    array = np.zeros((8, 3), np.float32)
    assert chip_bytes([jax.device_put(array, split), jax.device_put(array, whole)]) == 24 + 96


def test_weights_are_loaded_once_for_all_layouts_of_their_storage() -> None:
    weights = Weights(synthetic_state(TINY))

    def load(layout: Layout, mesh: MeshShape = DECODE.mesh) -> Any:
        setting = dataclasses.replace(PREFILL, layout=layout, mesh=mesh, attn_all_to_all=AttnAllToAll.NONE)
        return weights.load(weights.models(setting).decode, "float32")

    first = load(Layout.WEIGHT_STATIONARY_2D)
    assert load(Layout.WEIGHT_GATHERED_XY) is first
    assert load(Layout.WEIGHT_STATIONARY_1D) is not first
    assert prepare(weights, DECODE, METHOD).load_seconds < 0.05
    for size in (2, 3, 4, 6):
        load(Layout.WEIGHT_STATIONARY_2D, MeshShape(size))
    assert load(Layout.WEIGHT_STATIONARY_2D) is not first  # only the latest copies are kept


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_refusals_are_those_of_whatever_refuses(weights: Weights) -> None:
    """No list of what is legal is kept here: the texts are the layout's, the mesh's, the loader's own."""
    mesh = DECODE.mesh
    time_split = dataclasses.replace(
        DECODE, layout=Layout.WEIGHT_STATIONARY_2D_TIME_Z, attn_all_to_all=AttnAllToAll.NONE
    )
    found = refusal(lambda: prepare(weights, time_split, METHOD))
    assert found == refusal(lambda: check_pair(time_split.sharding, time_split.sharding, mesh))
    odd = dataclasses.replace(time_split, step=Step.PREFILL, context=21)
    found = refusal(lambda: prepare(weights, odd, METHOD))
    assert found == refusal(lambda: check_chunk(odd.sharding, 21, mesh))
    traded = dataclasses.replace(DECODE, layout=Layout.WEIGHT_GATHERED_XYZ)
    found = refusal(lambda: prepare(weights, traded, METHOD))
    assert found == refusal(lambda: traded.sharding)
    many = dataclasses.replace(DECODE, mesh=MeshShape(100))
    assert "mesh 100,1,1 has 100 chips" in refusal(lambda: prepare(weights, many, METHOD))
    rounded = Weights(quantize_state(synthetic_state(TINY)))
    assert "int8 kernels" in refusal(lambda: prepare(rounded, DECODE, METHOD))


@pytest.mark.parametrize("layout", [
    Layout.WEIGHT_STATIONARY_2D_BATCH_Z, Layout.WEIGHT_GATHERED_XYZ, Layout.WEIGHT_GATHERED_X_TIME,
])  # fmt: skip
def test_layouts_of_every_kind_prefill(weights: Weights, layout: Layout) -> None:
    setting = dataclasses.replace(PREFILL, layout=layout, attn_all_to_all=AttnAllToAll.NONE, context=16)
    assert prepare(weights, setting, METHOD).run() > 0
