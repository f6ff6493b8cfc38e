"""What every term would do on a model: its value on one batch, what it costs there, and what to set instead."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqreg.advice import negligible
from seqreg.context import Context, Evaluation
from seqreg.criterion import Criterion, LossReport
from seqreg.errors import Advice, BadInput
from seqreg.integrations.hf import context
from seqreg.integrations.hf.reference import adapted
from seqreg.overrides import trained
from seqreg.term import Term
from seqreg.terms.r3f import R3F

STEPS, LEARNING_RATE, OF_ADAPTERS = 3, 1e-5, 1e-3
"""Plain steps of AdamW on the batch before anything is measured, and their learning rates: what compares with the start
is 0 there, and so is what new adapters add. Those of adapters move every entry as fifteen steps at 2e-4 would."""
WEAK = 1e-4
"""A part of the loss below this share of the base loss hardly changes the gradient."""
Batch = Mapping[str, Any]
Verdict = Literal["counts", "weak", "nothing", "too much", "refused", "changes the input", "begins at 0"]


@dataclass(frozen=True)
class TermAdvice:
    """One term on one model and batch.

    Args:
        term: as `--terms` takes it
        value: unweighted, without the task loss of further passes; None where the term was refused
        part_over_base: weighted, over the base loss
        forwards, backwards: extra passes, counted
        seconds: CPU seconds of a loss and its gradients; wall time on an accelerator
        times_plain: the same over those of the base loss alone
        sources: where a term has noise and new dropout masks: its value with both, with the masks alone (scale=0) and
            with the noise alone (dropout="shared"), on the same draws
        note: what the term itself says: why it was refused, or does nothing, and what to set
    """

    term: str
    verdict: Verdict
    value: float | None = None
    part_over_base: float | None = None
    forwards: int = 0
    backwards: int = 0
    seconds: float | None = None
    times_plain: float | None = None
    sources: tuple[float, float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class ModelAdvice:
    """What a model is, as far as terms care, and every term on it.

    Args:
        dropout: the positive rates that its configuration and its adapters name
        embedding_rms: of the embedding weights: noise is large or small beside it
        base_loss, seconds: of the batch, after the plain steps; of a loss and its gradients
    """

    model: str
    kind: str
    parameters: int
    trained_parameters: int
    dropout: dict[str, float]
    embedding_rms: float
    precision: str
    tokens: int
    base_loss: float
    seconds: float
    terms: list[TermAdvice]


def advise(
    model: Any, batch: Batch, terms: Mapping[str, Term] | Sequence[Term], *, precision: str = "fp32", repeats: int = 2
) -> ModelAdvice:
    """Measure terms on a transformers model and a batch with labels; weights, modes and generators stay as they are.

    Args:
        terms: a list, or by the names that they are to have in the answer
        precision: "bf16" computes passes under autocast
        repeats: timings of every term; the shortest counts
    """
    with _restored(model), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        model.train()
        ctx = context(model, batch, step=0)
        named = terms if isinstance(terms, Mapping) else {term.name: term for term in terms}
        criteria = {name: Criterion(term) for name, term in named.items()}
        refused = _start(ctx, criteria)
        _plain_steps(model, batch)
        report, plain = _timed(model, batch, Criterion(), repeats)
        base = report.parts["base"]
        advice = [
            TermAdvice(name, "refused", note=refused[name])
            if name in refused
            else _advice(name, model, batch, criterion, base, plain, repeats)
            for name, criterion in criteria.items()
        ]
    parameters = [p.numel() for p in model.parameters()]
    weights = model.get_input_embeddings().weight.detach()
    return ModelAdvice(
        type(model).__name__, ctx.kind, sum(parameters), sum(p.numel() for p in trained(model).values()),
        dropout_rates(model), float(weights.float().square().mean().sqrt()), precision, int(ctx.mask.sum()),
        float(base), plain, advice,
    )  # fmt: skip


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Put weights, gradients, mode and generators back."""
    training, weights = model.training, {name: p.detach().clone() for name, p in trained(model).items()}
    try:
        with torch.random.fork_rng(devices=[] if model.device.type == "cpu" else None):
            torch.manual_seed(0)
            yield
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in trained(model).items():
                parameter.copy_(weights[name])


