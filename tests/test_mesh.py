"""Mesh shapes say what is legal, and mesh axes are physical axes of the devices.

Worked example: 16 chips at coordinates 2 × 2 × 4 as mesh 4,2,2: x runs along the physical z.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layers.errors import UserError
from layers.mesh import arrange, make_mesh
from layers.mesh_shape import AXES, MeshShape, host_devices_needed, legal_shapes, nearest_shape


@dataclasses.dataclass(frozen=True)
class Chip:
    """What `arrange` reads of a TPU device."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"


def tpu_slice(x: int, y: int, z: int, cores: int = 1, offset: int = 0) -> list[Chip]:
    """A box of chips, in the order of a runtime that goes host by host: not by coordinates."""
    places = list(itertools.product(range(z), range(y), range(x), range(cores)))
    chips = [Chip(i, (a + offset, b + offset, c + offset), core) for i, (c, b, a, core) in enumerate(places)]
    return chips[::2] + chips[1::2]


SLICES = [(4, 4, 1), (2, 2, 4), (4, 4, 4), (2, 4, 8), (3, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("2,2", "2,2,1"),
        ("2,2,2,2", "2,2,2"),
        ("0,2,2", "1,2,2"),
        ("-1,2,3", "1,2,3"),
        ("a,2,2", "1,2,2"),
        ("2.5,1,1", "2,1,1"),
        ("2x2x2", "2,2,2"),
        ("1e999,nan,4", "1,1,4"),
        ("²,1,1", "1,1,1"),
        ("", "1,1,1"),
    ],
)
def test_a_mesh_that_is_no_three_positive_integers_is_refused(text: str, nearest: str) -> None:
    with pytest.raises(UserError) as caught:
        MeshShape.parse(text)
    message = str(caught.value)
    assert message.endswith(f"nearest legal: {nearest}")
    assert repr(text) in message
    assert "\n" not in message
    MeshShape.parse(nearest)


@given(st.tuples(*[st.integers(1, 10**6)] * 3))
def test_a_shape_is_its_text(sizes: tuple[int, int, int]) -> None:
    shape = MeshShape(*sizes)
    assert MeshShape.parse(str(shape)) == shape
    assert shape.size == host_devices_needed(shape) == math.prod(sizes) == shape.over(AXES)
    assert shape.over(("z", "x")) == sizes[2] * sizes[0]
    assert shape.over(()) == 1


@pytest.mark.parametrize("size", [0, -1, True])
def test_an_axis_is_a_positive_integer(size: int) -> None:
    with pytest.raises(UserError, match="mesh axis y has size"):
        MeshShape(1, size, 1)


def test_legal_shapes_are_all_factorings() -> None:
    for devices in (1, 7, 8, 12, 64):
        triples = itertools.product(range(1, devices + 1), repeat=3)
        found = legal_shapes(devices)
        assert len(found) == len(set(found))
        assert {shape.sizes for shape in found} == {sizes for sizes in triples if math.prod(sizes) == devices}


def test_the_nearest_shape_differs_least() -> None:
    assert nearest_shape(MeshShape(3, 2, 2), legal_shapes(8)) == MeshShape(2, 2, 2)
    assert nearest_shape(MeshShape(9, 1, 1), legal_shapes(8)) == MeshShape(8, 1, 1)


def test_host_devices_are_taken_in_the_order_of_their_ids() -> None:
    devices = jax.devices()
    mesh = make_mesh(MeshShape(2, 2, 2), devices[::-1])
    assert mesh.axis_names == AXES
    assert mesh.devices.tolist() == np.array(devices, object).reshape(2, 2, 2).tolist()
    assert make_mesh(MeshShape(1, 3, 2)).devices.ravel().tolist() == devices[:6]


def test_a_mesh_larger_than_the_host_devices_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(UserError) as caught:
        make_mesh(MeshShape(3, 2, 2))
    message = str(caught.value)
    assert "mesh 3,2,2 has 12 chips and there are 8 (cpu)" in message
    assert all(str(shape) in message for shape in legal_shapes(8))
    assert message.endswith("nearest: 2,2,2")
    assert "\n" not in message


