"""Laws of scoring: a log-probability is the model's own, however the text is cut and wherever it runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import LoadOptions, MeshPlacement, load_params
from checkpoints.synthetic import synthetic_state
from inference_engine.config import EngineConfig
from inference_engine.model import OneDeviceModel
from inference_engine.score_windows import windows
from inference_engine.scoring import Scorer
from inference_engine.text_score import TextScore
from layers import serial
from layers.embedding import unembed
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.transformer import MeshModel
from tests.engines import SMALL, alone, request

CONFIG = EngineConfig(slots=3, max_context=24, prefill_chunk=8)
STRIDE = 10
IDS = [int(i) for i in np.random.default_rng(4).integers(0, SMALL.vocab, 61)]


@functools.cache
def scorer(config: EngineConfig = CONFIG) -> Scorer:
    return Scorer(OneDeviceModel(SMALL), load_params(synthetic_state(SMALL), LoadOptions()), config)


@functools.cache
def on_mesh(
    mesh: str, layout: Layout, setting: AttnAllToAll, context: ContextSplit = ContextSplit.NONE
) -> Scorer:
    shape = MeshShape.parse(mesh)
    placement = MeshPlacement(layout.form.storage, shape, make_mesh(shape))
    params = load_params(synthetic_state(SMALL), LoadOptions(placement=placement))
    sharding = ShardingConfig(layout, setting, context=context, ring=True)
    model = MeshModel(SMALL, shape, placement.mesh, sharding)
    return Scorer(model, params, CONFIG)


@functools.cache
def _whole(ids: tuple[int, ...]) -> np.ndarray:
    """All positions' logits at once, without a cache: the slow twin."""
    params = load_params(synthetic_state(SMALL), LoadOptions())
    tokens = jnp.asarray(ids, jnp.int32)[None]
    x, _ = serial.forward(SMALL, params, tokens, jnp.zeros((), jnp.int32))
    logprobs = jax.nn.log_softmax(unembed(SMALL, params, x)[0], axis=-1)
    return np.asarray(logprobs)[np.arange(len(ids) - 1), ids[1:]]


def expected(ids: list[int], context: int, stride: int) -> np.ndarray:
    """Every window by itself."""
    cuts = windows(len(ids), context, stride)
    whole = [_whole(tuple(ids[cut.start : cut.end])) for cut in cuts]
    return np.concatenate([row[c.first_scored - c.start - 1 :] for row, c in zip(whole, cuts, strict=True)])


@pytest.mark.parametrize("count", [2, 8, 9, 24, 25, 61])
def test_scores_are_those_of_all_logits_at_once(count: int) -> None:
    found = scorer().score(IDS[:count], STRIDE)
    np.testing.assert_allclose(found, expected(IDS[:count], CONFIG.max_context, STRIDE), atol=2e-5)


def test_scores_ignore_chunks_and_windows_beside() -> None:
    one = scorer(dataclasses.replace(CONFIG, slots=1, prefill_chunk=24)).score(IDS, STRIDE)
    np.testing.assert_allclose(scorer().score(IDS, STRIDE), one, atol=2e-5)


def test_a_window_that_reaches_further_back_scores_otherwise() -> None:
    near, far = (scorer().score(IDS, stride) for stride in (23, 4))
    assert np.max(np.abs(near[:23] - far[:23])) < 1e-6 < 1e-3 < np.max(np.abs(near[23:] - far[23:]))


@pytest.mark.parametrize(
    ("mesh", "layout", "setting"),
    [
        ("2,2,2", Layout.WEIGHT_STATIONARY_2D, AttnAllToAll.AXES_YZX),
        ("2,1,3", Layout.WEIGHT_STATIONARY_1D, AttnAllToAll.AXIS_Z),
        ("4,2,1", Layout.WEIGHT_STATIONARY_2D, AttnAllToAll.NONE),
        ("2,2,2", Layout.WEIGHT_GATHERED_XY, AttnAllToAll.AXIS_Z),
        ("2,2,2", Layout.WEIGHT_GATHERED_XYZ_TIME, AttnAllToAll.NONE),
    ],
    ids=["2,2,2", "2,1,3", "4,2,1", "gathered_xy", "gathered_xyz_time"],
)
def test_scores_on_a_mesh_are_one_devices(mesh: str, layout: Layout, setting: AttnAllToAll) -> None:
    found = on_mesh(mesh, layout, setting).score(IDS, STRIDE)
    np.testing.assert_allclose(found, scorer().score(IDS, STRIDE), atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "context"),
    [(Layout.WEIGHT_STATIONARY_2D, ContextSplit.XY), (Layout.WEIGHT_GATHERED_X, ContextSplit.YZ)],
)
def test_scores_of_dealt_texts_are_one_devices(layout: Layout, context: ContextSplit) -> None:
    found = on_mesh("2,2,2", layout, AttnAllToAll.NONE, context).score(IDS, STRIDE)
    np.testing.assert_allclose(found, scorer().score(IDS, STRIDE), atol=2e-5)


def test_no_chip_holds_the_whole_vocabulary() -> None:
    runs_on = on_mesh("2,2,2", Layout.WEIGHT_STATIONARY_2D, AttnAllToAll.AXES_YZX)
    program = runs_on._programs.step.executable.as_text()
    assert f",{runs_on.model.padded_vocab // 8}]" in program
    assert f"{runs_on.model.padded_vocab}]" not in program
    assert f"{runs_on.model.padded_vocab // 2}]" not in program


def test_scores_of_a_generated_text_are_those_that_generation_reports() -> None:
    prompt = request(3, 7)
    text = alone(prompt)
    found = scorer().score([*prompt.token_ids, *text.token_ids], STRIDE)
    np.testing.assert_allclose(found[-len(text.token_ids) :], text.logprobs, atol=2e-5)


def test_logits_that_are_not_finite_are_reported_as_such() -> None:
    broken = Scorer(OneDeviceModel(SMALL), scorer().params, CONFIG)
    table = np.array(broken.params.embedding)
    table[IDS[5]] = np.inf
    broken.params = broken.params.replace(embedding=jnp.asarray(table))
    assert np.isnan(broken.score(IDS[:24], STRIDE)).any()


def test_progress_counts_windows() -> None:
    seen: list[tuple[int, int]] = []
    scorer().score(IDS, STRIDE, lambda done, total: seen.append((done, total)))
    assert seen == [(3, 5), (5, 5)]


def test_cache_bytes_are_those_of_the_windows() -> None:
    assert scorer().cache_bytes == scorer()._programs.empty().nbytes


def test_bits_per_byte_and_perplexity_by_hand() -> None:
    quarter = float(np.log(0.25))
    score = TextScore((5, 6, 7), (None, quarter, quarter), num_bytes=5)
    assert score.bits_per_byte == pytest.approx(0.8)
    assert score.perplexity == pytest.approx(4)
    assert score.unusable == 0
    assert TextScore((5,), (float("nan"),), 1).unusable == 1
    assert TextScore((5,), (-1e9,), 1).perplexity == float("inf")
