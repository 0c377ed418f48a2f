"""Laws of --mesh: the text is one device's; a flag of a mesh without one is refused."""

from pathlib import Path

import pytest

import run_serving
from inference_engine.cli.mesh_flags import MeshOptions, mesh_group, mesh_options, mesh_words
from inference_engine.cli.options import Flags
from inference_engine.cli.report import RunReport
from inference_engine.layout_choice import LayoutRequest, Layouts
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout, ShardingConfig
from layers.mesh_shape import MeshShape
from tests.cli_runs import Run
from tests.tiny_checkpoint import save_tiny

SAMPLED = ("--prompt", "hello there", "--prompt", "a", "--temperature", "1", "--seed", "3", "--json")
SIZES = ("--max_new_tokens", "12", "--max_context", "32", "--prefill_chunk", "16", "--slots", "3")
FLAGS = [option.name for option in mesh_group().options]
VALUES = {
    "prefill_layout": "gathered_x",
    "decode_layout": "2d_batch_z",
    "attn_all_to_all": "z",
    "collectives": "latency",
    "reduce_dtype": "bfloat16",
}


def _flags(**given: str) -> Flags:
    return Flags(dict.fromkeys(FLAGS) | given, frozenset(given))


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_flags_of_a_mesh_without_one_are_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"--{name} .* nearest: --mesh 2,2,2 --{name} {value}"):
        mesh_options(_flags(**{name: value}))


def test_every_flag_reaches_the_sharding() -> None:
    request = LayoutRequest(
        Layout.WEIGHT_GATHERED_X,
        Layout.WEIGHT_STATIONARY_2D_BATCH_Z,
        AttnAllToAll.AXIS_Z,
        CollectiveConfig(CollectiveMode.LATENCY, "bfloat16"),
    )
    assert mesh_options(_flags(mesh="4,2,1", **VALUES)) == MeshOptions(MeshShape(4, 2, 1), request)


def test_layout_sets_both_steps_and_auto_leaves_them_open() -> None:
    both = mesh_options(_flags(mesh="2,2,2", layout="1d"))
    assert both is not None
    assert both.layouts.prefill is both.layouts.decode is Layout.WEIGHT_STATIONARY_1D
    opened = mesh_options(_flags(mesh="2,2,2", layout="auto", decode_layout="2d"))
    assert opened is not None
    assert (opened.layouts.prefill, opened.layouts.decode) == (None, Layout.WEIGHT_STATIONARY_2D)


def test_a_mesh_alone_takes_the_defaults() -> None:
    assert mesh_options(_flags(mesh="2,2,2")) == MeshOptions(MeshShape(2, 2, 2), LayoutRequest())
    assert mesh_options(_flags()) is None


def test_last_line_names_mesh_and_layout_and_bytes_a_chip() -> None:
    decode = ShardingConfig()
    words = mesh_words(MeshShape(2, 1, 3), Layouts(decode.for_prefill(Layout.WEIGHT_GATHERED_XY), decode))
    sizes = {"insert_bytes": 400, "insert_milliseconds": 0.5}
    report = RunReport("cpu", "cpu", 6, 1000, "float32", "float32", "int8", 2_000, 3_000, mesh=words, **sizes)
    line = report.line()
    assert "mesh 2,1,3, layout gathered_xy → 2d, all-to-all none, reference" in line
    assert "insert 400 B a chip, 0.50 ms" in line
    assert line.endswith("weights 2.00 kB, int8 cache 3.00 kB a chip")


class Generate:
    """Runs `generate` on the tiny checkpoint."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    def __call__(self, *words: str) -> Run:
        source = ("--checkpoint", str(self.path), "--tokenizer", "bytes")
        code = run_serving.main(["generate", *source, *SAMPLED, *SIZES, *words])
        return Run(code, *self.capsys.readouterr())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mesh"))


@pytest.fixture
def generate(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    return Generate(tiny, capsys)


_ON_ONE_DEVICE: dict[Path, list[list[int]]] = {}
"""Token ids of one device's run, which every mesh is compared with."""


def _same_text(generate: Generate, *words: str) -> None:
    if generate.path not in _ON_ONE_DEVICE:
        alone = generate()
        assert alone.code == 0, alone.err
        _ON_ONE_DEVICE[generate.path] = [row["token_ids"] for row in alone.rows]
    meshed = generate(*words)
    assert meshed.code == 0, meshed.err
    assert [row["token_ids"] for row in meshed.rows] == _ON_ONE_DEVICE[generate.path]
    assert f"mesh {words[1]}, layout" in meshed.err


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "1,1,1", "--layout", "1d"),
        ("--mesh", "2,2,2", "--attn_all_to_all", "yz", "--collectives", "latency"),
        ("--mesh", "4,2,1", "--prefill_layout", "gathered_xyz_time", "--decode_layout", "2d_batch_z"),
        ("--mesh", "2,1,3", "--layout", "auto", "--prefill_layout", "gathered_xy"),
    ],
    ids=lambda words: words[1],
)
def test_sampled_text_is_the_same_on_a_mesh(generate: Generate, words: tuple[str, ...]) -> None:
    _same_text(generate, *words)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1d", "2d"])
@pytest.mark.parametrize("setting", ["none", "z", "yz", "yzx"])
@pytest.mark.parametrize("mesh", ["1,1,1", "2,2,2", "4,2,1", "1,4,2", "2,1,3"])
def test_sampled_text_is_the_same_on_every_mesh(
    generate: Generate, mesh: str, setting: str, layout: str
) -> None:
    _same_text(generate, "--mesh", mesh, "--layout", layout, "--attn_all_to_all", setting)


def test_a_mesh_that_the_model_does_not_fit_is_refused(generate: Generate) -> None:
    run = generate("--mesh", "5,1,1")
    assert run.code == 2
    assert "embed=48 does not divide over the 5 chips" in run.err
