"""The criterion, which adds weighted terms to the label-smoothed loss."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqreg.advice import Advisor
from seqreg.context import Context, Count, Evaluation
from seqreg.engines.detect import check_group, refusal
from seqreg.errors import BadInput
from seqreg.forward import Pass
from seqreg.losses import Base, LossName, Smoothing, check_loss, check_smoothing
from seqreg.objective import BaseLoss, Part, PartResult, Path, WeightedSum, evaluate
from seqreg.overrides import Memory
from seqreg.schedules import weight_at
from seqreg.term import Term, packed_fix


@dataclass(frozen=True)
class LossReport:
    """A loss and what it is made of.

    Args:
        total: what to call `backward` on
        parts: weighted contributions, detached; they add up to `total`
        values: the same terms unweighted, and the plain negative log-likelihood
        weights: the weight of every active term at this step
        tasks: how much of a part is the task loss of a further pass, where a term adds one (R-Drop)
        paths: how each part was computed: "fused", "plain" (from all logits) or "own" (by the term itself)
        clean: the pass that the base loss was taken of; None on unlabelled data
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    values: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    tasks: Mapping[str, Tensor] = field(default_factory=dict)
    clean: Pass | None = field(default=None, repr=False)

    def scalars(self) -> dict[str, float]:
        """Everything for a log: `part/<name>` (these add up), `task/<name>`, `value/<name>`, `weight/<name>`."""
        return {
            **{f"part/{name}": float(part) for name, part in self.parts.items()},
            **{f"task/{name}": float(task) for name, task in self.tasks.items()},
            **{f"value/{name}": float(value) for name, value in self.values.items()},
            **{f"weight/{name}": weight for name, weight in self.weights.items()},
        }

    def __str__(self) -> str:
        return shown(float(self.total.detach()), self.scalars())


def shown(loss: float, scalars: Mapping[str, float]) -> str:
    """A loss and its parts in a line, of numbers as `LossReport.scalars` has them."""
    parts = []
    for key, part in scalars.items():
        kind, _, name = key.partition("/")
        if kind == "part":
            task = scalars.get(f"task/{name}")
            parts.append(f"{name} {part:.4g}" + ("" if task is None else f" ({task:.4g} of it a second task loss)"))
    return f"loss {loss:.4g} = {' + '.join(parts)}"


@dataclass(frozen=True)
class _Declared:
    """What an active term asks for on this batch."""

    term: Term
    weight: float
    joint: WeightedSum
    paths: frozenset[str]

    @classmethod
    def of(cls, term: Term, weight: float, ctx: Evaluation) -> _Declared:
        ctx.paths.clear()
        returned = term(ctx)
        if isinstance(returned, Part):
            joint = WeightedSum((1.0, returned))
        elif isinstance(returned, WeightedSum):
            joint = returned
        elif isinstance(returned, Tensor) and returned.shape == ():
            joint = WeightedSum(rest=returned)
        else:
            raise BadInput(f"{term.name} must return a scalar tensor, such as ctx.reduce(values), not {returned!r}")
        return cls(term, weight, joint, frozenset(ctx.paths))

    @property
    def items(self) -> list[tuple[float, Part]]:
        return [(self.weight * factor, part) for factor, part in self.joint.parts]

    def value(self, ctx: Evaluation, results: Sequence[PartResult]) -> Tensor:
        """The unweighted value, without a gradient."""
        value = torch.zeros((), device=ctx.mask.device) if self.joint.rest is None else self.joint.rest.detach()
        for (factor, part), result in zip(self.joint.parts, results, strict=True):
            value = value + factor * result.mean(part, ctx)
        return value

    def task(self, ctx: Evaluation, results: Sequence[PartResult]) -> Tensor | None:
        """The task loss of further passes in the value; None where it is only held against that of the clean pass."""
        pairs = zip(self.joint.parts, results, strict=True)
        tasks = [(factor, part, result) for (factor, part), result in pairs if isinstance(part, BaseLoss)]
        if sum(factor for factor, _, _ in tasks) <= 0:
            return None
        return torch.stack([factor * result.mean(part, ctx) for factor, part, result in tasks]).sum()

    def path(self, results: Sequence[PartResult]) -> Path:
        paths = {*self.paths, *(result.path for result in results)}
        return "plain" if "plain" in paths else "fused" if paths else "own"


