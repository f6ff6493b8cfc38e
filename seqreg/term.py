"""What a term is: its settings, the passes that it declares, and the loss that it takes of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor

from seqreg.context import Evaluation, On, Stream
from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Pass, Perturbation
from seqreg.objective import Part, WeightedSum
from seqreg.schedules import Weight, weight_at
from seqreg.settings import Settings, held


@dataclass(frozen=True)
class Cost:
    """What a term adds to a plain step, in passes through the whole model; one that begins at a layer counts as one."""

    forwards: int
    backwards: int


@dataclass(frozen=True)
class Hints:
    """What a user is told about a term.

    Args:
        remedy: what to set where the term does nothing
        gentler: what to set where the term is larger than the base loss
        starts_at_zero: the value is 0 when training begins although the term works: it is not said to do nothing
        needs_labels: the term cannot count on texts without labels
    """

    remedy: str = "raise weight, or leave the term out"
    gentler: str = "lower weight"
    starts_at_zero: bool = False
    needs_labels: bool = False


class Passes:
    """What a term asks of one batch: from this the criterion decides which passes are made together, and where.

    Args:
        extra: further passes, which the criterion makes and hands to `Term.loss`, in this order
        own: dropout masks of the passes that `Term.loss` makes itself, through `ctx.forward`; None where it makes none
        ascends: `Term.loss` calls `torch.autograd.grad`, which reentrant checkpointing forbids
        other_weights: `Term.loss` looks at weights other than the model's own
        hidden: the clean pass keeps the outputs of every layer
        input_shift: a change of the training input itself
        replaces_base_loss: the base loss is left out at this step
    """

    def __init__(
        self,
        *extra: ExtraPass,
        own: Dropout | Literal["unknown"] | None = None,
        ascends: bool = False,
        other_weights: bool = False,
        hidden: bool = False,
        input_shift: Perturbation | None = None,
        replaces_base_loss: bool = False,
    ) -> None:
        self.extra, self.hidden = extra, hidden
        self.input_shift, self.replaces_base_loss = input_shift, replaces_base_loss
        self.masks: set[str] = {one.dropout for one in extra} | (set() if own is None else {own})
        """Dropout masks of all further passes."""
        self.needs_clean_masks = own in ("shared", "unknown") or any(one.needs_clean_masks for one in extra)
        """Whether a pass may replay the dropout masks of the clean one, which is then made alone."""
        self.ascends = ascends or any(one.ascends for one in extra)
        self.other_weights = other_weights or any(one.weights is not None or not one.adapters for one in extra)


@dataclass(frozen=True, kw_only=True)
class Term(Settings):
    """A regularizer: turns a context into a scalar, or names two views that should agree.

    A term is a frozen dataclass; its fields are its settings everywhere (Python, YAML, command line). A subclass
    decorated with `@dataclass(frozen=True, kw_only=True)`, alone in a file of `seqreg/terms/`, is found by its file
    name; anywhere else, by its dotted name.

    Args:
        weight: a number >= 0, or a schedule: a function of the optimizer step
        name: what its part of the loss is called; the class name in lower case by default
        preset: a named set of defaults, such as "fairseq"; other arguments override it
        on: the examples that the term counts on: "labelled", "unlabelled" (texts without labels), or "both", where the
            mean is over all of them
    """

    weight: Weight = 1.0
    name: str = ""
    preset: str | None = None
    on: On = "labelled"

    stateful: ClassVar[bool] = False
    """True for a term that keeps something from step to step in `Evaluation.memory`."""
    hints: ClassVar[Hints] = Hints()

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__.lower())
        if "/" in str(self.name):
            self.refuse("name", "expected a name without '/'")
        super().__post_init__()
        if self.on != "labelled" and self.hints.needs_labels:
            self.refuse("on", f"{type(self).__name__} needs labels: use on='labelled'")
        try:
            weight_at(self.weight, 0)
        except BadInput as error:
            raise BadInput(f"{self.name}: {error}", key="weight", value=self.weight, fix=error.fix) from None

    @property
    @property
    @abstractmethod
    def cost(self) -> Cost:
        """Extra forward and backward passes with these settings."""

    def prepare(self, ctx: Evaluation) -> None:
        """Look at a training batch before anything runs. Called also where a schedule leaves the term out."""
        return

    def declare(self, ctx: Evaluation) -> Passes:
        """Declare the further passes of a batch, before any pass is made."""
        return Passes(own="unknown" if self.cost.forwards else None)

    @abstractmethod
    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Tensor | Part | WeightedSum:
        """The term's value on one batch, unweighted: a number, or the parts that it is the sum of.

        Args:
            passes: those that `declare` asked for, in its order
        """

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """Numbers that tell what the term is doing on this batch."""
        return {}


def counts_on(term: Term, stream: Stream) -> bool:
    """Whether a term counts on the examples of a stream."""
    return term.on in ("both", "unlabelled" if stream == "unlabelled" else "labelled")


@dataclass(frozen=True, kw_only=True)
class ConsistencyTerm(Term):
    """A term that asks two passes to agree.

    Args:
        confidence: on texts without labels, positions whose held side has no class of this probability count as 0, as
            in UDA; 0 counts all
        sharpen: on texts without labels, the temperature of the side that is held fixed; below 1 makes it more certain
    """

    confidence: float = 0.0
    sharpen: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.confidence < 1:
            self.refuse("confidence", "expected a probability in [0, 1)")
        if self.sharpen <= 0:
            self.refuse("sharpen", "expected a temperature > 0; UDA uses 0.4")
        for setting, off in (("confidence", 0.0), ("sharpen", 1.0)):
            if getattr(self, setting) != off and self.on == "labelled":
                self.refuse(setting, "only texts without labels have it: set on='both', or leave it out")


def check_packed(settings: Settings) -> None:
    """Refuse settings that count sequences on a batch whose rows hold several of them."""
    for f in fields(settings):
        if f.name in ("over", "spread", "per") and getattr(settings, f.name) in ("sentence", "sequence"):
            settings.refuse(f.name, packed_fix(f.name))
    for inner in held(settings):
        check_packed(inner)


def packed_fix(setting: str) -> str:
    """What to set instead where rows are packed."""
    other = "entry" if setting == "spread" else "token"
    return f"rows are packed, and would count as one sequence each: use {setting}={other!r}"
