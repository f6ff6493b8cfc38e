"""What a term is: its settings, what it is asked, what it answers."""

from __future__ import annotations

import sys
import types
import typing
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin

from torch import Tensor

from seqreg.context import Context, Evaluation
from seqreg.errors import BadInput, check_keys, nearest, refuse, yaml_hint
from seqreg.forward import Dropout, ExtraPass, Pass, Perturbation
from seqreg.objective import Part, WeightedSum
from seqreg.schedules import Weight, weight_at


@dataclass(frozen=True)
class Cost:
    """What a term adds to a plain step, in passes through the whole model; one that begins at a layer counts as one."""

    forwards: int
    backwards: int


class _Settings(ABCMeta):
    """Construction of terms: expands `preset`, under what the caller sets, and answers misspelt settings."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        term = typing.cast("type[Term]", cls)
        if values:
            raise BadInput(f"{cls.__name__} takes its settings by name, such as {cls.__name__}(weight={values[0]!r})")
        preset = settings.get("preset")
        if preset is not None:
            if not isinstance(preset, str) or preset not in term.presets:
                hint = nearest(str(preset), term.presets) if term.presets else "it has none"
                raise BadInput(f"{cls.__name__}: unknown preset {preset!r}; {hint}", key="preset", value=preset)
            settings = {**term.presets[preset], **settings}
        check_keys(cls.__name__, settings, (f.name for f in fields(term)))
        for f in fields(term):
            if f.default is MISSING and f.default_factory is MISSING and f.name not in settings:
                raise BadInput(f"{cls.__name__}: the setting {f.name!r} is missing", key=f.name)
        return super().__call__(**settings)


@dataclass(frozen=True, kw_only=True)
class Term(ABC, metaclass=_Settings):
    """A regularizer: turns a context into a scalar, or names two views that should agree.

    A term is a frozen dataclass; its fields are its settings everywhere (Python, YAML, command line). A subclass
    decorated with `@dataclass(frozen=True, kw_only=True)`, alone in a file of `seqreg/terms/`, is found by its file
    name; anywhere else, by its dotted name.

    Args:
        weight: a number >= 0, or a schedule: a function of the optimizer step
        name: what its part of the loss is called; the class name in lower case by default
        preset: a named set of defaults, such as "fairseq"; other arguments override it
    """

    weight: Weight = 1.0
    name: str = ""
    preset: str | None = None

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    needs_hidden: ClassVar[bool] = False
    """True for a term that looks at the outputs of every layer."""
    takes_unlabelled: ClassVar[bool] = False
    """True for a term that can count on unlabelled batches."""
    stateful: ClassVar[bool] = False
    """True for a term that keeps something from step to step in `Evaluation.memory`."""
    other_weights: ClassVar[bool] = False
    """True for a term that makes a pass with weights other than the model's own."""
    starts_at_zero: ClassVar[bool] = False
    """True for a term whose value is 0 when training begins although it works: it is then not said to do nothing."""
    remedy: ClassVar[str] = "raise weight, or leave the term out"
    """What to set where the term does nothing."""
    gentler: ClassVar[str] = "lower weight"
    """What to set where the term is larger than the base loss."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__.lower())
        if "/" in str(self.name):
            self.refuse("name", "expected a name without '/'")
        self._check_types()
        try:
            weight_at(self.weight, 0)
        except BadInput as error:
            raise BadInput(f"{self.name}: {error}", key="weight", value=self.weight, fix=error.fix) from None

    def _check_types(self) -> None:
        try:
            hints = typing.get_type_hints(type(self))
        except NameError:  # an annotation that exists for type checkers only says nothing here
            return
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "weight" and not _fits(value, hints[f.name]):
                self.refuse(f.name, _expected(value, hints[f.name]))

    def settings(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
            and (f.name, value) != ("name", type(self).__name__.lower())
        }

    def refuse(self, setting: str, fix: str) -> typing.NoReturn:
        """Raise for a bad setting: one line that names it, its value and the fix."""
        refuse(self, setting, fix)

    @property
    def uses_inner_gradient(self) -> bool:
        """True for a term that calls `torch.autograd.grad`, which reentrant checkpointing forbids."""
        return False

    @property
    def needs_unlabelled(self) -> bool:
        """True for a term that applies to unlabelled batches alone."""
        return False

    def applies_to(self, ctx: Context) -> bool:
        """Whether the term has a say on this batch: by default on labelled ones."""
        return ctx.labelled

    def replaces_base_loss(self, step: int | None) -> bool:
        """Whether the base loss is left out at this step."""
        return False

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """Extra forward and backward passes with these settings."""

    @abstractmethod
    def __call__(self, ctx: Evaluation) -> Tensor | Part | WeightedSum:
        """The term's value on one batch, unweighted: a number, or the parts that it is the sum of."""

    def prepare(self, ctx: Evaluation) -> None:
        """Called on every training batch before anything runs, also where a schedule leaves the term out."""
        return

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """Numbers that tell what the term is doing on this batch."""
        return {}

    def input_shift(self, ctx: Evaluation, weight: float) -> Perturbation | None:
        """A change of the training input itself, for a term that makes one."""
        return None

    def resumes_at(self, ctx: Context) -> tuple[str, int] | None:
        """The site and the layer at whose input `extra_pass` begins, with what the clean pass gave; None: at the start.

        Such a pass is made after the clean one, which is made alone.
        """
        return None

    def extra_pass(self, ctx: Evaluation) -> ExtraPass:
        """The further pass that `run_pass` makes: by default with dropout masks of its own, else unchanged."""
        return ExtraPass()

    @property
    def batchable(self) -> bool:
        """Whether `extra_pass` can be made in one batch with the clean pass, before that is known."""
        return False

    def run_pass(self, ctx: Evaluation) -> Pass:
        """The pass that `extra_pass` declares: made in one batch with the clean one where it could be, or now."""
        _ = ctx.clean
        return ctx.batched_passes.get(self.name) or ctx.run(self.extra_pass(ctx))

    @property
    def pass_dropout(self) -> Dropout | None:
        """Masks of its further passes; None where nothing is known of them."""
        return None

    @property
    def shares_dropout(self) -> bool:
        """Whether the term may replay the dropout masks of the clean pass."""
        return self.cost.forwards > 0 and self.pass_dropout in (None, "shared")

    def check_packed(self) -> None:
        """Refuse settings that count sequences on a batch whose rows hold several of them."""
        for f in fields(self):
            if f.name in ("over", "spread", "per") and getattr(self, f.name) in ("sentence", "sequence"):
                self.refuse(f.name, packed_fix(f.name))


def packed_fix(setting: str) -> str:
    """What to set instead where rows are packed."""
    other = "entry" if setting == "spread" else "token"
    return f"rows are packed, and would count as one sequence each: use {setting}={other!r}"


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def _expected(value: object, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return nearest(str(value), [str(option) for option in get_args(hint)])
    names = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    hinted = yaml_hint(value) if hint is float and isinstance(value, str) else ""
    return f"expected {names.get(hint, hint)}{hinted}"
