"""All settings of a run, with their bounds. What they mean is in the docstrings; a recipe is these as YAML."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from seqreg.workbench.config.cards import Generation
from seqreg.workbench.config.schema import Count, Few, Length, Natural, NotNegative, Positive, Section, Share

if TYPE_CHECKING:
    from seqreg.criterion import Criterion
    from seqreg.selective_update import Update


class Model(Section):
    """What is trained: a pretrained model by `name`, or one from scratch of an `architecture`.

    Args:
        name: a name on the Hugging Face hub, or a folder written by `save_pretrained`
        tokenizer: the same for the tokenizer; the model's own by default
        architecture: of a model from scratch, in transformers' spelling ("bart", "pegasus", "roberta" ...); its
            tokenizer is trained on the training text
        vocabulary: tokens of that tokenizer
        settings: of transformers' configuration, such as dropout
        new_head: draw a new classification head although the model has one, of another task
        head: "r4f" normalises a classification head; `head_layers`, `head_warmup`: see `seqreg.integrations.hf.r4f`
    """

    name: str | None = None
    tokenizer: str | None = None
    architecture: str | None = None
    vocabulary: int = Field(default=2000, ge=300, le=1_000_000)
    settings: dict[str, Any] = {}
    new_head: bool = False
    head: Literal["plain", "r4f"] = "plain"
    head_layers: Literal["all", "out_proj"] = "all"
    head_warmup: Natural = 15

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.name is None) == (self.architecture is None):
            raise ValueError(
                "set one of model.name (pretrained) and model.architecture (from scratch), and the other to null"
            )
        for key, value in _pairs(self.settings):
            if key.startswith("_") or key in ("auto_map", "trust_remote_code") or ("attn" in key and "/" in str(value)):
                raise ValueError(f"model.settings.{key}={value!r}: a recipe cannot name code to run")
            most = 1000 if "layers" in key else 10**8
            if isinstance(value, (int, float)) and not abs(value) <= most:
                raise ValueError(f"model.settings.{key}={value!r}: expected a finite number, at most {most:,}")
            if key.endswith(("layer", "layers", "heads")) and isinstance(value, int) and value < 0:
                raise ValueError(f"model.settings.{key}={value!r}: expected a whole number from 0")
        return self


def _pairs(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, also of mappings inside."""
    for key, value in settings.items():
        yield str(key), value
        if isinstance(value, dict):
            yield from _pairs(value)


class Data(Section):
    """Which rows, and how much of each text.

    Args:
        path: a file or a folder to use instead of the hub, with the card's columns
        also: further tasks that a trained model is scored on, to see what it still knows: name -> file or folder, null
            for the hub. Lengths, generation and metric are those of the run
        unlabelled: a file with the card's columns but no labels, for terms that take such rows: after every optimizer
            step another is made on them, of those terms alone (`terms.jachess.mode: alternate`)
        limit: at most so many rows of a split
        holdout: training rows that become the validation set, where the card says so; the card's number by default
        share: of the training rows, by a fixed shuffle: the same rows for every model and seed
        prefix: put before every source text, as T5 wants it
        group: put rows of like length into a batch, to save padding; all rows are read once before training
        max_source, max_target: tokens; the card's by default
        workers: processes that read ahead
        most_empty: stop if a larger share of the training rows is left out because a text is empty
    """

    path: str | None = None
    also: dict[str, str | None] = {}
    unlabelled: str | None = None
    limit: dict[str, Count] = {}
    holdout: Count | None = None
    share: float = Field(default=1.0, gt=0, le=1)
    prefix: str = ""
    max_source: Length = 512
    max_target: Length = 64
    workers: Few = 0
    group: bool = False
    most_empty: Share = 0.1


class Loss(Section):
    """The base loss; see `seqreg.Criterion`."""

    label_smoothing: Share = 0.0
    smoothing: Literal["torch", "fairseq"] = "torch"
    per: Literal["token", "sequence"] = "token"
    fused: bool = True


