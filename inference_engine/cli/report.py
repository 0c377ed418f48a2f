"""The last line of a run: what it ran on and how fast.

Data flow: device, model and `RunStats` → `RunReport` → `line()`.

Worked example: 5,532,720 parameters that took 0.5 s for 400 tokens in 100 steps:
"cpu ×1 · 5.53 M parameters, float32 · prefill 1,204 tokens/s · decode 800 tokens/s, 5.00 ms/token · weights
22.1 MB, cache 3.15 MB".
"""

import dataclasses

_SCALES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What the last line says.

    Attributes:
      platform, device_kind, devices: where it ran.
      parameters: of the model.
      weights, activations: dtypes.
      prefill_rate, decode_rate: tokens a second; 0 where nothing was done.
      score_rate: tokens a second of a run that scored and did nothing else.
      step_milliseconds: time of a decode step, which gives each text in it one token.
      cache: dtype of keys and values.
      weight_bytes, cache_bytes: on the device, or on each chip of the mesh.
      mesh: the mesh and the layout; empty for one device.
      insert_bytes, insert_milliseconds: of one prompt's way into its slot, on a mesh: what a chip moves, and
        the mean time.
    """

    platform: str
    device_kind: str
    devices: int
    parameters: int
    weights: str
    activations: str
    cache: str
    weight_bytes: int
    cache_bytes: int
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    step_milliseconds: float = 0.0
    mesh: str = ""
    insert_bytes: int = 0
    insert_milliseconds: float = 0.0
    score_rate: float | None = None

    def line(self) -> str:
        """The line."""
        kind = "" if self.device_kind == self.platform else f" ({self.device_kind})"
        dtypes = self.weights if self.weights == self.activations else f"{self.weights}/{self.activations}"
        cache = "cache" if self.cache == self.activations else f"{self.cache} cache"
        return " · ".join(
            (
                f"{self.platform}{kind} ×{self.devices}",
                *((self.mesh,) if self.mesh else ()),
                f"{quantity(self.parameters)} parameters, {dtypes}",
                *self._rates(),
                f"weights {quantity(self.weight_bytes)}B, {cache} {quantity(self.cache_bytes)}B"
                + (" a chip" if self.mesh else ""),
            )
        )

    def _rates(self) -> tuple[str, ...]:
        if self.score_rate is not None:
            return (f"score {_rate(self.score_rate)}",)
        return (
            f"prefill {_rate(self.prefill_rate)}",
            *((self._insert(),) if self.mesh else ()),
            f"decode {_rate(self.decode_rate)}, {self.step_milliseconds:.2f} ms/token",
        )

    def _insert(self) -> str:
        return f"insert {quantity(self.insert_bytes)}B a chip, {self.insert_milliseconds:.2f} ms"


def quantity(number: int) -> str:
    """Three digits and a decimal prefix, with a space before the prefix: 22131234 is "22.1 M"."""
    for scale, letter in _SCALES:
        if number >= 0.9995 * scale:  # 999,600 is 1.00 M, not 1000 k
            return f"{number / scale:#.3g}".rstrip(".") + f" {letter}"
    return f"{number} "


def _rate(rate: float) -> str:
    """Tokens a second; a dash where no token was counted."""
    return f"{rate:,.0f} tokens/s" if rate else "–"
