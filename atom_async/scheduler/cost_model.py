"""How long a step will take, fitted online from the steps that were measured.

    decode-only       d0 + d1 * sequences + d2 * attended tokens
    prefill-carrying  p0 + p1 * prompt tokens + p2 * attended pairs, plus the two decode terms

A chunk of n tokens behind a context of P attends n * (P + n/2) pairs. The two kinds have fixed costs of their
own: between machines they differ by twenty times, and what a step may hold follows from them.

Each kind is a weighted least-squares fit of three coefficients that cannot be negative, over normal equations that
forget exponentially within each size of step, in relative units so that short steps count as much as long ones.
Outliers are weighed down (Huber, "Robust estimation of a location parameter", 1964: the linear tail beyond a few
scales). A weak pull towards a prior keeps directions that the data does not show at a sane ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

Vector = tuple[float, float, float]

DECODE_PRIOR: Vector = (8.0, 0.05, 10.0)
"""ms, ms per sequence, ms per million attended tokens: an accelerator of middle size."""
PREFILL_PRIOR: Vector = (5.0, 50.0, 300.0)
"""ms, ms per thousand prompt tokens, ms per billion attended pairs."""
PRIOR_WEIGHT = 1e-4
"""Against one observation: a coefficient may be a hundred times what the prior's proportions say."""
FORGETTING = 0.85
"""Weight of the past per observation of the same size: about the last seven count."""
STALE = 5000
"""A size not seen for so many observations is forgotten."""
HUBER = 2.5
"""Residuals beyond this many scales count linearly."""
EAGER_FITS = 24
"""So many observations are each fitted at once; afterwards every eighth is."""
FIT_EVERY = 8


@dataclass(slots=True)
class StepWork:
    """What a step computes."""

    decodes: int = 0
    kv_tokens: int = 0
    """Context of all decodes together."""
    prefill_tokens: int = 0
    pairs: float = 0.0
    """Sum over chunks of tokens * attended context."""

    def add_chunk(self, start: int, length: int) -> None:
        self.prefill_tokens += length
        self.pairs += chunk_pairs(start, length)


def chunk_pairs(start: int, length: int) -> float:
    return length * (start + length / 2)


@dataclass(slots=True)
class Cell:
    """Normal equations of the observations of one size, the recent ones counting most."""

    a: list[float]
    """Upper triangle of the 3 x 3 matrix, row by row."""
    b: list[float]
    seen_at: int = 0
    scale: float = 1.0
    """Running mean of the relative error here: what is far beyond it is an outlier, what is always off is not."""


_TRIANGLE = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


class Fit:
    """Non-negative weighted least squares of y on three features.

    Observations are kept by size, so that a thousand equal steps do not wash out what a few others showed: it is
    the difference between sizes that tells a fixed cost from a marginal one, and a model that forgets it decides
    for the sizes that it then only sees.
    """

    def __init__(self, prior: Vector) -> None:
        self._prior = prior
        self.coefficients: Vector = prior
        self.observations = 0
        self._cells: dict[tuple[int, int], Cell] = {}
        """By size, least recently seen first."""

    def predict(self, x: Vector) -> float:
        c = self.coefficients
        return c[0] * x[0] + c[1] * x[1] + c[2] * x[2]

    def observe(self, size: tuple[int, int], x: Vector, y: float) -> None:
        """One step: what it is remembered under, its features, and its milliseconds."""
        if y <= 0:
            return
        error = abs(y - self.predict(x)) / y
        weight = 1.0 / (y * y)
        cell = self._cells.pop(size, None) or Cell([0.0] * 6, [0.0] * 3)
        self._cells[size] = cell
        if error > HUBER * cell.scale:
            weight *= HUBER * cell.scale / error
        cell.scale = max(cell.scale + 0.2 * (min(error, 1.0) - cell.scale), 0.01)
        self.observations += 1
        cell.seen_at = self.observations
        for k, (i, j) in enumerate(_TRIANGLE):
            cell.a[k] = FORGETTING * cell.a[k] + weight * x[i] * x[j]
        for i in range(3):
            cell.b[i] = FORGETTING * cell.b[i] + weight * x[i] * y
        if self.observations <= EAGER_FITS or self.observations % FIT_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        oldest = next(iter(self._cells))
        if self.observations - self._cells[oldest].seen_at > STALE:
            del self._cells[oldest]
        a = [[0.0] * 3 for _ in range(3)]
        b = [0.0] * 3
        for cell in self._cells.values():
            for k, (i, j) in enumerate(_TRIANGLE):
                a[i][j] += cell.a[k]
            for i in range(3):
                b[i] += cell.b[i]
        for i in range(3):
            for j in range(i):
                a[i][j] = a[j][i]
        self._pull_to_prior(a, b)
        self.coefficients = _non_negative(a, b)

    def _pull_to_prior(self, a: list[list[float]], b: list[float]) -> None:
        """Weakly, and towards the prior's proportions at the speed of this machine, which may be any."""
        prior = self._prior
        curvature = sum(prior[i] * a[i][j] * prior[j] for i in range(3) for j in range(3))
        speed = sum(prior[i] * b[i] for i in range(3)) / curvature
        for i in range(3):
            expected = speed * prior[i]
            pull = PRIOR_WEIGHT / (expected * expected)
            a[i][i] += pull
            b[i] += pull * expected


