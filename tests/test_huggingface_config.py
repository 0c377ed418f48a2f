"""Every field of a `config.json` is applied, known to be harmless, or refused by name; no weight is read.

Idea: the configs that transformers wrote are changed one field at a time; what must not change the model
does not, what must, does, and what is not understood is refused with its name and value. Tensors are made
so that reading one fails the test.

Data flow: a folder's config, changed → `find_reader(...).read` → HParams, or one line.

Worked example: `rope_scaling` of type "yarn" on Llama: "rope scaling 'yarn' is not supported; allowed:
default, linear, llama3".
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints.lazy import Box, LazyArray
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.registry import READERS, find_reader
from layers.errors import UserError
from layers.hparams import Activation, Bias, Block, HParams, NormPlacement, Rope, RopePairing, RopeScaling
from tests.huggingface_models import CASES, FOLDER


def config_of(name: str, **changes: object) -> dict[str, object]:
    """A folder's config with some fields changed; `...` takes one out."""
    config = json.loads((FOLDER / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def unreadable(shape: tuple[int, ...]) -> LazyArray:
    def refuse(box: Box) -> np.ndarray:
        raise AssertionError(f"read {box}")

    return LazyArray(shape, np.dtype(np.float32), refuse)


def read_hparams(config: dict[str, object], arrays: dict[str, LazyArray] | None = None) -> HParams:
    """The form that a config says, although no tensor is there to read."""
    named = NamedArrays("here", arrays or {}, config)
    reader = find_reader(named)
    return reader.read.__self__.hparams(named)  # type: ignore[attr-defined]


def refusal(config: dict[str, object], options: ReaderOptions = ReaderOptions()) -> str:
    named = NamedArrays("here", {"model.embed_tokens.weight": unreadable((72, 32))}, config)
    with pytest.raises(UserError) as error:
        find_reader(named).read(named, options)
    text = str(error.value)
    assert text.startswith("here: ")
    assert "\n" not in text
    return text.removeprefix("here: ")


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "layers": ("llama", {"num_hidden_layers": 10**9}, "=1000000000, expected at most 10,000"),
    "negative eps": ("llama", {"rms_norm_eps": -1.0}, "norm_eps must be between 0 and 1.0, got -1.0"),
    "huge eps": ("llama", {"rms_norm_eps": 1e300}, "norm_eps must be between 0 and 1.0, got 1e+300"),
    "theta": ("llama", {"rope_parameters": ..., "rope_theta": 0}, "rope theta must be > 0, got 0.0"),
    "rope list": ("llama", {"rope_parameters": []}, "rope_parameters=[], expected an object"),
    "rope factor": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
                    "rope_parameters: the config says factor=nan, expected a finite number"),
    "llama3 factors": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
        "low_freq_factor=4.0 must be > 0 and below high_freq_factor=4.0"),
    "yarn": ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 2.0}},
             "rope scaling 'yarn' is not supported; allowed: default, linear, llama3"),
    "dynamic": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dy"),
    "longrope": ("phi", {"rope_parameters": {"rope_type": "longrope", "short_factor": []}}, "rope scaling"),
    "scaling without factor": ("llama", {"rope_parameters": {"rope_type": "linear"}},
                               "rope_parameters has no factor, which 'linear' needs"),
    "scaling with more": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1}},
                          "rope_parameters has 'mscale', which 'linear' does not have"),
    "negative factor": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -2.0}},
                        "rope_parameters: rope scaling factor must be > 0, got -2.0"),
    "scaling a list": ("llama", {"rope_parameters": [1]}, "the config says rope_parameters=[1], expected an"),
    "unknown field": ("llama", {"residual_multiplier": 0.22},
                      "the config says residual_multiplier=0.22, which Llama is not known to have"),
    "architecture": ("llama", {"architectures": ["LlamaForSequenceClassification"]},
                     "architecture 'LlamaForSequenceClassification' is not supported; allowed: LlamaForC"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}},
                  "quantized weights (gptq) are not supported; allowed: float32,"),
    "activation": ("mistral", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; allowed: silu"),
    "no heads": ("llama", {"num_attention_heads": ...}, "the config has no num_attention_heads"),
    "heads": ("llama", {"num_attention_heads": 0}, "the config says num_attention_heads=0, expected a"),
    "heads true": ("llama", {"num_attention_heads": True}, "num_attention_heads=True, expected a positive"),
    "kv heads": ("llama", {"num_key_value_heads": 3}, "the config is impossible: kv_heads=3 does not divide"),
    "width": ("gpt_neox", {"num_attention_heads": 5}, "5 heads do not divide hidden_size 32"),
    "flag": ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1, expected true or false"),
    "eps": ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps='small', expected a finite number"),
    "infinite": ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf, expected a finite number"),
    "odd rotary": ("phi", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "rotary_dims=3 must be even"),
    "layer types": ("gemma2", {"layer_types": ["chunked_attention"] * 2},
                    "layer type 'chunked_attention' is not supported; allowed: sliding_attention, full_"),
    "layer count": ("gemma2", {"layer_types": ["full_attention"]}, "expected a list of 2 kinds"),
    "layer words": ("gemma2", {"layer_types": "full"}, "layer_types='full', expected a list of 2 kinds"),
    "no window": ("qwen2", {"use_sliding_window": False}, "layer_types has 'sliding_attention', but the con"),
    "alibi": ("falcon_7b", {"alibi": True}, "alibi=True, Falcon is supported with False only"),
    "post-norm residual": ("falcon_7b", {"apply_residual_connection_post_layernorm": True},
                           "apply_residual_connection_post_layernorm=True, supported: False"),
    "qk norm": ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True, StableLM is supported with False"),
    "bidirectional": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "unscaled attention": ("gptj", {"scale_attn_weights": False}, "scale_attn_weights=False, supported"),
    "encoder": ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True, supported: False"),
    "tied with a bias": ("gptj", {"tie_word_embeddings": True}, "the config is impossible: a tied output"),
    "model type": ("llama", {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
                   "model type 'mamba2' (Mamba2ForCausalLM) is not supported; supported: Llama, Mistral,"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str, changes: dict, message: str) -> None:
    found = refusal(config_of(name, **changes))
    assert message in found
    assert "here: " not in found


@pytest.mark.parametrize("name", CASES)
def test_every_unknown_field_is_refused(name: str) -> None:
    assert "a_new_multiplier=2" in refusal(config_of(name, a_new_multiplier=2))


@pytest.mark.parametrize(("name", "offset"), [("llama", 1), ("gemma", 0)])
def test_a_gain_offset_that_the_family_does_not_have_is_refused(name: str, offset: int) -> None:
    named = NamedArrays("here", {}, config_of(name))
    with pytest.raises(UserError, match=f"gamma_offset can only be {1 - offset}"):
        find_reader(named).read(named, ReaderOptions(offset))


def test_training_and_bookkeeping_change_nothing() -> None:
    plain = read_hparams(config_of("llama"))
    harmless = {"attention_dropout": 0.5, "use_cache": False, "_name_or_path": "x", "temperature": 0.6,
                "torch_dtype": "bfloat16", "pretraining_tp": 2, "another_null": None}  # fmt: skip
    assert read_hparams(config_of("llama", **harmless)) == plain


def test_old_and_new_ways_to_write_rotary_fields_agree() -> None:
    new = read_hparams(config_of("llama"))
    nested = dict(config_of("llama")["rope_parameters"])  # type: ignore[call-overload]
    theta = nested.pop("rope_theta")
    old = {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": nested}
    assert read_hparams(config_of("llama", **old)) == new
    nested["type"] = nested.pop("rope_type")
    assert read_hparams(config_of("llama", **old | {"rope_scaling": nested})) == new
    assert new.rope == Rope(theta=1000.0, scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32))
    pct = {"rope_parameters": ..., "rotary_pct": 0.25, "rotary_emb_base": 10000}
    assert read_hparams(config_of("gpt_neox", **pct)) == read_hparams(config_of("gpt_neox"))


FORMS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "mistral without windows": ("mistral", {"sliding_window": None}, {"windows": ()}),
    "mistral's own window": ("mistral", {"sliding_window": ...}, {"windows": (4096, 4096)}),
    "caps off": ("gemma2", {"attn_logit_softcapping": None}, {"attn_softcap": None}),
    "caps by default": ("gemma2", {"attn_logit_softcapping": ...}, {"attn_softcap": 50.0}),
    "qwen's later layers": (
        "qwen2", {"layer_types": ..., "max_window_layers": 1}, {"windows": (None, 6)},
    ),
    "qwen without windows": ("qwen2", {"layer_types": ..., "use_sliding_window": False}, {"windows": ()}),
    "gemma's gelu is tanh": ("gemma", {"hidden_act": "gelu"}, {"act": Activation.GELU_TANH_GATED}),
    "the newer activation wins": (
        "gemma", {"hidden_act": "gelu", "hidden_activation": "silu"}, {"act": Activation.SWISH_GATED},
    ),
    "all rotary": ("gptj", {"rotary_dim": None}, {"rope": Rope(RopePairing.INTERLEAVED)}),
    "gptj's default width": ("gptj", {"n_inner": None}, {"ff": 128}),
    "erf": ("gptj", {"activation_function": "gelu"}, {"act": Activation.GELU_ERF}),
    "llama without biases": ("llama_biases_linear", {"mlp_bias": False}, {
        "biases": frozenset({Bias.Q, Bias.K, Bias.V, Bias.O})}),
    "old falcon": ("falcon_7b", {"num_kv_heads": 4}, {"kv_heads": 1}),
    "falcon multi-head": ("falcon_7b", {"multi_query": False}, {"kv_heads": 4}),
    "falcon serial": ("falcon_7b", {"parallel_attn": False},
                      {"block": Block.SERIAL, "norm_placement": NormPlacement.TWO}),
    "cohere's theta": ("cohere", {"rope_parameters": ...}, {"rope": Rope(RopePairing.INTERLEAVED, 500000.0)}),
    "cohere's scale": ("cohere", {"logit_scale": ...}, {"logit_scale": 0.0625}),
    "qwen3's head width": ("qwen3", {"head_dim": ...}, {"qkv": 128}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected"), FORMS.values(), ids=FORMS)
def test_a_field_changes_the_form_as_it_says(name: str, changes: dict, expected: dict) -> None:
    found = read_hparams(config_of(name, **changes))
    assert {key: getattr(found, key) for key in expected} == expected
    before = read_hparams(config_of(name))
    assert dataclasses.replace(found, **{key: getattr(before, key) for key in expected}) == before


def test_every_family_is_named_once() -> None:
    names = [reader.name for reader in READERS]
    assert len(set(names)) == len(names)
    for family in ("Llama", "Mistral", "Gemma", "Gemma 2", "Qwen 2", "Qwen 3", "Phi", "StableLM", "Cohere",
                   "Falcon", "GPT-J", "GPT-NeoX"):  # fmt: skip
        assert family in names


def test_configs_lie_beside_their_weights() -> None:
    assert all((Path(FOLDER) / name / "config.json").is_file() for name in CASES)
