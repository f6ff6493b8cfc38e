"""What every term promises, on every architecture. Terms are discovered; a new one is tested without being listed."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch

from seqreg import (
    BadInput,
    Context,
    Criterion,
    LossReport,
    Pass,
    PassRequest,
    Term,
    build_criterion,
    build_term,
)
from seqreg.build import term_names
from seqreg.errors import Advice
from seqreg.integrations.hf import context
from tests.helpers import tiny_models

OUTSIDE = "tests.helpers.outside_term.ConfidencePenalty"
ATTACK = "tests.helpers.outside_attack.WorstCase"
TERMS = [*term_names(), OUTSIDE, ATTACK]
everywhere = pytest.mark.parametrize("model", tiny_models.MODELS)
every_term = pytest.mark.parametrize("term", TERMS)


class Counter:
    """Counts the passes that a context makes through its model."""

    def __init__(self, ctx: Context, fail_at: int | None = None) -> None:
        self.forwards, self.backwards, self.fail_at = 0, 0, fail_at
        self.inner, self.forward = ctx.forward.run, ctx.forward
        ctx.forward.run = self.run  # type: ignore[method-assign]

    def run(self, request: PassRequest) -> Pass:
        """A pass of a larger batch counts as several."""
        size = 1 if request.rows is None else len(request.rows) // self.forward.batch_size
        view = self.inner(request)
        self.forwards += size
        if self.fail_at is not None and self.forwards >= self.fail_at:
            raise RuntimeError("injected")
        output = view.logits if view.projection is None else view.projection.states
        if output.requires_grad:
            output.register_hook(lambda _: self.backward(size))
        return view

    def backward(self, size: int) -> None:
        self.backwards += size


def second_step(net: Any, name: str, *terms: Term, **batch: Any) -> LossReport:
    """The loss at the second step of training: a term that remembers has something to compare with."""
    criterion = Criterion(*terms)
    torch.manual_seed(3)
    with torch.no_grad():
        criterion(context(net, tiny_models.batch(name), step=0), training=True)
        for index, parameter in enumerate(net.parameters()):
            parameter.mul_(1.0 + 0.01 * (-1) ** index)
    torch.manual_seed(3)
    return criterion(context(net, tiny_models.batch(name, **batch), step=1))


@every_term
@everywhere
def test_value_and_gradient(term: str, model: str) -> None:
    net, plain = tiny_models.make(model), tiny_models.make(model)
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, float(index))
    modes = [module.training for module in net.modules()]
    report = second_step(net, model, build_term(term))
    (name,) = report.parts.keys() - {"base"}
    value = report.values[name]
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert modes == [module.training for module in net.modules()]
    for index, parameter in enumerate(net.parameters()):
        assert (parameter.grad == float(index)).all(), "a term must leave .grad alone"
    assert report.total.item() == pytest.approx(sum(part.item() for part in report.parts.values()), rel=1e-6)
    net.zero_grad()
    report.total.backward()
    second_step(plain, model).total.backward()
    pairs = [(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True) if a.grad is not None]
    assert all(torch.isfinite(with_term).all() for with_term, _ in pairs)
    assert any(not torch.equal(with_term, without) for with_term, without in pairs), (
        "the term must reach the parameters"
    )


@every_term
@everywhere
def test_same_seed_same_value(term: str, model: str) -> None:
    reports = [second_step(tiny_models.make(model), model, build_term(term)) for _ in range(2)]
    assert reports[0].total == reports[1].total
    assert reports[0].parts == reports[1].parts


@every_term
@everywhere
def test_padding_does_not_matter(term: str, model: str) -> None:
    quiet = {"uegr": {"low": 0.0, "high": 0.0}}.get(term, {})  # a term that sets dropout itself

    def report(**batch: Any) -> LossReport:
        net = tiny_models.dropout_off(tiny_models.make(model))
        return second_step(net.double() if exact else net, model, build_term(term, {"name": "term", **quiet}), **batch)

    exact = model != "prophetnet"  # which gives NaN in float64
    narrow, wide = report(), report(pad=4)
    tolerance = {"rel": 1e-6, "abs": 1e-14} if exact else {"rel": 1e-3, "abs": 1e-9}
    if not exact and term in ("freelb", "uegr"):  # differences of two losses, which are rounded each
        tolerance["abs"] = 2 * torch.finfo(torch.float32).eps * narrow.total.item()
    assert wide.values["term"].item() == pytest.approx(narrow.values["term"].item(), **tolerance)
    assert wide.total.item() == pytest.approx(narrow.total.item(), rel=1e-6)


def started(terms: list[Term], net: Any, model: str) -> Criterion:
    """A criterion past the first step, in which a term may measure its start."""
    criterion = Criterion(*terms)
    if any(term.stateful for term in terms):
        criterion(context(net, tiny_models.batch(model), step=0))
    return criterion


@every_term
@everywhere
def test_passes_are_as_stated(term: str, model: str) -> None:
    one, net = build_term(term), tiny_models.make(model)
    criterion = started([one], net, model)
    counter = Counter(ctx := context(net, tiny_models.batch(model), step=0))
    criterion(ctx).total.backward()
    assert counter.forwards == 1 + one.cost.forwards
    assert counter.backwards == 1 + one.cost.backwards


@every_term
@everywhere
def test_clean_pass_runs_once_for_any_number_of_terms(term: str, model: str) -> None:
    terms = [build_term(term, {"name": name}) for name in ("one", "two", "three")]
    net = tiny_models.make(model)
    criterion = started(terms, net, model)
    counter = Counter(ctx := context(net, tiny_models.batch(model), step=0))
    report = criterion(ctx)
    assert counter.forwards == 1 + sum(one.cost.forwards for one in terms)
    assert list(report.parts) == ["base", "one", "two", "three"]


@every_term
@pytest.mark.parametrize("reason", ["evaluation", "weight 0", "schedule"])
@everywhere
def test_off_costs_nothing(term: str, model: str, reason: str) -> None:
    net = tiny_models.make(model)
    net.train(reason != "evaluation")
    weight: Any = {"evaluation": 1.0, "weight 0": 0.0, "schedule": {"schedule": "start_at", "start": 5}}[reason]
    ctx = context(net, tiny_models.batch(model), step=4)
    counter = Counter(ctx)
    with torch.no_grad():
        report = Criterion(build_term(term, {"weight": weight}))(ctx)
    assert counter.forwards == 1
    assert list(report.parts) == ["base"]


@every_term
@pytest.mark.parametrize("fail_at", [1, 2])
@everywhere
def test_everything_is_restored_after_an_exception(term: str, model: str, fail_at: int) -> None:
    net = tiny_models.make(model)
    ctx = context(net, tiny_models.batch(model), step=0)
    ctx.forward.run(PassRequest(hidden=True))  # transformers puts hooks of its own on the layers, for good
    Counter(ctx, fail_at)
    before = fingerprint(net)
    with contextlib.suppress(RuntimeError):
        Criterion(build_term(term))(ctx)
    assert fingerprint(net) == before


def fingerprint(net: torch.nn.Module) -> list[Any]:
    return [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in net.modules()
    ] + [parameter.requires_grad for parameter in net.parameters()]


def test_a_term_outside_the_package_is_named_by_its_dotted_path() -> None:
    criterion = build_criterion({"terms": {OUTSIDE: {"weight": 0.3}}})
    assert criterion.terms[0].weight == 0.3
    assert criterion.terms[0].name == "confidencepenalty"
    assert type(build_term("mine", {"term": "tests.helpers.outside_term"})).__name__ == "ConfidencePenalty"
    with pytest.raises(BadInput, match="cannot be imported"):
        build_term("tests.helpers.outside_term.Missing")


HEADED = [name for name in tiny_models.MODELS if tiny_models.make(name).get_output_embeddings() is not None]


@every_term
@pytest.mark.parametrize("model", ["bart", "roberta", "llama"])
def test_texts_without_labels_count_or_are_refused(term: str, model: str) -> None:
    """A term that needs labels says so; any other counts, and adds to the gradient, wherever it is asked to."""
    if build_term(term).hints.needs_labels:
        with pytest.raises(BadInput, match="needs labels: use on='labelled'"):
            build_term(term, {"on": "both"})
        return
    one = build_term(term, {"on": "both"})
    net, criterion = tiny_models.make(model), Criterion(one)
    for step in range(2):
        with torch.no_grad():
            for index, parameter in enumerate(net.parameters()):
                parameter.mul_(1.0 + 0.01 * (-1) ** index)
        labelled = context(net, tiny_models.batch(model), step=step)
        texts = context(net, tiny_models.batch(model, rows=2, seed=4), step=step, stream="unlabelled")
        report = criterion(labelled, texts)
    assert report.parts.keys() == {"base", one.name, f"{one.name}.unlabelled"}
    assert torch.isfinite(report.total)
    report.total.backward()


@every_term
@pytest.mark.parametrize("model", HEADED)
def test_fused_is_plain(term: str, model: str) -> None:
    """Before there are logits and from them: the same total, values and gradients."""
    found = []
    for fused in (True, False):
        net = tiny_models.make(model)
        net = net if model == "prophetnet" else net.double()  # which gives NaN in float64
        criterion = Criterion(build_term(term, {"name": "term"}), label_smoothing=0.1, fused=fused)
        for step in (0, 1):
            torch.manual_seed(3)
            ctx = context(net, tiny_models.batch(model), step=step)
            report = criterion(ctx, batched=False)  # in both, which draw the same numbers
        report.total.backward()
        gradients = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
        found.append((report, gradients))
    (ours, fast), (plain, slow) = found
    assert "fused" not in plain.paths.values()
    if model not in ("prophetnet",):  # which works on its logits
        assert ours.paths["base"] == "fused" or term in ("uegr", "tests.helpers.outside_term.ConfidencePenalty")
    tolerance = 1e-7
    torch.testing.assert_close(ours.total, plain.total, rtol=tolerance, atol=tolerance)
    for name, value in ours.values.items():
        torch.testing.assert_close(value, plain.values[name], rtol=1e-5, atol=1e-9)
    assert fast.keys() == slow.keys()
    size = max(float(one.nan_to_num().norm()) for one in slow.values())
    for name, gradient in fast.items():  # LED's own gradients of padded positions are NaN
        assert torch.equal(gradient.isnan(), slow[name].isnan())
        assert (gradient - slow[name]).nan_to_num().norm() <= tolerance * size, name


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, Advice)]


@every_term
def test_a_term_works_or_says_that_it_does_nothing(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout: a gradient beside that of the task, far above rounding, or one line with the setting; once."""
    one = build_term(term, {"weight": 1.0})
    found, lines = [], []
    for terms in ((), (one,)):
        net = tiny_models.dropout_off(tiny_models.make("llama"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            second_step(net, "llama", *terms).total.backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double())
        lines += said(caught)
    plain, whole = found
    beside = whole - plain * (whole @ plain) / (plain @ plain)  # a multiple of the task's gradient is no regularizer
    works = beside.norm() / plain.norm() > 1e-4
    nothing = [line for line in lines if "does nothing" in line]
    assert works != bool(nothing), f"{term}: {float(beside.norm() / plain.norm()):.1e}, {lines}"
    assert all(line.startswith(f"{one.name}: ") and line.endswith(one.hints.remedy) for line in nothing)
    assert all("\n" not in line for line in lines)
    assert len(lines) == len(set(lines)) <= 1
    monkeypatch.setattr("seqreg.advice._first_rank", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Criterion(*(build_term(term) for _ in nothing))(context(net, tiny_models.batch("llama"), step=0))


@pytest.mark.parametrize("term", ["r3f", "rdrop"])
def test_terms_that_do_nothing_without_dropout_say_so(term: str) -> None:
    with pytest.warns(Advice, match=rf"^{term}: it is .* does nothing on this model and batch: (raise scale|give the)"):
        Criterion(build_term(term))(
            context(tiny_models.dropout_off(tiny_models.make("llama")), tiny_models.batch("llama"))
        )


def test_the_setting_that_a_warning_names_has_an_effect() -> None:
    """The setting that R3F's line names gives it an effect."""
    term = build_term("r3f", {"scale": 0.1, "relative": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = Criterion(term)(
            context(tiny_models.dropout_off(tiny_models.make("llama")), tiny_models.batch("llama"))
        )
    assert report.values["r3f"] > 1e-4 * report.parts["base"]


@every_term
def test_a_term_larger_than_the_base_loss_says_so_once(term: str) -> None:
    """With the setting that lowers it; a second task loss (R-Drop) does not count, nor a term of no value (NEFTune)."""
    one = build_term(term, {"weight": 1.0} if term == "neftune" else {"weight": 1e12})
    criterion, lines = Criterion(one), []
    net, large = tiny_models.make("bart"), False
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            report = criterion(context(net, tiny_models.batch("bart"), step=step), training=True)
            for parameter in net.parameters():
                parameter.mul_(1.01)
        lines += said(caught)
        large |= bool(report.parts[one.name] - report.tasks.get(one.name, 0) > report.parts["base"])
    assert len(lines) == (1 if large else 0)
    assert all(
        re.match(rf"{one.name}: it is .* times the base loss of .*: {one.hints.gentler}$", line) for line in lines
    )
    assert large == (term not in ("neftune", OUTSIDE))  # a penalty on confidence is negative


@every_term
@everywhere
def test_defaults_begin_below_the_base_loss(term: str, model: str) -> None:
    report = second_step(tiny_models.make(model, spread=2.0), model, build_term(term, {"name": "term"}))
    assert report.parts["term"] - report.tasks.get("term", 0) < report.parts["base"]
