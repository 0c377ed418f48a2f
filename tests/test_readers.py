"""Foreign checkpoints: logits of the originals, and what is refused by name.

Idea: the stored logits were made by running the original implementations, so a reader is right when the
plain NumPy restatement of the model, fed with what the reader made, gives them. That this has power is
shown by reading with one detail wrong each. Forms without an original at hand are written into the foreign
layout by hand here and must read back to the arrays they were made from.

Data flow: tests/oracles/*.npz → reader → neutral state → reference logits.

Worked example: exchanging w0 and w1 of PaLM-pytorch (gate and value) moves its logits by more than 0.1.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoints.lazy import Box, LazyArray
from checkpoints.named_arrays import NamedArrays
from checkpoints.npz_source import read_npz
from checkpoints.readers import cohere, palm_pytorch, palm_rlhf
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.registry import find_reader
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import Activation, Bias, HParams, Norm, Rope, RopePairing
from tests.model_forms import FORMS, random_weights
from tests.reference_model import reference_logits

ORACLES = Path(__file__).parent / "oracles"
FILES = {
    "PaLM-pytorch": ORACLES / "palm_pytorch_0.2.2.npz",
    "PaLM-rlhf-pytorch": ORACLES / "palm_rlhf_0.2.1.npz",
    "Cohere": ORACLES / "cohere_rms_mqa_ls1.000.npz",
}
TOLERANCE = 1e-4


def named(family: str) -> NamedArrays:
    """An oracle's tensors, in memory, so that a test can change them."""
    lazy = read_npz(FILES[family])
    return NamedArrays("here", {key: np.asarray(a) for key, a in lazy.arrays.items()}, dict(lazy.config))


def read(source: NamedArrays, gamma_offset: int | None = None) -> CheckpointState:
    return find_reader(source).read(source, ReaderOptions(gamma_offset))


def changed(source: NamedArrays, config: dict | None = None, **tensors: np.ndarray | None) -> NamedArrays:
    """With some tensors replaced, or removed if None, and another config; `__` in names is a dot."""
    arrays = dict(source.arrays) | {key.replace("__", "."): array for key, array in tensors.items()}
    kept = {key: array for key, array in arrays.items() if array is not None}
    return NamedArrays(source.source, kept, source.config if config is None else config)


def logits_error(state: CheckpointState, family: str) -> float:
    with np.load(FILES[family], allow_pickle=False) as oracle:
        ids, expected = oracle["ids"], oracle["logits"]
    weights = {key: np.asarray(entry) for key, entry in state.weights.items()}
    return float(np.max(np.abs(reference_logits(state.hparams, weights, ids) - expected)))


@pytest.mark.parametrize("family", FILES)
def test_logits_equal_the_original_implementation(family: str) -> None:
    source = read_npz(FILES[family])
    assert find_reader(source).name.startswith(family)
    assert logits_error(read(source), family) < TOLERANCE


def test_greedy_continuation_equals_the_original_implementation() -> None:
    state = read(named("Cohere"))
    weights = {key: np.asarray(entry) for key, entry in state.weights.items()}
    greedy = named("Cohere").config["greedy"]
    logits = reference_logits(state.hparams, weights, np.array([greedy]))[0]
    start = named("Cohere").config["prompt_len"]
    assert np.argmax(logits, -1)[start - 1 : -1].tolist() == greedy[start:]


WRONG = {
    "pairing": lambda h: {"rope": dataclasses.replace(h.rope, pairing=_other_pairing(h))},
    "theta": lambda h: {"rope": dataclasses.replace(h.rope, theta=500000.0)},
    "norm": lambda h: {"norm": Norm.RMS if h.norm is Norm.LAYER else Norm.LAYER},
    "gain offset": lambda h: {"norm_gain_offset": 1},
    "logit scale": lambda h: {"logit_scale": None},
    "activation": lambda h: {"act": Activation.GELU_TANH_GATED},
}


def _other_pairing(hparams: HParams) -> RopePairing:
    return next(pairing for pairing in RopePairing if pairing is not hparams.rope.pairing)


