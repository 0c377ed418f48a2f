"""The training script learns through the engine's own forward pass, and saves what it measured."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.state import state_spec
from layers.hparams import HParams
from training.export import Figures, card
from training.train import TrainConfig, init_state, learning_rate, loss_fn, train, windows

TINY = HParams(layers=1, embed=24, ff=48, heads=2, kv_heads=1, qkv=8, vocab=32)
CONFIG = TrainConfig(max_steps=40, batch=2, time=16, warmup=2, evaluate_every=20)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path, pattern = tmp_path / "tokens.npz", np.tile(np.arange(7, dtype=np.int32), 60)
    np.savez(path, train=pattern, validation=pattern[:200], train_bytes=420, validation_bytes=200)
    return path


def test_training_learns_a_pattern_and_records_it(tokens_file: Path, tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"):  # the optimiser's own arithmetic promotes
        train(CONFIG, TINY, tokens_file, tmp_path / "work")
    record = json.loads((tmp_path / "work" / "record.json").read_text())
    assert record["validation_nats_per_token"] < math.log(32) / 2
    assert (record["step"], record["tokens"]) == (40, 40 * 32)
    bits = record["validation_nats_per_token"] / math.log(2)
    assert record["validation_bits_per_byte"] == pytest.approx(bits)
    saved = np.load(tmp_path / "work" / "state.npz")
    assert {key: saved[key].shape for key in saved.files} == state_spec(TINY)


def test_every_weight_gets_a_gradient() -> None:
    weights = init_state(TINY, seed=0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 17)), jnp.int32)
    grads = jax.grad(lambda w: loss_fn(TINY, w, tokens))(weights)
    assert all(float(jnp.max(jnp.abs(grad))) > 0 for grad in grads.values())


def test_windows_score_every_token_once() -> None:
    data = windows(np.arange(50, dtype=np.int32), 16)
    assert data.shape == (3, 17)
    assert data[:, 1:].reshape(-1).tolist() == list(range(1, 49))


def test_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    config = dataclasses.replace(CONFIG, warmup=50, learning_rate=1.0)
    assert learning_rate(config, 25, 0.0) == pytest.approx(0.5)
    assert learning_rate(config, 50, 0.0) == pytest.approx(1.0)
    assert learning_rate(config, 900, 1.0) == pytest.approx(0.05)
    assert learning_rate(config, 900, 2.0) == pytest.approx(0.05)


def test_model_card_says_what_was_measured() -> None:
    text = card({"step": 1200, "tokens": 2457600, "seconds": 5700}, Figures(2.0, 1.99, 2.78, 3.24), 5469840)
    for part in ("1,200 steps", "2.5 million, in windows", "95 minutes", "| 2.000 |", "| 3.240 |"):
        assert part in text
