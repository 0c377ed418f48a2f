"""Grids of a sweep by question: each a function that returns its `Grid`.

They are for 8 chips, or 8 host devices, and the embedded model; flags beside `--grid` exchange single
factors.
"""

from inference_engine.profiling.settings import Grid, Step
from layers.collectives.mode import REDUCE_DTYPES, CollectiveMode
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape, legal_shapes

CUBE = MeshShape(2, 2, 2)
BEST = (AttnAllToAll.AXES_YZX,)


STATIONARY = (Layout.WEIGHT_STATIONARY_1D, Layout.WEIGHT_STATIONARY_2D, Layout.WEIGHT_STATIONARY_2D_BATCH_Z)


def all_to_all() -> Grid:
    """Which all-to-all of attention, at which batch?"""
    return Grid(mesh=(CUBE,), layout=(Layout.WEIGHT_STATIONARY_2D,), batch=(1, 2, 4, 8, 16, 32))


def meshes() -> Grid:
    """Which mesh of 8 chips, in which layout?"""
    return Grid(mesh=tuple(legal_shapes(8)), layout=STATIONARY, attn_all_to_all=BEST)


def collectives() -> Grid:
    """Which form of the collective matmuls, and does bfloat16 pay for what travels?"""
    return Grid(
        mesh=(MeshShape(8, 1, 1), CUBE),
        layout=STATIONARY[:2],
        attn_all_to_all=BEST,
        collectives=tuple(CollectiveMode),
        reduce_dtype=REDUCE_DTYPES,
    )


def weights() -> Grid:
    """Which dtype of the weights, and from which batch on does it not matter?"""
    return Grid(
        mesh=(CUBE,),
        layout=(Layout.WEIGHT_STATIONARY_2D,),
        attn_all_to_all=BEST,
        weights=("float32", "bfloat16", "int8"),
        batch=(1, 8, 64),
    )


def prefill() -> Grid:
    """Which layout for prompts of which number and length? What a layout refuses is a row, too."""
    settings = (AttnAllToAll.NONE, AttnAllToAll.AXIS_Z, AttnAllToAll.AXES_YZX)
    return Grid(mesh=(CUBE,), attn_all_to_all=settings, batch=(1, 8), context=(64, 256), step=(Step.PREFILL,))


def everything_small() -> Grid:
    """A bit of every factor: all layouts, all-to-alls and collectives, both steps."""
    return Grid(mesh=(CUBE,), collectives=tuple(CollectiveMode), batch=(2,), context=(32,), step=tuple(Step))


GRIDS = {
    function.__name__: function
    for function in (all_to_all, meshes, collectives, weights, prefill, everything_small)
}  # fmt: skip
