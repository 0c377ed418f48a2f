"""The two collective matmuls in all modes, and in XLA's own forms, side by side.

One problem is `[batch, rows] @ [rows, cols]` over N chips on one axis, as a layer has it in front of its
projections (`allgather_matmul`, the weight split by columns) and behind them (`matmul_reducescatter`, split
by rows). A program runs it for a stack of layers in a loop, as a model does, each layer with weights and
activations of its own: what does not change would be computed once, and the cost of starting a program is
shared.

  reference, one_way, throughput, latency   `layers.collectives`, one stored weight for all
  xla_tiled        `lax` collective and one plain product inside shard_map, the weight stored plain
  xla_partitioner  a plain product under jit, its operands sharded: XLA chooses the collective

Data flow: `Problem` → a program and its operands for each form → rounds in turn → `FormRow`s.

Worked example: batch 8, 240 × 2,176 on 4 chips in float32: a chip multiplies [8, 240] by [240, 544], reads
522 kB of weights, and its reduce-scatter sends 3 × 8 × 544 × 4 = 52 kB.
"""

import dataclasses
import enum
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from inference_engine.checking.tolerance import tolerance
from inference_engine.profiling.bounds import Work, bound
from inference_engine.profiling.place import Place
from inference_engine.profiling.spread import Timing
from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.collectives.reductions import reduce_scatter
from layers.errors import UserError
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape

AXIS = "x"


class Op(enum.Enum):
    """Which collective matmul."""

    ALLGATHER_MATMUL = "allgather_matmul"
    MATMUL_REDUCESCATTER = "matmul_reducescatter"


class XlaForm(enum.Enum):
    """The same without this project's functions."""

    TILED = "xla_tiled"
    PARTITIONER = "xla_partitioner"


FORMS: tuple[CollectiveMode | XlaForm, ...] = (*CollectiveMode, *XlaForm)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes over all chips, and dtypes."""

    op: Op
    chips: int
    batch: int
    rows: int
    cols: int
    weights: str
    activation_dtype: str
    reduce_dtype: str
    layers: int = 8

    def __post_init__(self) -> None:
        common = math.gcd(self.rows, self.cols)
        for name in ("rows", "cols"):
            size = getattr(self, name)
            if size % self.chips:
                legal = [chips for chips in range(1, common + 1) if common % chips == 0]
                nearest = min(legal, key=lambda chips: (abs(chips - self.chips), chips))
                raise UserError(
                    f"{self.op.value}: {name}={size} does not divide over {self.chips} chips; "
                    f"nearest: {nearest} chips"
                )

    @property
    def sent_bytes(self) -> int:
        """What a chip has to send, for one layer: N − 1 shards, of x or of the result."""
        if self.op is Op.ALLGATHER_MATMUL:
            shard = self.batch * self.rows // self.chips * jnp.dtype(self.activation_dtype).itemsize
        else:
            shard = self.batch * self.cols // self.chips * jnp.dtype(self.reduce_dtype).itemsize
        return (self.chips - 1) * shard

    @property
    def work(self) -> Work:
        """Of one chip, for one layer."""
        weights = self.rows * self.cols // self.chips
        read = weights * jnp.dtype(self.weights).itemsize
        return Work(2.0 * self.batch * weights, float(read), float(self.sent_bytes))

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self) | {"op": self.op.value}


@dataclasses.dataclass(frozen=True)
class FormRow:
    """One form of one problem.

    Attributes:
      timing: seconds of one layer.
      share: the bound's time by the median; None where the chip's figures are not known.
      error: max|a − reference| / max|reference|.
      ok: error within the tolerance of the dtypes.
    """

    problem: Problem
    form: str
    timing: Timing
    share: float | None
    error: float
    ok: bool
    compile_seconds: float

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        return {
            **self.problem.to_json(),
            "form": self.form,
            "sent_bytes": self.problem.sent_bytes,
            "timing": self.timing.to_json(),
            "bound_share": self.share,
            "error": self.error,
            "ok": self.ok,
            "compile_seconds": self.compile_seconds,
        }


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """Activations [layers, batch, rows] and weights [layers, rows, cols] of a problem."""

    x: np.ndarray
    w: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> "_Arrays":
        rng = np.random.default_rng(0)
        x = rng.standard_normal((problem.layers, problem.batch, problem.rows), np.float32)
        shape = (problem.layers, problem.rows, problem.cols)
        if problem.weights == "int8":
            w = rng.integers(-127, 128, shape, np.int8)
        else:
            w = (rng.standard_normal(shape, np.float32) / np.sqrt(problem.rows, dtype=np.float32)).astype(
                jnp.dtype(problem.weights)
            )
        return cls(x.astype(jnp.dtype(problem.activation_dtype)), w)

    def chunked(self, problem: Problem) -> np.ndarray:
        """The weights chunk by chunk, as `layers.collectives` has them: [layers, chunks, rows, cols]."""
        n = problem.chips
        if problem.op is Op.ALLGATHER_MATMUL:  # chunk i are the rows of chip i
            return self.w.reshape(problem.layers, n, problem.rows // n, problem.cols)
        split = self.w.reshape(problem.layers, problem.rows, n, problem.cols // n)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [layers, batch, …], w [layers, …], index) → float32 [batch, …] of that layer, on one chip."""


