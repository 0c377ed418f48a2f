"""Runs the checker on meshes of more chips than the test process has, and reports as JSON.

    python -m tests.check_meshes 16 5 4,4,1 4,2,2

The first number is the count of devices; one case in 5 runs.

Worked example: the line {"mesh": "4,4,1", "cases": 6, "worst": 8e-07, "bad": []}.
"""

import json
import sys

import jax

from checkpoints.synthetic import synthetic_state
from inference_engine.checking.cases import Case, Factors, covering_cases
from inference_engine.checking.run import Checker, Row
from layers.hparams import HParams
from layers.layout import Layout
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape

# kv heads fewer than the shards; embed and ff divide over 6, 8 and 16 chips, the vocabulary over none.
GROUPED = HParams(layers=2, embed=48, ff=96, heads=8, kv_heads=2, qkv=8, vocab=71, windows=(3, None))
CORE = Factors(
    prefill_layout=(
        Layout.WEIGHT_STATIONARY_1D, Layout.WEIGHT_STATIONARY_2D_TIME_Z, Layout.WEIGHT_GATHERED_XYZ,
        Layout.WEIGHT_GATHERED_XY_TIME,
    ),
    weights=("float32", "int8"),
    activation_dtype=("float32",),
    reduce_dtype=("float32",),
    batch=(1, 3),
    prompt_tokens=(5,),
)  # fmt: skip
"""In float32, with a few of the prefill layouts: every pair of the other values occurs."""


def rows(mesh: str, every: int = 1, hparams: HParams = GROUPED, factors: Factors = CORE) -> list[Row]:
    """Outcomes of a covering set on one mesh, or of one case in `every`."""
    shape = MeshShape.parse(mesh)
    checker = Checker(synthetic_state(hparams), shape, make_mesh(shape), longest=6, steps=4)
    cases: list[Case] = covering_cases(factors, shape)[::every]
    found = list(checker.rows(cases))
    assert [row.case for row in found] == cases
    return found


def main() -> None:
    """One line a mesh."""
    chips, every, *meshes = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(chips))
    for mesh in meshes:
        found = rows(mesh, int(every))
        worst = max(row.max_rel_err for row in found)
        bad = [row.to_json() for row in found if not row.ok]
        print(json.dumps({"mesh": mesh, "cases": len(found), "worst": worst, "bad": bad}), flush=True)


if __name__ == "__main__":
    main()
