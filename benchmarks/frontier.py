"""What cheaper forms of a consistency term cost, and what is left of its gradient, on a real model and batch.

A gradient is random: dropout masks, noise, and the examples or tokens that are left out are drawn. Its mean says
whether a cheaper form aims at the same; one step says how far a single draw points that way. Norms of means are
estimated from products of different draws, so that randomness does not add to them.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.steps import criterion_step
from benchmarks.worker_process import count_flops
from seqreg.build import build_term
from seqreg.context import Evaluation
from seqreg.criterion import Criterion
from seqreg.errors import Advice, BadInput
from seqreg.integrations.hf import context
from seqreg.integrations.hf import model as hf
from seqreg.objective import Part, WeightedSum, evaluate
from seqreg.schedules import weight_at
from seqreg.term import Term
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import completions
from seqreg.workbench.data.encoding import Encoded, collator
from seqreg.workbench.run.train import prepare

Batch = dict[str, Any]
Difference = Literal["noise", "masks"]
WHOLE: dict[Difference, dict[str, Any]] = {
    "noise": {"weight": 1.0, "scale": 0.1, "relative": True, "dropout": "shared"},
    "masks": {"weight": 1.0, "scale": 0.0, "dropout": "independent"},
}
"""Settings of R3F: its two passes differ in noise alone, or in dropout masks alone, which is R-Drop's divergence."""


@dataclass(frozen=True)
class GradientCost:
    """A form of a term.

    Args:
        flops: of the whole step, over those of a plain one
        cosine: between its mean gradient and that of the whole term
        norm: of its mean gradient, over that of the whole term
        step_cosine: between one gradient and the mean one of the whole term: the root of the mean square of a
            gradient takes the place of its norm
        error: the standard error of `step_cosine`, of the draws of this form
    """

    name: str
    flops: float
    cosine: float
    norm: float
    step_cosine: float
    error: float


@dataclass(frozen=True)
class Frontier:
    model: str
    examples: int
    draws: int
    rows: dict[str, tuple[GradientCost, ...]]
    """By what the two passes differ in."""


@dataclass
class _Gradients:
    """Draws of a gradient.

    Args:
        total: their sum                                                            # [P]
        squares: the squared norm of each
        products: of each with the mean of the whole term; of the whole term with the mean of the draws before
    """

    total: Tensor
    squares: list[float]
    products: list[float]

    @property
    def draws(self) -> int:
        return len(self.squares)

    @property
    def mean_square(self) -> float:
        """The squared norm of the mean, without bias; not below 0."""
        pairs = float(self.total.double().square().sum()) - sum(self.squares)
        return max(pairs / (self.draws * (self.draws - 1)), 0.0)

    def compare(self, name: str, flops: float, whole: _Gradients) -> GradientCost:
        size, size_of_whole = math.sqrt(self.mean_square), math.sqrt(whole.mean_square)
        product = whole.mean_square if self is whole else statistics.fmean(self.products)
        unit = math.sqrt(statistics.fmean(self.squares)) * size_of_whole
        several = len(self.products) > 1
        error = statistics.stdev(self.products) / math.sqrt(len(self.products)) if several else math.nan
        return GradientCost(
            name, flops, _ratio(product, size * size_of_whole), _ratio(size, size_of_whole), _ratio(product, unit),
            _ratio(error, unit),
        )  # fmt: skip


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def measure(
    run: Run,
    draws: int = 32,
    progress: Callable[[str], None] | None = None,
) -> Frontier:
    """Every form of R3F on one batch of a recipe's training data, with its model as it is.

    Args:
        draws: gradients of every form
        progress: told what is being done
    """
    if draws < 2:
        raise BadInput(f"draws={draws}: expected a whole number >= 2, as two gradients are compared")
    model, batch = model_and_batch(run)
    plain = _flops(model, batch)
    found: dict[str, tuple[GradientCost, ...]] = {}
    for difference, settings in WHOLE.items():
        whole: _Gradients | None = None
        rows = []
        for number, (name, changes) in enumerate(forms(difference, model).items()):
            if progress is not None:
                progress(f"{difference}: {name}")
            term = build_term("r3f", {**settings, **changes})
            gradients = draw(term, model, batch, range(number * draws, (number + 1) * draws), whole)
            whole = gradients if whole is None else whole
            rows.append(gradients.compare(name, _flops(model, batch, term) / plain, whole))
        found[difference] = (rows[0], *(every(rows[0], k) for k in (2, 4)), *rows[1:])
    return Frontier(run.config.model.name or type(model).__name__, len(batch["input_ids"]), draws, found)


def model_and_batch(run: Run) -> tuple[Any, Batch]:
    """The model of a recipe in training mode, and the first batch of its training data."""
    loaded = prepare(run)
    prompt = completions.prompt_of(run, loaded.model)
    encoded = Encoded(loaded.splits.first, loaded.tokenizer, run.config, prompt)
    collate = collator(loaded.tokenizer, run.card.kind, prompt)
    size = min(run.config.optimisation.per_device_train_batch_size, len(encoded))
    return loaded.model.train(), dict(collate([encoded[index] for index in range(size)]))


