"""Block attention as Pallas TPU kernels: what `AttentionForm.kernel` is on a TPU.

The same interface and semantics as `attention_walk.XlaBlocks`, and the same tiles left out; what stays in
fast memory is decided here instead of by the compiler. Off a TPU it runs in Pallas' TPU interpret mode
alone, which is for tests.

Data flow: `Block` → `KernelInputs`, heads first → kernels → the order of the ring.

Worked example: tiles of 512 × 512 with qkv 128 in bfloat16 hold 128 KiB each of q, k and v, and 1 MiB of
scores in float32.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from layers.attention_blocks import Block, Gradients, OutputGradient, ScoreForm, without_padding
from layers.pallas_backward import RowGradients, dkv_kernel, dq_kernel
from layers.pallas_forward import forward_kernel
from layers.pallas_tiles import KernelInputs, KernelTiles, heads_first, heads_last, rows_across
from layers.softmax_merge import Partial


@dataclasses.dataclass(frozen=True)
class PallasBlocks:
    """TPU kernels; tile sizes in tokens, multiples of 128. `interpret` runs them on a CPU."""

    queries: int = 512
    keys: int = 512
    interpret: pltpu.InterpretParams | bool = False

    def forward(self, block: Block, form: ScoreForm, running: Partial) -> Partial:
        """See `BlockKernel.forward`."""
        tiles = KernelTiles.of(block, self.queries, self.keys)
        inputs, rows = KernelInputs.of(block, tiles), tiles.queries
        before = (heads_first(running.output, rows), rows_across(running.lse, rows))
        output, lse = forward_kernel(inputs, before, block.bounds, form, tiles, self.interpret)
        return Partial(heads_last(output, rows), rows.unpad(jnp.swapaxes(lse[:, :, 0], 1, 2)))

    def backward(
        self, block: Block, form: ScoreForm, gradient: OutputGradient, dq: Float[Array, "..."]
    ) -> Gradients:
        """See `BlockKernel.backward`."""
        tiles = KernelTiles.of(block, self.queries, self.keys)
        inputs, rows = KernelInputs.of(block, tiles), tiles.queries
        d_output = without_padding(block.queries.places, gradient.d_output).astype(block.keys.v.dtype)
        rows_of = RowGradients(
            heads_first(d_output, rows), rows_across(gradient.lse, rows), rows_across(gradient.delta, rows)
        )
        options = (block.bounds, form, tiles, self.interpret)
        dq = dq_kernel(inputs, rows_of, heads_first(dq, rows), *options)
        dk, dv = dkv_kernel(inputs, rows_of, *options)
        return heads_last(dq, rows), heads_last(dk, tiles.keys), heads_last(dv, tiles.keys)
