"""What a command line has to be given from outside: the values that configs/ holds.

Nothing in this package imports configs/; run_serving.py hands it over.

Worked example: `Registries(MODELS, EngineConfig(), SamplingParams(), prompt="KING.\\n")`.
"""

import dataclasses
from collections.abc import Callable, Mapping

from inference_engine.config import EngineConfig
from inference_engine.pretrained import PretrainedModel
from inference_engine.profiling.settings import Grid
from inference_engine.sampling_params import SamplingParams
from layers.hparams import HParams


@dataclasses.dataclass(frozen=True)
class Registries:
    """Values by name, and the defaults of flags.

    Attributes:
      models: name → function that returns the model's form.
      engine: sizes where no flag says otherwise.
      sampling: settings where no flag says otherwise.
      prompt: what is continued where no prompt is given.
      grids: name → function that returns a grid of a sweep.
      pretrained: models that are fetched by their name.
    """

    models: Mapping[str, Callable[[], HParams]]
    engine: EngineConfig
    sampling: SamplingParams
    prompt: str
    grids: Mapping[str, Callable[[], Grid]] = dataclasses.field(default_factory=dict)
    pretrained: Mapping[str, PretrainedModel] = dataclasses.field(default_factory=dict)
