"""What travels round the ring, read from the compiled program: hops, their number and size, and memory.

Idea: results do not show what a ring costs. A hop is a `collective-permute`; one inside a loop counts by the
loop's trip count, which XLA writes beside it.

Worked example: 8 chips forward are 7 hops of k and 7 of v; with a window of one chunk 1 and 1.
"""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layers.attention_blocks import ReferenceBlocks
from layers.attention_walk import XlaBlocks
from layers.ring_attention import AttentionForm, ring_attention
from layers.ring_schedule import TokenOrder
from tests.ring_runs import line
from tests.scheduled_programs import Program, instructions

CHUNK, HEADS, KV_HEADS, QKV = 16, 4, 2, 8
REFERENCE = ReferenceBlocks()


def compile_step(
    form: AttentionForm, chips: int, chunk: int, qkv: int, backward: bool
) -> jax.stages.Compiled:
    ring = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, "x", form),
        mesh=line(chips),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
    )

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        if not backward:
            return (ring(q, k, v),)
        output, pull = jax.vjp(ring, q, k, v)
        return output, *pull(d_output)

    sharding = NamedSharding(line(chips), P(None, "x"))
    shapes = [
        jax.ShapeDtypeStruct((1, chunk * chips, heads, qkv), jnp.float32, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return jax.jit(step).lower(*shapes).compile()


@functools.cache
def program_text(form: AttentionForm, chips: int, backward: bool) -> str:
    return compile_step(form, chips, CHUNK, QKV, backward).as_text()


def hops(text: str) -> Counter[int]:
    """Elements of a hop → how many a run makes."""
    program = Program(text)
    entry = re.search(r"ENTRY %([\w.\-]+)", text)
    assert entry
    counted: Counter[int] = Counter()

    def visit(name: str, times: int) -> None:
        for line_ in instructions_and_loops(program.computations[name]):
            loop = re.search(r"body=%([\w.\-]+)", line_)
            if loop:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line_)
                visit(loop.group(1), times * int(trips.group(1)) if trips else 0)
        for instruction in instructions(program.computations[name]):
            if instruction.opcode in ("collective-permute", "collective-permute-start"):
                counted[instruction.elements] += times

    visit(entry.group(1), 1)
    return counted


def instructions_and_loops(block: str) -> list[str]:
    return [line_ for line_ in block.splitlines() if " while(" in line_]


KV, PLACES = CHUNK * KV_HEADS * QKV, 2 * CHUNK
CAUSAL, FULL = AttentionForm(is_causal=True, kernel=REFERENCE), AttentionForm(kernel=REFERENCE)
ZIGZAG = dataclasses.replace(CAUSAL, order=TokenOrder.ZIGZAG)


def _window(left: int, right: int) -> AttentionForm:
    return AttentionForm(window_size=(left, right), kernel=REFERENCE)


@pytest.mark.parametrize(
    ("form", "chips", "expected"),
    [
        (CAUSAL, 8, 7),
        (ZIGZAG, 8, 7),
        (FULL, 3, 2),
        (FULL, 2, 1),
        (FULL, 1, 0),
        (_window(CHUNK, 0), 8, 1),
        (_window(CHUNK + 1, 0), 8, 2),
        (_window(0, 0), 8, 0),
        (_window(CHUNK, CHUNK), 8, 3),  # one jump ahead, then two hops
    ],
    ids=["causal", "zigzag", "3 chips", "2 chips", "1 chip", "w=chunk", "w>chunk", "w=0", "both sides"],
)
def test_forward_hops_are_those_that_somebody_needs(form: AttentionForm, chips: int, expected: int) -> None:
    assert hops(program_text(form, chips, False)) == Counter({KV: 2 * expected, PLACES: expected}) + Counter()


@pytest.mark.parametrize(
    ("form", "chips", "keys", "gradients"),
    [
        (CAUSAL, 8, 7 + 7, 8),
        (FULL, 3, 2 + 2, 3),
        (_window(CHUNK, 0), 8, 1, 2),  # the one chunk that came forward is still there
        (_window(0, 0), 8, 0, 0),
    ],
    ids=["causal", "3 chips", "w=chunk", "w=0"],
)
def test_backward_keys_travel_again_and_their_gradients_come_home(
    form: AttentionForm, chips: int, keys: int, gradients: int
) -> None:
    assert hops(program_text(form, chips, True))[KV] == 2 * (keys + gradients)


@pytest.mark.parametrize("form", [CAUSAL, ZIGZAG, _window(CHUNK, 0)], ids=["causal", "zigzag", "window"])
def test_nothing_is_gathered(form: AttentionForm) -> None:
    text = program_text(form, 8, True)
    assert not re.search(r"all-gather|all-to-all|all-reduce|reduce-scatter", text)


def test_the_ring_holds_two_chunks_of_keys_and_little_else() -> None:
    """Inputs, outputs and two chunks, times 1.5, at a length where tiles are small beside chunks."""
    chunk, qkv = 4096, 16
    form = AttentionForm(is_causal=True, kernel=XlaBlocks(queries=32, keys=32))
    memory = compile_step(form, 8, chunk, qkv, True).memory_analysis()
    inputs_and_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes
    two_chunks = 2 * 2 * chunk * KV_HEADS * qkv * 4
    assert inputs_and_outputs + memory.temp_size_in_bytes <= 1.5 * (inputs_and_outputs + two_chunks)


def test_forward_memory_is_the_output_and_two_chunks() -> None:
    chunk, qkv = 4096, 16
    form = AttentionForm(is_causal=True, kernel=XlaBlocks(queries=32, keys=32))
    memory = compile_step(form, 8, chunk, qkv, False).memory_analysis()
    one_chunk = 2 * chunk * KV_HEADS * qkv * 4
    output_and_lse = chunk * HEADS * (qkv + 1) * 4
    assert memory.temp_size_in_bytes <= 1.1 * (2 * one_chunk + output_and_lse)
