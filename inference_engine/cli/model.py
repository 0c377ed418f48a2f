"""From options to a loaded engine: the part of every command that needs jax.

Opening reads names, shapes and the tokenizer; weights are read only once everything else is known to fit.

Data flow: `ModelOptions` → `open_model` → `OpenedModel` → (prompts are checked) → `load_engine` → `Engine`.

Worked example: the embedded checkpoint on a CPU is held in float32, 22 MB, layers unrolled, with
4 slots of 512 positions.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

import checkpoints
from checkpoints.formats import open_checkpoint
from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.state import CheckpointState, OpenedCheckpoint
from inference_engine.chat_template import ChatTemplate
from inference_engine.cli.flags import nearest, shown
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.memory import available_bytes, check_memory
from inference_engine.cli.mesh_flags import MeshOptions, mesh_words
from inference_engine.cli.model_flags import BYTES, LayersForm, ModelOptions
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.report import RunReport
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.layout_choice import Layouts, Workload, choose_layouts
from inference_engine.model import OneDeviceModel
from inference_engine.pretrained import fetch
from inference_engine.scoring import Scorer
from inference_engine.steps import Models
from inference_engine.tokenizer import NUM_BYTES, ByteTokenizer, Tokenizer, check_vocab_fits
from inference_engine.tokenizer_files import open_chat_template, open_tokenizer
from layers.attention import AttentionBlocks
from layers.communication import ElementBytes, insert_elements
from layers.errors import UserError
from layers.head_order import padded_form
from layers.hparams import HParams
from layers.mesh import make_mesh
from layers.params import Params
from layers.partitioning import check_model
from layers.serial import ForwardOptions
from layers.transformer import MeshModel

BFLOAT16_BYTES = 2
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
Loaded = TypeVar("Loaded", Engine, Scorer)


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """An opened model whose weights are still where they were stored.

    Attributes:
      state, tokenizer, load: weights, text, and how weights are to be held.
      mesh: None for one device.
      chat: the text around a conversation; None where the model has none.
    """

    state: CheckpointState
    tokenizer: Tokenizer
    load: LoadOptions
    mesh: MeshOptions | None = None
    layouts: Layouts | None = None
    chat: ChatTemplate | None = None

    @property
    def hparams(self) -> HParams:
        """The model's form."""
        return self.state.hparams

    def runs_as(self, options: ForwardOptions) -> Models:
        """The model on its device or mesh."""
        if self.layouts is None or self.load.placement is None:
            model = OneDeviceModel(self.hparams, options)
            return Models(model, model)
        place = self.load.placement
        return Models(
            *(
                MeshModel(self.hparams, place.shape, place.mesh, sharding, options)
                for sharding in (self.layouts.prefill, self.layouts.decode)
            )
        )

    def insert_bytes(self, config: EngineConfig) -> int:
        """Bytes that a chip moves to put one prefilled prompt into its slot; 0 on one device."""
        if self.mesh is None or self.layouts is None:
            return 0
        padded, layouts = padded_form(self.hparams, self.mesh.shape), self.layouts
        elements = insert_elements(
            padded, self.mesh.shape, layouts.prefill, layouts.decode, config.cache_time
        )
        form = self.hparams
        of_one = config.cache_token_bytes(form) / (2 * form.layers * form.kv_heads * form.qkv)
        return round(elements * of_one)

    def words(self) -> str:
        """Mesh and layouts in a phrase; nothing for one device."""
        if self.mesh is None or self.layouts is None:
            return ""
        return mesh_words(self.mesh.shape, self.layouts)


def default_checkpoint() -> Path:
    """The folder of the embedded model."""
    return Path(str(checkpoints.__file__)).parent / "default"


def open_model(options: ModelOptions, mesh: MeshOptions | None = None) -> OpenedModel:
    """Opens checkpoint and tokenizer; no weight is read.

    Raises UserError: neither is readable, there is no tokenizer or it does not fit the model, or the mesh
    fits neither the devices nor the model.
    """
    path = options.checkpoint or default_checkpoint()
    if options.pretrained is not None:
        path = fetch(options.pretrained)
    opened = open_checkpoint(path, options.reader)
    tokenizer, chat = _open_tokenizer(opened, options.tokenizer)
    check_vocab_fits(tokenizer, opened.state.hparams.vocab)
    weights = WeightsDtype(options.weights or default_weights(opened.state))
    auto = options.layers is LayersForm.AUTO and on_cpu() and mesh is None
    stacked = not (auto or options.layers is LayersForm.UNROLLED)
    if mesh is not None:
        check_model(opened.state.hparams, mesh.shape)
        make_mesh(mesh.shape)
    return OpenedModel(opened.state, tokenizer, LoadOptions(weights, stacked), mesh, chat=chat)


def lay_out(model: OpenedModel, config: EngineConfig) -> OpenedModel:
    """The model with its layouts on the mesh decided, for the sizes of an engine; one device stays as it is.

    Raises UserError for layouts that cannot run together.
    """
    if model.mesh is None:
        return model
    sizes = ElementBytes(
        weights=ELEMENT_BYTES[model.load.weights.value],
        activations=ELEMENT_BYTES[config.activation_dtype],
        sums=ELEMENT_BYTES[model.mesh.layouts.collectives.reduce_dtype],
    )
    work = Workload(config.slots, config.prefill_rows, config.prefill_chunk, sizes)
    layouts = choose_layouts(model.mesh.layouts, model.hparams, model.mesh.shape, work)
    shape = model.mesh.shape
    placement = MeshPlacement(layouts.decode.layout.form.storage, shape, make_mesh(shape))
    load = dataclasses.replace(model.load, placement=placement)
    return dataclasses.replace(model, load=load, layouts=layouts)


