"""GGUF files of the llama family: transformers' logits, exact dequantization, one line for what is wrong.

Idea: a file is made from a Hugging Face folder whose logits transformers computed, by the permutation of q
and k rows that GGUF is known for; so interleaved rotary on the stored rows has to give those logits.
Quantized files are compared with what the package `gguf` makes of their bytes.

Data flow: folder → `gguf_files.write_gguf` → `open_checkpoint` → logits; damaged copies → the line.

Worked example: nine heads with three kv heads, on one device and on 2×2×2.
"""

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.gguf_header import read_header
from checkpoints.gguf_source import read_gguf
from checkpoints.readers.options import ReaderOptions
from layers.errors import UserError
from layers.hparams import Bias, RopePairing, RopeScaling
from tests.extras import NEEDS_GGUF, NEEDS_SAFETENSORS
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.huggingface_models import EXPECTED, FOLDER, NEW_TOKENS, PROMPT
from tests.huggingface_runs import run
from tests.reference_model import reference_logits

pytestmark = [NEEDS_GGUF, NEEDS_SAFETENSORS]
NAME = "llama_nine_heads"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf") / "model.gguf")


def written(path: Path, metadata: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    """The good file with other metadata (None takes a key out) and tensors (`__` is a dot)."""
    keys = llama_metadata(NAME) | (metadata or {})
    arrays = llama_tensors(NAME) | {key.replace("__", "."): array for key, array in tensors.items()}
    return write_gguf(
        path,
        {key: value for key, value in keys.items() if value is not None},
        {key: array for key, array in arrays.items() if array is not None},
    )


def line(path: Path, options: ReaderOptions | None = None) -> str:
    with pytest.raises(UserError) as error:
        open_checkpoint(path, options)
    text = str(error.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "2,2,2"])
def test_logits_and_greedy_tokens_are_those_of_transformers(good: Path, on_mesh: bool) -> None:
    assert detect(good) is Container.GGUF
    state = open_checkpoint(good).state
    assert state.hparams.rope.pairing is RopePairing.INTERLEAVED
    with np.load(FOLDER / NAME / EXPECTED) as stored:
        found = run(state, stored["ids"], PROMPT, NEW_TOKENS, on_mesh=on_mesh)
        assert np.max(np.abs(found.logits - stored["logits"])) / np.max(np.abs(stored["logits"])) < 1e-4
        assert found.greedy.tolist() == stored["greedy"].tolist()


def test_rows_in_the_other_order_change_the_logits(tmp_path: Path) -> None:
    tensors = llama_tensors(NAME)
    for key in [key for key in tensors if "attn_q" in key]:
        tensors[key] = tensors[key][::-1].copy()
    state = open_checkpoint(write_gguf(tmp_path / "a.gguf", llama_metadata(NAME), tensors)).state
    with np.load(FOLDER / NAME / EXPECTED) as stored:
        weights = {key: np.asarray(entry) for key, entry in state.weights.items()}
        error = np.abs(reference_logits(state.hparams, weights, stored["ids"]) - stored["logits"])
        assert np.max(error) / np.max(np.abs(stored["logits"])) > 1e-2


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_an_encoding_is_read_as_the_package_reads_it(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    import gguf

    array = rng.normal(size=(5, 96)).astype(np.float32)
    path = write_gguf(tmp_path / "a.gguf", {}, {"a": array}, {"a": kind})
    number = gguf.GGMLQuantizationType[kind]
    expected = gguf.dequantize(gguf.quantize(array, number), number)
    check_rectangles(read_gguf(path).arrays["a"], expected, rng)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_a_k_quant_is_read_as_the_package_reads_it(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Any bytes are weights; the package makes none of these encodings."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    stored = rng.integers(0, 60, (3, 2 * size), np.uint8)  # small bytes: finite scales
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(stored, number)
    assert expected.shape == (3, 2 * block)
    check_rectangles(read_gguf(tmp_path / "a.gguf").arrays["a"], expected, rng)


def check_rectangles(found: Any, expected: np.ndarray, rng: np.random.Generator) -> None:
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), expected)
    rows, columns = expected.shape
    for _ in range(40):
        top, left = int(rng.integers(0, rows)), int(rng.integers(0, columns))
        box = np.s_[top : int(rng.integers(top, rows + 1)), left : int(rng.integers(left, columns + 1))]
        np.testing.assert_array_equal(found[box].astype(np.float32), expected[box])


def test_a_quantized_model_is_its_dequantized_weights(tmp_path: Path) -> None:
    import gguf

    ff = 64  # rows of w2 are then two blocks
    shapes = {"ffn_down": (72, ff), "ffn_gate": (ff, 72), "ffn_up": (ff, 72)}
    tensors = {
        key: np.resize(array, shapes.get(key.split(".")[-2], array.shape))
        for key, array in llama_tensors(NAME).items()
    }
    kinds = {key: "Q4_1" for key in tensors if "ffn_down" in key}
    metadata = llama_metadata(NAME) | {"llama.feed_forward_length": ff}
    state = open_checkpoint(write_gguf(tmp_path / "a.gguf", metadata, tensors, kinds)).state
    kind = gguf.GGMLQuantizationType.Q4_1
    expected = gguf.dequantize(gguf.quantize(tensors["blk.1.ffn_down.weight"], kind), kind)
    np.testing.assert_array_equal(np.asarray(state.weights["layer_1/w2"]), expected.T)


