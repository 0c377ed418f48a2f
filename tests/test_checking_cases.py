"""Laws of the covering set."""

import dataclasses
import functools
import itertools

import pytest

from inference_engine.checking.cases import Case, Factors, all_cases, covering_cases, illegal_settings
from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, ContextSplit, Layout, check_pair
from layers.mesh_shape import MeshShape

CUBE = MeshShape(2, 2, 2)
MESHES = [MeshShape.parse(text) for text in ("2,2,2", "2,1,3", "1,4,2", "1,1,1")]

NONE, XY = ContextSplit.NONE, ContextSplit.XY
SMALL = Factors(
    weights=("float32",), kv_cache_dtype=("auto",), batch=(1, 3), prompt_tokens=(5,), context=(NONE, XY),
    prefill_context=(NONE,), collectives=(CollectiveMode.REFERENCE, CollectiveMode.ONE_WAY),
)  # fmt: skip
ONE = Factors(
    collectives=(CollectiveMode.REFERENCE,), weights=("float32",), activation_dtype=("float32",),
    reduce_dtype=("float32",), kv_cache_dtype=("auto",), prefixes=("own",), batch=(1,), prompt_tokens=(5,),
)  # fmt: skip


@functools.cache
def covering(mesh: MeshShape) -> list[Case]:
    """The covering set of all factors, made once for all tests of it."""
    return covering_cases(Factors(), mesh)


def _pairs(cases: list[Case]) -> set:
    rows = [list(case.to_json().items()) for case in cases]
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_covering_set_holds_every_legal_pair_of_values(mesh: MeshShape) -> None:
    assert _pairs(covering_cases(SMALL, mesh)) == _pairs(list(all_cases(SMALL, mesh)))


@pytest.mark.parametrize(
    "narrowed",
    [
        {"context": (ContextSplit.XYZ,), "prefill_context": (ContextSplit.XYZ,)},
        {"context": (ContextSplit.Z,), "prefill_context": (ContextSplit.Z,)},
        {"context": (ContextSplit.XYZ,), "prefill_context": (NONE, XY)},
        {"layout": (Layout.WEIGHT_GATHERED_X,), "prefill_context": (XY,)},
        {"attn_all_to_all": (AttnAllToAll.AXES_YZ,)},
    ],
    ids=str,
)
def test_a_narrowed_set_holds_every_legal_pair_too(narrowed: dict) -> None:
    factors = dataclasses.replace(SMALL, batch=(1,), **narrowed)
    assert _pairs(covering_cases(factors, CUBE)) == _pairs(list(all_cases(factors, CUBE)))


def test_covering_set_is_small_and_has_no_case_twice() -> None:
    cases = covering(CUBE)
    assert len(set(cases)) == len(cases) <= 84


def test_exact_dtypes_cover_every_pair_among_themselves() -> None:
    fewer = {"weights": ("float32", "int8"), "batch": (1, 8), "prompt_tokens": (1, 12)}  # of the exact ones
    few = {"context": (NONE, XY), "prefill_context": (NONE, XY), "prefixes": ("own",)}
    exact = Factors(activation_dtype=("float32",), reduce_dtype=("float32",), **fewer, **few)
    cases = covering(CUBE)
    found = [c for c in cases if (c.activation_dtype, c.reduce_dtype) == ("float32", "float32")]
    assert _pairs(found) >= _pairs(list(all_cases(exact, CUBE)))


def test_covering_set_is_always_the_same() -> None:
    assert covering(CUBE) == covering_cases(Factors(), CUBE)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_case_can_run(mesh: MeshShape) -> None:
    for case in covering(mesh):
        check_pair(case.prefill, case.decode, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_is_left_out_is_listed_with_the_reason(mesh: MeshShape) -> None:
    undealt = dataclasses.replace(ONE, context=(NONE,), prefill_context=(NONE,))
    legal = {(c.layout, c.prefill_layout, c.attn_all_to_all) for c in all_cases(undealt, mesh)}
    listed = dict(illegal_settings(undealt, mesh))
    for layout, prefill, trade in itertools.product(Layout, Layout, AttnAllToAll):
        names = (
            f"decode layout {layout.value}",
            f"decode layout {layout.value}, prefill_layout {prefill.value}",
            f"decode layout {layout.value}, attn_all_to_all {trade.value}",
        )
        assert ((layout, prefill, trade) in legal) != any(listed.get(name) for name in names)


def test_contexts_that_are_left_out_are_listed_with_the_reason() -> None:
    cases = list(all_cases(ONE, CUBE))
    listed = dict(illegal_settings(ONE, CUBE))
    for name, other in (("prefill_layout", "prefill_context"), ("attn_all_to_all", "context")):
        legal = {(getattr(c, name), getattr(c, other)) for c in cases}
        for first, second in itertools.product(getattr(ONE, name), getattr(ONE, other)):
            why = listed.get(f"{name} {first.value}, {other} {second.value}")
            assert ((first, second) in legal) == (why is None), (first, second)


def test_decoding_splits_no_time_and_1d_shares_no_weights_with_2d() -> None:
    listed = dict(illegal_settings(Factors(), CUBE))
    assert "one token a row" in listed["decode layout gathered_x_time"]
    assert "one copy of them" in listed["decode layout 1d, prefill_layout 2d"]
    assert not any(
        "prefill_layout 1d" in name for name in dict(illegal_settings(Factors(), MeshShape(1, 4, 2)))
    )