def _start(ctx: Context, criteria: Mapping[str, Criterion]) -> dict[str, str]:
    """Show the starting weights to terms that compare with them; returns the refusals, by name."""
    refused = {}
    for name, criterion in criteria.items():
        if criterion.terms[0].hints.starts_at_zero:
            try:
                with torch.no_grad():
                    criterion(ctx)
            except BadInput as error:
                refused[name] = str(error)
    return refused


def _plain_steps(model: nn.Module, batch: Batch) -> None:
    rate = LEARNING_RATE if adapted(model) is None else OF_ADAPTERS
    optimizer = torch.optim.AdamW(trained(model).values(), rate, weight_decay=0.0)
    for _ in range(STEPS):
        Criterion()(context(model, batch, step=0)).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _timed(model: Any, batch: Batch, criterion: Criterion, repeats: int) -> tuple[LossReport, float]:
    """The loss of the first call, and the seconds of the shortest."""
    device = model.device.type
    clock, spent, first = time.process_time if device == "cpu" else time.perf_counter, list[float](), None
    for _ in range(repeats):
        begin = clock()
        report = criterion(context(model, batch, step=0))
        report.total.backward()  # type: ignore[no-untyped-call]
        if device != "cpu":
            torch.accelerator.synchronize()
        spent.append(clock() - begin)
        model.zero_grad(set_to_none=True)
        first = first or report
    assert first is not None
    return first, min(spent)


def _advice(
    name: str, model: nn.Module, batch: Batch, criterion: Criterion, base: Tensor, plain: float, repeats: int
) -> TermAdvice:
    term = criterion.terms[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            report, seconds = _timed(model, batch, criterion, repeats)
            if term.name not in report.parts:
                raise BadInput("its weight is 0 at step 0, so there is nothing to measure")
            sources = _sources(model, batch, term)
        except BadInput as error:
            return TermAdvice(name, "refused", note=str(error))
    lines = [str(warning.message) for warning in said if issubclass(warning.category, Advice)]
    part = float(report.parts[term.name]) - float(report.tasks.get(term.name, 0.0))  # without further task losses
    value = part / report.weights[term.name]
    verdict, share, cost = _verdict(term, context(model, batch, step=0), part, base), part / float(base), term.cost
    note = "; ".join(line.removeprefix(f"{term.name}: ") for line in lines)
    passes = (cost.forwards, cost.backwards)
    return TermAdvice(name, verdict, value, share, *passes, seconds, seconds / plain, sources, note)


def _sources(model: Any, batch: Batch, term: Term) -> tuple[float, float, float] | None:
    """Values with noise and new dropout masks, with the masks alone and with the noise alone; None for other terms."""
    if not isinstance(term, R3F) or term.dropout != "independent" or not dropout_rates(model):
        return None

    def value(variant: Term) -> float:
        with torch.random.fork_rng(devices=[] if model.device.type == "cpu" else None), torch.no_grad():
            torch.manual_seed(0)
            report = Criterion(variant)(context(model, batch, step=0))
        return float(report.parts[term.name]) / report.weights[term.name]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Advice)  # of a variant that nobody chose
        noise = value(replace(term, dropout="shared")) if term.scale else 0.0
        return value(term), value(replace(term, scale=0.0)), noise


def _verdict(term: Term, ctx: Context, part: float, base: Tensor) -> Verdict:
    """What a weighted term is beside the base loss."""
    if term.declare(Evaluation(ctx)).input_shift is not None:
        return "changes the input"
    if term.hints.starts_at_zero and abs(part) < WEAK * float(base):
        return "begins at 0"
    if negligible(abs(part), base, float(base)):
        return "nothing"
    return "too much" if part > float(base) else "weak" if abs(part) < WEAK * float(base) else "counts"


def dropout_rates(model: Any) -> dict[str, float]:
    """The positive dropout rates that a model's configuration and its adapters name."""
    settings = model.config.to_dict()
    rates = {
        key: float(value)
        for key, value in settings.items()
        if ("dropout" in key or "pdrop" in key) and isinstance(value, (int, float)) and value > 0
    }
    of_adapters = max((config.lora_dropout for config in getattr(model, "peft_config", {}).values()), default=0.0)
    return {**rates, "lora_dropout": of_adapters} if of_adapters else rates