@pytest.mark.parametrize("family", FILES)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_stored_logits_see_a_wrong_form(family: str, wrong: str) -> None:
    state = read(named(family))
    hparams = dataclasses.replace(state.hparams, **WRONG[wrong](state.hparams))
    assert logits_error(CheckpointState(hparams, state.weights), family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", FILES)
@pytest.mark.parametrize("pair", [("w0", "w1"), ("k", "v")])
def test_the_stored_logits_see_exchanged_tensors(family: str, pair: tuple[str, str]) -> None:
    state = read(named(family))
    weights = dict(state.weights)
    a, b = (f"layer_1/{name}" for name in pair)
    weights[a], weights[b] = weights[b], weights[a]
    assert logits_error(CheckpointState(state.hparams, weights), family) > 100 * TOLERANCE


def test_the_stored_logits_see_missing_xpos() -> None:
    state = read(named("PaLM-rlhf-pytorch"))
    assert state.hparams.rope.xpos_scale_base == 512
    hparams = dataclasses.replace(state.hparams, rope=Rope())
    assert logits_error(CheckpointState(hparams, state.weights), "PaLM-rlhf-pytorch") > 10 * TOLERANCE


def test_gains_of_later_palm_rlhf_releases_act_as_one_plus_gain() -> None:
    source = named("PaLM-rlhf-pytorch")
    config = {key: value for key, value in source.config.items() if key != "gamma_offset"}
    with pytest.raises(UserError, match="does not say whether norm gains are gamma"):
        read(changed(source, config))
    gains = {key: array - 1 for key, array in source.arrays.items() if key.endswith("gamma")}
    later = NamedArrays("here", dict(source.arrays) | gains, config)
    assert logits_error(read(later, gamma_offset=1), "PaLM-rlhf-pytorch") < TOLERANCE
    assert logits_error(read(later, gamma_offset=0), "PaLM-rlhf-pytorch") > 100 * TOLERANCE
    with pytest.raises(UserError, match="gamma_offset is 2; allowed: 0, 1"):
        read(later, gamma_offset=2)


@pytest.mark.parametrize("family", ["PaLM-pytorch", "Cohere"])
def test_a_gain_offset_is_refused_where_there_is_none(family: str) -> None:
    with pytest.raises(UserError, match="gamma_offset can only be 0"):
        read(named(family), gamma_offset=1)
    assert read(named(family), gamma_offset=0).hparams.norm_gain_offset == 0


def test_palm_rlhf_query_and_key_norm_is_length_normalisation(rng: np.random.Generator) -> None:
    source = named("PaLM-rlhf-pytorch")
    scales = {
        f"layers.{i}.fn.{name}_scale": rng.uniform(0.5, 2, 16).astype(np.float32)
        for i in range(3)
        for name in "qk"
    }
    state = read(NamedArrays("here", dict(source.arrays) | scales, source.config))
    assert state.hparams.qk_norm is Norm.RMS
    gain = np.asarray(state.weights["layer_1/q_norm_gain"])
    assert gain.shape == (4, 16)
    assert state.weights["layer_1/k_norm_gain"].shape == (1, 16)
    x = rng.normal(size=(4, 16))
    original = x / np.linalg.norm(x, axis=-1, keepdims=True) * scales["layers.1.fn.q_scale"]
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    ours = x / np.sqrt(mean_square + state.hparams.qk_norm_eps) * gain
    np.testing.assert_allclose(ours, original, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "output", "embedding"),
    [
        ("PaLM-pytorch", "5.weight", "0.weight"),
        ("PaLM-rlhf-pytorch", "to_logits.weight", "token_emb.weight"),
        ("Cohere", "lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_an_output_projection_of_its_own_is_kept(family: str, output: str, embedding: str) -> None:
    source = named(family)
    assert read(source).hparams.tied
    absent = NamedArrays("here", {k: a for k, a in source.arrays.items() if k != output}, source.config)
    assert read(absent).hparams.tied
    own = source.arrays[output].copy()
    own[-1, -1] += 1
    state = read(NamedArrays("here", dict(source.arrays) | {output: own}, source.config))
    assert not state.hparams.tied
    np.testing.assert_array_equal(np.asarray(state.weights["lm_head"]), own.T)
    np.testing.assert_array_equal(np.asarray(state.weights["embedding"]), source.arrays[embedding])


def to_cohere(hparams: HParams, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A neutral state in Hugging Face's layout, written out by hand."""
    out = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm_gain"]}
    for i in range(hparams.layers):
        ours = {key.removeprefix(f"layer_{i}/"): w for key, w in weights.items() if f"layer_{i}/" in key}
        theirs = {"input_layernorm.weight": ours["norm_gain"]}
        for name, mlp in (("w0", "gate"), ("w1", "up"), ("w2", "down")):
            theirs[f"mlp.{mlp}_proj.weight"] = ours[name].T
        for name in "qkv":
            theirs[f"self_attn.{name}_proj.weight"] = ours[name].reshape(hparams.embed, -1).T
        theirs["self_attn.o_proj.weight"] = ours["o"].reshape(-1, hparams.embed).T
        for name in "qkvo":
            if f"{name}_bias" in ours:
                theirs[f"self_attn.{name}_proj.bias"] = ours[f"{name}_bias"].reshape(-1)
        for name in "qk":
            if f"{name}_norm_gain" in ours:
                theirs[f"self_attn.{name}_norm.weight"] = ours[f"{name}_norm_gain"]
        out |= {f"model.layers.{i}.{key}": array for key, array in theirs.items()}
    return out


def cohere_config(hparams: HParams) -> dict[str, object]:
    """What transformers writes into config.json."""
    return {
        "model_type": "cohere", "vocab_size": hparams.vocab, "hidden_size": hparams.embed,
        "intermediate_size": hparams.ff, "num_hidden_layers": hparams.layers,
        "num_attention_heads": hparams.heads, "num_key_value_heads": hparams.kv_heads,
        "head_dim": hparams.qkv, "layer_norm_eps": hparams.norm_eps, "logit_scale": hparams.logit_scale,
        "max_position_embeddings": 8192, "attention_bias": bool(hparams.biases),
        "use_qk_norm": hparams.qk_norm is not None, "rope_parameters": {
            "rope_type": "default", "rope_theta": hparams.rope.theta,
        },
    }  # fmt: skip


@pytest.mark.parametrize("biases", [frozenset(), frozenset({Bias.Q, Bias.K, Bias.V, Bias.O})])
@pytest.mark.parametrize("name", ["cohere", "cohere_plus"])
def test_grouped_query_cohere_reads_back_to_what_it_was_made_from(name: str, biases: frozenset[Bias]) -> None:
    hparams = dataclasses.replace(FORMS[name], biases=biases, max_positions=8192)
    weights = random_weights(hparams, seed=1)
    state = read(NamedArrays("here", to_cohere(hparams, weights), cohere_config(hparams)))
    # The norm's epsilon is the only one that Cohere has.
    expected = dataclasses.replace(hparams, qk_norm_eps=hparams.norm_eps)
    assert state.hparams == expected
    assert state.weights.keys() == weights.keys()
    for key, array in weights.items():
        np.testing.assert_array_equal(np.asarray(state.weights[key]), array)


def cohere_with(**config: object) -> NamedArrays:
    hparams = FORMS["cohere"]
    arrays = to_cohere(hparams, random_weights(hparams, seed=1))
    merged = {key: value for key, value in (cohere_config(hparams) | config).items() if value is not None}
    return NamedArrays("here", arrays, merged)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": None}, "rope scaling 'yarn'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; allowed: silu"),
        ({"head_dim": 16}, "q_proj.weight has shape [64, 48], expected [128, 48]"),
        ({"num_attention_heads": None}, "the config has no num_attention_heads"),
        ({"num_attention_heads": "8"}, "num_attention_heads='8', expected a positive integer"),
        ({"num_hidden_layers": 3}, "missing model.layers.2."),
        ({"num_hidden_layers": 1}, "unexpected model.layers.1."),
        ({"vocab_size": 73}, "model.embed_tokens.weight has shape [72, 48], expected [73, 48]"),
        ({"logit_scale": float("inf")}, "logit_scale=inf, expected a finite number"),
        ({"norm": "batch", "model_type": None}, "norm='batch'; expected 'rms eps 1e-6' or 'layer eps 1e-5'"),
        (
            {"norm": "rms eps 1e-6", "rope": "half", "model_type": None},
            "rope='half'; Cohere's rotary is interleaved",
        ),
        (
            {"norm": "rms eps 1e-6", "head_dim": 16, "model_type": None},
            "8 heads and 2 kv heads of width 16 do not fit 64 rows of q_proj",
        ),
        ({"norm": "batch"}, "norm='batch', which Cohere is not known to have"),
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; supported: Llama, Mistral,"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(cohere_with(**config))
    assert message in str(error.value)


def test_a_config_without_rotary_base_takes_the_family_default() -> None:
    assert read(cohere_with(rope_parameters=None)).hparams.rope.theta == 500000.0
    assert read(cohere_with(rope_parameters=None, rope_theta=1e4)).hparams.rope.theta == 10000.0


def test_tanh_gelu_and_erf_gelu_are_told_apart() -> None:
    assert read(cohere_with(hidden_act="gelu")).hparams.act is Activation.GELU_ERF_GATED
    assert read(cohere_with(hidden_act="gelu_pytorch_tanh")).hparams.act is Activation.GELU_TANH_GATED


PYTORCH, RLHF = "PaLM-pytorch", "PaLM-rlhf-pytorch"
ONES = np.ones((48,), np.float32)
REFUSED: dict[str, tuple[str, dict[str, np.ndarray | None], str]] = {
    "missing matrix": (PYTORCH, {"2__fn__attn_out__weight": None}, "missing 2.fn.attn_out.weight; the"),
    "missing layer": (
        RLHF, {"layers__1__fn__fused_attn_ff_proj__weight": None},
        "missing layers.1.fn.fused_attn_ff_proj.weight, although there is a layer 2",
    ),
    "unknown": (RLHF, {"layers__0__fn__norm__gama": ONES}, "unexpected layers.0.fn.norm.gama [48]; the"),
    "shape": (
        PYTORCH, {"3__fn__ff_out__1__weight": np.ones((48, 191), np.float32)},
        "3.fn.ff_out.1.weight has shape [48, 191], expected [48, 192]",
    ),
    "rank": (PYTORCH, {"0__weight": np.ones((256, 48, 1))}, "0.weight has shape [256, 48, 1], expected a"),
    "beta": (RLHF, {"layers__2__fn__norm__beta": ONES}, "layers.2.fn.norm.beta is expected to be zero"),
    "lora": (RLHF, {"finetune_modules__a__0__0__A": ONES}, "finetune_modules.a.0.0.A is a LoRA weight"),
    "palm_lite": (PYTORCH, {"1__fn__norm__g": ONES}, "this is palm_lite"),
    "head width": (
        PYTORCH, {"1__fn__rotary_emb__inv_freq": ONES[:4]}, "1.fn.fused_attn_ff_proj.weight has 480 rows",
    ),
    "dtype": (RLHF, {"norm__gamma": np.ones((48,), np.int64)}, "final_norm_gain has dtype int64, expected"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_a_foreign_checkpoint_that_does_not_fit_is_refused_by_name(
    family: str, tensors: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(UserError) as error:
        read(changed(named(family), **tensors))
    assert str(error.value).startswith(f"here: {message}")
    assert "\n" not in str(error.value)


def test_palm_lite_is_refused_also_without_its_norm() -> None:
    """Its shared keys and values look like heads of half the width where nothing says the width."""
    source = named(PYTORCH)
    fused = {key: array[16:] for key, array in source.arrays.items() if "fused" in key}
    arrays = {key: array for key, array in source.arrays.items() if "inv_freq" not in key}
    config = {key: value for key, value in source.config.items() if key != "dim_head"}
    with pytest.raises(UserError, match="this may be palm_lite"):
        read(NamedArrays("here", arrays | fused, config))


@pytest.mark.parametrize("family", [PYTORCH, RLHF])
@pytest.mark.parametrize("key", ["dim", "depth", "dim_head", "heads", "num_tokens"])
def test_sizes_that_disagree_with_the_config_are_refused(family: str, key: str) -> None:
    source = named(family)
    with pytest.raises(UserError, match=f"the config says {key}=7"):
        read(changed(source, dict(source.config) | {key: 7}))


def test_a_bidirectional_model_is_refused() -> None:
    source = named(RLHF)
    with pytest.raises(UserError, match="causal=false"):
        read(changed(source, dict(source.config) | {"causal": False}))


def test_tensors_of_no_known_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"no known one has tensors named a, b; known by their names: PaLM"):
        find_reader(NamedArrays("here", {"a": ONES, "b": ONES}, {}))


def unreadable(array: np.ndarray) -> LazyArray:
    def refuse(box: Box) -> np.ndarray:
        raise AssertionError(f"read {box}")

    return LazyArray(array.shape, array.dtype, refuse)


SPOIL: dict[str, Callable[[NamedArrays], NamedArrays]] = {
    "unknown model": lambda s: changed(s, {"model_type": "gpt2"}),
    "palm_lite": lambda s: changed(s, **{"1__fn__norm__g": ONES}),
    "sizes": lambda s: changed(s, dict(s.config) | {"dim": 7}),
}


@pytest.mark.parametrize("spoil", SPOIL)
def test_an_unsupported_model_is_refused_before_any_weight_is_read(spoil: str) -> None:
    source = named(PYTORCH)
    lazy = NamedArrays(
        "here", {key: unreadable(array) for key, array in source.arrays.items()}, source.config
    )
    reader = palm_pytorch.read if spoil != "unknown model" else lambda s, o: find_reader(s)
    with pytest.raises(UserError):
        reader(SPOIL[spoil](lazy), ReaderOptions())


def test_readers_are_lazy_but_for_the_tied_comparison() -> None:
    source = named("Cohere")
    embeddings = ("model.embed_tokens.weight", "lm_head.weight")
    lazy = {k: array if k in embeddings else unreadable(array) for k, array in source.arrays.items()}
    state = read(NamedArrays("here", lazy, source.config))
    with pytest.raises(AssertionError, match="read"):
        state.weights["layer_0/q"][:1]


@pytest.mark.parametrize("reader", [palm_pytorch, palm_rlhf, cohere])
def test_no_family_takes_another_ones_files(reader: object) -> None:
    taken = [family for family in FILES if reader.matches(named(family))]
    assert len(taken) == 1


def test_a_member_is_a_tensor_only_with_the_prefix(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, ids=np.zeros(3), meta=json.dumps({"a": 1}), **{"w::x": np.arange(6).reshape(2, 3)})
    source = read_npz(path)
    assert list(source.arrays) == ["x"]
    assert source.config == {"a": 1}
    np.testing.assert_array_equal(source.arrays["x"][1:, :2], [[3, 4]])
