"""THROUGHPUT: half of every shard travels each way round, so that both links carry all the time.

All-gather halves the rows, reduce-scatter the columns, each together with the weight's; a weight is read
once whatever the mode. Where the two halves are of one and the same chunk — the chip's own and, on an
even ring, the opposite one's — a single product takes both, since every matmul has a cost of its own.

Worked example, 4 chips, chip 0, "‹" the first half, "›" the second. All-gather: x₀ w[0] beside the first
hops; ‹x₃ ‹w[3] and ›x₁ ›w[1] beside the second; x₂ w[2] beside the third; ‹x₁ ‹w[1] and ›x₃ ›w[3].
Reduce-scatter: ‹ for chip 3 and › for chip 1 leave; both halves for chip 2 join what arrives; then ‹ for
chip 1 and › for chip 3; last both halves for itself.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks, halves
from layers.collectives.ring import Index, Ring, after, alone

Halves = tuple[Array, Array]
Step = Callable[[Index, tuple[Array, ...]], tuple[Array, ...]]


def allgather_matmul_throughput(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring
) -> Float32[Array, "*batch cols"]:
    """N products (of two halves each), N − 1 hops of half of x in each direction."""
    first, second = halves(w.rows)

    def apart(k: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        on, back, total = _arrive(ring, *carry)
        total = total + w.dot(on, ring.at(-k), rows=first)
        return on, back, total + w.dot(back, ring.at(k), rows=second)

    def together(k: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        on, back, total = _arrive(ring, *carry)
        return on, back, total + w.dot(jnp.concatenate([on, back], axis=-1), ring.at(k))

    carry = (x[..., : first.stop], x[..., first.stop :], w.dot(x, ring.index))
    meetings = [] if ring.opposite is None else [ring.opposite]
    *_, total = _walk(ring, apart, together, meetings, carry)
    return total


def matmul_reducescatter_throughput(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring, reduce_dtype: str
) -> Float32[Array, "*batch cols"]:
    """N products (of two halves each), N − 1 hops of half a result in each direction."""
    first, second = halves(w.cols)

    def apart(x: Array, k: Index) -> Halves:
        on = alone(w.dot(x, ring.at(-1 - k), cols=first))
        return on, alone(w.dot(x, ring.at(1 + k), cols=second))

    def together(x: Array, k: Index) -> Halves:
        both = alone(w.dot(x, ring.at(1 + k)))
        return both[..., : first.stop], both[..., first.stop :]

    def joining(products: Callable[[Array, Index], Halves]) -> Step:
        def step(k: Index, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            on, back = (half.astype(reduce_dtype) for half in carry)
            new_on, new_back = products(after(x, on, back), k)
            on, back = ring.hop(on, +1), ring.hop(back, -1)
            return on.astype(jnp.float32) + new_on, back.astype(jnp.float32) + new_back

        return step

    meetings = [ring.size - 1] if ring.opposite is None else [ring.opposite - 1, ring.size - 1]
    carry = together(x, 0) if meetings[0] == 0 else apart(x, 0)
    later = [meeting for meeting in meetings if meeting > 0]
    return jnp.concatenate(_walk(ring, joining(apart), joining(together), later, carry), axis=-1)


def _arrive(ring: Ring, on: Array, back: Array, total: Array) -> tuple[Array, Array, Array]:
    """Both halves a hop further, readable when the products so far are in `total`."""
    return after(ring.hop(on, +1), total), after(ring.hop(back, -1), total), total


def _walk(
    ring: Ring, apart: Step, together: Step, meetings: Sequence[int], carry: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Steps 1 to N − 1, `together` at the meetings (in order) and `apart` elsewhere."""
    start = 1
    for meeting in meetings:
        carry = ring.run(apart, carry, start, meeting)
        carry = ring.run(together, carry, meeting, meeting + 1)
        start = meeting + 1
    return ring.run(apart, carry, start, ring.size)
