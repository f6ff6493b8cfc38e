"""The configuration of a run: a recipe, a recipe of terms and the command line, laid on top of each other."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from seqreg.errors import BadInput, nearest
from seqreg.workbench import cards, catalogue, layers
from seqreg.workbench.cards import Card, Generation
from seqreg.workbench.sections import Count, Natural, NotNegative, Positive, Section, Share, checked

if TYPE_CHECKING:
    from seqreg.criterion import Criterion


class Model(Section):
    """What is trained: a pretrained model by `name`, or one from scratch of an `architecture`.

    Args:
        name: a name on the Hugging Face hub, or a folder written by `save_pretrained`
        tokenizer: the same for the tokenizer; the model's own by default
        architecture: of a model from scratch, in transformers' spelling ("bart", "pegasus", "roberta" ...); its
            tokenizer is trained on the training text
        vocabulary: tokens of that tokenizer
        settings: of transformers' configuration, such as dropout
        head: "r4f" normalises a classification head; `head_layers`: see `seqreg.integrations.hf.r4f`
    """

    name: str | None = None
    tokenizer: str | None = None
    architecture: str | None = None
    vocabulary: int = Field(default=2000, ge=300)
    settings: dict[str, Any] = {}
    head: Literal["plain", "r4f"] = "plain"
    head_layers: Literal["all", "out_proj"] = "all"

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.name is None) == (self.architecture is None):
            raise ValueError(
                "set one of model.name (pretrained) and model.architecture (from scratch), and the other to null"
            )
        return self


class Data(Section):
    """Which rows, and how much of each text.

    Args:
        path: a file or a folder to use instead of the hub, with the card's columns
        limit: at most so many rows of a split
        prefix: put before every source text, as T5 wants it
        max_source, max_target: tokens; the card's by default
        workers: processes that read ahead
    """

    path: str | None = None
    limit: dict[str, Count] = {}
    prefix: str = ""
    max_source: Count = 512
    max_target: Count = 64
    workers: Natural = 0


class Loss(Section):
    """The base loss; see `seqreg.Criterion`."""

    label_smoothing: Share = 0.0
    smoothing: Literal["torch", "fairseq"] = "torch"
    per: Literal["token", "sequence"] = "token"


class Optimisation(Section):
    """How it is trained.

    Args:
        steps: optimizer steps; or `epochs`
        batch_size: rows in one pass on one device; times `accumulation` times devices in one step
        warmup: steps, or below 1 a share of all steps
        clip: the largest gradient norm; 0 for none
        precision: of the passes; weights are always float32
    """

    learning_rate: Positive = 3e-5
    steps: Count | None = None
    epochs: Positive | None = None
    batch_size: Count = 8
    accumulation: Count = 1
    warmup: NotNegative = 0.0
    schedule: Literal["linear", "polynomial", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = "linear"
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    betas: list[Share] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip: NotNegative = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False

    @model_validator(mode="after")
    def _ends(self) -> Optimisation:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"set one of optimisation.steps={self.steps} and optimisation.epochs={self.epochs}, the other to null"
            )
        warm = self.warmup if self.warmup >= 1 else math.ceil(self.warmup * (self.steps or 0))
        if self.steps is not None and warm >= self.steps:
            raise ValueError(f"warmup={self.warmup:g} leaves nothing of steps={self.steps}")
        return self


class Evaluation(Section):
    """When and how it is judged.

    Args:
        every: evaluate on the validation set every so many steps; 0 for the end alone
        before: also evaluate the untrained model
        best: keep the checkpoint with the best validation score instead of the last
        confidence, resamples: of the bootstrap intervals
    """

    every: Natural = 0
    batch_size: Count = 16
    before: bool = False
    best: bool = False
    confidence: float = Field(default=0.95, gt=0, lt=1)
    resamples: Natural = 1000


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
    samples: Natural = 4
    anatomy_steps: Natural = 500
    smoothness_steps: Natural = 0


class Checkpoints(Section):
    """Checkpoints to resume from. `every`: steps, 0 for none but the final model; `keep`: how many stay on disk."""

    every: Natural = 0
    keep: Count = 1


class Config(Section):
    """All settings of a run."""

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


@dataclass(frozen=True)
class Run:
    """A configuration with the card of its task."""

    config: Config
    card: Card
    origins: layers.Layers

    def save(self, folder: Path) -> None:
        """Write config.yaml, which is a recipe again, and the card beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config.model_dump(mode="json"), "task": "task.yaml"}
        (folder / "config.yaml").write_text(layers.dump(config), encoding="utf-8")
        card = self.card.model_dump(mode="json", exclude_defaults=True)
        (folder / "task.yaml").write_text(layers.dump(card), encoding="utf-8")


