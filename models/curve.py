"""A measured curve: straight lines between the points, bisect for one value, numpy for many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Curve:
    """Piecewise-linear y(x) through points with ascending `xs`; both of shape (m,), m >= 1.

    Below the first point the first value holds: a kernel has a floor. Above the last point the curve goes
    on with the mean slope of its upper half, which single noisy points can't bend; callers count such use
    (`models/domain.py`). Interpolation is linear, not logarithmic: kernel time is made of tiles, and tiles
    add up.
    """

    __slots__ = ("_slopes", "xs", "ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        if len(xs) != len(ys) or not xs:
            raise ValueError(
                f"a curve needs as many y as x, and one at least: {len(xs)} x, {len(ys)} y"
            )
        if any(b <= a for a, b in pairwise(xs)):
            raise ValueError("a curve's x must ascend")
        self.xs = [float(x) for x in xs]
        self.ys = [float(y) for y in ys]
        slopes = [
            (y1 - y0) / (x1 - x0)
            for x0, x1, y0, y1 in zip(self.xs, self.xs[1:], self.ys, self.ys[1:], strict=False)
        ]
        self._slopes = [*slopes, self._upper_slope()]

    def _upper_slope(self) -> float:
        last = self.xs[-1]
        at = next((i for i, x in enumerate(self.xs) if x >= last / 2), 0)
        if at == len(self.xs) - 1:
            at = len(self.xs) - 2
        if at < 0:
            return 0.0
        return max(0.0, (self.ys[-1] - self.ys[at]) / (last - self.xs[at]))

    def __call__(self, x: float) -> float:
        """y at one x."""
        xs = self.xs
        i = bisect_right(xs, x) - 1
        if i < 0:
            return self.ys[0]
        return self.ys[i] + self._slopes[i] * (x - xs[i])

    def many(self, x: FloatArray) -> FloatArray:
        """y at each x; the same additions in the same order as `__call__`, so the bits are equal."""
        xs = np.asarray(self.xs)
        i = np.searchsorted(xs, x, side="right") - 1
        below = i < 0
        i = np.where(below, 0, i)
        y = np.asarray(self.ys)[i] + np.asarray(self._slopes)[i] * (x - xs[i])
        result: FloatArray = np.where(below, self.ys[0], y)
        return result


def blend(a: Curve, b: Curve, weight: float) -> Curve:
    """(1 - weight) a + weight b on the union of their points."""
    xs = sorted({*a.xs, *b.xs})
    return Curve(xs, [a(x) + weight * (b(x) - a(x)) for x in xs])


def bracket(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """(i, j, w): x lies between axis[i] and axis[j] at weight w of j. Outside: the nearest end, or w > 1.

    Below the first point the first point stands; above the last the last two extrapolate.
    """
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0, 0.0
    j = min(bisect_right(axis, x), len(axis) - 1)
    i = j - 1
    return i, j, (x - axis[i]) / (axis[j] - axis[i])
