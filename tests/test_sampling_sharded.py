"""Laws of sampling over a sharded vocabulary: every mesh draws the tokens of one device, and gathers nothing.

Idea: the same requests and logits through the sampler on one device and inside `shard_map`, over meshes with
even, uneven and two-axis shards. Data flow: logits [slots, 48] over n shards → tokens, equal to the bit.

Worked example: a vocabulary of 47 over 3 shards: 16 columns each, the last with one column of padding.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inference_engine import sampling
from inference_engine.sampling import Sampled, sample, top_logprobs
from inference_engine.sampling_state import SamplingState, count_tokens
from inference_engine.vocab_shard import vocab_shard
from tests.sampling_twin import (
    MIXTURE,
    VOCAB,
    WIDTH,
    draw,
    padded,
    positions_of,
    state_of,
    tied_logits,
)

TOP = 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and which of its axes shard the vocabulary and the slots."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    vocab_axes: tuple[str, ...]
    slot_axes: tuple[str, ...] = ()

    def mesh(self) -> Mesh:
        devices = jax.devices()[: math.prod(self.shape)]
        return jax.make_mesh(self.shape, self.axes, (AxisType.Auto,) * len(self.shape), devices=devices)


LAYOUTS = {
    "2, twice": Layout((2, 2), ("x", "y"), ("y",)),
    "3": Layout((3,), ("x",), ("x",)),
    "8": Layout((8,), ("x",), ("x",)),
    "slots over x": Layout((2, 2, 2), ("x", "y", "z"), ("y", "z"), ("x",)),
    "order z, y": Layout((1, 3, 2), ("x", "y", "z"), ("z", "y")),
}


def specs(layout: Layout, state: SamplingState) -> SamplingState:
    """The slots over the slot axes, the vocabulary over its own."""
    slots, vocab = layout.slot_axes or None, layout.vocab_axes
    wide = {"output_counts", "prompt_mask", "logit_bias"}
    names = {f.name: P(slots, vocab) if f.name in wide else P(slots) for f in dataclasses.fields(state)}
    return SamplingState(**names)


def sharded_step(layout: Layout, state: SamplingState, vocab: int = VOCAB) -> jax.stages.Wrapped:
    """One sampler step inside `shard_map`, its tokens counted, with the most likely alternatives."""
    slots = P(layout.slot_axes or None)

    def step(
        logits: jax.Array, state: SamplingState, positions: jax.Array, active: jax.Array
    ) -> tuple[Sampled, SamplingState, tuple[jax.Array, jax.Array]]:
        shard = vocab_shard(vocab, logits.shape[1], layout.vocab_axes, layout.slot_axes)
        result = sample(logits, state, positions, active, shard)
        return result, count_tokens(state, result.tokens, active, shard), top_logprobs(logits, shard, TOP)

    wide = P(layout.slot_axes or None, layout.vocab_axes)
    state_specs = specs(layout, state)
    in_specs, out_specs = (wide, state_specs, slots, slots), (slots, state_specs, slots)
    mesh = layout.mesh()
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    return jax.jit(mapped, in_shardings=placed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sharded_vocabulary_draws_the_tokens_of_one_device(name: str) -> None:
    """Ties, every option, unusable logits, padding: tokens to the bit, log-probabilities to rounding."""
    state = state_of(MIXTURE)
    step, active = sharded_step(LAYOUTS[name], state), jnp.ones(len(MIXTURE), jnp.bool_)
    for seed in range(12):
        logits = tied_logits(np.random.default_rng(seed), len(MIXTURE), scale=1.0)
        if seed == 0:
            logits[2, 40], logits[5, 1], logits[6] = math.nan, math.inf, -math.inf
        cases = [dataclasses.replace(case, position=seed) for case in MIXTURE]
        tokens, logprobs = draw(logits, cases)
        result, counted, (values, ids) = step(padded(logits), state, positions_of(cases), active)
        np.testing.assert_array_equal(result.tokens, tokens)
        np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)
        added = np.asarray(counted.output_counts - state.output_counts)
        np.testing.assert_array_equal(added.argmax(axis=1)[tokens >= 0], tokens[tokens >= 0])
        assert added.sum() == (tokens >= 0).sum()
        if seed:
            one_values, one_ids = top_logprobs(padded(logits), vocab_shard(VOCAB, WIDTH), TOP)
            np.testing.assert_array_equal(ids, one_ids)
            np.testing.assert_allclose(values, one_values, atol=1e-5)


def test_the_compiled_sampler_gathers_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No all-gather or all-to-all at all; what is summed over the chips is far smaller than a shard."""
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    vocab, slots = 8 * 512 - 3, len(MIXTURE)
    logits = padded(tied_logits(np.random.default_rng(0), slots, vocab, scale=8.0), 8 * 512)
    state = state_of(MIXTURE, 8 * 512)
    arguments = (logits, state, positions_of(MIXTURE), jnp.ones(slots, jnp.bool_))
    compiled = sharded_step(LAYOUTS["8"], state, vocab).lower(*arguments).compile()
    text = compiled.as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    results = re.findall(r"= ([^=]*?) all-reduce(?:-start)?\(", text)
    shapes = re.findall(r"[a-z]\d+\[([\d,]*)\]", " ".join(results))
    assert len(shapes) > 10
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    assert max(sizes) <= slots * TOP * 8
    assert max(sizes) < slots * 512