def forms(difference: Difference, model: Any) -> dict[str, dict[str, Any]]:
    """The whole term first, then cheaper forms by name."""
    found: dict[str, dict[str, Any]] = {"whole": {}}
    for number, (site, stack) in enumerate(hf.stacks(hf.unwrap(model)).items()):
        layers = len(hf.layers(stack))
        shares = (0, 0.5) if number else (0.25, 0.5, 0.75)
        for layer in dict.fromkeys(round(layers * share) for share in shares):
            found[f"{site}, layer={layer}"] = {"where": site, "layer": layer}
    found["grad=clean, weight doubled"] = {"grad": "clean", "weight": 2.0}
    found["token_fraction=0.5"] = {"token_fraction": 0.5}
    if difference == "masks":  # examples cannot be left out where masks are shared
        found["example_fraction=0.5"] = {"example_fraction": 0.5}
    return found


def every(whole: GradientCost, k: int) -> GradientCost:
    """`Every(k)` of the whole term: k times its weight at every k-th step, so that squares are k times as large."""
    flops = 1 + (whole.flops - 1) / k
    less = 1 / math.sqrt(k)
    return replace(
        whole, name=f"Every(k={k})", flops=flops, step_cosine=less * whole.step_cosine, error=less * whole.error
    )


def draw(
    term: Term, model: Any, batch: Mapping[str, Any], seeds: Sequence[int], whole: _Gradients | None = None
) -> _Gradients:
    """Gradients of a term alone, without the base loss; forms that are compared have different seeds."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    drawn = _Gradients(torch.zeros(sum(parameter.numel() for parameter in parameters)), [], [])
    for seed in seeds:
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        (weight_at(term.weight, 0) * value(term, model, batch)).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in parameters])
        drawn.squares.append(float(gradient.double().square().sum()))
        other = drawn if whole is None else whole
        before = drawn.draws - 1 if whole is None else whole.draws
        if before:
            drawn.products.append(float(gradient.double() @ other.total.double()) / before)
        drawn.total += gradient
    model.zero_grad(set_to_none=True)
    return drawn


def value(term: Term, model: Any, batch: Mapping[str, Any]) -> Tensor:
    """A term that consists of parts, unweighted, on one batch."""
    evaluation = Evaluation(context(model, batch, step=0))
    extras = term.declare(evaluation).extra
    for extra in extras:
        if extra.resumes_at is not None:
            evaluation.forward.keep_input(*extra.resumes_at)
    declared = term.loss(evaluation, [evaluation.run(extra) for extra in extras])
    assert isinstance(declared, (Part, WeightedSum))
    parts = declared.parts if isinstance(declared, WeightedSum) else ((1.0, declared),)
    return evaluate([(factor, part, evaluation) for factor, part in parts])[0]


def _flops(model: Any, batch: Batch, *terms: Term) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Advice)  # a weight of 1 is not to be trained with
        return count_flops(criterion_step(Criterion(*terms), model, batch))


def plot(frontier: Frontier, path: str) -> None:
    """The cost of a step against the cosine of one gradient, a panel for noise and one for masks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"noise": "other noise, the same dropout masks", "masks": "other dropout masks (R-Drop's divergence)"}
    figure, axes = pyplot.subplots(
        1, len(frontier.rows), figsize=(7.4 * len(frontier.rows), 4.4), squeeze=False, layout="constrained"
    )
    for axis, (difference, rows) in zip(axes[0], frontier.rows.items(), strict=True):
        best = [row for row in rows if not any(_dominates(other, row) for other in rows)]
        best.sort(key=lambda row: row.flops)
        axis.plot([row.flops for row in best], [row.step_cosine for row in best], color="#999999", linewidth=1)
        for marker, row in zip("*ovs^<>DPXdhp8", rows, strict=False):
            options = {"marker": marker, "linestyle": "none", "markersize": 7, "capsize": 2, "elinewidth": 0.8}
            axis.errorbar(row.flops, row.step_cosine, row.error, label=row.name, **options)
        axis.set_title(titles[difference], fontsize=10)
        axis.set_xlabel("operations of a step, plain = 1")
        axis.set_xlim(1.0, None)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes[0][0].set_ylabel("cosine of one gradient with\nthe mean of the whole term")
    figure.suptitle(f"R3F, {frontier.model.rstrip('/').rsplit('/', 1)[-1]}: regularization per operation")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _dominates(one: GradientCost, other: GradientCost) -> bool:
    """Whether one is no dearer and points no worse, and is better in either."""
    no_worse = one.flops <= other.flops and one.step_cosine >= other.step_cosine
    return no_worse and (one.flops, one.step_cosine) != (other.flops, other.step_cosine)
