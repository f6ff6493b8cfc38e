"""How often tests reject when there is nothing to find: `python -m tests.metrics.simulate` (about a minute).

Score of a method, seed s, example e:  mean + seed effect + example effect (the same for both methods) + an effect of
the method on the example (mean 0) + noise; the two methods are equally good by construction, so every rejection is an
error. Sizes are in points of ROUGE.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqreg.metrics import statistics
from seqreg.metrics.bootstrap import resampled_means
from seqreg.metrics.texts import CorpusScore

Array = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Standard deviations of the effects; `skewed` draws them from an exponential distribution instead of a normal."""

    name: str
    seeds: int
    examples: int
    seed: float = 0.4
    method: float = 4.0
    noise: float = 8.0
    skewed: bool = False

    def draw(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Scores of two equally good methods, [seeds, examples]."""
        shape = (self.seeds, self.examples)
        both = 40 + 15 * rng.standard_normal(self.examples)
        first, second = (
            both + self.seed * self._unit(rng, (self.seeds, 1)) + self.noise * self._unit(rng, shape) for _ in range(2)
        )
        return first, second + self.method * self._unit(rng, (1, self.examples))

    def _unit(self, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        return rng.exponential(size=shape) - 1 if self.skewed else rng.standard_normal(shape)


WORLDS = (
    World("5 seeds, 500 examples", 5, 500),
    World("5 seeds, 2000 examples", 5, 2000),
    World("10 seeds, 500 examples", 10, 500),
    World("3 seeds, 500 examples", 3, 500),
    World("5 seeds, seeds matter most", 5, 500, seed=2.0),
    World("5 seeds, examples matter most", 5, 500, seed=0.02, method=12.0),
    World("5 seeds, noise alone", 5, 500, seed=0.0, method=0.0),
    World("5 seeds, skewed effects", 5, 500, seed=1.0, skewed=True),
)


def few_examples(examples: int) -> tuple[World, ...]:
    """Worlds with so few test examples that resampling them may err."""
    return (
        World("5 seeds", 5, examples),
        World("10 seeds", 10, examples),
        World("5 seeds, seeds matter most", 5, examples, seed=2.0),
        World("5 seeds, examples matter most", 5, examples, seed=0.02, method=12.0),
        World("5 seeds, skewed effects", 5, examples, seed=1.0, skewed=True),
    )


def level(world: World, comparisons: int = 500, resamples: int = 999) -> float:
    """The share of comparisons in which the two-level bootstrap rejects at 5%."""
    rng, found = np.random.default_rng(1), 0
    for place in range(comparisons):
        p = statistics.two_level(*world.draw(rng), resamples=resamples, seed=place).p
        found += p is not None and p <= 0.05
    return found / comparisons


def classes_level(examples: int, seeds: int = 5, comparisons: int = 500) -> float:
    """The same of Welch's test on accuracies of one test set: a row is right if its ease, the seed and noise say so."""
    rng, found = np.random.default_rng(2), 0
    for _ in range(comparisons):
        ease = rng.standard_normal(examples) + 0.3
        scores = [
            100 * (ease + 0.1 * rng.standard_normal((seeds, 1)) + rng.standard_normal((seeds, examples)) > 0).mean(1)
            for _ in range(2)
        ]
        p = statistics.welch(list(scores[0]), list(scores[1])).p
        found += p is not None and p <= 0.05
    return found / comparisons


def error_counts(
    world: World, rng: np.random.Generator, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Edits of two equally good methods, [seeds, examples]: every symbol is wrong by a chance of its own.

    Effects are those of a world, on the logit of that chance, a tenth of their size; each method has its own effect on
    an example, drawn alike.
    """
    ease, sides = 1.5 * rng.standard_normal(world.examples) - 2, []
    for _ in range(2):
        effect = world.method * rng.standard_normal((1, world.examples)) / 2**0.5
        noise = world.noise * rng.standard_normal((world.seeds, world.examples))
        logit = ease + (effect + noise + world.seed * rng.standard_normal((world.seeds, 1))) / 10
        sides.append(rng.binomial(lengths, 1 / (1 + np.exp(-logit))))
    return sides[0], sides[1]


def corpus_level(world: World, comparisons: int = 500, resamples: int = 999) -> dict[str, float]:
    """Shares of comparisons of error rates that are rejected at 5%: by pseudo-values, and by seeds alone."""
    rng, found = np.random.default_rng(3), {"two-level, pseudo-values": 0, "Welch": 0}
    for place in range(comparisons):
        lengths = rng.integers(2, 20, world.examples)
        sides = [
            np.stack([_error_rate(np.stack([edits, lengths], 1)).pseudovalues() for edits in side])
            for side in error_counts(world, rng, lengths)
        ]
        ps = {
            "two-level, pseudo-values": statistics.two_level(sides[0], sides[1], resamples=resamples, seed=place).p,
            "Welch": statistics.welch(list(sides[0].mean(1)), list(sides[1].mean(1))).p,
        }
        for name, p in ps.items():
            found[name] += p is not None and p <= 0.05
    return {name: count / comparisons for name, count in found.items()}


def _error_rate(table: NDArray[np.int64]) -> CorpusScore:
    return CorpusScore(table, lambda sums: float(sums[0] / sums[1]))


def naive(first: Array, second: Array, resamples: int, seed: int) -> float:
    """The p value of a two-level percentile bootstrap without any correction."""
    d, rng = second - first, np.random.default_rng(seed)
    n, count = d.shape
    means = [
        d[np.ix_(rng.integers(0, n, n), rng.integers(0, count, count))].mean() for _ in range(resamples)
    ]  # fmt: skip
    below = float(np.mean(np.asarray(means) <= 0))
    return 2 * min(below, 1 - below)


def one_level(first: Array, second: Array, resamples: int, seed: int) -> float:
    """The p value of the paired bootstrap over the examples of one model each.      first, second [examples]

    It tests these two models. Taken for a test of two methods it rejects far too often, whatever the number of
    examples: the more there are, the more.
    """
    d = second - first
    drift = np.abs(resampled_means((d - d.mean())[None], resamples, np.random.default_rng(seed))[0])
    return float((1 + (drift >= abs(d.mean()) - 1e-12).sum()) / (resamples + 1))


def rates(world: World, comparisons: int = 500, resamples: int = 1999, slow: bool = False) -> dict[str, float]:
    """Shares of comparisons in which each test rejects at 5%."""
    rng, found = np.random.default_rng(1), dict[str, list[float]]()
    for place in range(comparisons):
        first, second = world.draw(rng)
        ps = {
            "two-level": statistics.two_level(first, second, resamples=resamples, seed=place).p,
            "one seed, paired": one_level(first[0], second[0], resamples, place),
            "Welch": statistics.welch(list(first.mean(1)), list(second.mean(1))).p,
        }
        if slow:
            ps["naive two-level"] = naive(first, second, 499, place)
        for name, p in ps.items():
            assert p is not None
            found.setdefault(name, []).append(p)
    return {name: float(np.mean(np.asarray(ps) <= 0.05)) for name, ps in found.items()}


def coverage(seeds: int, draws: int = 1000, resamples: int = 1999) -> dict[str, float]:
    """Shares of 95% intervals that hold the true mean of normal scores of so many seeds."""
    rng, hits = np.random.default_rng(seeds), {"Student": 0, "BCa": 0}
    for place in range(draws):
        scores = rng.standard_normal(seeds)
        ends = {
            "Student": statistics.student(scores),
            "BCa": statistics.bca(scores, resamples=resamples, seed=place),
        }
        for name, (low, high) in ends.items():
            hits[name] += low <= 0 <= high
    return {name: count / draws for name, count in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=500)
    parser.add_argument("--resamples", type=int, default=1999)
    parser.add_argument("--intervals", action="store_true", help="how often intervals of a mean hold it, instead")
    parser.add_argument("--examples", action="store_true", help="how few test examples are too few, instead")
    parser.add_argument("--corpus", action="store_true", help="error rates, which are no means over examples, instead")
    asked = parser.parse_args()
    if asked.corpus:
        print("| world | two-level, pseudo-values | Welch over seeds |\n|---|--:|--:|")
        for world in WORLDS[:-1]:
            found = [*corpus_level(world, asked.comparisons, asked.resamples).values()]
            print(f"| {world.name} | " + " | ".join(f"{100 * value:.1f}%" for value in found) + " |", flush=True)
        return
    if asked.examples:
        names = [world.name for world in few_examples(1)]
        print(f"| examples | {' | '.join(names)} | classes |\n|--:|{'--:|' * (len(names) + 1)}")
        for count in (2, 3, 5, 10, 20, 50):
            found = [*(level(world, asked.comparisons) for world in few_examples(count))]
            found.append(classes_level(count, comparisons=asked.comparisons))
            print(f"| {count} | " + " | ".join(f"{100 * value:.1f}%" for value in found) + " |", flush=True)
        return
    if asked.intervals:
        print("| seeds | Student | BCa |\n|--:|--:|--:|")
        for seeds in (2, 3, 5, 10, 20):
            found = coverage(seeds)
            print(f"| {seeds} | " + " | ".join(f"{100 * value:.0f}%" for value in found.values()) + " |", flush=True)
        return
    print(f"Rejections at 5% in {asked.comparisons} comparisons of two equally good methods\n")
    print("| world | two-level | one seed, paired | Welch over seeds | two-level, uncorrected |\n|---|---|---|---|---|")
    for world in WORLDS:
        found = rates(world, asked.comparisons, asked.resamples, slow=True)
        print(f"| {world.name} | " + " | ".join(f"{100 * value:.1f}%" for value in found.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