@pytest.mark.parametrize("box", SLICES, ids=str)
def test_every_factoring_of_a_slice_uses_every_chip_once(box: tuple[int, int, int]) -> None:
    chips = tpu_slice(*box)
    for shape in legal_shapes(len(chips)):
        mesh = arrange(shape, chips)
        assert mesh.shape == shape.sizes
        assert {chip.id for chip in mesh.ravel()} == {chip.id for chip in chips}


@pytest.mark.parametrize("box", SLICES, ids=str)
def test_a_mesh_of_the_slice_own_shape_is_the_slice(box: tuple[int, int, int]) -> None:
    mesh = arrange(MeshShape(*box), tpu_slice(*box, offset=4))
    for place in np.ndindex(*box):
        assert mesh[place].coords == tuple(4 + at for at in place)


@pytest.mark.parametrize("sizes", set(itertools.permutations((2, 2, 4))), ids=str)
def test_whole_mesh_axes_are_physical_axes_in_any_order(sizes: tuple[int, int, int]) -> None:
    mesh = arrange(MeshShape(*sizes), tpu_slice(2, 2, 4))
    for axis in range(3):
        lines = np.moveaxis(mesh, axis, -1).reshape(-1, sizes[axis])
        for line in lines:
            coords = np.array([chip.coords for chip in line])
            steps = np.diff(coords, axis=0)
            assert (np.abs(steps).sum(axis=1) == 1).all()
            assert (steps == steps[0]).all()


def test_a_longer_mesh_axis_is_made_of_whole_physical_axes() -> None:
    mesh = arrange(MeshShape(8, 2, 1), tpu_slice(2, 2, 4))
    for y in range(2):
        line = np.array([chip.coords for chip in mesh[:, y, 0]])
        assert len(np.unique(line[:, 2])) == 4
        assert sum(len(np.unique(line[:, axis])) == 2 for axis in (0, 1)) == 1


def test_the_cores_of_a_chip_are_a_physical_axis() -> None:
    mesh = arrange(MeshShape(2, 2, 2), tpu_slice(2, 2, 1, cores=2))
    for x, y in np.ndindex(2, 2):
        assert [chip.core_on_chip for chip in mesh[x, y]] == [0, 1]
        assert {chip.coords for chip in mesh[x, y]} == {(x, y, 0)}


@pytest.mark.parametrize(("shape", "chips"), [("2,2,2", 8), ("4,4,2", 32)])
def test_a_slice_is_used_whole(shape: str, chips: int) -> None:
    with pytest.raises(UserError) as caught:
        arrange(MeshShape.parse(shape), tpu_slice(2, 2, 4))
    message = str(caught.value)
    assert f"mesh {shape} has {chips} chips and there are 16 (tpu of 2x2x4)" in message
    assert "idle ones" in message
    assert all(str(legal) in message for legal in legal_shapes(16))


def test_chips_that_fill_no_box_are_refused() -> None:
    with pytest.raises(UserError, match=r"15 devices do not fill a box of chips .* 2x2x4"):
        arrange(MeshShape(15, 1, 1), tpu_slice(2, 2, 4)[1:])
    twice = [Chip(0, (0, 0, 0)), Chip(1, (0, 0, 0)), Chip(2, (1, 0, 0)), Chip(3, (3, 0, 0))]
    with pytest.raises(UserError, match="4 devices do not fill a box"):
        arrange(MeshShape(4, 1, 1), twice)


def test_chips_of_two_slices_are_refused() -> None:
    chips = [dataclasses.replace(chip, slice_index=chip.id % 2) for chip in tpu_slice(2, 2, 1)]
    with pytest.raises(UserError, match="belong to 2 TPU slices"):
        arrange(MeshShape(2, 2, 1), chips)


def test_a_step_refuses_weights_that_lie_otherwise_than_it_says() -> None:
    """The reason why Auto axes are safe here: nothing committed is moved silently."""
    mesh = make_mesh(MeshShape(2, 2, 2))
    assert set(mesh.axis_types) == {AxisType.Auto}
    wanted, other = (NamedSharding(mesh, P(axis)) for axis in ("x", "y"))
    double = jax.shard_map(lambda w: w * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    step = jax.jit(double, in_shardings=wanted)
    ones = jnp.ones((4, 2))
    assert step(jax.device_put(ones, wanted)).sharding == wanted
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg"):
        step(jax.device_put(ones, other))
    assert step(jax.device_put(ones, wanted))[0, 0] == 2.0