def resolve(
    recipe: str, *, terms: Sequence[str] = (), variants: Sequence[str] = (), overrides: Sequence[str] = ()
) -> Run:
    """Lay a recipe, its variants, recipes of terms and `key=value` on top of each other, and check the result."""
    path = catalogue.find("recipes", recipe)
    stack, values = layers.Layers(), layers.read(path)
    choices = values.pop("variants", {})
    stack.add(values, str(path))
    for variant in variants:
        if not isinstance(choices, dict) or variant not in choices:
            hint = nearest(variant, choices) if choices else "it has none"
            raise BadInput(f"{path}: unknown variant {variant!r}; {hint}")
        stack.add(choices[variant] or {}, f"{path} ({variant})")
    chosen = [name for name in terms if name not in ("none", "baseline")]
    files = [(name, catalogue.find("recipes/terms", name)) for name in chosen]
    blocks = [(found, layers.read(found)) for _, found in files]
    regression = [(found, block.pop("regression", None)) for found, block in blocks]
    for found, block in blocks:
        _only(block, ("terms", "model"), str(found))
        stack.add(block, str(found))
    for assignment in overrides:
        stack.set(assignment)
    card, card_path = _card(stack, path)
    extra = regression if card.kind == "regression" else []
    stack = _with_card(stack, card, card_path, [(str(found), block) for found, block in extra if block])
    for assignment in overrides:
        stack.set(assignment)
    _drop_terms(stack)
    name = "-".join([path.stem if path.stem != "config" else path.parent.name, *variants])
    stack.values.setdefault("output", f"runs/{name}/{'-'.join(Path(t).stem for t in chosen) or 'baseline'}")
    config = checked(Config, stack.values, stack.origin)
    _check_terms(config, stack)
    return Run(config, card, stack)


def _only(block: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in block:
        if key not in known:
            raise BadInput(f"{where}: {key}: unknown key; {nearest(key, known)}")


def _card(stack: layers.Layers, recipe: Path) -> tuple[Card, Path]:
    """The card that the layers ask for; a relative path counts from the file that names it."""
    task = stack.values.get("task")
    if task is None:
        raise BadInput(f"{recipe}: task is missing; choose from {', '.join(catalogue.names('tasks'))}")
    if isinstance(task, str) and task.endswith((".yaml", ".yml")) and stack.origin("task") != "command line":
        task = str(recipe.parent / task)
    try:
        card, path = cards.load(task)
    except BadInput as error:
        raise BadInput(f"{stack.origin('task')}: task={task!r}: {error}") from None
    stack.values["task"] = str(path.resolve()) if task.endswith((".yaml", ".yml")) else task
    return card, path


def _with_card(
    stack: layers.Layers, card: Card, path: Path, extra: Sequence[tuple[str, dict[str, Any]]]
) -> layers.Layers:
    """The same layers on top of what the card says about lengths and generation, with `extra` above both."""
    below = layers.Layers()
    below.add(
        {
            "data": {"max_source": card.lengths.source, "max_target": card.lengths.target},
            "generation": card.generation.model_dump(),
        },
        str(path),
    )
    origins = dict(below.origins)
    below.add(stack.values, "")
    below.origins = {**origins, **stack.origins}
    for where, block in extra:
        below.add(block, where)
    return below


def _drop_terms(stack: layers.Layers) -> None:
    """`terms.r3f=null` takes a term out again; a bare `r3f:` in a file is the term with its defaults."""
    terms = stack.values.get("terms")
    if terms is None:
        stack.values.pop("terms", None)
    elif isinstance(terms, dict):
        for name in [name for name, value in terms.items() if value is None]:
            if stack.origin(f"terms.{name}") == "command line":
                del terms[name]


def _check_terms(config: Config, stack: layers.Layers) -> None:
    """Build the criterion once, so that a misspelt term or setting is found before anything else happens."""
    try:
        config.criterion()
    except BadInput as error:
        message = str(error)
        found = re.search(r"unknown (?:setting|preset|schedule) '([^']+)'|\b(\w+)=", message)
        word = next(filter(None, found.groups()), "") if found else ""
        for name, settings in config.terms.items():
            for key, value in (settings or {}).items():
                if word in (key, value):
                    raise BadInput(
                        f"{stack.origin(f'terms.{name}.{key}')}: terms.{name}.{key}={value!r}: {message}"
                    ) from None
        named = [f"terms.{name}" for name in config.terms if f"{name!r}" in message or name == word]
        raise BadInput(f"{stack.origin(named[0] if named else 'terms')}: {message}") from None


def load(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """The run that was saved in a folder."""
    if not (folder / "config.yaml").is_file():
        raise BadInput(f"{folder}: not a run of seqreg: it has no config.yaml")
    return resolve(str(folder / "config.yaml"), overrides=overrides)