def on_cpu() -> bool:
    """Whether the default device is the host."""
    return jax.default_backend() == "cpu"


def default_activation_dtype(weights: WeightsDtype) -> str:
    """The activations' dtype where none was asked for."""
    return "float32" if on_cpu() or weights is WeightsDtype.FLOAT32 else "bfloat16"


def load_engine(model: OpenedModel, config: EngineConfig, interrupts: Interrupts) -> Engine:
    """Reads the weights and compiles the steps, with progress on stderr.

    Raises UserError: damaged weights, weights that the dtype does not allow, not enough memory.
    """
    check_memory(model.hparams, model.load.weights, config, _available(model.mesh))
    return _load(model, config, interrupts, _engine)


def _engine(models: Models, params: Params, config: EngineConfig) -> Engine:
    return Engine(models.decode, params, config, models.prefill)


def load_scorer(model: OpenedModel, config: EngineConfig, interrupts: Interrupts) -> Scorer:
    """The same for scoring, in prefill's layout."""
    available = _available(model.mesh)
    check_memory(model.hparams, model.load.weights, config, available, generates=False)
    return _load(model, config, interrupts, _scorer)


def _scorer(models: Models, params: Params, config: EngineConfig) -> Scorer:
    return Scorer(models.prefill, params, config)


def _load(
    model: OpenedModel,
    config: EngineConfig,
    interrupts: Interrupts,
    make: Callable[[Models, Params, EngineConfig], Loaded],
) -> Loaded:
    config.check_model(model.hparams)
    try:
        with phase("loading weights", interrupts, Unit.BYTES) as update:
            params = load_params(model.state, model.load, update)
        with phase("compiling", interrupts):
            blocks = AttentionBlocks.on(jax.default_backend())
            options = ForwardOptions(config.activation_dtype, blocks)
            return make(model.runs_as(options), params, config)
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(error, model, config) from None


def _available(mesh: MeshOptions | None) -> int | None:
    """Memory of all chips together; host devices share theirs."""
    of_one = available_bytes()
    return of_one if of_one is None or mesh is None or on_cpu() else of_one * mesh.shape.size


def out_of_memory(error: jax.errors.JaxRuntimeError, model: OpenedModel, config: EngineConfig) -> Exception:
    """The error as a line for the user where memory is what was missing, else the error itself."""
    if _OUT_OF_MEMORY not in str(error):
        return error
    return UserError(
        f"{jax.devices()[0].device_kind} has too little memory for {model.hparams.param_count:,} parameters "
        f"and {config.slots} slots of {config.max_context} positions; "
        "nearest: a smaller --slots, --max_context or --weights int8"
    )


def report(
    model: OpenedModel, params: Params, config: EngineConfig, cache_bytes: int, **figures: Any
) -> RunReport:
    """The last line of a run; `cache_bytes` are those of all chips, `figures` the report's other fields."""
    leaves = jax.tree.leaves(params)
    devices = leaves[0].devices()
    device = next(iter(devices))
    return RunReport(
        platform=device.platform,
        device_kind=device.device_kind,
        devices=len(devices),
        parameters=model.hparams.param_count,
        weights=model.load.weights.value,
        activations=config.activation_dtype,
        cache=config.cache_dtype,
        weight_bytes=sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
        cache_bytes=cache_bytes // len(devices),
        mesh=model.words(),
        **figures,
    )


def default_weights(state: CheckpointState) -> str:
    """The kernels' dtype where none was asked for: as stored, but float32 on a CPU.

    A CPU multiplies in float32: bfloat16 kernels would be converted again in every step.
    """
    if state.quantized:
        return "int8"
    stored = np.dtype(state.weights["embedding"].dtype)  # type: ignore[union-attr]
    return "float32" if on_cpu() or stored.itemsize > BFLOAT16_BYTES else "bfloat16"


def byte_tokenizer(vocab: int) -> ByteTokenizer:
    """One id a byte, with BOS and EOS where the model has ids for them.

    Models trained on raw bytes, as PaLM-rlhf-pytorch's example is, have 256 ids and no marks.
    """
    smallest = ByteTokenizer().vocab_size
    tokenizer = ByteTokenizer(max(vocab, smallest))
    if vocab < smallest:
        tokenizer.bos_id = tokenizer.eos_id = None
        tokenizer.vocab_size = NUM_BYTES
    return tokenizer


def _open_tokenizer(opened: OpenedCheckpoint, asked: str | None) -> tuple[Tokenizer, ChatTemplate | None]:
    if asked == BYTES:
        return byte_tokenizer(opened.state.hparams.vocab), None
    path = opened.tokenizer_file if asked is None else Path(asked)
    if asked is not None and not Path(asked).exists() and (close := nearest(asked, [BYTES])):
        raise UserError(f"--tokenizer={shown(asked)}: no such file; allowed: a path, or {BYTES}{close}")
    if path is None:
        raise UserError(
            f"{opened.source}: no tokenizer in it; allowed: --tokenizer PATH (a sentencepiece model, a "
            f"tokenizer.json or a GGUF file) or --tokenizer {BYTES}"
        )
    return open_tokenizer(path), open_chat_template(path)