def test_the_form_follows_the_metadata(tmp_path: Path, good: Path) -> None:
    plain = open_checkpoint(good).state.hparams
    ones = np.ones(72, np.float32)
    path = written(
        tmp_path / "a.gguf",
        {"llama.attention.sliding_window": 5, "llama.rope.scaling.type": "linear",
         "llama.rope.scaling.factor": 2.0},
        **{f"blk__{i}__attn_q__bias": ones for i in range(2)},
    )  # fmt: skip
    found = open_checkpoint(path).state.hparams
    assert found.windows == (5, 5)
    assert found.rope.scaling == RopeScaling("linear", 2.0)
    assert found.biases == frozenset({Bias.Q})
    assert dataclasses.replace(found, windows=(), rope=plain.rope, biases=frozenset()) == plain


def test_stretched_frequencies_are_recognised_or_refused(tmp_path: Path) -> None:
    base = {"llama.rope.freq_base": 500000.0}
    turns = 8192 * 500000.0 ** (-np.arange(0, 8, 2) / 8) / (2 * np.pi)
    keep = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / (keep + (1 - keep) / 32)).astype(np.float32)
    path = written(tmp_path / "a.gguf", base, rope_freqs__weight=divisors)
    scaling = open_checkpoint(path).state.hparams.rope.scaling
    assert scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    path = written(tmp_path / "b.gguf", base, rope_freqs__weight=np.ones(4, np.float32))
    assert open_checkpoint(path).state.hparams.rope.scaling is None
    path = written(tmp_path / "c.gguf", base, rope_freqs__weight=divisors[::-1].copy())
    assert "rope_freqs.weight is no llama3 scaling" in line(path)


KEY = "llama.attention."
REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "unknown key": ({"llama.residual_scale": 2.0}, {}, "residual_scale=2.0, which Llama in GGUF is not"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type 'yarn' is not supported"),
    "factor alone": ({"llama.rope.scaling.factor": 4.0}, {}, "rope.scaling.factor=4.0, but no rope.scal"),
    "experts": ({"llama.expert_count": 8}, {}, "expert_count=8, Llama in GGUF is supported with 0 only"),
    "heads a list": ({f"{KEY}head_count": [9, 9]}, {}, "head_count=[9, 9], expected a positive integer"),
    "no layers": ({"llama.block_count": None}, {}, "the config has no block_count"),
    "no eps": ({f"{KEY}layer_norm_rms_epsilon": None}, {}, f"no {KEY}layer_norm_rms_epsilon"),
    "kv heads": ({f"{KEY}head_count_kv": 2}, {}, "the metadata is impossible: kv_heads=2 does not divide"),
    "widths": ({f"{KEY}value_length": 16}, {}, "value_length=16, Llama in GGUF is supported with 8 only"),
    "parts": ({"split.count": 3}, {}, "one of 3 parts; expected one file"),
    "missing tensor": ({}, {"blk__1__ffn_up__weight": None}, "missing blk.1.ffn_up.weight; the closest"),
    "extra tensor": ({}, {"blk__0__ffn_gate_inp__weight": np.ones((8, 72), np.float32)}, "unexpected blk.0"),
    "shape": ({}, {"blk__0__attn_norm__weight": np.ones(71, np.float32)}, "has shape [71], expected [72]"),
    "no embedding": ({}, {"token_embd__weight": None}, "missing token_embd.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("metadata", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused_by_name(
    metadata: dict, tensors: dict, message: str, tmp_path: Path
) -> None:
    assert message in line(written(tmp_path / "a.gguf", metadata, **tensors))


def test_other_architectures_and_options_are_refused(tmp_path: Path, good: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, {"a": np.ones(4, np.float32)}, architecture="rwkv6")
    assert "GGUF architecture 'rwkv6' is not supported; supported: llama" in line(path)
    assert "gamma_offset can only be 0" in line(good, ReaderOptions(gamma_offset=1))


def put(at: int, form: str, value: int) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        raw = struct.pack(form, value)
        return content[:at] + raw + content[at + len(raw) :]

    return edit


def endless_list(content: bytes) -> bytes:
    """A first value that claims 2^60 bytes, which a walk would take for ever."""
    key = b"a"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, 1 << 60)
    return content[:8] + struct.pack("<QQ", 0, 1) + pair + bytes(64)


BAD_HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "version": (put(4, "<I", 9), "GGUF version 9 is not supported; supported: 2, 3"),
    "big-endian": (put(4, ">I", 3), "GGUF version 50331648 is not supported"),
    "tensors": (put(8, "<Q", 1 << 50), "claims 1,125,899,906,842,624 items"),
    "pairs": (put(16, "<Q", 1 << 60), "truncated or damaged: the header claims"),
    "key length": (put(24, "<Q", 1 << 62), "truncated or damaged: metadata 0 claims"),
    "endless list": (endless_list, "truncated or damaged: a claims 1,152,921,504,606,846,976 items"),
    "magic alone": (lambda content: content[:4], "truncated in the header"),
    "half": (lambda content: content[: len(content) // 2], "truncated: "),
    "a byte short": (lambda content: content[:-33], "truncated: "),
}


@pytest.mark.parametrize(("edit", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_damaged_header_is_refused_by_name_without_memory(
    edit: Callable[[bytes], bytes], message: str, good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(edit(good.read_bytes()))
    read_gguf(good)  # imports
    tracemalloc.start()
    assert message in line(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_the_header_says_what_the_package_wrote(tmp_path: Path) -> None:
    metadata = {
        "a.flag": True,
        "a.text": "é",
        "a.numbers": [1, -2, 3],
        "a.texts": ["x", "yz"],
        "a.float": 0.5,
    }
    header = read_header(write_gguf(tmp_path / "a.gguf", metadata, {"t": np.zeros((2, 3), np.float32)}))
    assert {key: header.metadata[key] for key in metadata} == metadata
    assert header.tensors["t"].shape == (2, 3)
