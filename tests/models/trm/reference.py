"""The Tiny Recursive Model once more, in plain loops over Python's doubles: slow, and without torch.

`python -m tests.models.trm.reference` prints the golden losses of tests/golden/trm_losses.json.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Vector = list[float]
Matrix = list[Vector]
Weights = Mapping[str, Matrix]

SIDE, WIDTH, HEADS, LAYERS, PUZZLE_TOKENS = 4, 8, 2, 2, 2
H_CYCLES, L_CYCLES, MULTIPLE, MOST_STEPS = 2, 2, 8, 3
CELLS, VOCAB = SIDE * SIDE, SIDE + 2
TOKENS = CELLS + PUZZLE_TOKENS


def inner(width: int) -> int:
    return math.ceil(round(4 * width * 2 / 3) / MULTIPLE) * MULTIPLE


def shapes(mixer: str) -> dict[str, tuple[int, ...]]:
    """Of all weights, by the names that the toolkit's model gives them."""
    found: dict[str, tuple[int, ...]] = {"puzzle": (1, WIDTH), "y_first": (WIDTH,), "z_first": (WIDTH,)}
    found |= {"token.weight": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        mixed = {"gate_up": (2 * inner(TOKENS), TOKENS), "down": (TOKENS, inner(TOKENS))}
        if mixer == "attention":
            mixed = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
        network = {"gate_up": (2 * inner(WIDTH), WIDTH), "down": (WIDTH, inner(WIDTH))}
        for part, weights in (("mixer", mixed), ("network", network)):
            found |= {f"blocks.{layer}.{part}.{name}.weight": shape for name, shape in weights.items()}
    return found | {"head.weight": (VOCAB, WIDTH), "halt.weight": (2, WIDTH), "halt.bias": (2,)}


def weights_of(mixer: str) -> dict[str, Matrix]:
    """Numbers that no generator is needed for; vectors are matrices of one row."""
    found, number = {}, 0
    for name, shape in shapes(mixer).items():
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        found[name] = [
            [
                1.2 / math.sqrt(columns) * math.sin(1.7 * (number + row * columns + column))
                for column in range(columns)
            ]
            for row in range(rows)
        ]
        number += rows * columns
    return found


def puzzles() -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of four new puzzles for each of four steps, solved or not: what a loader would give."""
    inputs = [[1 + (3 * row + 5 * cell * cell) % 5 for cell in range(CELLS)] for row in range(16)]
    targets = [[2 + (row + 2 * cell + cell // 4) % 4 for cell in range(CELLS)] for row in range(16)]
    targets[3][7] = targets[5][0] = -100
    return inputs, targets


def as_single(value: float) -> float:
    """What is left of `value` in single precision, in which the model keeps its rotations."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def matvec(matrix: Matrix, vector: Sequence[float]) -> Vector:
    return [sum(weight * value for weight, value in zip(row, vector, strict=True)) for row in matrix]


def added(one: Matrix, other: Matrix) -> Matrix:
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def normalised(matrix: Matrix) -> Matrix:
    return [
        [value / math.sqrt(sum(other * other for other in row) / len(row) + 1e-5) for value in row]
        for row in matrix
    ]


def gated(weights: Weights, name: str, rows: Matrix) -> Matrix:
    result = []
    for row in rows:
        both = matvec(weights[f"{name}.gate_up.weight"], row)
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
        result.append(matvec(weights[f"{name}.down.weight"], hidden))
    return result


def rotated(vector: Vector, position: int, round_off: Callable[[float], float]) -> Vector:
    half, result = len(vector) // 2, list(vector)
    for index in range(half):
        angle = position * 1e4 ** (-2 * index / len(vector))
        cosine, sine = round_off(math.cos(angle)), round_off(math.sin(angle))
        result[index] = vector[index] * cosine - vector[index + half] * sine
        result[index + half] = vector[index + half] * cosine + vector[index] * sine
    return result


def attended(weights: Weights, name: str, rows: Matrix, round_off: Callable[[float], float]) -> Matrix:
    size = WIDTH // HEADS
    triples = [matvec(weights[f"{name}.qkv.weight"], row) for row in rows]
    mixed = [[0.0] * WIDTH for _ in rows]
    for head in range(HEADS):
        cut = slice(head * size, (head + 1) * size)
        queries = [rotated(row[:WIDTH][cut], place, round_off) for place, row in enumerate(triples)]
        keys = [rotated(row[WIDTH : 2 * WIDTH][cut], place, round_off) for place, row in enumerate(triples)]
        for place, query in enumerate(queries):
            scores = [math.exp(value / math.sqrt(size)) for value in matvec(keys, query)]
            for score, row in zip(scores, triples, strict=True):
                for index, value in enumerate(row[2 * WIDTH :][cut]):
                    mixed[place][head * size + index] += score / sum(scores) * value
    return [matvec(weights[f"{name}.out.weight"], row) for row in mixed]


@dataclass
class Reference:
    """The network with the weights of its last cycle, and those that all before it have."""

    mixer: str
    weights: Weights
    before: Weights
    round_off: Callable[[float], float] = field(default=float)

    def thought(
        self, tokens: Sequence[int], y: Matrix | None, z: Matrix | None
    ) -> tuple[Matrix, float, Matrix, Matrix]:
        """One supervision step: logits of each cell, the halting logit, and where it leaves off."""
        y = y or [list(self.before["y_first"][0]) for _ in range(TOKENS)]
        z = z or [list(self.before["z_first"][0]) for _ in range(TOKENS)]
        for cycle in range(H_CYCLES):
            weights = self.weights if cycle == H_CYCLES - 1 else self.before
            x = self.embedded(weights, tokens)
            for _ in range(L_CYCLES):
                z = self.network(weights, added(z, added(y, x)))
            y = self.network(weights, added(y, z))
        logits = [matvec(self.weights["head.weight"], row) for row in y[PUZZLE_TOKENS:]]
        halt = matvec(self.weights["halt.weight"], y[0])[0] + self.weights["halt.bias"][0][0]
        return logits, halt, y, z

    def embedded(self, weights: Weights, tokens: Sequence[int]) -> Matrix:
        rows = [weights["puzzle"][0]] + [[0.0] * WIDTH] * (PUZZLE_TOKENS - 1)
        rows = rows + [weights["token.weight"][token] for token in tokens]
        return [[math.sqrt(WIDTH) * value for value in row] for row in rows]

    def network(self, weights: Weights, rows: Matrix) -> Matrix:
        for layer in range(LAYERS):
            name = f"blocks.{layer}.mixer"
            if self.mixer == "mlp":
                columns = transposed(rows)
                rows = transposed(normalised(added(columns, gated(weights, name, columns))))
            else:
                rows = normalised(added(rows, attended(weights, name, rows, self.round_off)))
            rows = normalised(added(rows, gated(weights, f"blocks.{layer}.network", rows)))
        return rows


def row_loss(logits: Matrix, halt: float, targets: Sequence[int]) -> tuple[float, bool]:
    """Of one puzzle, and whether every cell is right."""
    losses, exact = [], True
    for cell, target in zip(logits, targets, strict=True):
        if target == -100:
            continue
        shares = [value + 1 if value >= 0 else 1 / (1 - value) for value in cell]
        losses.append(-math.log(shares[target] / sum(shares)))
        exact = exact and cell.index(max(cell)) == target
    halting = math.log1p(math.exp(-halt)) if exact else math.log1p(math.exp(halt))
    return sum(losses) / len(losses) + 0.5 * halting, exact


def losses(reference: Reference, *, steps: int, rows: int = 4) -> list[float]:
    """The loss, summed over rows, of each supervision step; samples stay for MOST_STEPS or until halted."""
    inputs, targets = puzzles()
    places: list[tuple[int, Matrix | None, Matrix | None, int]] = [(0, None, None, MOST_STEPS)] * rows
    result = []
    for step in range(steps):
        total = 0.0
        for row in range(rows):
            sample, y, z, count = places[row]
            if count >= MOST_STEPS:
                sample, y, z, count = step * rows + row, None, None, 0
            logits, halt, y, z = reference.thought(inputs[sample], y, z)
            total += row_loss(logits, halt, targets[sample])[0]
            places[row] = sample, y, z, MOST_STEPS if halt > 0 else count + 1
        result.append(total)
    return result


def main() -> None:
    golden = {
        mixer: losses(Reference(mixer, weights_of(mixer), weights_of(mixer), as_single), steps=4)
        for mixer in ("mlp", "attention")
    }
    print(json.dumps(golden, indent=2))


if __name__ == "__main__":
    main()
