"""The command line: hands the values of configs/ to the commands, and runs one of them.

    python run_serving.py COMMAND [flags]
    python run_serving.py COMMAND --help

Nothing heavy is imported here: jax starts after the flags are understood.
"""

import sys
from collections.abc import Sequence

from inference_engine.cli.interrupts import Interrupts


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command that the words name (default: those of the process); returns the exit code."""
    interrupts = Interrupts()
    with interrupts.taken():  # before anything else is imported, which a Ctrl-C may interrupt too
        from configs.engines import interactive
        from configs.models import MODELS
        from configs.pretrained import PRETRAINED
        from configs.prompts import free_text, shakespeare_prompt
        from configs.sweeps import GRIDS
        from inference_engine.cli.check_command import check_command
        from inference_engine.cli.compare_command import compare_command
        from inference_engine.cli.convert_command import convert_command
        from inference_engine.cli.generate_command import generate_command
        from inference_engine.cli.inspect_command import inspect_command
        from inference_engine.cli.main import main as run_command
        from inference_engine.cli.profile_command import profile_command
        from inference_engine.cli.registries import Registries
        from inference_engine.cli.score_command import score_command
        from inference_engine.cli.sweep_command import sweep_command

        registries = Registries(
            models=MODELS,
            engine=interactive(),
            sampling=free_text(),
            prompt=shakespeare_prompt(),
            grids=GRIDS,
            pretrained=PRETRAINED,
        )
        commands = (
            generate_command(registries),
            score_command(registries),
            check_command(),
            inspect_command(),
            convert_command(),
            sweep_command(registries),
            compare_command(),
            profile_command(registries),
        )
        return run_command(commands, sys.argv[1:] if words is None else words, interrupts)


if __name__ == "__main__":
    sys.exit(main())
