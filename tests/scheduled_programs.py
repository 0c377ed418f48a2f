"""Reads what matters of a compiled TPU program: the order of its loop body, its hops and its copies.

`compiled.as_text()` of a TPU program is its schedule: one instruction stream a chip, in order. Only
fusions and copies carry the compiler's estimate of their cycles; collectives carry none.

Worked example: `collective-permute-start`, a fusion with a convolution of 8,666 cycles,
`collective-permute-done` is one hop with one matmul of 8,666 cycles beside it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w\-]*)\(")
ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
REDUCTIONS = ("reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    dtype: str
    elements: int
    cycles: int
    text: str

    @property
    def called(self) -> str:
        """The computation of a fusion."""
        found = re.search(r"calls=%([\w.\-]+)", self.text)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Hop:
    """One ring hop: what it carries, and the estimated cycles of the matmuls between its start and done."""

    dtype: str
    elements: int
    matmul_cycles: int


class Program:
    """A compiled program with one loop, its layers."""

    def __init__(self, text: str) -> None:
        blocks = re.split(r"\n(?=(?:%|ENTRY %)[\w.\-]+ [^\n]*\{\n)", text)
        self.computations = {self._name(block): block for block in blocks[1:]}
        body = re.search(r"body=%([\w.\-]+)", text)
        self.body = list(instructions(self.computations[body.group(1)])) if body else []

    @staticmethod
    def _name(block: str) -> str:
        found = re.match(r"(?:ENTRY )?%([\w.\-]+) ", block)
        assert found, block[:80]
        return found.group(1)

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one pass of the loop, collectives left out."""
        return sum(instruction.cycles for instruction in self.body)

    def is_matmul(self, instruction: Instruction) -> bool:
        """Whether an instruction is, or is a fusion around, a matrix product."""
        inside = self.computations.get(instruction.called, "")
        return bool(re.search(r" (convolution|dot)\(", instruction.text + inside))

    def hops(self) -> list[Hop]:
        """The body's ring hops, in the order in which they end."""
        running: dict[str, int] = {}
        starts = {}
        found = []
        for instruction in self.body:
            if instruction.opcode == "collective-permute-start":
                starts[instruction.name], running[instruction.name] = instruction, 0
            elif instruction.opcode == "collective-permute-done":
                started = re.findall(r"%([\w.\-]+)", instruction.text.split("-done(")[1])[0]
                found.append(Hop(starts[started].dtype, starts[started].elements, running.pop(started)))
            elif self.is_matmul(instruction):
                running = {name: cycles + instruction.cycles for name, cycles in running.items()}
        return found

    def reductions(self) -> list[tuple[str, str]]:
        """(kind, dtype) of the body's sums over chips; an all-reduce-scatter kernel is a reduce-scatter."""
        found = []
        for instruction in self.body:
            if instruction.called.startswith("all-reduce-scatter"):
                found.append(("reduce-scatter", instruction.dtype))
            elif instruction.opcode in REDUCTIONS:
                found.append((instruction.opcode, instruction.dtype))
        return found

    def group(self, instruction: Instruction) -> int:
        """Chips that take part in a collective together."""
        text = instruction.text + self.computations.get(instruction.called, "")
        found = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
        assert found, f"no list of chips in {instruction.text.strip()[:160]}"
        return len(found.group(1).split(","))

    def copies(self, elements: int) -> list[str]:
        """Instructions of the body that write an array of at least so many elements, matmuls aside."""
        expected = ("parameter", "get-tuple-element", "tuple", "bitcast", "all-gather", *REDUCTIONS)
        return [
            instruction.text.strip()[:160]
            for instruction in self.body
            if instruction.elements >= elements
            and instruction.opcode not in expected
            and not self.is_matmul(instruction)
        ]


def instructions(block: str) -> Iterator[Instruction]:
    """The instructions of a computation's text; of a tuple the first array counts."""
    for line in block.splitlines():
        found = INSTRUCTION.match(line)
        array = ARRAY.search(found["shape"]) if found else None
        if found and array:
            elements = math.prod(int(size) for size in array["dims"].split(",") if size)
            estimate = re.search(r'"estimated_cycles":"?(\d+)', line)
            cycles = int(estimate.group(1)) if estimate else 0
            yield Instruction(found["name"], found["opcode"], array["dtype"], elements, cycles, line)
