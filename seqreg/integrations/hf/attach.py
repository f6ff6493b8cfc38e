"""A criterion for any `transformers.Trainer`: an instance that is there, or a class that is to be made."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal, get_args

from transformers import Seq2SeqTrainer, Trainer

from seqreg.criterion import Criterion
from seqreg.errors import BadInput, check_keys, nearest
from seqreg.integrations.hf.sft import is_sft
from seqreg.integrations.hf.trainer import RegularizedTrainer, check_criterion

OwnLoss = Literal["refuse", "replace", "call"]

PREFERENCES = "its loss compares answers with each other"
REWARDS = "its loss weighs sampled text by rewards"
TEACHER = "its loss compares the model with a teacher"
PAIRS = "its loss is of pairs of texts, not of labels"
NOT_OF_LABELS = {
    **dict.fromkeys("BCO CPO DPO KTO ORPO Reward TPO".split(), PREFERENCES),
    **dict.fromkeys(
        "A2PO AsyncGRPO GFPO GMPO GRPO GRPOWithReplayBuffer NashMD OnlineDPO PAPO PPO RLOO XPO".split(), REWARDS
    ),
    **dict.fromkeys(
        "AsyncDistillation Distillation GKD GOLD IWOPD MiniLLM SDFT SDPO ServerDistillation".split(), TEACHER
    ),
    **dict.fromkeys("SentenceTransformer SparseEncoder CrossEncoder".split(), PAIRS),
}
"""Trainers whose loss is not that of labels, by the first part of their names."""


def attach(trainer: Any, criterion: Criterion, *, own_loss: OwnLoss = "refuse", **options: Any) -> Any:
    """Let a trainer that is already there train by a criterion; returns the same trainer.

    Works for `transformers.Trainer` and its subclasses: `Seq2SeqTrainer`, TRL's `SFTTrainer` in all its modes, your
    own. The criterion replaces the loss, and without terms the loss is what it was. All else stays: data, collators,
    metrics, callbacks, checkpoints; the parts of the loss are logged, and what terms remember is saved and resumed.

    Args:
        criterion: the loss
        own_loss: where the trainer's class has a `compute_loss` of its own: "refuse" it, "replace" it by the criterion,
            or "call" it, and let the criterion answer its `super().compute_loss(...)`
        options: `diagnostics_steps`, `smoothness_steps`, `update`, `unlabelled_dataset`, `unlabelled_ratio`,
            `replay_dataset`, `replay_share`, `build_context` and `strict` of `RegularizedTrainer`
    """
    if not isinstance(trainer, Trainer):
        what = f"the class {trainer.__name__}" if isinstance(trainer, type) else f"a {type(trainer).__name__}"
        raise BadInput(f"attach takes a transformers.Trainer that has been made, not {what}")
    if isinstance(trainer, RegularizedTrainer):
        raise BadInput(f"{type(trainer).__name__} has a criterion already: make another trainer for another one")
    check_criterion(criterion)
    check_keys("attach", options, list(inspect.signature(RegularizedTrainer.set_criterion).parameters)[2:])
    if trainer.is_in_train:
        raise BadInput("attach: the trainer is training already: attach before trainer.train()")
    if "compute_loss" in vars(trainer):
        raise BadInput("attach: compute_loss was assigned to this trainer: put it into a subclass, or leave it out")
    plain = type(trainer)
    trainer.__class__ = _with_criterion(plain, own_loss)
    try:
        trainer.set_criterion(criterion, **options)
    except BaseException:
        trainer.__class__ = plain
        raise
    return trainer


def regularized(trainer_class: Any, *, own_loss: OwnLoss = "refuse") -> Any:
    """The subclass of a trainer's class that takes `criterion=` and the other options of `RegularizedTrainer`.

    Args:
        trainer_class: `transformers.Trainer` or a subclass, such as TRL's `SFTTrainer`
        own_loss: as for `attach`; with "call" the class must hand `criterion=` on to `super().__init__`
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, Trainer):
        raise BadInput(f"regularized takes a subclass of transformers.Trainer, not {trainer_class!r}")
    if issubclass(trainer_class, RegularizedTrainer):
        return trainer_class
    made = _with_criterion(trainer_class, own_loss)
    if made.__bases__[0] is trainer_class:
        _check_init(trainer_class)
    return made


def _check_init(plain: Any) -> None:
    """Refuse a class whose `__init__`, which is called before the criterion's, cannot hand `criterion=` on."""
    for cls in plain.__mro__[: plain.__mro__.index(_library(plain))]:
        taken = inspect.signature(vars(cls).get("__init__", RegularizedTrainer.__init__)).parameters
        if "criterion" not in taken and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise BadInput(
                f"{cls.__name__}.__init__ takes no criterion= to hand on to super().__init__: make the trainer, then "
                "attach(trainer, criterion, own_loss='call')"
            )


def _with_criterion(plain: Any, own_loss: OwnLoss) -> Any:
    return _calling(plain) if _check(plain, own_loss) and own_loss == "call" else _replacing(plain)


def _replacing(plain: Any) -> Any:
    """The criterion's methods first."""
    return _class(f"Regularized{plain.__name__}", (RegularizedTrainer, plain), plain.__doc__)


def _calling(plain: Any) -> Any:
    """The criterion's methods right before those of the library, so that the class' own are called and call them."""
    library = _library(plain)
    return _class(f"Regularized{plain.__name__}", (plain, _replacing(library)), plain.__doc__)


def _library(plain: Any) -> Any:
    """The class of transformers or TRL that a class with a loss of its own is made from."""
    own = [place for place, cls in enumerate(plain.__mro__) if "compute_loss" in vars(cls) and not _has_its_loss(cls)]
    return next(cls for cls in plain.__mro__[own[-1] :] if cls is Seq2SeqTrainer or _has_its_loss(cls))


def _has_its_loss(cls: Any) -> bool:
    """Whether it is a class of transformers or TRL whose loss a criterion takes the place of."""
    return cls is Trainer or is_sft(cls)


@functools.cache
def _class(name: str, bases: tuple[Any, ...], doc: str | None) -> Any:
    """One class for the same bases, however often it is asked for."""
    return type(name, bases, {"__doc__": doc, "loss_is_scaled_for_ga": True})


def _check(plain: Any, own_loss: str) -> bool:
    """Refuse a class that cannot work; tells whether it has a loss of its own."""
    if own_loss not in get_args(OwnLoss):
        raise BadInput(f"own_loss={own_loss!r}: {nearest(str(own_loss), get_args(OwnLoss))}")
    for cls in plain.__mro__:
        reason = NOT_OF_LABELS.get(cls.__name__.removesuffix("Trainer")) if cls.__name__.endswith("Trainer") else None
        if reason is not None and not cls.__module__.startswith("transformers."):
            raise BadInput(f"{cls.__name__}: {reason}, and no criterion can replace it; see docs/library.md")
    owner = next(cls for cls in plain.__mro__ if "compute_loss" in vars(cls))
    if _has_its_loss(owner):
        return False
    if own_loss == "refuse":
        raise BadInput(
            f"{owner.__name__} has a compute_loss of its own: own_loss='replace' puts the criterion in its place, "
            "own_loss='call' lets it call the criterion as super().compute_loss"
        )
    return True
