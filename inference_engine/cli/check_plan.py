"""What a call of `check` asks for, understood before jax starts.

Data flow: flags → `check_plan` → `CheckPlan` → `check_run.run`.

Worked example: `--layout 1d --json` is a plan of the mesh 2,2,2 whose factors hold one layout.
"""

import dataclasses
from typing import Any

from inference_engine.checking.cases import Factors
from inference_engine.cli.mesh_flags import CUBE, MESH
from inference_engine.cli.model_flags import AUTO, ModelOptions, model_options
from inference_engine.cli.options import Flags
from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, ContextSplit, Layout
from layers.mesh_shape import MeshShape


@dataclasses.dataclass(frozen=True)
class CheckPlan:
    """What one call asks for.

    Attributes:
      shape: the mesh.
      factors: values that take part.
      exhaustive: every combination instead of a covering set.
      json: an object instead of a table.
      model: which model; how its weights are held is a factor.
    """

    shape: MeshShape
    factors: Factors
    exhaustive: bool
    json: bool
    model: ModelOptions


def check_plan(flags: Flags) -> CheckPlan:
    """What the flags ask for; raises UserError for a mesh that is none or an empty path."""
    known = {"tokenizer": None, "layers": AUTO} | dict(flags.values)
    return CheckPlan(
        shape=MeshShape.parse(CUBE if flags[MESH] is None else flags[MESH]),
        factors=dataclasses.replace(Factors(), **_narrowed(flags)),
        exhaustive=flags["exhaustive"],
        json=flags["json"],
        model=model_options(Flags(known, flags.given)),
    )


def _narrowed(flags: Flags) -> dict[str, tuple[Any, ...]]:
    """Factors that a flag names one value of; --layout and --context_parallel name two."""
    given = {name: flags[name] for name in flags.given}
    of_both = {
        "layout": given.get("decode_layout", given.get("layout")),
        "prefill_layout": given.get("prefill_layout", given.get("layout")),
        "context": given.get("decode_context_parallel", given.get("context_parallel")),
        "prefill_context": given.get("context_parallel"),
    }
    given |= {name: value for name, value in of_both.items() if value is not None}
    made = {
        "layout": Layout, "prefill_layout": Layout,
        "context": ContextSplit, "prefill_context": ContextSplit,
        "attn_all_to_all": AttnAllToAll, "collectives": CollectiveMode,
        "weights": str, "activation_dtype": str, "reduce_dtype": str,
        "kv_cache_dtype": str, "prefixes": str,
    }  # fmt: skip
    return {name: (make(given[name]),) for name, make in made.items() if name in given}
