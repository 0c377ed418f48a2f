"""Laws of long prompts: dealt over chips, the cache kept so or dealt anew, they give one device's tokens."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints.load import LoadOptions, MeshPlacement, load_params
from checkpoints.orbax_store import save_checkpoint
from checkpoints.synthetic import synthetic_state
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.model import OneDeviceModel
from inference_engine.request import Request
from inference_engine.sampling_params import SamplingParams
from layers.hparams import HParams
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.transformer import MeshModel
from tests.test_imports import REPO

MODEL = HParams(layers=2, embed=48, ff=96, heads=8, kv_heads=4, qkv=8, vocab=71, windows=(50, None))
CONFIG = EngineConfig(slots=3, max_context=320, prefill_chunk=64, prefill_rows=2)
PROMPTS = [tuple((which * 29 + i * i * 5 + i) % 71 for i in range(n)) for which, n in enumerate((291, 40))]
TWO_D, XYZ_TIME = Layout.WEIGHT_STATIONARY_2D, Layout.WEIGHT_GATHERED_XYZ_TIME
Split = ContextSplit
CASES = {
    "kept": ("2,2,2", ShardingConfig(context=Split.XYZ), TWO_D, Split.XYZ),
    "kept_by_odd_chips": ("3,2,1", ShardingConfig(context=Split.XY), TWO_D, Split.XY),
    "dealt_anew": ("2,2,2", ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZX), XYZ_TIME, Split.NONE),
    "other_axes": ("2,2,2", ShardingConfig(context=Split.Z), Layout.WEIGHT_GATHERED_XY_TIME, Split.NONE),
    "kept_in_1d": (
        "4,2,1", ShardingConfig(Layout.WEIGHT_STATIONARY_1D, context=Split.X),
        Layout.WEIGHT_STATIONARY_1D, Split.X,
    ),
}  # fmt: skip


def _tokens(engine: Engine, steps: int = 8) -> list[list[int]]:
    """Tokens of both prompts, sampled with a seed, in slots 2 and 0."""
    state, prefix = engine.init_decode_state(), engine.prefill(PROMPTS)
    for row, slot in enumerate((2, 0)):
        request = Request("", PROMPTS[row], SamplingParams(max_new_tokens=steps, seed=7 + row))
        state = engine.insert(prefix, row, state, slot, request)
    found = []
    for _ in range(steps):
        state, result = engine.generate(state)
        found.append(np.asarray(result.packed)[:, 0])
    return np.stack(found)[:, [2, 0]].T.tolist()


@functools.cache
def one_device() -> list[list[int]]:
    return _tokens(Engine(OneDeviceModel(MODEL), load_params(synthetic_state(MODEL)), CONFIG))


@pytest.mark.parametrize("name", CASES)
def test_dealt_prompts_give_one_devices_tokens(name: str) -> None:
    mesh_text, decode, layout, context = CASES[name]
    shape = MeshShape.parse(mesh_text)
    mesh, prefill = make_mesh(shape), decode.for_prefill(layout, context)
    placement = MeshPlacement(decode.layout.form.storage, shape, mesh)
    params = load_params(synthetic_state(MODEL), LoadOptions(placement=placement))
    chunk = 64 if shape.size == 8 else 66
    config = EngineConfig(slots=3, max_context=320, prefill_chunk=chunk, prefill_rows=2)
    models = [MeshModel(MODEL, shape, mesh, sharding) for sharding in (decode, prefill)]
    assert _tokens(Engine(models[0], params, config, models[1])) == one_device()


def test_a_dealt_cache_is_smaller_on_each_chip() -> None:
    shape = MeshShape(2, 2, 2)
    model = MeshModel(MODEL, shape, make_mesh(shape), ShardingConfig(context=Split.XYZ))
    whole = MeshModel(MODEL, shape, make_mesh(shape), ShardingConfig())
    dealt, plain = (each.cache_shape(1, 320) for each in (model, whole))
    assert (dealt.kv_heads, dealt.time) == (4, 320)  # of which a chip has an eighth of the positions
    assert plain.kv_heads == 8  # two chips have each kv head, and all positions of it


@pytest.mark.long
@pytest.mark.parametrize("decode", ["xyz", "none"])
def test_a_prompt_of_16k_tokens_gives_one_devices_tokens(decode: str, tmp_path: Path) -> None:
    """Through the command line, without the settings of the tests."""
    form = HParams(layers=2, embed=48, ff=96, heads=2, kv_heads=1, qkv=16, vocab=258)
    save_checkpoint(tmp_path / "model", synthetic_state(form))
    text = "".join(chr(97 + (i * i * 7 + i // 31) % 26) for i in range(16_384))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    call = [
        sys.executable, "run_serving.py", "generate", "--json", "--checkpoint", str(tmp_path / "model"),
        "--tokenizer", "bytes", "--prompts_file", str(tmp_path / "prompts.jsonl"), "--slots", "1",
        "--max_context", "16448", "--prefill_chunk", "4096", "--max_new_tokens", "24", "--temperature", "0",
    ]  # fmt: skip
    dealt = ["--mesh", "2,2,2", "--context_parallel", "xyz", "--decode_context_parallel", decode]
    found = []
    for flags in ([], dealt):
        done = subprocess.run([*call, *flags], cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["prompt_tokens"] >= 16_384
    assert found[0]["token_ids"] == found[1]["token_ids"]