class Optimisation(Section):
    """How it is trained.

    Args:
        steps: optimizer steps; or `epochs`
        batch_size: rows in one pass on one device; times `accumulation` times devices in one step
        warmup: steps, or below 1 a share of all steps, which fits any number of them
        clip: the largest gradient norm; 0 for none
        precision: of the passes; weights are always float32
        patience: a step that is not finite is not made; after so many in a row the training stops
        update: a change of the optimizer's step, by name with its settings: {selective: {ratio: 0.3}} (UEGR's backward
            stage), {child_tuning_f: {}} or {child_tuning_d: {}}; see `seqreg.selective_update`
    """

    learning_rate: float = Field(default=3e-5, gt=0, le=100)
    steps: Count | None = None
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    batch_size: Length = 8
    accumulation: Length = 1
    warmup: NotNegative = 0.0
    schedule: Literal["linear", "polynomial", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = "linear"
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    betas: list[Share] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip: NotNegative = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False
    patience: Count = 3
    update: dict[str, dict[str, Any] | None] | None = None

    @model_validator(mode="after")
    def _ends(self) -> Optimisation:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"set one of optimisation.steps={self.steps} and optimisation.epochs={self.epochs}, the other to null"
            )
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"optimisation.warmup={self.warmup:g} leaves nothing of optimisation.steps={self.steps}: set both"
            )
        if self.schedule == "polynomial" and self.learning_rate <= 1e-7:
            raise ValueError(
                f"optimisation.learning_rate={self.learning_rate:g}: schedule=polynomial ends at 1e-7: expected more"
            )
        return self

    @property
    def warmup_steps(self) -> float:
        """As transformers takes it: steps; or a share where the number of steps is not known yet."""
        if self.warmup >= 1:
            return int(self.warmup)
        return self.warmup if self.steps is None else min(math.ceil(self.warmup * self.steps), self.steps - 1)


class Evaluation(Section):
    """When and how it is judged.

    Args:
        every: evaluate on the validation set every so many steps; 0 for the end alone
        before: also evaluate the untrained model
        best: keep the checkpoint with the best validation score instead of the last
        confidence, resamples: of the bootstrap intervals; 0 resamples for none, where classes are predicted
    """

    every: Natural = 0
    batch_size: Length = 16
    before: bool = False
    best: bool = False
    confidence: float = Field(default=0.95, gt=0, lt=1)
    resamples: int = Field(default=1000, ge=0, le=100_000)


class Logging(Section):
    """What is written while it trains.

    Args:
        every: steps between two points of every curve
        tensorboard: write event files
        samples: outputs shown as text at every evaluation
        anatomy_steps, smoothness_steps: see `RegularizedTrainer`
    """

    every: Count = 50
    tensorboard: bool = True
    samples: Few = 4
    anatomy_steps: Natural = 500
    smoothness_steps: Natural = 0


class Checkpoints(Section):
    """What a run goes on from when it was stopped.

    Args:
        every: steps from one to the next; 0 for none by steps. These stay when the run is finished
        minutes: also one when so many have passed since the last, 0 for none; these go when the run is finished
        keep: how many stay on disk, beside the best one
    """

    every: Natural = 0
    minutes: NotNegative = 10.0
    keep: Count = 2


class Config(Section):
    """All settings of a run."""

    known_elsewhere: ClassVar[bool] = True
    task: str
    model: Model
    data: Data = Data()
    loss: Loss = Loss()
    terms: dict[str, dict[str, Any] | None] = {}
    optimisation: Optimisation
    generation: Generation = Generation()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    checkpoints: Checkpoints = Checkpoints()
    seed: Natural = 1
    output: str

    @model_validator(mode="after")
    def _best_needs_checkpoints(self) -> Config:
        every, saved = self.evaluation.every, self.checkpoints.every
        if self.evaluation.best and (not every or not saved or saved % every):
            raise ValueError(
                f"evaluation.best needs evaluation.every={every} > 0 and checkpoints.every={saved} a multiple of it"
            )
        return self

    @property
    def method(self) -> str:
        """What the run is called in tables: its terms, R4F for R3F with a normalised head."""
        if self.model.head == "r4f":
            return "r4f" if list(self.terms) == ["r3f"] else "+".join([*self.terms, "r4f"])
        return "+".join(self.terms) or "baseline"

    def criterion(self) -> Criterion:
        """The loss of this run."""
        from seqreg.build import build_criterion

        chosen = {name: settings or {} for name, settings in self.terms.items()}
        return build_criterion({**self.loss.model_dump(), "terms": chosen})

    def update(self) -> Update | None:
        """The change of the optimizer's step; a new one, as it remembers."""
        from seqreg.build import build_update

        chosen = self.optimisation.update
        return build_update({name: settings or {} for name, settings in chosen.items()}) if chosen else None
