"""A comparison with the restatement sees every planted mistake, and every weight of every form."""

import functools
from collections.abc import Mapping

import numpy as np
import pytest

from layers.hparams import HParams
from tests import reference_model
from tests.model_forms import FORMS, random_ids, random_weights
from tests.planted_mistakes import MISTAKES
from tests.reference_model import reference_logits

TIME = 20


@functools.cache
def _right(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, ids and logits of a form, computed once."""
    hparams = FORMS[name]
    weights, ids = random_weights(hparams, seed=3), random_ids(hparams, 2, TIME, seed=3)
    return weights, ids, reference_logits(hparams, weights, ids)


def _moved(name: str, hparams: HParams, weights: Mapping[str, np.ndarray]) -> float:
    """By how much of the largest right logit the logits move."""
    _, ids, logits = _right(name)
    return float(np.max(np.abs(reference_logits(hparams, weights, ids) - logits)) / np.max(np.abs(logits)))


@pytest.mark.parametrize("mistake_name", MISTAKES)
def test_planted_mistake_moves_the_logits_of_every_form_it_concerns(
    mistake_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[mistake_name]
    concerned = [name for name, hparams in FORMS.items() if mistake.concerns(hparams)]
    assert concerned, "no form shows this mistake"
    planted = {name: mistake.plant(FORMS[name], _right(name)[0]) for name in concerned}
    for function, wrong in mistake.patches.items():
        monkeypatch.setattr(reference_model, function, wrong)
    moved = {name: _moved(name, *planted[name]) for name in concerned}
    unseen = {name: error for name, error in moved.items() if not error > mistake.floor}
    assert not unseen


def _blind(hparams: HParams, key: str) -> bool:
    """Whether a weight has no effect by design: q and k where every token sees only itself."""
    layer, _, name = key.rpartition("/")
    window = hparams.window(int(layer.removeprefix("layer_"))) if layer else None
    return window == 1 and name in ("q", "k", "q_bias", "k_bias")


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_moves_the_logits(name: str, rng: np.random.Generator) -> None:
    hparams, (weights, _, _) = FORMS[name], _right(name)
    for key, weight in weights.items():
        noise = 0.2 * np.std(weight) * rng.standard_normal(weight.shape)
        moved = _moved(name, hparams, {**weights, key: weight + noise})
        assert (moved == 0) if _blind(hparams, key) else (moved > 1e-3), key


def test_likeliest_token_is_seldom_the_input() -> None:
    for name, hparams in FORMS.items():
        ids = random_ids(hparams, 4, TIME, seed=5)
        best = reference_logits(hparams, _right(name)[0], ids).argmax(-1)
        assert np.mean(best == ids) < 0.1, name


def test_every_weight_is_in_the_parameter_count() -> None:
    for name, hparams in FORMS.items():
        assert sum(weight.size for weight in _right(name)[0].values()) == hparams.param_count, name