def _non_negative(a: list[list[float]], b: list[float]) -> Vector:
    """argmin of c'Ac/2 - b'c with c >= 0: the best of the feasible solutions on each set of free coefficients."""
    best: Vector = (0.0, 0.0, 0.0)
    lowest = 0.0
    for size in (3, 2, 1):
        for free in combinations(range(3), size):
            solution = _solve_on(a, b, free)
            if solution is None or min(solution) < 0:
                continue
            c = [0.0, 0.0, 0.0]
            for index, value in zip(free, solution, strict=True):
                c[index] = value
            objective = -sum(b[i] * c[i] for i in free) / 2
            if objective < lowest:
                lowest, best = objective, (c[0], c[1], c[2])
        if size == 3 and lowest < 0:
            return best
    return best


def _solve_on(a: list[list[float]], b: list[float], free: Sequence[int]) -> list[float] | None:
    """Cholesky on the rows and columns `free`. None when they do not determine a solution."""
    n = len(free)
    lower = [[0.0] * n for _ in range(n)]
    z: list[float] = []
    for i in range(n):
        for j in range(i + 1):
            rest = a[free[i]][free[j]] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j:
                if rest <= 1e-14 * a[free[i]][free[i]]:
                    return None
                lower[i][i] = rest**0.5
            else:
                lower[i][j] = rest / lower[j][j]
        z.append((b[free[i]] - sum(lower[i][k] * z[k] for k in range(i))) / lower[i][i])
    solution = [0.0] * n
    for i in reversed(range(n)):
        later = sum(lower[k][i] * solution[k] for k in range(i + 1, n))
        solution[i] = (z[i] - later) / lower[i][i]
    return solution


class CostModel:
    """Predicts in milliseconds; `observe` feeds it. Deterministic: equal observations give equal predictions."""

    def __init__(self) -> None:
        self.decode = Fit(DECODE_PRIOR)
        self.prefill = Fit(PREFILL_PRIOR)
        self.error = 0.0
        """Running mean of |predicted - measured| / measured, over all steps."""
        self._observed = 0

    def observe(self, work: StepWork, elapsed_ms: float, predicted_ms: float) -> None:
        """A step was measured. `predicted_ms` is what was predicted when it was submitted."""
        if elapsed_ms <= 0:
            return
        self._observed += 1
        error = min(abs(predicted_ms - elapsed_ms) / elapsed_ms, 10.0)
        self.error += (error - self.error) * max(0.02, 1 / self._observed)
        if not work.prefill_tokens:
            size = (work.decodes.bit_length(), work.kv_tokens.bit_length())
            self.decode.observe(size, (1.0, work.decodes, work.kv_tokens / 1e6), elapsed_ms)
            return
        decoding = self._decode_terms(work.decodes, work.kv_tokens)
        rest = max(elapsed_ms - decoding, 0.1 * elapsed_ms)
        size = (work.prefill_tokens.bit_length(), int(work.pairs / work.prefill_tokens).bit_length())
        self.prefill.observe(size, (1.0, work.prefill_tokens / 1e3, work.pairs / 1e9), rest)

    def step_ms(self, work: StepWork) -> float:
        if not work.prefill_tokens:
            return self.decode_ms(work.decodes, work.kv_tokens)
        return self.base_ms(work.decodes, work.kv_tokens) + self.tokens_ms(work.prefill_tokens, work.pairs)

    def decode_ms(self, decodes: int, kv_tokens: int) -> float:
        """A decode-only step."""
        return self.decode.coefficients[0] + self._decode_terms(decodes, kv_tokens) if decodes else 0.0

    def base_ms(self, decodes: int, kv_tokens: int) -> float:
        """A prefill-carrying step, without its prompt tokens."""
        return self.prefill.coefficients[0] + self._decode_terms(decodes, kv_tokens)

    def tokens_ms(self, tokens: int, pairs: float) -> float:
        """What prompt tokens add to a step."""
        return self.prefill.coefficients[1] * tokens / 1e3 + self.prefill.coefficients[2] * pairs / 1e9

    def chunk_ms(self, start: int, length: int) -> float:
        return self.tokens_ms(length, chunk_pairs(start, length))

    def tokens_within(self, ms: float, start: int) -> int:
        """The most prompt tokens behind `start` that add no more than `ms`."""
        if ms <= 0:
            return 0
        per_token = self.prefill.coefficients[1] / 1e3 + self.prefill.coefficients[2] * start / 1e9
        quadratic = self.prefill.coefficients[2] / 2e9
        if quadratic * ms <= 1e-12 * per_token * per_token:
            return int(ms / per_token) if per_token > 0 else 1 << 30
        return int(((per_token * per_token + 4 * quadratic * ms) ** 0.5 - per_token) / (2 * quadratic))

    def _decode_terms(self, decodes: int, kv_tokens: int) -> float:
        return self.decode.coefficients[1] * decodes + self.decode.coefficients[2] * kv_tokens / 1e6
