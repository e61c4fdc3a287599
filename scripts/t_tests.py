"""Student's t, its tests (paired, one sample, Welch's) and Holm's correction, with nothing but Python's standard library."""

import dataclasses
import math
import statistics


def _continued_fraction(a, b, x):
    """Of the incomplete beta function, by Lentz's method; converges fast for x < (a + 1) / (a + b + 2)."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 1000):
        for numerator in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                          -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):  # fmt: skip
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def incomplete_beta(a, b, x):
    """Regularised: I_x(a, b), the distribution function of Beta(a, b)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, 1 - x) / b


def t_two_sided(t, freedom):
    """P(|T| >= |t|)"""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_cdf(t, freedom):
    half = t_two_sided(t, freedom) / 2
    return 1 - half if t > 0 else half


def t_quantile(p, freedom):
    """The t with t_cdf(t) = p, by bisection."""
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    two_sided = 2 * (1 - p)
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > two_sided:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_two_sided(middle, freedom) > two_sided:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclasses.dataclass
class Paired:
    """Mean of paired differences. One pair has no spread: then deviation, interval and p are None."""

    n: int
    mean: float
    deviation: float | None = None  # standard deviation of the differences
    low: float | None = None  # confidence interval of the mean
    high: float | None = None
    p: float | None = None  # of the paired t-test, two-sided


def paired(differences, confidence=0.95):
    """None without differences."""
    n = len(differences)
    if n == 0:
        return None
    mean = statistics.fmean(differences)
    if n == 1:
        return Paired(1, mean)
    deviation = statistics.stdev(differences)
    error = deviation / math.sqrt(n)
    half = t_quantile((1 + confidence) / 2, n - 1) * error
    if error > 0:
        p = t_two_sided(mean / error, n - 1)
    else:
        p = 1.0 if mean == 0 else 0.0
    return Paired(n, mean, deviation, mean - half, mean + half, p)


def mean_below(values, bound):
    """p of the one-sided one-sample t-test: small if the mean of what the values are drawn from is below the bound. None without a
    spread to judge by: fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if mean < bound else 1.0
    return t_cdf((mean - bound) / error, len(values) - 1)


def welch(a, b):
    """p of Welch's t-test, two-sided: do two samples of different spread have the same mean? None if one has fewer than two values."""
    if min(len(a), len(b)) < 2:
        return None
    errors = [statistics.variance(values) / len(values) for values in (a, b)]  # squared, of the means
    difference, error = statistics.fmean(a) - statistics.fmean(b), sum(errors)
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    freedom = error**2 / sum(e**2 / (len(values) - 1) for e, values in zip(errors, (a, b)))
    return t_two_sided(difference / math.sqrt(error), freedom)


def holm(p_values):
    """Adjusted for having been chosen among all of them (Holm 1979), in the order given; None stays None."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted, largest = [None] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = largest
    return adjusted
