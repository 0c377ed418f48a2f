"""A converted checkpoint loads as the original does, in every dtype, and appears whole or not at all.

Idea: weights in memory are compared bit for bit, so logits are equal too. Conversions are interrupted between
groups and killed; what they leave does not load, and the same command goes on from it.

Data flow: source → `run_serving.main(["convert", …])` → saved folder → `load_params` of both.

Worked example: interrupted after the first of several groups, the second run writes the others alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import run_serving
from checkpoints.formats import open_checkpoint
from checkpoints.load import LoadOptions, WeightsDtype, load_params
from checkpoints.orbax_store import save_checkpoint
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from checkpoints.synthetic import synthetic_state
from inference_engine.cli.convert_command import tokenizer_files
from inference_engine.tokenizer_files import open_chat_template, open_tokenizer
from layers.errors import UserError
from layers.hparams import HParams
from tests.extras import NEEDS_GGUF, NEEDS_SAFETENSORS, NEEDS_TOKENIZERS
from tests.huggingface_models import FOLDER
from tests.test_imports import REPO
from tests.tiny_checkpoint import TINY

ORACLES = Path(__file__).parent / "oracles"
ORACLE = ORACLES / "palm_pytorch_0.2.2.npz"


def convert(*words: object) -> int:
    return run_serving.main(["convert", *map(str, words)])


def same_params(a: CheckpointState, b: CheckpointState, weights: WeightsDtype) -> None:
    left, right = (jax.tree.leaves(load_params(state, LoadOptions(weights))) for state in (a, b))
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_converted_checkpoint_loads_as_the_original(weights: str | None, tmp_path: Path) -> None:
    asked = [] if weights is None else ["--weights", weights]
    assert convert(ORACLE, tmp_path / "out", *asked) == 0
    found, original = open_checkpoint(tmp_path / "out"), open_checkpoint(ORACLE)
    assert found.state.hparams == original.state.hparams
    assert found.state.quantized == (weights == "int8")
    for dtype in [WeightsDtype.INT8] if weights else list(WeightsDtype):
        same_params(found.state, original.state, dtype)
    assert found.extra["source"] == str(ORACLE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@NEEDS_SAFETENSORS
@pytest.mark.parametrize("name", ["llama_nine_heads", "gemma2", "falcon_40b"])
def test_hugging_face_folders_convert_to_int8(name: str, tmp_path: Path) -> None:
    assert convert(FOLDER / name, tmp_path / "out", "--weights", "int8") == 0
    found, original = open_checkpoint(tmp_path / "out").state, open_checkpoint(FOLDER / name).state
    same_params(found, original, WeightsDtype.INT8)


def test_the_source_s_options_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ORACLES / "palm_rlhf_0.2.1.npz"
    assert convert(source, tmp_path / "out", "--gamma_offset", "1") == 0
    assert open_checkpoint(tmp_path / "out").state.hparams.norm_gain_offset == 1
    expected = open_checkpoint(source, ReaderOptions(1)).state
    same_params(open_checkpoint(tmp_path / "out").state, expected, WeightsDtype.FLOAT32)


REFUSED = {
    "no target": (["x"], "no TARGET; usage: convert SOURCE TARGET [flags]"),
    "too much": (["x", "y", "z"], "unexpected 'z'; usage: convert SOURCE TARGET [flags]"),
    "no source": (["nowhere", "out"], "nowhere: no such file or folder"),
    "dtype": ([str(ORACLE), "out", "--weights", "float32"], "--weights=float32 is not known; allowed: int8"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(*words) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_replaced_by_accident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(ORACLE, tmp_path / "out") == 0
    assert convert(ORACLE, tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
    assert convert(ORACLE, tmp_path / "out", "--overwrite") == 0
    assert convert(tmp_path / "out", tmp_path / "out", "--overwrite") == 2
    assert "the target is the source" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert convert(tmp_path / "link", tmp_path / "out", "--overwrite") == 2
    assert "the target is the source" in capsys.readouterr().err
    assert convert(ORACLE, tmp_path / "link", "--overwrite") == 2
    assert "a link will not be replaced" in capsys.readouterr().err
    assert convert(tmp_path / "out", tmp_path / "out" / "inner") == 0
    assert convert(tmp_path / "out" / "inner", tmp_path / "out", "--overwrite") == 2
    assert "the target is the source or holds it" in capsys.readouterr().err
    assert (tmp_path / "out" / "inner").is_dir()


@pytest.mark.parametrize("beside", ["out.partial", "out.replaced"])
def test_a_folder_that_no_save_left_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: str
) -> None:
    assert convert(ORACLE, tmp_path / "out") == 0
    (tmp_path / beside).mkdir()
    (tmp_path / beside / "mine.txt").write_text("keep")
    assert convert(ORACLE, tmp_path / "out", "--overwrite") == 2
    error = capsys.readouterr().err
    assert beside in error
    assert "Traceback" not in error
    assert (tmp_path / beside / "mine.txt").read_text() == "keep"


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(ORACLE, Path(f"{tmp_path}/out\udcff")) == 2
    assert "a path that is not UTF-8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_goes_on_where_it_stopped(tmp_path: Path) -> None:
    state, path = synthetic_state(TINY), tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        if done > total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, state, group_bytes=1 << 14, resume_as="a", progress=interrupt)
    partial = path.with_name("out.partial")
    written = {item.name: item.stat().st_mtime_ns for item in partial.glob("weights_*")}
    assert len(written) > 1
    with pytest.raises(UserError, match="an unfinished save"):
        open_checkpoint(partial)
    assert not path.exists()
    save_checkpoint(path, state, group_bytes=1 << 14, resume_as="a")
    assert not partial.exists()
    kept = {item.name: item.stat().st_mtime_ns for item in path.glob("weights_*")}
    assert written.items() <= kept.items()
    same_params(open_checkpoint(path).state, state, WeightsDtype.FLOAT32)


def test_another_conversion_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(
            path, synthetic_state(TINY, 1), group_bytes=1 << 14, resume_as="a", progress=interrupt
        )
    save_checkpoint(path, synthetic_state(TINY, 2), group_bytes=1 << 14, resume_as="b")
    same_params(open_checkpoint(path).state, synthetic_state(TINY, 2), WeightsDtype.FLOAT32)
    assert not (path / "resume.txt").exists()


def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path) -> None:
    form = HParams(layers=12, embed=256, ff=1024, heads=8, kv_heads=1, qkv=32, vocab=4096)
    save_checkpoint(tmp_path / "source", synthetic_state(form))
    code = (
        "import sys; from inference_engine.cli import convert_command as c; c.GROUP_BYTES = 1 << 20; "
        "import run_serving; sys.exit(run_serving.main(sys.argv[1:]))"
    )
    words = [
        sys.executable,
        "-c",
        code,
        "convert",
        tmp_path / "source",
        tmp_path / "out",
        "--weights",
        "int8",
    ]
    started = subprocess.Popen(words, cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while not (partial / "weights_1").is_dir() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="an unfinished save"):
        open_checkpoint(partial)
    written = {item.name for item in partial.glob("weights_?")}
    assert subprocess.run(words, cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode == 0
    assert written
    same_params(open_checkpoint(tmp_path / "out").state, synthetic_state(form), WeightsDtype.INT8)


@NEEDS_GGUF
@NEEDS_TOKENIZERS
def test_tokenizers_travel_along(tmp_path: Path) -> None:
    from tests.gguf_files import write_gguf
    from tests.test_chat_template import CHATML
    from tests.test_json_tokenizer import byte_level

    fields = json.loads(byte_level())
    tokens = sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in fields["model"]["merges"]],
        "tokenizer.chat_template": CHATML,
    }  # fmt: skip
    source = write_gguf(tmp_path / "a.gguf", metadata, {"t": np.zeros((64, 1024), np.float32)})
    bare, beside = tokenizer_files(source, tmp_path)
    assert bare is not None
    assert beside == []
    assert bare.stat().st_size < source.stat().st_size - 200_000
    save_checkpoint(tmp_path / "gguf", synthetic_state(TINY), bare)
    kept = open_checkpoint(tmp_path / "gguf").tokenizer_file
    assert kept is not None
    assert open_tokenizer(kept).encode("the cat") == open_tokenizer(source).encode("the cat")
    assert open_chat_template(kept) is not None
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_level())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    file, beside = tokenizer_files(folder / "tokenizer.json", tmp_path)
    save_checkpoint(tmp_path / "json", synthetic_state(TINY), file, companions=beside)
    kept = open_checkpoint(tmp_path / "json").tokenizer_file
    assert kept is not None
    assert open_tokenizer(kept).end_ids == {5, 6}
