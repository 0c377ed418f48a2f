"""Where a command runs: the one place that configures jax, after the flags and before jax starts.

Every command has the flags of `runtime_group()` and calls `start_jax` before it imports what computes.

Data flow: flags → `RuntimeOptions` → `start_jax` → `jax.devices()`.

Worked example: `RuntimeOptions(host_devices=8)` on a machine without accelerator gives eight host devices.
"""

import dataclasses

from inference_engine.cli.mesh_flags import MeshOptions
from inference_engine.cli.options import Flags, Group, Kind, Option
from layers.errors import UserError
from layers.mesh_shape import host_devices_needed

AUTO = "auto"
PLATFORMS = (AUTO, "cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """What jax has to be told before it starts.

    Attributes:
      platform: cpu, gpu, tpu, or auto for the best that is there.
      host_devices: how many devices a CPU shows.
    """

    platform: str = AUTO
    host_devices: int = 1


def runtime_group() -> Group:
    """The flags that every command has."""
    return Group(
        "Where it runs",
        (
            Option(
                "platform",
                "kind of device",
                Kind.CHOICE,
                default=AUTO,
                choices=PLATFORMS,
                shown_default="auto, the best that is there",
            ),
        ),
    )


def runtime_options(flags: Flags, mesh: MeshOptions | None = None) -> RuntimeOptions:
    """The options that the flags of `runtime_group` ask for, with a host device for each chip of the mesh."""
    chips = 1 if mesh is None else host_devices_needed(mesh.shape)
    return RuntimeOptions(platform=flags["platform"], host_devices=chips)


def start_jax(options: RuntimeOptions) -> None:
    """Configures jax and starts it.

    Raises UserError if the platform is not there.
    """
    import jax

    # One device is what jax makes anyway; and one that runs already keeps the devices that it has.
    if options.host_devices > max(1, jax.config.values["jax_num_cpu_devices"]):
        jax.config.update("jax_num_cpu_devices", options.host_devices)
    if options.platform not in (AUTO, jax.config.values["jax_platforms"]):
        jax.config.update("jax_platforms", options.platform)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"platform {options.platform} does not start here ({reason}); allowed: {', '.join(PLATFORMS)}; "
            "nearest: --platform cpu"
        ) from None
    if options.platform not in (AUTO, devices[0].platform):
        raise UserError(
            f"--platform={options.platform} is not what jax runs on, {devices[0].platform}; "
            f"nearest: --platform {devices[0].platform}"
        )
