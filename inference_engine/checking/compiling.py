"""How much a program of the check is optimised: as much as it pays.

On a CPU the compiler's optimisation takes longer than a small program runs. Without it, reading a weight
takes about 7 ns longer (copying, widening and multiplying it are plain loops); with it, compiling takes about
2 s longer. Both were measured on the default checkpoint.

Worked example: 33 steps of 5.47 M weights are 181 M reads, 1.3 s longer without: not optimised. Gathered over
8 chips they are 1,444 M, 10 s longer: optimised.
"""

CompilerOptions = dict[str, bool | int]

OPTIMISED_FROM = 300_000_000
"""Reads of a weight, over all chips and steps."""


def compiler_options(platform: str, reads: int) -> CompilerOptions:
    """Options for a program that reads weights so many times; elsewhere than on a CPU the compiler's own."""
    if platform != "cpu":
        return {}
    level = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
    plain = {"xla_backend_optimization_level": 0}
    return {"xla_cpu_use_fusion_emitters": False} | (level if reads >= OPTIMISED_FROM else plain)
