"""Published sizes and the refusals of `HParams`."""

import dataclasses

import pytest

from configs.models import MODELS, palm_8b, palm_62b, palm_540b, palm_shakespeare
from layers.head_order import padded_form
from layers.hparams import Bias, Block, HParams, NormPlacement, Rope
from layers.mesh_shape import MeshShape

PALM_BILLIONS = ((palm_8b, 8.63), (palm_62b, 62.50), (palm_540b, 540.36))


@pytest.mark.parametrize(("model", "billions"), PALM_BILLIONS)
def test_palm_sizes_have_the_published_parameter_counts(model: object, billions: float) -> None:
    assert round(model().param_count / 1e9, 2) == billions


def test_heads_padded_to_64_make_540b_558_billion() -> None:
    assert round(padded_form(palm_540b(), MeshShape(4, 4, 4)).param_count / 1e9, 1) == 558.2


def test_default_model_divides_over_meshes_with_axes_of_two_three_and_four() -> None:
    model = palm_shakespeare()
    assert model.embed % 48 == 0 and model.ff % 48 == 0


def test_registry_names_are_the_functions_names() -> None:
    assert all(name == function.__name__ for name, function in MODELS.items())


BAD = (
    ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ({"layers": 0}, "layers must be a positive integer"),
    ({"vocab": True}, "vocab must be a positive integer"),
    ({"block": Block.SERIAL}, "a serial block has at least two norms"),
    ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
    ({"windows": (0, None)}, "at least 1"),
    ({"norm_gain_offset": 2}, "norm_gain_offset must be 0 or 1"),
    ({"rope": Rope(rotary_dims=3)}, "rotary_dims=3 must be even"),
    ({"rope": Rope(rotary_dims=18)}, "between 2 and qkv=16"),
    ({"biases": frozenset({Bias.LM_HEAD})}, "no bias of its own"),
)


@pytest.mark.parametrize(("change", "message"), BAD)
def test_forms_that_contradict_themselves_are_refused(change: dict, message: str) -> None:
    base = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=1, qkv=16, vocab=64)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(base, **change)


def test_only_a_parallel_block_with_one_norm_is_fused() -> None:
    base = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=1, qkv=16, vocab=64)
    assert base.fused
    assert not dataclasses.replace(base, norm_placement=NormPlacement.TWO).fused
