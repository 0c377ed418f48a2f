"""Runs a model of any form on one device or on a mesh, as comparisons with other implementations need it.

Data flow: weights on their device or mesh → logits of whole texts in one prefill → greedy steps from the
middle of these texts: a step overwrites in the cache what the prefill wrote behind the prompt.

Worked example: texts of 21 tokens are prefilled; with a prompt of 8 the first step feeds token 7 again, at
position 7, and the last of 32 steps writes position 38.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from checkpoints.load import LoadOptions, MeshPlacement, load_params
from checkpoints.state import CheckpointState
from inference_engine.model import Model, OneDeviceModel
from layers.kv_cache import KVCache
from layers.layout import AttnAllToAll, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.transformer import LOGITS_SPEC, MeshModel

CUBE = MeshShape(2, 2, 2)
SHARDING = ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZ)

Forward = Callable[..., tuple[jax.Array, KVCache]]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model says: float32 logits [batch, time, vocab], and the first row's continuation [steps]."""

    logits: np.ndarray
    greedy: np.ndarray


def run(state: CheckpointState, ids: np.ndarray, prompt: int, steps: int, *, on_mesh: bool) -> Run:
    """Logits of `ids` [batch, time], and what follows the first `prompt` tokens of the first row."""
    model, params = _placed(state, on_mesh=on_mesh)
    vocab = state.hparams.vocab
    forward, cache = _program(model, params, rows=len(ids), time=max(ids.shape[1], prompt + steps))
    logits, cache = forward(params, cache, ids.astype(np.int32), np.int32(0))
    tokens, greedy = ids[:, prompt - 1].astype(np.int32), []
    for step in range(steps):
        last, cache = forward(params, cache, tokens[:, None], np.int32(prompt - 1 + step))
        tokens = np.argmax(np.asarray(last)[:, 0, :vocab], -1).astype(np.int32)
        greedy.append(int(tokens[0]))
    return Run(np.asarray(logits)[..., :vocab], np.array(greedy))


def _placed(state: CheckpointState, *, on_mesh: bool) -> tuple[Model, Params]:
    if not on_mesh:
        return OneDeviceModel(state.hparams), load_params(state)
    mesh = make_mesh(CUBE)
    params = load_params(
        state, LoadOptions(placement=MeshPlacement(SHARDING.layout.form.storage, CUBE, mesh))
    )
    return MeshModel(state.hparams, CUBE, mesh, SHARDING), params


def _program(model: Model, params: Params, rows: int, time: int) -> tuple[Forward, KVCache]:
    """The model's step as one function, and an empty cache."""
    cache = KVCache.zeros(model.cache_shape(rows, time), jnp.dtype("float32"), stacked=True)
    specs = (model.param_specs(params), model.cache_specs(cache), P(), P())

    def step(params: Params, cache: KVCache, tokens: jax.Array, start: jax.Array) -> tuple:
        x, cache = model.forward(params, tokens, start, cache)
        return model.logits(params, x, rows), cache

    sharded = model.sharded(step, specs, (LOGITS_SPEC, specs[1]))
    placed = model.placed(specs)
    if placed is None:
        return jax.jit(sharded), cache
    return jax.jit(sharded, in_shardings=placed), jax.device_put(cache, placed[1])
