"""Laws of the device table and of the bounds that are made from it."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs.models import palm_8b, palm_shakespeare
from inference_engine.profiling.bounds import Work, bound, decode_flops, prefill_flops
from inference_engine.profiling.chips import CHIPS, ChipSpec, find_chip, overridden
from layers.errors import UserError
from layers.hparams import HParams


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"),
    ],
)  # fmt: skip
def test_jax_names_of_devices_are_known(kind: str, name: str) -> None:
    assert find_chip(kind) is CHIPS[name]


@pytest.mark.parametrize("kind", ["TPU v99", "NVIDIA A100", "TPU v4 lite", ""])
def test_an_unknown_device_is_named_and_has_no_bound(kind: str) -> None:
    chip = find_chip(kind)
    assert (chip.name, chip.known) == (kind, False)
    assert bound(Work(1.0, 1.0, 1.0), chip, "float32").seconds is None


def test_every_chip_is_whole_and_plausible() -> None:
    for chip in CHIPS.values():
        assert {"float32", "bfloat16", "int8"} == set(chip.flops)
        assert chip.known
        assert chip.source
        assert chip.memory_speed is not None and chip.memory_bytes is not None
        assert 0.01 < chip.memory_bytes / chip.memory_speed < 0.06  # a chip reads its memory in 10 to 60 ms
        assert ChipSpec.from_json(json.loads(json.dumps(chip.to_json()))) == chip


def test_devices_of_one_chip_share_it() -> None:
    whole = CHIPS["tpu7x"]
    assert whole.flops_of("bfloat16") == whole.flops["bfloat16"] / 2
    four = dataclasses.replace(CHIPS["v4"], devices=4)
    alone, shared = (bound(Work(1e12, 1e9, 1e6), chip, "bfloat16") for chip in (CHIPS["v4"], four))
    assert shared.flops == pytest.approx(4 * (alone.flops or 0))
    assert shared.memory == pytest.approx(4 * (alone.memory or 0))
    assert shared.links == pytest.approx(4 * (alone.links or 0))


def test_a_bound_is_the_slowest_resource() -> None:
    made = bound(Work(flops=0.0, memory_bytes=8e9, sent_bytes=0.0), CHIPS["v5e"], "bfloat16")
    assert made.seconds == made.memory == pytest.approx(8e9 / 819e9)


def test_figures_are_overridden_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_text('{"memory_speed": 1e9, "flops": {"bfloat16": 5.0}}')
    made = overridden(CHIPS["v4"], path)
    assert (made.memory_speed, made.flops["bfloat16"]) == (1e9, 5.0)
    assert (made.flops["int8"], made.links) == (CHIPS["v4"].flops["int8"], 6)
    assert made.source == str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1]", "no object"),
        ("{", "cannot be read as JSON"),
        ('{"speed": 1}', "speed; allowed"),
        ('{"links": 0}', "links=0; allowed: a positive number"),
        ('{"flops": {"int8": "fast"}}', "allowed: positive numbers by dtype"),
        ('{"name": 3}', "name=3; allowed: a text"),
    ],
)
def test_bad_figures_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "chip.json"
    path.write_text(text)
    with pytest.raises(UserError, match=found.replace("[", r"\[")):
        overridden(CHIPS["v4"], path)
    with pytest.raises(UserError, match="cannot be read"):
        overridden(CHIPS["v4"], tmp_path / "none")


def test_decode_multiplies_every_parameter_but_the_norms_once() -> None:
    form = palm_8b()
    norms = form.layers * form.embed + form.embed
    scores = 4 * form.layers * form.heads * form.qkv * 1
    assert decode_flops(form, 3, 0) == 3 * (2 * (form.param_count - norms) + scores)


def test_prefill_counts_what_has_a_reader() -> None:
    form = palm_shakespeare()
    one = dataclasses.replace(form, layers=1)
    keys_values = 2 * form.embed * form.kv_heads * form.qkv
    assert prefill_flops(one, 2, 10) == 2 * 10 * 2 * keys_values
    assert prefill_flops(form, 2, 10) == 2 * prefill_flops(form, 1, 10)


def test_a_window_bounds_the_scores() -> None:
    form = HParams(layers=2, embed=8, ff=8, heads=2, kv_heads=1, qkv=4, vocab=16, windows=(4, None))
    longer = decode_flops(form, 1, 99) - decode_flops(form, 1, 49)
    assert longer == 4 * 2 * 4 * 50  # of the layer without a window alone
