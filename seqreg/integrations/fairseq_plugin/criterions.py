"""The criterions `seqreg` and `seqreg_sentence_prediction`: fairseq's own, with terms.

fairseq reads the types of the settings below when it runs, so that annotations must be types here, not text.
"""

from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion
from omegaconf import II
from torch import Tensor, nn

from seqreg.criterion import Criterion
from seqreg.errors import BadInput
from seqreg.integrations.fairseq_plugin import model as fs
from seqreg.integrations.fairseq_plugin.forward import FairseqForward
from seqreg.integrations.fairseq_plugin.regularizer import Memory, Regularizer, Remembering, answered, log_parts, logged
from seqreg.integrations.fairseq_plugin.settings import read_loss, read_terms
from seqreg.losses import IGNORE, check_labels

HELP = "a YAML file of terms, such as recipes/terms/r3f.yaml, or YAML in braces: {terms: {r3f: {weight: 0.1}}}"


@dataclass
class SeqregConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """Settings of `--criterion seqreg`: those of label_smoothed_cross_entropy, and the terms."""

    seqreg_terms: str = field(default="", metadata={"help": HELP})
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006 - fairseq does not know list[int] on every Python
    distributed_world_size: int = II("distributed_training.distributed_world_size")


@dataclass
class SeqregSentencePredictionConfig(SentencePredictionConfig):
    """Settings of `--criterion seqreg_sentence_prediction`: those of sentence_prediction, and the terms."""

    seqreg_terms: str = field(default="", metadata={"help": HELP})
    distributed_world_size: int = II("distributed_training.distributed_world_size")


@register_criterion("seqreg", dataclass=SeqregConfig)
class SeqregCriterion(Remembering, LabelSmoothedCrossEntropyCriterion):
    """label_smoothed_cross_entropy plus weighted terms, for models that give a distribution a token."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        seqreg_terms: str = "",
        update_freq: Any = (1,),
        distributed_world_size: int = 1,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        own = Criterion(
            *read_terms(seqreg_terms),
            label_smoothing=label_smoothing,
            smoothing="fairseq",
            per="sequence" if sentence_avg else "token",
            loss=read_loss(seqreg_terms),
        )
        alone = distributed_world_size <= 1 and all(number == 1 for number in update_freq)
        self.regularizer = Regularizer(own, alone=alone)
        self.memory = _memory(own, distributed_world_size)
        self.regularizer.listen(task)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        with answered():
            return super().build_criterion(cfg, task)

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """As in fairseq. Terms are on in training alone: validation is fairseq's own."""
        if not model.training:
            found: tuple[Tensor, Any, dict[str, Any]] = super().forward(model, sample, reduce)
            return found
        if not reduce:
            raise BadInput("reduce=False: terms have no loss a token in training; call model.eval() to score")
        forward = FairseqForward(model, sample["net_input"])
        target = fs.unwrap(model).get_targets(sample, None)
        labels = target.masked_fill(target.eq(self.padding_idx), IGNORE)
        if self.ignore_prefix_size > 0:
            labels[:, : self.ignore_prefix_size] = IGNORE
        size = target.size(0) if self.sentence_avg else sample["ntokens"]
        report, ctx = self.regularizer(forward, labels, "tokens", float(size))
        loss = report.total * float(size)
        log = {
            "loss": loss.detach(),
            "nll_loss": report.values["nll"] * float(size),
            "ntokens": sample["ntokens"],
            "nsentences": target.size(0),
            "sample_size": size,
            **logged(report, float(size)),
        }
        if self.report_accuracy and report.clean is not None:
            right = report.clean.logits.argmax(-1).eq(labels) & ctx.mask
            log |= {"n_correct": right.sum().item(), "total": ctx.mask.sum().item()}
        return loss, size, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: Any) -> None:
        """What fairseq logs, and every part of the loss by name."""
        super().reduce_metrics(logging_outputs)
        log_parts(logging_outputs)


@register_criterion("seqreg_sentence_prediction", dataclass=SeqregSentencePredictionConfig)
class SeqregSentencePrediction(Remembering, SentencePredictionCriterion):
    """sentence_prediction plus weighted terms, for RoBERTa and BART with a classification head."""

    def __init__(self, cfg: SeqregSentencePredictionConfig, task: Any) -> None:
        super().__init__(cfg, task)
        own = Criterion(
            *read_terms(cfg.seqreg_terms, regression=cfg.regression_target),
            loss="nll" if cfg.regression_target else read_loss(cfg.seqreg_terms),
        )
        self.regularizer = Regularizer(own, alone=True)
        self.memory = _memory(own, cfg.distributed_world_size)
        self.regularizer.listen(task)

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        with answered():
            return super().build_criterion(cfg, task)

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """As in fairseq. Terms are on in training alone: validation is fairseq's own."""
        module = fs.unwrap(model)
        if not model.training:
            found: tuple[Tensor, Any, dict[str, Any]] = super().forward(model, sample, reduce)
            return found
        heads = dict(module.named_children()).get("classification_heads", nn.ModuleDict())
        if self.classification_head_name not in heads:
            raise BadInput(f"{type(module).__name__} has no classification head {self.classification_head_name!r}")
        forward = FairseqForward(model, sample["net_input"], self.classification_head_name)
        targets = module.get_targets(sample, None)
        size = targets.numel()
        if self.regression_target:
            report, ctx = self.regularizer(forward, targets.view(len(targets), -1).float(), "regression", float(size))
        else:
            labels = targets.view(-1)
            check_labels(labels, heads[self.classification_head_name].out_proj.out_features, "see --num-classes")
            report, ctx = self.regularizer(forward, labels, "classes", float(size))
        loss = report.total * float(size)
        log = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": size,
            "sample_size": size,
            **logged(report, float(size)),
        }
        if not self.regression_target and report.clean is not None:
            log["ncorrect"] = report.clean.logits.argmax(1).eq(ctx.labels).sum()
        return loss, size, log

    @staticmethod
    def reduce_metrics(logging_outputs: Any) -> None:
        """What fairseq logs, and every part of the loss by name."""
        SentencePredictionCriterion.reduce_metrics(logging_outputs)
        log_parts(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """No: validation logs lists of predictions."""
        return False


def _memory(criterion: Criterion, workers: int) -> Memory | None:
    """A part of the criterion that is saved with it, if a term remembers something."""
    remembering = [term.name for term in criterion.terms if term.stateful]
    if not remembering:
        return None
    if workers > 1:
        raise BadInput(f"{remembering[0]} remembers from step to step, which fairseq saves on one worker only: use one")
    return Memory(criterion)
