"""What a step's time goes into: each traced instruction belongs to a part by its scope and its opcode.

The layers name what they do (`jax.named_scope`): weights, attention, residual (embedding, gathers, norms),
sampling. The names are in the metadata
of the compiled program's instructions, and a trace says how long each instruction ran. Collectives are a part
of their own, told by their opcodes, so that no layout has to name them; from which scope they come is kept.

Data flow: program text → `instructions` → with the traced durations → `split` → `Part`s.

Worked example: `%all-gather.3 = f32[8,240] all-gather(…),
metadata={op_name="jit(generate_step)/…/weights/…"}` that ran for 40 µs adds 40 µs to the collectives of the
weights.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SCOPES = ("weights", "attention", "residual", "sampling")
OTHER = "other"
COLLECTIVES = "collectives"
PARTS = ("weights", "attention", "residual", COLLECTIVES, "sampling", OTHER)
TOP = 10

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s(?P<opcode>[a-z][a-z0-9\-]*)\(")
_READ = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="(?P<path>[^"]*)"')
_COLLECTIVE = re.compile(
    r"^(all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(-start|-done)?$"
)
_CONTAINERS = ("while", "conditional", "call")
"""Instructions whose time is that of the instructions inside them."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program: its opcode and the path of scopes it came from."""

    name: str
    opcode: str
    path: str

    @property
    def scope(self) -> str:
        """The innermost scope that has a name here."""
        found = [part for part in self.path.split("/") if part in SCOPES]
        return found[-1] if found else OTHER

    @property
    def part(self) -> str:
        """The part of the step that its time counts for."""
        return COLLECTIVES if _COLLECTIVE.match(self.opcode) else self.scope


def instructions(text: str) -> dict[str, Instruction]:
    """The instructions of a program by name; those inside fusions, which are never traced, are among them.

    Some that the compiler rewrote have lost their path (on a CPU the products of attention): they get that
    of the nearest instruction that they read.
    """
    found: dict[str, Instruction] = {}
    for line in text.splitlines():  # what is read stands before its reader
        match = _INSTRUCTION.match(line)
        opcode = None if match is None else _OPCODE.search(" " + match["rest"])
        if match is None or opcode is None:
            continue
        name, path = match["name"], _OP_NAME.search(line)
        reads = _READ.findall(match["rest"][opcode.end() - 1 :].partition("), ")[0])
        inherited = (found[other].path for other in reads if other in found)
        known = next((each for each in inherited if each), "") if path is None else path["path"]
        found[name] = Instruction(name, opcode["opcode"], known)
    return found


@dataclasses.dataclass(frozen=True)
class Split:
    """Seconds of one step on one chip, on average over chips and steps.

    Attributes:
      parts: by part, collectives of all scopes together.
      collectives: of these, by the scope they come from.
      top: the instructions that took longest: name, opcode, part, scope, seconds.
    """

    parts: dict[str, float]
    collectives: dict[str, float]
    top: tuple[dict[str, Any], ...]

    @property
    def total(self) -> float:
        """Of all instructions."""
        return sum(self.parts.values())


def split(known: Mapping[str, Instruction], traced: Iterable[tuple[str, float]], runs: int) -> Split:
    """Sums traced (instruction, seconds) by part; `runs` is steps times chips."""
    by_name: dict[str, float] = defaultdict(float)
    for name, seconds in traced:
        if name in known and known[name].opcode not in _CONTAINERS:
            by_name[name] += seconds / runs
    parts = dict.fromkeys(PARTS, 0.0)
    collectives = dict.fromkeys((*SCOPES, OTHER), 0.0)
    for name, seconds in by_name.items():
        parts[known[name].part] += seconds
        if known[name].part == COLLECTIVES:
            collectives[known[name].scope] += seconds
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:TOP]
    top = tuple(
        {"name": name, "opcode": known[name].opcode, "part": known[name].part, "scope": known[name].scope,
         "seconds": seconds}
        for name, seconds in longest
    )  # fmt: skip
    return Split(parts, collectives, top)


def traced_instructions(trace: Any, module: str) -> Iterator[tuple[str, float]]:
    """(instruction, seconds) of a module in a `jax.profiler.ProfileData`.

    On a CPU and a GPU an event says which instruction of which module it is; on a TPU it stands in a line of
    instructions and is named after it.
    """
    for plane in trace.planes:
        device = plane.name.startswith("/device:")
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                op = stats.get("hlo_op") or (event.name if device and line.name == "XLA Ops" else None)
                if op is not None and stats.get("hlo_module", module) == module:
                    yield str(op).lstrip("%").partition(" ")[0], event.duration_ns * 1e-9
