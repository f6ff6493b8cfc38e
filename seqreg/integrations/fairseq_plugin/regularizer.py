"""The criterion of seqreg inside one of fairseq: counts, the step, the log, and what terms remember."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.logging import metrics
from torch import Tensor, nn

from seqreg.context import Context, Count, Kind
from seqreg.criterion import Criterion, LossReport
from seqreg.errors import BadInput
from seqreg.integrations.fairseq_plugin.forward import FairseqForward
from seqreg.losses import IGNORE


class SampleSize(Count):
    """What fairseq divides by, where the other count of the whole update cannot be known: asking for it is an error.

    fairseq adds up the gradients of all micro-batches on all workers and then divides by the sum of their
    sample_size: tokens, or sentences with --sentence-avg. A criterion sees one micro-batch at a time.
    """

    size: float
    sentences: bool

    def __init__(self, size: float, *, sentences: bool) -> None:
        self.__dict__.update(size=size, sentences=sentences)  # the class is frozen

    @property
    def labels(self) -> float:
        return self._known(not self.sentences, "tokens", "sentences", "per: sequence")

    @property
    def sequences(self) -> float:
        return self._known(self.sentences, "sentences", "tokens", "per: token, or --sentence-avg")

    def _known(self, known: bool, wanted: str, divisor: str, fix: str) -> float:
        if not known:
            raise BadInput(
                f"a term is averaged over {wanted}, and fairseq divides several micro-batches or workers by their "
                f"{divisor}: set {fix}, or train with --update-freq 1 on one worker"
            )
        return self.size


class Regularizer:
    """Computes losses in the way that fairseq's trainer expects them: sums, to be divided by the sample size.

    Args:
        criterion: of seqreg
        alone: whether an update is one micro-batch on one worker, whose counts are all known
    """

    step: int | None = None
    """The number of the update, from the trainer."""

    def __init__(self, criterion: Criterion, *, alone: bool) -> None:
        self.criterion, self.alone = criterion, alone
        self.one_by_one = any(term.preset == "fairseq" for term in criterion.terms)
        """Passes are made one after the other, as fairseq does, so that the same seed draws the same numbers."""

    def listen(self, task: Any) -> None:
        """Learn the number of every update, and answer bad input in one line instead of a traceback and crash.pt."""
        train_step = task.train_step

        @functools.wraps(train_step)
        def wrapped(*values: Any, **named: Any) -> Any:
            self.step = named.get("update_num", values[4] if len(values) > 4 else None)
            with answered():
                return train_step(*values, **named)

        task.train_step = wrapped

    def __call__(self, forward: FairseqForward, labels: Tensor, kind: Kind, size: float) -> tuple[LossReport, Context]:
        """The loss of one micro-batch divided by its size, and the context that it was taken on.

        Args:
            labels: with `IGNORE` where there is none
            size: fairseq's sample_size
        """
        ctx = Context(forward, labels, kind=kind, step=self.step, count=self._count(labels, kind, size))
        return self.criterion(ctx, training=True, batched=not self.one_by_one), ctx

    def _count(self, labels: Tensor, kind: Kind, size: float) -> Count:
        if kind != "tokens":  # a row is a label: both counts are the sample size
            return Count(len(labels), len(labels))
        sentences = self.criterion.per == "sequence"
        if not self.alone:
            return SampleSize(size, sentences=sentences)
        here = Count.of(labels != IGNORE)
        return replace(here, sequences=size) if sentences else replace(here, labels=size)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """What cannot be right is one line and exit code 2, as everywhere in seqreg."""
    try:
        yield
    except BadInput as error:
        print(f"seqreg: {error}", file=sys.stderr, flush=True)
        raise SystemExit(BadInput.code) from None


def logged(report: LossReport, size: float) -> dict[str, Any]:
    """The parts of a loss as sums over the micro-batch, in nats; `log_parts` divides them."""
    values = {name: value for name, value in report.values.items() if name != "nll"}
    kinds: dict[str, Mapping[str, Any]] = {
        "part": report.parts,
        "task": report.tasks,
        "value": values,
        "weight": report.weights,
    }
    return {f"{kind}/{name}": number * size for kind, numbers in kinds.items() for name, number in numbers.items()}


def log_parts(logs: Sequence[Mapping[str, Any]]) -> None:
    """Parts and values in base 2, as fairseq's loss: the parts add up to it."""
    size = sum(log.get("sample_size", 0) for log in logs)
    for key in sorted({key for log in logs for key in log if key.startswith(("part/", "task/", "value/", "weight/"))}):
        unit = 1.0 if key.startswith("weight/") else math.log(2)
        total = sum(log.get(key, 0) for log in logs)
        metrics.log_scalar(key, total / (size or 1) / unit, size, priority=15)


class Memory(nn.Module):
    """What terms remember, as part of fairseq's checkpoints.

    fairseq saves and loads the state of a criterion that has parameters. This one is frozen, so that no optimizer
    sees it; what is remembered goes with it.
    """

    def __init__(self, criterion: Criterion) -> None:
        super().__init__()
        self.criterion = criterion
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)

    def get_extra_state(self) -> dict[str, Tensor]:
        return self.criterion.state_dict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        with answered():  # fairseq would say that the architectures do not match
            self.criterion.load_state_dict(state)


class Remembering:
    """For a criterion that can begin from any checkpoint: one of a run without such a term has nothing for it."""

    def load_state_dict(self, state_dict: Any, *values: Any, **named: Any) -> Any:
        if state_dict is None:
            return None
        return super().load_state_dict(state_dict, *values, **named)  # type: ignore[misc]


def _with_criterion(upgrade: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(upgrade)
    def wrapped(state: Any) -> Any:
        state = upgrade(state)
        state.setdefault("criterion", None)  # fairseq asks for it, and released models are older than it
        return state

    return wrapped


checkpoint_utils._upgrade_state_dict = _with_criterion(checkpoint_utils._upgrade_state_dict)
