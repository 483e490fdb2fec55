"""PTX as text -> instructions that ptx_block.py runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache


class EmulationError(Exception):
    """The kernel does what no kernel may do, or what the emulator does not know."""


@dataclass(slots=True)
class Instruction:
    """One instruction. Operands are strings; {a, b} is a list of them."""

    text: str
    opcode: str
    operands: list
    guard: str | None  # the predicate that it runs under
    negated: bool
    target: int = -1  # of a branch
    parts: tuple[str, ...] = field(init=False)  # of the opcode

    def __post_init__(self):
        self.parts = tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Program:
    parameters: tuple[str, ...]  # names, in order
    instructions: list[Instruction]
    threads: int  # of a block, as .maxntid says


@lru_cache(maxsize=16)
def parse(ptx: str) -> Program:
    """The one kernel of a text. Labels in braces are local to them, as registers are not here: a
    name of inline PTX is written before it is read.
    """
    entry = ptx[ptx.index(".entry") :]
    head, body = entry[: entry.index("{")], entry[entry.index("{") + 1 :]
    parameters = tuple(re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)", head))
    threads = int(re.search(r"\.maxntid\s+(\d+)", head)[1])
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"\.reg\s+[^;]*;|\.(loc|file|pragma)\b[^\n]*", "", body)
    instructions: list[Instruction] = []
    labels: dict[tuple[int, str], int] = {}
    branches: list[tuple[Instruction, list[int]]] = []
    scopes, count = [0], 0
    for statement in body.split(";"):
        statement = statement.strip()
        while True:
            label = re.match(r"([$\w]+):\s*", statement)
            if label:
                labels[scopes[-1], label[1]] = len(instructions)
                statement = statement[label.end() :]
            elif statement.startswith("{"):
                count += 1
                scopes.append(count)
                statement = statement[1:].strip()
            elif statement.startswith("}"):
                scopes = scopes[:-1] or [0]
                statement = statement[1:].strip()
            else:
                break
        if statement:
            instruction = _instruction(" ".join(statement.split()))
            if instruction.parts[0] == "bra":
                branches.append((instruction, scopes.copy()))
            instructions.append(instruction)
    for instruction, place in branches:
        name = instruction.operands[0]
        scope = next(s for s in reversed(place) if (s, name) in labels)
        instruction.target = labels[scope, name]
    return Program(parameters, instructions, threads)


def _instruction(text: str) -> Instruction:
    guard, negated, rest = None, False, text
    guarded = re.match(r"@(!?)(%?\w+)\s+(.*)", text)
    if guarded:
        negated, guard, rest = bool(guarded[1]), guarded[2], guarded[3]
    opcode, *operands = rest.split(None, 1)
    return Instruction(text, opcode, split_operands("".join(operands)), guard, negated)


def split_operands(text: str) -> list:
    """At the commas outside brackets and braces."""
    operands, depth, current = [], 0, ""
    for sign in text:
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += sign
    operands = [*operands, current.strip()] if current.strip() else operands
    return [
        [part.strip() for part in o[1:-1].split(",")] if o.startswith("{") else o for o in operands
    ]
