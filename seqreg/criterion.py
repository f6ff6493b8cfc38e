"""The criterion, which adds weighted terms to the label-smoothed loss."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqreg.advice import Advisor
from seqreg.context import Context, Count, Evaluation, Stream
from seqreg.engines.detect import check_group, refusal
from seqreg.errors import BadInput
from seqreg.forward import Pass
from seqreg.losses import Base, LossName, Smoothing, check_loss, check_smoothing
from seqreg.objective import BaseLoss, Consistency, Part, PartResult, Path, WeightedSum, confident, evaluate
from seqreg.overrides import Memory
from seqreg.schedules import weight_at
from seqreg.term import ConsistencyTerm, Passes, Term, check_packed, counts_on, packed_fix


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


def term_of(part: str) -> str:
    """The term that a part of the loss is of, or "base": its name without the stream.

    >>> term_of("vat.unlabelled"), term_of("base.replay"), term_of("r3f")
    ('vat', 'base', 'r3f')
    """
    return part.removesuffix(".unlabelled").removesuffix(".replay")


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
    """What an active term adds to the loss of this batch."""

    term: Term
    weight: float
    ctx: Evaluation
    joint: WeightedSum
    paths: frozenset[str]

    @classmethod
    def of(cls, term: Term, weight: float, passes: Passes, ctx: Evaluation) -> _Declared:
        ctx.paths.clear()
        returned = term.loss(ctx, [ctx.run(extra) for extra in passes.extra])
        if isinstance(returned, Part):
            joint = WeightedSum((1.0, returned))
        elif isinstance(returned, WeightedSum):
            joint = returned
        elif isinstance(returned, Tensor) and returned.shape == ():
            joint = WeightedSum(rest=returned)
        else:
            raise BadInput(f"{term.name} must return a scalar tensor, such as ctx.reduce(values), not {returned!r}")
        if isinstance(term, ConsistencyTerm) and not ctx.labelled:
            joint = joint.on_texts(confidence=term.confidence, sharpen=term.sharpen)
        return cls(term, weight, ctx, joint, frozenset(ctx.paths))

    @property
    def items(self) -> list[tuple[float, Part, Evaluation]]:
        return [(self.weight * factor, part, self.ctx) for factor, part in self.joint.parts]

    def value(self, results: Sequence[PartResult]) -> Tensor:
        """The unweighted value, without a gradient."""
        value = torch.zeros((), device=self.ctx.mask.device) if self.joint.rest is None else self.joint.rest.detach()
        for (factor, part), result in zip(self.joint.parts, results, strict=True):
            value = value + factor * result.mean(part, self.ctx)
        return value

    def task(self, results: Sequence[PartResult]) -> Tensor | None:
        """The task loss of further passes in the value; None where it is only held against that of the clean pass."""
        pairs = zip(self.joint.parts, results, strict=True)
        tasks = [(factor, part, result) for (factor, part), result in pairs if isinstance(part, BaseLoss)]
        if sum(factor for factor, _, _ in tasks) <= 0:
            return None
        return torch.stack([factor * result.mean(part, self.ctx) for factor, part, result in tasks]).sum()

    def path(self, results: Sequence[PartResult]) -> Path:
        paths = {*self.paths, *(result.path for result in results)}
        return "plain" if "plain" in paths else "fused" if paths else "own"


def joined(contexts: Sequence[Context]) -> list[Context]:
    """The contexts of one micro-batch with one count: the one that they were given, or the sum of their own."""
    for ctx in contexts:
        if not isinstance(ctx, Context):
            raise BadInput(f"a criterion takes a context, not {type(ctx).__name__}: criterion(context(model, batch))")
    if len(contexts) == 1:
        return list(contexts)
    streams = [ctx.stream for ctx in contexts]
    if len(set(streams)) < len(streams):
        raise BadInput(f"contexts of one call are {', '.join(streams)}: expected at most one of each stream")
    if len({ctx.step for ctx in contexts}) > 1 or len({ctx.training for ctx in contexts}) > 1:
        raise BadInput("contexts of one call differ in step or training mode: they are of one optimizer step")
    if all(ctx.count == contexts[0].count for ctx in contexts):
        return list(contexts)
    if not all(ctx.count.of_batch for ctx in contexts):
        raise BadInput("contexts of one call have different counts: pass the same count=count(model, ...) to each")
    made: list[Context] = []
    total = replace(functools.reduce(operator.add, (ctx.count for ctx in contexts)), contexts=lambda: made)
    made += [replace(ctx, count=total) for ctx in contexts]
    return made


def _sum(reports: Sequence[LossReport]) -> LossReport:
    """The loss of all streams of a micro-batch."""

    def merged(name: str) -> Any:
        return {key: value for report in reports for key, value in getattr(report, name).items()}

    return LossReport(
        functools.reduce(operator.add, (report.total for report in reports)),
        **{name: merged(name) for name in ("parts", "values", "weights", "paths", "tasks")},
        clean=next((report.clean for report in reports if report.clean), None),
    )


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

    def __call__(
        self, ctx: Context, *streams: Context, training: bool | None = None, batched: bool = True
    ) -> LossReport:
        """The loss of one batch. Terms count in training only, and a term of weight 0 costs nothing.

        Args:
            streams: contexts of further examples of the same step, `context(model, batch, stream="unlabelled")` or
                "replay", at most one of each
            training: overrides `ctx.training`
            batched: False makes one pass after the other, also where some could be made as one larger batch
        """
        contexts = joined((ctx, *streams))
        ctx = contexts[0]
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
        if training and not ctx.forward.observing:
            check_group()
        weights = {term.name: weight_at(term.weight, ctx.step) for term in self.terms} if training else {}
        if weights:
            given = {one.stream for one in contexts}
            self.check_streams(given | ({"unlabelled"} if ctx.count.unlabelled is not None else set()))
            self._check_model(ctx.forward.module)
        reports = [self._report(one, weights, batched and torch.is_grad_enabled()) for one in contexts]
        report = reports[0] if len(reports) == 1 else _sum(reports)
        ctx.forward.take_loss(report.total)
        return report

    def _report(self, ctx: Context, weights: Mapping[str, float], batched: bool) -> LossReport:
        """The loss of the examples of one stream; names of parts end with the stream, but for the labelled one."""
        weighted = [(term, weights[term.name]) for term in self.terms if weights and counts_on(term, ctx.stream)]
        active = [(term, weight) for term, weight in weighted if weight > 0]
        with ctx.forward.one_step():
            evaluation, passes = self._evaluation(ctx, active, memory=self.memory, batched=batched)
            for term, weight in weighted:
                if weight > 0 or callable(term.weight):
                    term.prepare(evaluation)
            return self._reported(evaluation, active, passes, {term.name: weight for term, weight in weighted})

    def _reported(
        self,
        ctx: Evaluation,
        active: Sequence[tuple[Term, float]],
        passes: Sequence[Passes],
        weights: Mapping[str, float],
    ) -> LossReport:
        suffix = "" if ctx.stream == "labelled" else f".{ctx.stream}"
        replaced = any(asked.replaces_base_loss for asked in passes)
        base = [(0.0 if replaced else 1.0, BaseLoss(ctx.clean))] if ctx.labelled else []
        declared = [
            _Declared.of(term, weight, asked, ctx.averaged_on(term.on))
            for (term, weight), asked in zip(active, passes, strict=True)
        ]
        total, results = evaluate([*((*one, ctx) for one in base), *(item for one in declared for item in one.items)])
        total = total.to(ctx.mask.device)
        values: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {} if suffix else {"base": torch.zeros((), device=ctx.mask.device)}
        paths, tasks = dict[str, Path](), dict[str, Tensor]()
        for factor, task in base:
            of_base, results = results[0], results[1:]
            paths[f"base{suffix}"], parts[f"base{suffix}"] = of_base.path, factor * of_base.mean(task, ctx)
            if of_base.nll is not None:
                values[f"nll{suffix}"] = ctx.averaged_on_stream().reduce(of_base.nll, per=self.per)
        if ctx.labelled and ctx.clean.aux_loss is not None:
            aux = ctx.share * ctx.clean.aux_loss
            total, parts[f"aux_loss{suffix}"] = total + aux, aux.detach()
        for one in declared:
            own_results, results = results[: len(one.items)], results[len(one.items) :]
            value, name = one.value(own_results), f"{one.term.name}{suffix}"
            values[name], parts[name], paths[name] = value, one.weight * value, one.path(own_results)
            second = one.task(own_results)
            if second is not None:
                tasks[name] = one.weight * second
            if not suffix or one.term.on == "unlabelled":
                base_part = parts.get("base", torch.zeros((), device=value.device))
                self._advisor.look(one.term, one.weight, value if second is None else value - second, base_part)
            if one.joint.rest is not None:
                total = total + one.weight * one.joint.rest
        for name, note in ctx.notes.items():
            self._advisor.say(name, "note", note)
        return LossReport(total, parts, values, weights, paths, tasks, ctx.clean if ctx.labelled else None)

    def check_streams(self, given: Collection[Stream]) -> None:
        """Refuse examples that no term counts on, and terms that count on examples which a step does not have."""
        for term in self.terms:
            if term.on != "labelled" and "unlabelled" not in given:
                raise BadInput(
                    f"{term.name}: on={term.on!r} counts on texts without labels, and there are none: give "
                    "unlabelled_dataset= to attach, data.unlabelled=FILE to a recipe, or "
                    "criterion(ctx, context(model, texts, stream='unlabelled')) in a loop"
                )
        if "unlabelled" in given and not any(counts_on(term, "unlabelled") for term in self.terms):
            takers = [term.name for term in self.terms if not term.hints.needs_labels]
            fix = f"set on='both' or on='unlabelled' on {takers[0]}" if takers else "add a term such as VAT(on='both')"
            raise BadInput(f"texts without labels were given, and no term counts on them: {fix}")

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
        weighted = [(term, weight_at(term.weight, ctx.step)) for term in self.terms if counts_on(term, ctx.stream)]
        active = [(term, weight) for term, weight in weighted if weight > 0]
        numbers: dict[str, float] = {}
        with ctx.observed() as observed, torch.no_grad(), observed.forward.one_step():
            own = Count.of(ctx.mask, ctx.forward.targets, ctx.stream)
            alone = replace(observed, count=own)  # whatever its share in the optimizer step
            evaluation, passes = self._evaluation(alone, active, memory=copy.deepcopy(self.memory))
            evaluation = evaluation.averaged_on_stream()
            base = float(BaseLoss(evaluation.clean).value(evaluation)) if ctx.labelled else 0.0
            for (term, weight), asked in zip(active, passes, strict=True):
                declared = _Declared.of(term, weight, asked, evaluation)
                results = evaluate(declared.items)[1]
                value = weight * float(declared.value(results))
                numbers[f"{term.name}/part_over_base"] = value / base if base else 0.0
                numbers |= {f"{term.name}/{key}": number for key, number in term.diagnostics(evaluation).items()}
                for _, part in declared.joint.parts:
                    if isinstance(part, Consistency) and part.confidence:
                        kept = confident(part.held.logits, part.confidence) & evaluation.mask
                        numbers[f"{term.name}/confident_share"] = float(kept.sum() / evaluation.mask.sum())
        return numbers

    def _evaluation(
        self, ctx: Context, active: Sequence[tuple[Term, float]], *, memory: Memory, batched: bool = False
    ) -> tuple[Evaluation, list[Passes]]:
        """What one call and its terms share, and what every term asks for.

        Args:
            batched: make passes that can be in one batch with the clean one, unless a pass replays its dropout masks
        """
        _check(ctx, active, self.per)
        evaluation = Evaluation(ctx, self.base, memory=memory, fused=self.fused)
        passes = [_declared_by(term, evaluation) for term, _ in active]
        _check_passes(ctx, active, passes)
        extras = [extra for asked in passes for extra in asked.extra]
        resumed = [extra.resumes_at for extra in extras if extra.resumes_at is not None]
        for site, layer in resumed:
            ctx.forward.keep_input(site, layer)
        input_shifts = [asked.input_shift for asked in passes if asked.input_shift is not None]
        alone = input_shifts or ctx.forward.drops_layers or resumed or any(asked.needs_clean_masks for asked in passes)
        batched = batched and self.fused and ctx.forward.batch_size is not None and not alone
        evaluation.before_clean(
            input_shifts=input_shifts,
            batched=[extra for extra in extras if batched and extra.batchable],
            hidden=any(asked.hidden for asked in passes),
        )
        return evaluation, passes

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
        if forward.packed:
            check_packed(term)


def _declared_by(term: Term, ctx: Evaluation) -> Passes:
    passes = term.declare(ctx)
    if not isinstance(passes, Passes):
        raise BadInput(f"{term.name}: declare must return Passes(ExtraPass(), ...), not {passes!r}")
    return passes


def _check_passes(ctx: Context, active: Sequence[tuple[Term, float]], passes: Sequence[Passes]) -> None:
    """Refuse passes that cannot be made on this model."""
    forward = ctx.forward
    for (term, _), asked in zip(active, passes, strict=True):
        kinds = [cls.__name__ for cls in type(term).__mro__]
        if reason := refusal(forward.engine, other_weights=asked.other_weights, kinds=kinds):
            raise BadInput(f"{term.name}: {reason}")
        if asked.ascends and torch.is_inference_mode_enabled():
            raise BadInput(
                f"{term.name} needs torch.autograd.grad, which torch.inference_mode forbids: use torch.no_grad(), or "
                "model.eval() to leave terms out"
            )
        if asked.ascends and forward.reentrant:
            raise BadInput(
                f"{term.name} needs torch.autograd.grad, which {forward.checkpointing} forbids: {forward.reentrant_fix}"
            )
        if forward.ragged and asked.masks - {"shared"}:
            raise BadInput(
                f"{term.name}: layerdrop drops other layers in every pass, which DistributedDataParallel cannot "
                "synchronise: set the model's layerdrop to 0, or dropout='shared'"
            )
