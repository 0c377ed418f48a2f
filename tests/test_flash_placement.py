"""Laws of how sharded attention runs: what fits stays where it is, the rest is brought into such a form."""

import pytest

from layers.flash_placement import Axes, FlashPlacement, FlashShapes, Spec, place, spec_axes

MESH = {"x": 2, "y": 4}
SHAPES = FlashShapes(batch=2, time=24, keys=24, heads=8, kv_heads=2)


def spec(batch: Axes = (), time: Axes = (), heads: Axes = (), width: Axes = ()) -> Spec:
    return batch, time, heads, width


X, Y, XY = ("x",), ("y",), ("x", "y")
CASES = {
    "nothing": (spec(), spec(), FlashPlacement((), (), (), (), ())),
    "batch": (spec(X), spec(X), FlashPlacement(X, (), (), (), ())),
    "keys follow the batch": (spec(X, Y), spec(), FlashPlacement(X, Y, (), (), ())),
    "ring": (spec((), XY), spec((), XY), FlashPlacement((), XY, XY, (), ())),
    "ring and batch": (spec(X, Y), spec(X, Y), FlashPlacement(X, Y, Y, (), ())),
    "queries are cut like keys": (spec(), spec((), Y), FlashPlacement((), Y, Y, (), ())),
    "keys follow their queries": (spec((), X), spec((), Y), FlashPlacement((), X, X, (), ())),
    "heads": (spec((), (), X), spec((), (), X), FlashPlacement((), (), (), X, X)),
    "more head shards than kv heads": (spec((), (), Y), spec(), FlashPlacement((), (), (), Y, ())),
    "heads follow kv heads": (spec(), spec((), (), X), FlashPlacement((), (), (), X, X)),
    "ring and heads": (spec((), Y, X), spec((), Y, X), FlashPlacement((), Y, Y, X, X)),
    "an axis serves once": (spec(X), spec((), X), FlashPlacement(X, (), (), (), ())),
}


@pytest.mark.parametrize(("q", "k", "expected"), CASES.values(), ids=CASES)
def test_placements(q: Spec, k: Spec, expected: FlashPlacement) -> None:
    assert place(q, (k, k), SHAPES, MESH) == expected


def test_gradients_of_keys_are_summed_where_queries_alone_are_split() -> None:
    assert place(spec((), XY), (spec(), spec()), SHAPES, MESH).summed == XY
    assert place(spec((), X, Y), (spec(), spec()), SHAPES, MESH).summed == XY
    assert place(spec((), XY), (spec((), XY),) * 2, SHAPES, MESH).summed == ()
    assert place(spec(X, (), Y), (spec(X), spec(X)), SHAPES, MESH).summed == Y


def test_what_does_not_divide_is_made_whole() -> None:
    odd = FlashShapes(batch=3, time=10, keys=10, heads=6, kv_heads=3)
    assert place(spec(X, Y), (spec(X, Y),) * 2, odd, MESH) == FlashPlacement((), (), (), (), ())
    assert place(spec((), X, ()), (spec(),) * 2, odd, MESH).time == X
    assert place(spec((), (), X), (spec(),) * 2, odd, MESH) == FlashPlacement((), (), (), X, ())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_sharded_width_is_refused_by_name(name: str) -> None:
    specs = {key: spec((), (), (), X if key == name else ()) for key in "qkv"}
    with pytest.raises(ValueError, match=rf"width \(last dim\) of {name} is sharded over x"):
        place(specs["q"], (specs["k"], specs["v"]), SHAPES, MESH)


def test_partition_specs_are_read() -> None:
    assert spec_axes(("x", ("y", "z"), None)) == (("x",), ("y", "z"), (), ())