class Criterion:
    """The label-smoothed loss plus weighted terms.

    Args:
        terms: any number, each with its own `weight`
        label_smoothing: in [0, 1); 0.1 in most summarization recipes
        smoothing: "torch" spreads it over all V classes, "fairseq" over the V - 1 others
        per: what the base loss is averaged over: "token", or "sequence" (fairseq's --sentence-avg)
        loss: "nll", or "dft": the negative log-likelihood of every label times its probability, which is held fixed
            (Wu et al., arXiv 2508.05629); without label smoothing. `LossReport.values` has the plain "nll" in both
        fused: False computes everything from the logits of all tokens, and makes one pass after the other: slower, for
            comparison and for a loss that is to be differentiated twice
    """

    def __init__(
        self,
        *terms: Term,
        label_smoothing: float = 0.0,
        smoothing: Smoothing = "torch",
        per: Literal["token", "sequence"] = "token",
        loss: LossName = "nll",
        fused: bool = True,
    ) -> None:
        for term in terms:
            if not isinstance(term, Term):
                raise BadInput(f"{term!r} is not a term: write Criterion(R3F(weight=0.1), ...), or use build_criterion")
        check_smoothing(label_smoothing, smoothing)
        check_loss(loss, label_smoothing)
        if per not in ("token", "sequence"):
            raise BadInput(f"per={per!r}: choose 'token' or 'sequence'")
        if not isinstance(fused, bool):
            raise BadInput(f"fused={fused!r}: expected True or False")
        names = [term.name for term in terms]
        for name in names:
            if names.count(name) > 1 or name in ("base", "nll", "aux_loss"):
                raise BadInput(f"two parts of the loss are called {name!r}: give one of them another name=")
        self.terms, self.base = terms, Base(label_smoothing, smoothing, per, loss)
        self.label_smoothing, self.smoothing, self.per, self.loss = label_smoothing, smoothing, per, loss
        self.fused = fused
        self.memory: Memory = {}
        self._remembered: weakref.ref[nn.Module] | None = None
        """The model that the memory is of; None where it was loaded."""
        self._advisor = Advisor()

    def __repr__(self) -> str:
        shown = [
            f"{type(term).__name__}({', '.join(f'{key}={value!r}' for key, value in term.settings().items())})"
            for term in self.terms
        ]
        base = f"label_smoothing={self.label_smoothing}, smoothing={self.smoothing!r}, per={self.per!r}"
        base += "" if self.loss == "nll" else f", loss={self.loss!r}"
        return f"Criterion({', '.join([*shown, base])})"

    def __call__(self, ctx: Context, training: bool | None = None, *, batched: bool = True) -> LossReport:
        """The loss of one batch. Terms count in training only, and a term of weight 0 costs nothing.

        Args:
            training: overrides `ctx.training`
            batched: False makes one pass after the other, also where some could be made as one larger batch
        """
        if not isinstance(ctx, Context):
            raise BadInput(f"a criterion takes a context, not {type(ctx).__name__}: criterion(context(model, batch))")
        if training is None:
            training = ctx.training
            if not training and self.terms and torch.is_grad_enabled():
                self._advisor.say(
                    self.terms[0].name,
                    "evaluation",
                    "the model is in evaluation mode, so all terms are off: call model.train() to train, or evaluate "
                    "under torch.no_grad()",
                    UserWarning,
                )
        if training:
            check_group()
        weighted = self._weighted(ctx) if training else []
        active = [(term, weight) for term, weight in weighted if weight > 0]
        if weighted:
            self._check_model(ctx.forward.module)
        with ctx.forward.one_step():
            evaluation = self._evaluation(ctx, active, memory=self.memory, batched=batched and torch.is_grad_enabled())
            for term, weight in weighted:
                if weight > 0 or callable(term.weight):
                    term.prepare(evaluation)
            report = self._report(evaluation, active, {term.name: weight for term, weight in weighted})
            ctx.forward.take_loss(report.total)
            return report

    def _report(
        self, ctx: Evaluation, active: Sequence[tuple[Term, float]], weights: Mapping[str, float]
    ) -> LossReport:
        replaced = any(term.replaces_base_loss(ctx.step) for term, _ in active)
        base = [(0.0 if replaced else 1.0, BaseLoss(ctx.clean))] if ctx.labelled else []
        declared = [_Declared.of(term, weight, ctx) for term, weight in active]
        total, results = evaluate([*base, *(item for term in declared for item in term.items)], ctx)
        values: dict[str, Tensor] = {}
        parts, paths = {"base": torch.zeros((), device=ctx.mask.device)}, {}
        tasks: dict[str, Tensor] = {}
        for factor, task in base:
            of_base, results = results[0], results[1:]
            paths["base"], parts["base"] = of_base.path, factor * of_base.mean(task, ctx)
            if of_base.nll is not None:
                values["nll"] = ctx.reduce(of_base.nll, per=self.per)
        if ctx.labelled and ctx.clean.aux_loss is not None:
            aux = ctx.share * ctx.clean.aux_loss
            total, parts["aux_loss"] = total + aux, aux.detach()
        for term in declared:
            own_results, results = results[: len(term.items)], results[len(term.items) :]
            value, name = term.value(ctx, own_results), term.term.name
            values[name], parts[name], paths[name] = value, term.weight * value, term.path(own_results)
            second = term.task(ctx, own_results)
            if second is not None:
                tasks[name] = term.weight * second
            self._advisor.look(term.term, term.weight, value if second is None else value - second, parts["base"])
            if term.joint.rest is not None:
                total = total + term.weight * term.joint.rest
        for name, note in ctx.notes.items():
            self._advisor.say(name, "note", note)
        return LossReport(total, parts, values, weights, paths, tasks, ctx.clean if ctx.labelled else None)

    def _check_model(self, module: nn.Module) -> None:
        """Refuse to compare a model with what terms keep of another one."""
        known = None if self._remembered is None or not self.memory else self._remembered()
        if known is not None and known is not module:
            raise BadInput(
                f"{next(iter(self.memory))}: what it keeps from step to step is of another model: begin a new criterion"
            )
        if known is None:
            self._remembered = weakref.ref(module)

    def without(self, *names: str) -> Criterion:
        """The same criterion, with the same memory, without some of its terms."""
        other = copy.copy(self)
        other.terms = tuple(term for term in self.terms if term.name not in names)
        return other

    def diagnostics(self, ctx: Context) -> dict[str, float]:
        """What every active term is really doing on this batch, as `<term>/<number>`.

        For all of them `part_over_base`, the weighted term over the base loss. Costs several passes, and changes
        nothing: no gradient, generator, or result of training.
        """
        active = [(term, weight) for term, weight in self._weighted(ctx) if weight > 0]
        numbers: dict[str, float] = {}
        with ctx.forward.observed(), torch.no_grad(), ctx.forward.one_step():
            alone = replace(
                ctx, count=Count.of(ctx.mask, ctx.forward.targets)
            )  # whatever its share in the optimizer step
            evaluation = self._evaluation(alone, active, memory=copy.deepcopy(self.memory))
            base = float(BaseLoss(evaluation.clean).value(evaluation))
            for term, weight in active:
                declared = _Declared.of(term, weight, evaluation)
                results = evaluate(declared.items, evaluation)[1]
                value = weight * float(declared.value(evaluation, results))
                numbers[f"{term.name}/part_over_base"] = value / base if base else 0.0
                numbers |= {f"{term.name}/{key}": number for key, number in term.diagnostics(evaluation).items()}
        return numbers

    def _weighted(self, ctx: Context) -> list[tuple[Term, float]]:
        """The terms that count on this batch, and their weights now; those that do not are refused, or say so."""
        for term in self.terms:
            if not term.applies_to(ctx) and ctx.labelled:
                text = "it counts on unlabelled batches alone, and this one has labels: give it context(..., "
                self._advisor.say(term.name, "labelled", f"{text}unlabelled=True)")
            elif not term.applies_to(ctx):
                raise BadInput(
                    f"{term.name}: it counts on labelled batches alone, and this one has no labels: leave "
                    f"{term.name} out of the criterion, or unlabelled=True out of the context"
                )
        return [(term, weight_at(term.weight, ctx.step)) for term in self.terms if term.applies_to(ctx)]

    def _evaluation(
        self, ctx: Context, active: Sequence[tuple[Term, float]], *, memory: Memory, batched: bool = False
    ) -> Evaluation:
        """What one call and its terms share; passes that can may be `batched` with the clean one."""
        _check(ctx, active, self.per)
        terms = [term for term, _ in active]
        hidden = any(term.needs_hidden for term in terms)
        evaluation = Evaluation(ctx, self.base, memory=memory, fused=self.fused, hidden=hidden)
        shifts = [term.input_shift(evaluation, weight) for term, weight in active]
        input_shifts = [shift for shift in shifts if shift is not None]
        resumed = [point for term in terms if (point := term.resumes_at(evaluation)) is not None]
        for site, layer in resumed:
            ctx.forward.keep_input(site, layer)
        shared = resumed or any(term.shares_dropout and not term.batchable for term in terms)
        alone = input_shifts or ctx.forward.drops_layers or shared
        batched = batched and self.fused and ctx.forward.batch_size is not None and not alone
        extras = {term.name: term.extra_pass(evaluation) for term in terms if batched and term.batchable}
        evaluation.before_clean(input_shifts, extras)
        return evaluation

    def __getstate__(self) -> dict[str, Any]:
        """All but the reference to the model, which copies and other processes do not have."""
        return {**vars(self), "_remembered": None}

    def state_dict(self) -> dict[str, Tensor]:
        """What terms keep from step to step (Bregman's teacher): save it with your checkpoints."""
        return {f"{name}/{key}": value for name, values in self.memory.items() for key, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave."""
        names = {term.name for term in self.terms}
        self.memory, self._remembered = {}, None
        for path, value in state.items():
            name, _, key = path.partition("/")
            if name not in names:
                raise BadInput(f"the saved state is of a term {name!r} that this criterion does not have")
            self.memory.setdefault(name, {})[key] = value.clone()


def _check(ctx: Context, active: Sequence[tuple[Term, float]], per: str) -> None:
    """Refuse what the model or the batch cannot give to the criterion or its terms."""
    forward = ctx.forward
    if forward.packed and per == "sequence":
        raise BadInput(f"the criterion: per={per!r}: {packed_fix('per')}")
    for term, _ in active:
        kinds = [cls.__name__ for cls in type(term).__mro__]
        if reason := refusal(forward.engine, other_weights=term.other_weights, kinds=kinds):
            raise BadInput(f"{term.name}: {reason}")
        if forward.packed:
            term.check_packed()
        if term.uses_inner_gradient and torch.is_inference_mode_enabled():
            raise BadInput(
                f"{term.name} needs torch.autograd.grad, which torch.inference_mode forbids: use torch.no_grad(), or "
                "model.eval() to leave terms out"
            )
        if term.uses_inner_gradient and forward.reentrant:
            raise BadInput(
                f"{term.name} needs torch.autograd.grad, which reentrant gradient checkpointing forbids: "
                "set gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        if forward.ragged and term.cost.forwards and term.pass_dropout != "shared":
            raise BadInput(
                f"{term.name}: layerdrop drops other layers in every pass, which DistributedDataParallel cannot "
                "synchronise: set the model's layerdrop to 0, or dropout='shared'"
            )
