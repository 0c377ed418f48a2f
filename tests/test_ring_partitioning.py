"""Laws of attention under plain `jit`: the sharding of its arrays changes where it runs and nothing else.

Worked example: on 2,4 with q over (x, y) in time and k, v likewise, 8 chips make one ring; the program holds
hops and no all-gather.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layers.ring_attention import AttentionForm
from layers.ring_partitioning import flash_mha, flash_mha_with_lse
from tests.attention_oracle import Problem, assert_equal, mask_of, results
from tests.ring_runs import grid

NAMES = ("output", "lse", "dq", "dk", "dv")
FORM = AttentionForm(is_causal=True)


def step(problem: Problem, form: AttentionForm = FORM, **options: jax.Array) -> dict[str, jax.Array]:
    found, backward = jax.vjp(
        lambda q, k, v: flash_mha_with_lse(q, k, v, form, **options), problem.q, problem.k, problem.v
    )
    return dict(zip(NAMES, (*found, *backward((problem.d_output, problem.d_lse))), strict=True))


def placed(problem: Problem, q: P, k: P) -> Problem:
    mesh = grid(2, 4)
    specs = Problem(q, k, k, q, P(*q[:3]))
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), problem, specs)


LOCAL, RING, SUMMED, MOVED = "local", "ring", "summed", "moved"
CASES = {
    "batch": (P("x"), P("x"), LOCAL),
    "heads": (P(None, None, "x"), P(None, None, "x"), LOCAL),
    "time": (P(None, "y"), P(None, "y"), RING),
    "time over two axes": (P(None, ("x", "y")), P(None, ("x", "y")), RING),
    "time over two axes, the minor first": (P(None, ("y", "x")), P(None, ("y", "x")), RING),
    "batch and time": (P("x", "y"), P("x", "y"), RING),
    "heads and time": (P(None, "y", "x"), P(None, "y", "x"), RING),
    "more head shards than kv heads": (P(None, None, ("x", "y")), P(), SUMMED),
    "time, and more head shards than kv heads": (P(None, "x", "y"), P(None, "x"), RING + SUMMED),
    "queries alone": (P(None, "y"), P(), SUMMED),
    "keys alone": (P(), P(None, "y"), MOVED),
    "queries and keys over other axes": (P(None, "x"), P(None, "y"), MOVED),
}


@pytest.mark.parametrize(("q", "k", "how"), CASES.values(), ids=CASES)
def test_sharding_changes_nothing_but_where_it_runs(q: P, k: P, how: str, rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 24, 24, heads=8)
    arrays = placed(problem, q, k)
    program = jax.jit(step).lower(arrays).compile()
    found = {name: np.asarray(x) for name, x in program(arrays).items()}
    assert_equal(found, results(problem, mask_of(24, 24, is_causal=True)))
    text = program.as_text()
    assert bool(re.search("collective-permute", text)) == (RING in how) or how == MOVED
    assert bool(re.search("all-reduce", text)) == (SUMMED in how) or how == MOVED
    assert not re.search("all-gather|all-to-all", text) or how == MOVED


def test_results_lie_like_the_arrays(rng: np.random.Generator) -> None:
    arrays = placed(Problem.random(rng, 24, 24), P("x", "y"), P("x", "y"))
    found = jax.jit(step)(arrays)
    assert all(found[name].sharding.spec[:2] == ("x", "y") for name in NAMES)


def test_rank_coded_values_come_back_exactly() -> None:
    codes = np.arange(2 * 24 * 2 * 8).reshape(2, 24, 2, 8).astype(np.float32)
    q = np.zeros((2, 24, 8, 8), np.float32)
    attend = jax.jit(lambda q, k, v: flash_mha(q, k, v, window_size=(0, 0)))
    for q_spec, k_spec in ((P(None, ("y", "x")), P(None, ("y", "x"))), (P(None, None, ("x", "y")), P())):
        problem = placed(Problem(q, codes, codes, q, q[..., 0]), q_spec, k_spec)
        assert np.array_equal(attend(problem.q, problem.k, problem.v), np.repeat(codes, 4, axis=2))


def test_segments_lengths_and_windows_hold_under_sharding(rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 16, 24)
    form = AttentionForm(window_size=(9, 3), soft_cap=1.5)
    options = {
        "q_segments": np.sort(rng.integers(0, 2, (2, 16)), axis=1).astype(np.int32),
        "k_segments": np.sort(rng.integers(0, 2, (2, 24)), axis=1).astype(np.int32),
        "key_lengths": np.array([0, 17], np.int32),
    }
    found = jax.jit(lambda p, **o: step(p, form, **o))(placed(problem, P("x", "y"), P("x", "y")), **options)
    mask = mask_of(
        16,
        24,
        window=(9, 3),
        q_segments=options["q_segments"],
        k_segments=options["k_segments"],
        lengths=options["key_lengths"],
    )
    assert_equal({k: np.asarray(v) for k, v in found.items()}, results(problem, mask, cap=1.5))


def test_a_length_that_does_not_divide_is_right(rng: np.random.Generator) -> None:
    problem, mesh = Problem.random(rng, 10, 10), grid(2, 4)

    @jax.jit
    def run(problem: Problem) -> dict[str, jax.Array]:
        sharding = NamedSharding(mesh, P(None, "y"))
        spread = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), problem)
        return step(spread)

    found = {name: np.asarray(x) for name, x in run(problem).items()}
    assert_equal(found, results(problem, mask_of(10, 10, is_causal=True)))


def test_vmap_goes_into_the_batch_any_number_of_times(rng: np.random.Generator) -> None:
    q = rng.normal(size=(2, 3, 1, 8, 4, 8)).astype(np.float32)
    k = rng.normal(size=(3, 1, 8, 2, 8)).astype(np.float32)
    spread = NamedSharding(grid(2, 4), P(None, None, None, "y"))

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(flash_mha(q, k, k, is_causal=True)))

    twice = jax.vmap(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1))), in_axes=(0, None))
    values, gradients = jax.jit(twice)(jax.device_put(q, spread), k)
    one = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for i, j in np.ndindex(2, 3):
        value, gradient = one(q[i, j], k[j])
        assert np.allclose(values[i, j], value, rtol=1e-5)
        for a, b in zip(gradients, gradient, strict=True):
            assert np.allclose(a[i, j], b, atol=1e-5)


def test_it_runs_inside_shard_map(rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 8, 8)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda q, k, v: flash_mha(q, k, v, is_causal=True),
            mesh=grid(2, 4),
            in_specs=(P("x", None, "y"), P("x"), P("x")),
            out_specs=P("x", None, "y"),
        )
        return jnp.sum(local(q, k, v) * problem.d_output)

    one_kv_head = (problem.q, problem.k[:, :, :1], problem.v[:, :, :1])
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*one_kv_head)
    alone = problem.replace(k=one_kv_head[1], v=one_kv_head[2], d_lse=np.zeros_like(problem.d_lse))
    expected = results(alone, mask_of(8, 8, is_causal=True))
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert np.allclose(gradient, expected[name], atol=1e-5), name


def test_a_sharded_width_is_refused(rng: np.random.Generator) -> None:
    arrays = placed(Problem.random(rng, 24, 24), P(None, None, None, "x"), P())
    with pytest.raises(Exception, match=r"width \(last dim\) of q is sharded over x"):
        jax.jit(lambda p: flash_mha(p.q, p.k, p.v))(arrays)