def _mode_layer(problem: Problem, mode: CollectiveMode) -> Layer:
    config = CollectiveConfig(mode, problem.reduce_dtype)
    run = allgather_matmul if problem.op is Op.ALLGATHER_MATMUL else matmul_reducescatter

    def layer(x: jax.Array, w: jax.Array, index: jax.Array) -> jax.Array:
        return run(lax.dynamic_index_in_dim(x, index, keepdims=False), w, AXIS, config, layer=index)

    return layer


def _tiled_layer(problem: Problem) -> Layer:
    def layer(x: jax.Array, w: jax.Array, index: jax.Array) -> jax.Array:
        x, w = (lax.dynamic_index_in_dim(array, index, keepdims=False) for array in (x, w))
        if problem.op is Op.ALLGATHER_MATMUL:
            x = lax.all_gather(x, AXIS, axis=1, tiled=True)
            return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
        product = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
        return reduce_scatter(product, AXIS, problem.reduce_dtype, dimension=1)

    return layer


def _plain_layer(problem: Problem) -> Layer:
    def layer(x: jax.Array, w: jax.Array, index: jax.Array) -> jax.Array:
        x, w = (lax.dynamic_index_in_dim(array, index, keepdims=False) for array in (x, w))
        product = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.dtype(problem.reduce_dtype))
        return product.astype(jnp.float32)

    return layer


@dataclasses.dataclass
class _Program:
    """A compiled form and its operands."""

    form: CollectiveMode | XlaForm
    run: Callable[[], jax.Array]
    compile_seconds: float
    rounds: list[float] = dataclasses.field(default_factory=list)

    def time(self, layers: int) -> None:
        """One round."""
        began = time.perf_counter()
        self.run().block_until_ready()
        self.rounds.append((time.perf_counter() - began) / layers)


def _program(problem: Problem, form: CollectiveMode | XlaForm, arrays: _Arrays, mesh: Mesh) -> _Program:
    gather = problem.op is Op.ALLGATHER_MATMUL
    chunked = isinstance(form, CollectiveMode)
    w = arrays.chunked(problem) if chunked else arrays.w
    split = (None, AXIS) if gather else (AXIS, None)
    w_spec = P(*(None,) * (w.ndim - 2), *split)
    x_spec, out_spec = P(None, None, AXIS), P(None, AXIS)
    layer = {
        CollectiveMode: lambda: _mode_layer(problem, CollectiveMode(form)),
        XlaForm: lambda: (_tiled_layer if form is XlaForm.TILED else _plain_layer)(problem),
    }[type(form)]()

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        first = layer(x, w, jnp.int32(0))
        return lax.fori_loop(1, problem.layers, lambda i, total: total + layer(x, w, i), first)

    if form is not XlaForm.PARTITIONER:
        whole = jax.shard_map(whole, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=out_spec)
    places = [NamedSharding(mesh, spec) for spec in (x_spec, w_spec, out_spec)]
    jitted = jax.jit(whole, in_shardings=tuple(places[:2]), out_shardings=places[2])
    operands = [jax.device_put(array, place) for array, place in zip((arrays.x, w), places[:2], strict=True)]
    began = time.perf_counter()
    compiled = jitted.lower(*operands).compile()
    return _Program(form, lambda: compiled(*operands), time.perf_counter() - began)


def measure(
    problem: Problem, forms: Sequence[CollectiveMode | XlaForm], rounds: int, place: Place
) -> list[FormRow]:
    """All forms of a problem, in turn, round after round; errors are against REFERENCE.

    Raises UserError if there are fewer devices than chips.
    """
    mesh = make_mesh(MeshShape(problem.chips))
    arrays = _Arrays.of(problem)
    programs = [_program(problem, form, arrays, mesh) for form in forms]
    oracle = next((p for p in programs if p.form is CollectiveMode.REFERENCE), None)
    oracle = oracle or _program(problem, CollectiveMode.REFERENCE, arrays, mesh)
    expected = np.asarray(oracle.run())
    errors = [
        float(np.max(np.abs(np.asarray(p.run()) - expected)) / np.max(np.abs(expected))) for p in programs
    ]
    order = random.Random(0)
    for _ in range(rounds):
        for program in order.sample(programs, len(programs)):
            program.time(problem.layers)
    least = bound(problem.work, place.chip_of(problem.chips), problem.activation_dtype).seconds
    limit = tolerance(problem.activation_dtype, problem.reduce_dtype, "auto")
    rows = []
    for program, error in zip(programs, errors, strict=True):
        timing = Timing.of(program.rounds)
        share = None if least is None else least / timing.median
        rows.append(
            FormRow(
                problem, program.form.value, timing, share, error, error <= limit, program.compile_seconds
            )
        )
    return rows
