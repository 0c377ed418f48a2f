"""Native checkpoints: everything comes back bit for bit, whole or not at all, and shard by shard.

Idea: small models of several forms go to disk and back in every dtype. Saves are broken in the middle, by
an exception and by a kill, and every stored file is damaged in turn: what is read then is either an error
or exactly what was saved.

Data flow: random state → `save_checkpoint` → folder → `open_orbax` → the same state.

Worked example: with groups of 30,000 bytes the bfloat16 PaLM form (3 layers of about 20,000 parameters)
becomes `weights_0` … and no more than one group is in memory at a time.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.formats import open_checkpoint
from checkpoints.hparams_json import hparams_from_json, hparams_to_json
from checkpoints.int8 import quantize_state
from checkpoints.lazy import ArrayLike, Box, LazyArray
from checkpoints.orbax_store import open_orbax, save_checkpoint
from checkpoints.state import CheckpointState, QuantizedTensor
from layers.errors import UserError
from layers.hparams import HParams
from tests.model_forms import FORMS, random_weights

PALM = FORMS["palm"]
SMALL = dataclasses.replace(PALM, layers=1, embed=8, ff=16, heads=2, qkv=4, vocab=16)
LARGER = dataclasses.replace(SMALL, vocab=512)  # its embedding is not stored inside the index


def make_state(hparams: HParams = SMALL, dtype: object = np.float32, seed: int = 0) -> CheckpointState:
    weights = random_weights(hparams, seed)
    return CheckpointState(hparams, {key: array.astype(dtype) for key, array in weights.items()})


def arrays(state: CheckpointState) -> Iterator[tuple[str, ArrayLike]]:
    """Every array of a state, the parts of int8 kernels included."""
    for key, entry in state.weights.items():
        if isinstance(entry, QuantizedTensor):
            yield f"{key} value", entry.qvalue
            yield f"{key} scale", entry.scale
        else:
            yield key, entry


def assert_equal(a: CheckpointState, b: CheckpointState) -> None:
    assert a.hparams == b.hparams
    ours, theirs = dict(arrays(a)), dict(arrays(b))
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.dtype == theirs[key].dtype, key
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[key]), err_msg=key)


@pytest.mark.parametrize("name", FORMS)
def test_hparams_survive_json(name: str) -> None:
    text = json.dumps(hparams_to_json(FORMS[name]), allow_nan=False)
    assert hparams_from_json(json.loads(text), "here") == FORMS[name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"layer": 3}, "hparams has an unknown field 'layer'; nearest: layers"),
        ({"layers": 0}, "hparams is impossible: HParams.layers must be a positive integer, got 0"),
        ({"layers": "3"}, "hparams.layers is '3', expected an integer"),
        ({"layers": True}, "hparams.layers is True, expected an integer"),
        ({"norm": "rsm"}, "hparams.norm is 'rsm'; allowed: rms, layer; nearest: rms"),
        ({"norm_eps": "1e-5"}, "hparams.norm_eps is '1e-5', expected a number"),
        ({"norm_eps": float("nan")}, "hparams.norm_eps is nan, expected a finite number"),
        ({"rope": {"thet": 1.0}}, "hparams.rope has an unknown field 'thet'; nearest: theta"),
        ({"rope": 3}, "hparams.rope is 3, expected an object"),
        ({"biases": ["q", "w"]}, "hparams.biases[1] is 'w'; allowed: q, k"),
        ({"windows": [None, 1.5, 2]}, "hparams.windows[1] is 1.5, expected an integer"),
        ({"heads": None}, "hparams.heads is None, expected an integer"),
    ],
)
def test_impossible_hparams_are_refused_by_field(spoil: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        hparams_from_json(hparams_to_json(PALM) | spoil, "here")
    assert str(error.value).startswith(f"here: {message}")


def test_a_field_that_an_older_file_lacks_takes_its_default() -> None:
    old = {key: value for key, value in hparams_to_json(PALM).items() if key != "qk_norm_eps"}
    assert hparams_from_json(old, "here") == PALM
    del old["ff"]
    with pytest.raises(UserError, match="here: hparams has no ff"):
        hparams_from_json(old, "here")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_every_float_dtype_comes_back_bit_for_bit(dtype: object, tmp_path: Path) -> None:
    state = make_state(dtype=dtype)
    save_checkpoint(tmp_path / "a", state)
    assert_equal(state, open_orbax(tmp_path / "a").state)


def test_plain_orbax_restores_what_is_stored(tmp_path: Path) -> None:
    state = make_state(dtype=ml_dtypes.bfloat16)
    save_checkpoint(tmp_path / "a", state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(tmp_path / "a" / "weights_0")
    np.testing.assert_array_equal(np.asarray(tree["embedding"]), state.weights["embedding"])
    np.testing.assert_array_equal(np.asarray(tree["layer_0"]["q"]), state.weights["layer_0/q"])
    assert sum(len(jax.tree.leaves(node)) for node in tree.values()) == len(state.weights)


@pytest.mark.parametrize("name", ["palm", "gptj", "gemma2"])
def test_int8_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    state = quantize_state(make_state(FORMS[name]))
    save_checkpoint(tmp_path / "a", state)
    restored = open_orbax(tmp_path / "a").state
    assert restored.quantized
    assert_equal(state, restored)


@pytest.mark.parametrize("name", ["all_biases_gated_soft_caps", "parallel_pre_and_post", "cohere_plus"])
def test_every_kind_of_tensor_comes_back(name: str, tmp_path: Path) -> None:
    state = make_state(FORMS[name])
    save_checkpoint(tmp_path / "a", state)
    assert_equal(state, open_checkpoint(tmp_path / "a").state)


def test_quantizing_before_saving_equals_quantizing_after_loading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "float", make_state())
    save_checkpoint(tmp_path / "int8", quantize_state(make_state()))
    loaded = quantize_state(open_orbax(tmp_path / "float").state)
    assert_equal(loaded, open_orbax(tmp_path / "int8").state)


def test_tokenizer_and_extra_are_kept(tmp_path: Path) -> None:
    tokenizer = tmp_path / "pieces.model"
    tokenizer.write_bytes(b"\x00pieces")
    save_checkpoint(tmp_path / "a", make_state(), tokenizer_file=tokenizer, extra={"steps": 7})
    opened = open_orbax(tmp_path / "a")
    assert opened.tokenizer_file == tmp_path / "a" / "tokenizer.model"
    assert opened.tokenizer_file.read_bytes() == b"\x00pieces"
    assert opened.extra == {"steps": 7}
    assert opened.source == str(tmp_path / "a")
    save_checkpoint(tmp_path / "b", make_state())
    assert open_orbax(tmp_path / "b").tokenizer_file is None


def test_a_saved_model_can_be_moved_and_named_with_any_characters(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", make_state())
    (tmp_path / "a").rename(tmp_path / "b %20 ü.model")
    assert_equal(make_state(), open_checkpoint(tmp_path / "b %20 ü.model").state)


def test_a_weight_goes_shard_by_shard_into_its_sharding(tmp_path: Path) -> None:
    state = make_state(PALM)
    save_checkpoint(tmp_path / "a", state)
    weight = open_orbax(tmp_path / "a").state.weights["layer_1/w0"]
    asked: list[int] = []

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        part = weight[index]
        asked.append(part.size)
        return part

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    placed = jax.make_array_from_callback(weight.shape, sharding, shard)
    np.testing.assert_array_equal(np.asarray(placed), state.weights["layer_1/w0"])
    assert asked == [48 * 96 // 8] * 8


def test_large_weights_are_stored_in_chunks_that_are_read_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints.orbax_store.CHUNK_BYTES", 1 << 10)
    state = make_state(PALM)
    save_checkpoint(tmp_path / "a", state)
    weight = open_orbax(tmp_path / "a").state.weights["layer_1/w0"]
    assert np.prod(weight.fetch.store.chunk_layout.read_chunk.shape) * 4 <= 1 << 10
    np.testing.assert_array_equal(weight[10:20, 30:90], state.weights["layer_1/w0"][10:20, 30:90])


def lazily(state: CheckpointState, on_read: Callable[[str], None]) -> CheckpointState:
    """The state with arrays that report each read."""

    def wrap(key: str, array: np.ndarray) -> LazyArray:
        def fetch(box: Box) -> np.ndarray:
            on_read(key)
            return array[box]

        return LazyArray(array.shape, array.dtype, fetch)

    return CheckpointState(state.hparams, {key: wrap(key, array) for key, array in state.weights.items()})


def test_a_save_holds_one_group_of_weights_at_a_time(tmp_path: Path) -> None:
    written_before: dict[str, list[str]] = {}
    partial = tmp_path / "a.partial"

    def note(key: str) -> None:
        written_before[key] = sorted(item.name for item in partial.iterdir())

    state = make_state(PALM)
    save_checkpoint(tmp_path / "a", lazily(state, note), group_bytes=100_000)
    assert written_before["embedding"] == []
    assert len(written_before["layer_2/w2"]) >= 3
    assert_equal(state, open_orbax(tmp_path / "a").state)


def fail_at(wanted: str, error: BaseException) -> Callable[[str], None]:
    def on_read(key: str) -> None:
        if key == wanted:
            raise error

    return on_read


@pytest.mark.parametrize(
    "error", [UserError("source: damaged"), KeyboardInterrupt(), OSError(28, "disk full")]
)
def test_a_save_that_fails_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    state = lazily(make_state(PALM), fail_at("layer_2/w2", error))
    with pytest.raises((UserError, KeyboardInterrupt)):
        save_checkpoint(tmp_path / "a", state, group_bytes=100_000)
    assert list(tmp_path.iterdir()) == []


def test_an_overwriting_save_that_fails_leaves_the_old_model(tmp_path: Path) -> None:
    old, new = make_state(seed=1), make_state(seed=2)
    save_checkpoint(tmp_path / "a", old)
    broken = lazily(new, fail_at("layer_0/w2", UserError("source: damaged")))
    with pytest.raises(UserError, match="source: damaged"):
        save_checkpoint(tmp_path / "a", broken, overwrite=True)
    assert_equal(old, open_orbax(tmp_path / "a").state)
    save_checkpoint(tmp_path / "a", new, overwrite=True)
    assert_equal(new, open_orbax(tmp_path / "a").state)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_killed_at_any_read_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """What is on disk at a moment is what a kill at that moment leaves."""
    work, moments = tmp_path / "work", tmp_path / "moments"
    work.mkdir()

    def snapshot(key: str) -> None:
        shutil.copytree(work, moments / key.replace("/", "_"))

    save_checkpoint(work / "a", lazily(make_state(), snapshot), group_bytes=700)
    left = sorted(moments.iterdir())
    assert len(left) == len(make_state().weights)
    for moment in left:
        assert [path.name for path in moment.iterdir()] == ["a.partial"]
        with pytest.raises(UserError, match="no such file or folder"):
            open_checkpoint(moment / "a")
        with pytest.raises(UserError, match="an unfinished save"):
            open_checkpoint(moment / "a.partial")
        (moment / "a.partial").rename(moment / "b")
        with pytest.raises(UserError, match=r"a folder without checkpoint\.json|an empty folder"):
            open_checkpoint(moment / "b")


def test_a_save_goes_over_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / "a.partial" / "weights_0").mkdir(parents=True)
    (tmp_path / "a.partial" / "weights_7").mkdir(parents=True)
    save_checkpoint(tmp_path / "a", make_state())
    assert_equal(make_state(), open_checkpoint(tmp_path / "a").state)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_that_cannot_be_put_in_place_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_state(seed=1)
    save_checkpoint(tmp_path / "a", old)
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name == "a.partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(UserError, match=r"cannot be written \(Input/output error\)"):
        save_checkpoint(tmp_path / "a", make_state(seed=2), overwrite=True)
    assert_equal(old, open_orbax(tmp_path / "a").state)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", make_state())
    with pytest.raises(UserError, match="exists already"):
        save_checkpoint(tmp_path / "a", make_state())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is no checkpoint and will not be overwritten"):
        save_checkpoint(tmp_path / "home", make_state(), overwrite=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_a_model_that_is_not_whole_is_not_saved(tmp_path: Path) -> None:
    state = make_state()
    weights = {key: array for key, array in state.weights.items() if key != "layer_0/o"}
    with pytest.raises(UserError, match=r"the model to save: missing layer_0/o \[2, 4, 8\]"):
        save_checkpoint(tmp_path / "a", CheckpointState(state.hparams, weights))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(tmp_path / "file" / "a", make_state())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a"
    save_checkpoint(path, make_state(LARGER))
    return path


def stored_files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(bytes(255 - byte for byte in path.read_bytes())),
    "gone": lambda path: path.unlink(),
}


def error_or_equal(path: Path) -> str | None:
    """The message, or None where everything comes back as it was saved."""
    try:
        assert_equal(make_state(LARGER), open_checkpoint(path).state)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_stored_file_is_an_error_or_harmless(damage: str, saved: Path, tmp_path: Path) -> None:
    refused = []
    for number, name in enumerate(stored_files(saved)):
        copy = tmp_path / str(number)
        shutil.copytree(saved, copy)
        DAMAGE[damage](copy / name)
        message = error_or_equal(copy)
        assert message is None or (str(copy) in message and "\n" not in message)
        refused += [name.name] if message else []
    assert "checkpoint.json" in refused
    # The last bytes of a data file are padding.
    assert len(refused) >= (3 if damage == "short" else 4), refused


METADATA: dict[str, tuple[Callable[[dict], object], str]] = {
    "version": (lambda d: d | {"version": 2}, "version 2 is not known; this program reads 1"),
    "format": (lambda d: d | {"format": "other"}, "expected an object with format 'neutral-state'"),
    "unknown field": (lambda d: d | {"mesh": "2,2"}, "unknown field 'mesh'; known: format"),
    "a list": (lambda d: [d], "expected an object"),
    "no items": (lambda d: d | {"items": []}, "items is [], expected names"),
    "item elsewhere": (lambda d: d | {"items": ["../other"]}, "items is ['../other'], expected names"),
    "missing item": (lambda d: d | {"items": ["weights_0", "weights_1"]}, "weights_1: missing, although"),
    "item twice": (lambda d: d | {"items": ["weights_0", "weights_0"]}, "is there twice"),
    "tokenizer elsewhere": (
        lambda d: d | {"tokenizer": "/etc/passwd"},
        "tokenizer is '/etc/passwd', expected",
    ),
    "missing tokenizer": (lambda d: d | {"tokenizer": "t.model"}, "t.model: missing, although"),
    "extra": (lambda d: d | {"extra": 3}, "extra is 3, expected an object"),
    "no hparams": (lambda d: d | {"hparams": None}, "hparams is None, expected an object"),
    "other hparams": (
        lambda d: d | {"hparams": d["hparams"] | {"ff": 17}},
        "layer_0/w0 has shape [8, 16], expected [8, 17]",
    ),
    "more layers": (lambda d: d | {"hparams": d["hparams"] | {"layers": 2}}, "missing layer_1/q [8, 2, 4]"),
}


@pytest.mark.parametrize(("spoil", "message"), METADATA.values(), ids=METADATA)
def test_metadata_that_does_not_fit_is_refused(
    spoil: Callable[[dict], object], message: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "a")
    file = tmp_path / "a" / "checkpoint.json"
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(UserError) as error:
        open_orbax(tmp_path / "a")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
