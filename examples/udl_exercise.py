"""Exercise 12.2 of "Understanding Deep Learning": multi-head self-attention on six tokens.

    python examples/udl_exercise.py

Prints the answer, and exits with an error if it is not the book's to three decimals.
"""

from __future__ import annotations

import sys

import numpy as np

from fastattn.udl import multihead_scaled_self_attention

TOKENS = 6  # N
FEATURES = 8  # D
HEADS = 2
TOLERANCE = 0.00051  # the answer is printed to three decimals
ANSWER = np.array(  # (D, N), as the notebook prints it
    [
        [-21.207, -5.373, -20.933, -9.179, -11.319, -17.812],
        [-1.995, 7.906, -10.516, 3.452, 9.863, -7.24],
        [5.479, 1.115, 9.244, 0.453, 5.656, 7.089],
        [-7.413, -7.416, 0.363, -5.573, -6.736, -0.848],
        [-11.261, -9.937, -4.848, -8.915, -13.378, -5.761],
        [3.548, 10.036, -2.244, 1.604, 12.113, -2.557],
        [4.888, -5.814, 2.407, 3.228, -4.232, 3.71],
        [1.248, 18.894, -6.409, 3.224, 19.717, -5.629],
    ]
)


def draw() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """X (D, N) and the parameters by name, drawn in the order of the notebook."""
    random = np.random.RandomState(3)  # the stream of np.random.seed(3)
    X = random.normal(size=(FEATURES, TOKENS))
    random = np.random.RandomState(0)
    head_dim = FEATURES // HEADS
    parameters = {}
    for head in "12":
        for kind, columns in (("omega", FEATURES), ("beta", 1)):
            for role in "qkv":
                name = f"{kind}_{role}{head}"
                parameters[name] = random.normal(size=(head_dim, columns))
    parameters["omega_c"] = random.normal(size=(FEATURES, FEATURES))
    return X, parameters


def main() -> int:
    """Print the exercise's answer. Returns the exit status."""
    X, parameters = draw()
    answer = multihead_scaled_self_attention(X, **parameters)
    print("Exercise 12.2: multi-head scaled self-attention of X (8 features, 6 tokens)\n")
    print("feature " + "".join(f"token {n}".rjust(10) for n in range(TOKENS)))
    for d, row in enumerate(answer):
        print(f"{d:7d} " + "".join(f"{value:10.3f}" for value in row))
    error = np.abs(answer - ANSWER).max()
    verdict = "as in the book" if error <= TOLERANCE else "NOT the book's answer"
    print(f"\nlargest difference from the printed answer: {error:.5f}: {verdict}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
