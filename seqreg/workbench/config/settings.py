"""All settings of a run, with their bounds and meaning; a recipe is these as YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from seqreg.workbench.config.cards import ColumnNames, Generation, Prompt
from seqreg.workbench.config.schema import (
    Count,
    Few,
    Length,
    Natural,
    NotNegative,
    Positive,
    Section,
    Share,
    known_encoding,
    one_character,
)  # fmt: skip

if TYPE_CHECKING:
    from seqreg.criterion import Criterion
    from seqreg.selective_update import Update

VOCABULARY, CHARACTERS = "vocabulary:", "characters"
"""Tokenizers of single symbols: of a list in the model's config.json, or of all characters of the training text."""
BUFFER_SIZE = 1000
"""Of the shuffle buffer of datasets, by default."""
LAYERS = 1000
"""The most layers of a model, more than any has."""


class Lora(Section):
    """Low-rank adapters, in the words of PEFT: they alone are trained, and are taken into the weights in the end.

    Args:
        r: their rank
        lora_alpha: they are multiplied by lora_alpha / r
        lora_dropout: of what goes into them, while training
        target_modules: names of the layers that get one, or "all-linear"; PEFT's choice for the architecture by default
        modules_to_save: names of modules that are trained as a whole beside them; a new classification head always is
    """

    r: int = Field(default=8, ge=1, le=4096)
    lora_alpha: float = Field(default=16, gt=0, le=100_000)
    lora_dropout: Share = 0.0
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] = []

    @model_validator(mode="after")
    def _names_modules(self) -> Lora:
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("model.lora.target_modules: expected names of layers, such as [q_proj, v_proj], or null")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ValueError(
                    f"model.lora.target_modules={self.target_modules!r}: a text is a regular expression, and this is "
                    f"none ({error}): write names as a list, such as [q_proj, v_proj]"
                ) from None
        return self


class Model(Section):
    """What is trained: a pretrained model by `name`, or one from scratch of an `architecture`.

    Args:
        name: a name on the Hugging Face hub, or a folder written by `save_pretrained`
        tokenizer: the same for the tokenizer; the model's own by default. "vocabulary:KEY" is one of single symbols,
            which the model's config.json lists under this key: a text of characters, or a list of symbols that are
            apart by spaces in the data; an id is the place in it. "characters", for a model from scratch, is one of all
            characters of the training text
        target_tokenizer: the same for targets, where they need another one; as `tokenizer` by default
        architecture: of a model from scratch, in transformers' spelling ("bart", "pegasus", "roberta" ...); its
            tokenizer is trained on the training text
        vocab_size: tokens of that tokenizer
        settings: of transformers' configuration, such as dropout
        new_head: draw a new classification head although the model has one, of another task
        head: "r4f" normalises the classification head; "plain" leaves it as it is
        head_layers: "all" weight matrices of a normalised head (the paper), or only the last, "out_proj" (fairseq)
        head_warmup: power iterations of a normalised head before the first pass (fairseq makes none)
        lora: train low-rank adapters instead of the weights: {r: 8, lora_alpha: 16}; {} for PEFT's layers and our
            sizes, null to train all weights
    """

    name: str | None = None
    tokenizer: str | None = None
    target_tokenizer: str | None = None
    architecture: str | None = None
    vocab_size: int = Field(default=2000, ge=300, le=1_000_000)
    settings: dict[str, Any] = {}
    new_head: bool = False
    head: Literal["plain", "r4f"] = "plain"
    head_layers: Literal["all", "out_proj"] = "all"
    head_warmup: Natural = 15
    lora: Lora | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.name is None) == (self.architecture is None):
            raise ValueError(
                "set one of model.name (pretrained) and model.architecture (from scratch), and the other to null"
            )
        self._check_tokenizers()
        if self.lora is not None and self.name is None:
            raise ValueError("model.lora: adapters are for a pretrained model: set model.name, or model.lora=null")
        for key, value in _pairs(self.settings):
            if key.startswith("_") or key in ("auto_map", "trust_remote_code") or ("attn" in key and "/" in str(value)):
                raise ValueError(f"model.settings.{key}={value!r}: a recipe cannot name code to run")
            most = LAYERS if "layers" in key else 10**8
            if isinstance(value, (int, float)) and not abs(value) <= most:
                raise ValueError(f"model.settings.{key}={value!r}: expected a finite number, at most {most:,}")
            if key.endswith(("layer", "layers", "heads")) and isinstance(value, int) and value < 0:
                raise ValueError(f"model.settings.{key}={value!r}: expected a whole number from 0")
        return self

    def _check_tokenizers(self) -> None:
        names = {"tokenizer": self.tokenizer, "target_tokenizer": self.target_tokenizer}
        for key, name in names.items():
            if name is None or not _is_symbols(name):
                continue
            if name == VOCABULARY or (name == CHARACTERS) == (self.name is not None):
                fix = f"{VOCABULARY}KEY is for model.name, {CHARACTERS} for model.architecture"
                raise ValueError(f"model.{key}={name!r}: {fix}")
            if not all(other is None or _is_symbols(other) for other in names.values()) or self.tokenizer is None:
                raise ValueError(f"model.{key}={name!r}: set both model.tokenizer and model.target_tokenizer like this")
        if self.target_tokenizer is not None and self.name is None and not self.has_symbols:
            raise ValueError(f"model.target_tokenizer={self.target_tokenizer!r}: for a model from scratch: characters")

    @property
    def has_symbols(self) -> bool:
        """Whether its tokenizers are of single symbols, made here."""
        return _is_symbols(self.tokenizer or "")


def _is_symbols(name: str) -> bool:
    return name == CHARACTERS or name.startswith(VOCABULARY)


def _pairs(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, also of mappings inside."""
    for key, value in settings.items():
        yield str(key), value
        if isinstance(value, dict):
            yield from _pairs(value)


class Replay(Section):
    """Old examples that are mixed into training, so that an old skill is kept.

    Args:
        task: the card of the old task, such as glue/sst2; that of the run by default
        path: a file of old examples, or a folder with its training file; null for the hub
        share: of old examples among all labelled examples of a step
        targets: "labels" of the file, or "start" where the starting model writes what it says for every source, which
            needs no labels
    """

    task: str | None = None
    path: str | None = None
    share: float = Field(default=0.05, gt=0, lt=1)
    targets: Literal["labels", "start"] = "labels"


class Data(Section):
    """Which examples, and how much of each text.

    Args:
        path: a file or a folder to use instead of the hub, with the card's columns
        columns: other names of columns than the card's, by what they hold: {source: body}
        delimiter: between the cells of a CSV file: one character, or \\t for a tab; the card's by default, or a comma
        encoding: of files that are text, in Python's names; the card's by default, or utf-8
        subset: on the hub, the configuration of the dataset; the card's by default
        revision: on the hub, the branch, tag or commit of the dataset
        also: further tasks that the model is scored on, before training (`evaluation.retention`) and after it, to see
            what it has forgotten: name -> file or folder, null for the hub. Lengths, generation and metric are those of
            the run
        corpora: held-out plain text whose perplexity is measured before training and after it, of a causal language
            model: a name of yours -> a .txt file, with an empty line between texts, or a file with the column `text`.
            Long texts are read in windows of max_source_length + max_target_length tokens
        unlabelled: a file with the card's columns but no labels, for terms with `on: unlabelled` or `on: both`; every
            optimizer step has some of its texts
        unlabelled_ratio: texts without labels per labelled example
        unlabelled_targets: what the decoder of an encoder-decoder reads for texts without labels: "start" lets the
            starting model write it, once; "none" gives it its start token alone; else a column of the file. Such
            targets are never learnt as labels
        replay: labelled examples of an old task, mixed into every optimizer step: {task: glue/sst2, share: 0.05}
        limit: at most so many examples of a split, or texts of a corpus, by its name
        holdout: training examples that become the validation set, where the card says so; the card's number by default
        train_fraction: of the training examples, by a fixed shuffle: the same ones for every model and seed
        source_prefix: put before every source text, as T5 wants it
        prompt: what a causal language model reads before it writes a target: "{source}\\nTL;DR: " with the source text
            in the place of {source}; spaces at its end are the beginning of the target. The card's by default
        chat_template: give the prompt to a causal language model as the message of a user, by the chat template of its
            tokenizer, and train on the assistant's answer; data that are chats always are
        padding_free: put all training examples of a batch into one row, without padding, each with positions and
            attention of its own, as TRL's setting of this name does; for causal language models
        packing: the same, with batches of bins instead of examples, as TRL's setting of this name does: a bin has as
            many training examples as fit into max_length tokens, by best-fit decreasing
        max_length: tokens of a bin with packing; 1024 by default, as in TRL
        group_by_length: put examples of similar length into a batch, to save padding; all are read once before training
        max_source_length: tokens after which a source text is cut; the card's by default
        max_target_length: the same for the target
        dataloader_num_workers: processes that read ahead
        max_empty_fraction: stop if a larger share of the training examples is left out because a text is empty
        keep_in_memory: hold examples in memory, and tokenize each when it is read; false: write them and their token
            ids to Arrow files once, and read those; by default false for files of more than 64 MB
        cache_dir: the folder of these files, which may be removed at any time; `seqreg` in the cache of datasets by
            default
        streaming: read training examples while the model trains, from a file or from the hub, and hold `buffer_size` of
            them: nothing is downloaded or written first. They come in their order, mixed by a shuffle buffer, and from
            the beginning again when they end; a bad record is found when it is reached
        buffer_size: examples in the shuffle buffer of datasets; 1 keeps their order
    """

    path: str | None = None
    columns: ColumnNames = ColumnNames()
    delimiter: str | None = None
    encoding: str | None = None
    subset: str | None = None
    revision: str | None = None
    also: dict[str, str | None] = {}
    corpora: dict[str, str] = {}
    unlabelled: str | None = None
    unlabelled_ratio: float = Field(default=1.0, gt=0, le=1000)
    unlabelled_targets: str = "start"
    replay: Replay | None = None
    limit: dict[str, Count] = {}
    holdout: Count | None = None
    train_fraction: float = Field(default=1.0, gt=0, le=1)
    source_prefix: str = ""
    prompt: Prompt | None = None
    chat_template: bool = False
    padding_free: bool = False
    packing: bool = False
    max_length: Length | None = None
    max_source_length: Length = 512
    max_target_length: Length = 64
    dataloader_num_workers: Few = 0
    group_by_length: bool = False
    max_empty_fraction: Share = 0.1
    keep_in_memory: bool | None = None
    cache_dir: str | None = None
    streaming: bool = False
    buffer_size: Length = BUFFER_SIZE

    @property
    def joins_examples(self) -> bool:
        """Whether all training examples of a batch are in one row."""
        return self.padding_free or self.packing

    @property
    def bin_length(self) -> int:
        """Tokens of a bin."""
        return self.max_length or 1024

    @model_validator(mode="after")
    def _packing_alone(self) -> Data:
        if self.max_length is not None and not self.packing:
            raise ValueError(
                f"data.max_length={self.max_length}: the length of bins, which data.packing=true makes: set that, or "
                "data.max_source_length, which cuts a source"
            )
        if self.packing and self.group_by_length:
            raise ValueError("data.packing and data.group_by_length: bins have no padding to save: set one of them")
        return self

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        return None if value is None else one_character(value)

    @field_validator("encoding")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        return None if value is None else known_encoding(value)

    @model_validator(mode="after")
    def _can_be_streamed(self) -> Data:
        if not self.streaming:
            if self.buffer_size != BUFFER_SIZE:
                raise ValueError(f"data.buffer_size={self.buffer_size}: of a stream: set data.streaming=true")
            return self
        refused = {
            "group_by_length=true": self.group_by_length and "lengths are not known before the examples are read",
            "packing=true": self.packing and "lengths are not known before the examples are read",
            f"train_fraction={self.train_fraction:g}": self.train_fraction < 1
            and "the number of examples is not known",
            f"holdout={self.holdout}": self.holdout is not None and "nothing can be held out of a stream",
            f"keep_in_memory={str(self.keep_in_memory).lower()}": self.keep_in_memory is not None
            and "a stream is neither held in memory nor written to disk",
            f"dataloader_num_workers={self.dataloader_num_workers}": self.dataloader_num_workers > 1
            and "a stream is read by one process: at most 1",
        }
        for key, reason in refused.items():
            if reason:
                raise ValueError(f"data.{key}: {reason}: leave it out, or data.streaming=true")
        return self

    @property
    def indexed(self) -> Data:
        """The same examples for what has to draw from all of them: not as a stream."""
        return self.updated(streaming=False, buffer_size=BUFFER_SIZE)


class Loss(Section):
    """The base loss; see `seqreg.Criterion`.

    Args:
        label_smoothing: 0.1 in most summarization recipes
        smoothing: "torch" spreads it over all V classes, "fairseq" over the V - 1 others
        per: what it is averaged over: "token", or "sequence" (fairseq's --sentence-avg)
        loss: "nll", or "dft", which multiplies it by the probability of the label, held fixed; without label smoothing
        fused: compute head and loss together in chunks of tokens; false computes everything from all logits, slower
    """

    label_smoothing: Share = 0.0
    smoothing: Literal["torch", "fairseq"] = "torch"
    per: Literal["token", "sequence"] = "token"
    loss: Literal["nll", "dft"] = "nll"
    fused: bool = True

    @model_validator(mode="after")
    def _dft_has_no_smoothing(self) -> Loss:
        if self.loss == "dft" and self.label_smoothing:
            raise ValueError(
                f"loss.loss=dft has no label smoothing: set loss.label_smoothing={self.label_smoothing:g} to 0"
            )
        return self


class Optimisation(Section):
    """How it is trained.

    Args:
        learning_rate: the highest, after the warm-up
        max_steps: optimizer steps; or num_train_epochs, and the other null
        num_train_epochs: passes over the training set
        per_device_train_batch_size: examples in one pass on one device
        gradient_accumulation_steps: passes per step; a step sees batch size x this x devices examples
        warmup_steps: steps, or below 1 a share of all steps, which fits any number of them
        lr_scheduler_type: how the learning rate falls, in transformers' names; "polynomial" ends at 1e-7
        optim: AdamW or Adafactor
        adam_beta1, adam_beta2, adam_epsilon: of AdamW
        weight_decay: of all weights but biases and norms
        max_grad_norm: the largest gradient norm; 0 for none
        precision: of the passes; weights are always float32
        gradient_checkpointing: compute activations again in the backward pass, to save memory
        nonfinite_patience: a step that is not finite is not made; after so many in a row the run stops
        update: a change of the optimizer's step, by name with its settings: {stochastic: {alpha: 0.6, beta: 1.0}} (of
            RoAST, and UEGR's backward stage), {selective: {ratio: 0.3}}, {child_tuning_f: {}} or {child_tuning_d: {}};
            see `seqreg.selective_update`
        ema_decay: also keep an exponential moving average of the weights, and save it beside the model, in
            ema.safetensors; the run stays what it is. At step t the decay is at most (1 + t) / (10 + t). null for none
    """

    learning_rate: float = Field(default=3e-5, gt=0, le=100)
    max_steps: Count | None = None
    num_train_epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    per_device_train_batch_size: Length = 8
    gradient_accumulation_steps: Length = 1
    warmup_steps: NotNegative = 0.0
    lr_scheduler_type: Literal["linear", "polynomial", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = (
        "linear"
    )
    optim: Literal["adamw", "adafactor"] = "adamw"
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    max_grad_norm: NotNegative = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    nonfinite_patience: Count = 3
    update: dict[str, dict[str, Any] | None] | None = None
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _ends(self) -> Optimisation:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise ValueError(
                f"set one of optimisation.max_steps={self.max_steps} and "
                f"optimisation.num_train_epochs={self.num_train_epochs}, the other to null"
            )
        if self.max_steps is not None and self.warmup >= self.max_steps:
            raise ValueError(
                f"optimisation.warmup_steps={self.warmup_steps:g} leaves nothing of "
                f"optimisation.max_steps={self.max_steps}: set both"
            )
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= 1e-7:
            raise ValueError(
                f"optimisation.learning_rate={self.learning_rate:g}: lr_scheduler_type=polynomial ends at 1e-7: "
                "expected more"
            )
        return self

    @property
    def warmup(self) -> float:
        """As transformers takes it: steps; or a share where the number of steps is not known yet."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return (
            self.warmup_steps
            if self.max_steps is None
            else min(math.ceil(self.warmup_steps * self.max_steps), self.max_steps - 1)
        )


class EvaluationSettings(Section):
    """When and how it is judged.

    Args:
        eval_steps: evaluate on the validation set every so many steps; 0 for the end alone
        per_device_eval_batch_size: examples in one pass on one device
        eval_before_training: also evaluate the model that training starts from, on the set that the task is judged by:
            what fine-tuning was worth is the difference
        load_best_model_at_end: keep the checkpoint with the best validation score instead of the last
        test_sets: score the trained model on the sets that it is judged by in the end too; false, as in the trials of a
            search, for the validation set alone
        drift_examples: how far the trained model is from the one that it started from is measured on so many examples
            of the validation set, by a fixed sample; 0 for not at all. Costs two passes over them when the run ends,
            and the memory of a second model
        retention: score a pretrained model on the tasks of `data.also` before training too, and on the texts of
            `data.corpora` before and after; what was forgotten is the difference. Costs one more evaluation of each
        early_stopping_patience: stop when the score was not better than the best so far in so many evaluations one
            after the other; 0 for never
        confidence: of the bootstrap intervals
        resamples: of the bootstrap; 0 for no intervals, where classes are predicted
    """

    eval_steps: Natural = 0
    per_device_eval_batch_size: Length = 16
    eval_before_training: bool = True
    load_best_model_at_end: bool = False
    test_sets: bool = True
    drift_examples: Natural = 200
    retention: bool = True
    early_stopping_patience: Natural = 0
    confidence: float = Field(default=0.95, gt=0, lt=1)
    resamples: int = Field(default=1000, ge=0, le=100_000)


Tracker = Literal["wandb", "mlflow", "comet_ml", "clearml", "swanlab", "trackio", "dvclive"]


class Logging(Section):
    """What is written while it trains.

    Args:
        logging_steps: steps between two points of every curve
        tensorboard: write event files
        report_to: where else curves go, by transformers' callbacks: wandb, mlflow and so on, one or a list; their own
            environment variables say to which project
        samples: outputs shown as text at every evaluation
        diagnostics_steps: steps between two diagnostics of every term; 0 for none
        smoothness_steps: steps between two measurements of smoothness, which cost extra passes; 0 for none
        drift_steps: steps between two measurements of drift (`evaluation.drift_examples`), each for the next log; the
            starting model then stays in memory; 0 for the end alone
        projector: also write the mean encoder states of the examples of `evaluation.drift_examples`, under the starting
            and the trained model, for TensorBoard's projector
    """

    logging_steps: Count = 50
    tensorboard: bool = True
    report_to: list[Tracker] = []
    samples: Few = 4
    diagnostics_steps: Natural = 500
    smoothness_steps: Natural = 0
    drift_steps: Natural = 0
    projector: bool = False

    @field_validator("report_to", mode="before")
    @classmethod
    def _as_transformers_reads_it(cls, value: Any) -> Any:
        """A name alone is a list of one, and "none" an empty one."""
        if not isinstance(value, str):
            return value
        return [] if value == "none" else [value]

    @model_validator(mode="after")
    def _projector_is_of_tensorboard(self) -> Logging:
        if self.projector and not self.tensorboard:
            raise ValueError("logging.projector=true: it is TensorBoard's: set logging.tensorboard=true")
        return self


class Checkpoints(Section):
    """What a run is resumed from when it was stopped.

    Args:
        save_steps: steps from one to the next; 0 for none by steps. These stay when the run is finished
        save_minutes: also one when so many have passed since the last, 0 for none; these go when the run is finished
        save_total_limit: how many stay on disk, beside the best one
    """

    save_steps: Natural = 0
    save_minutes: NotNegative = 10.0
    save_total_limit: Count = 2


class EngineSettings(Section):
    """What spreads the model over the processes of torchrun; one process needs no engine.

    Args:
        name: "ddp": every process holds the whole model; "fsdp2": a shard of it (torch's `fully_shard`, on every layer)
        reshard_after_forward: of fsdp2: free the whole weights of a layer after its forward pass, and gather them again
            for the backward one; false takes memory, and saves a third of the communication
        param_dtype: of fsdp2: what weights are cast to in every pass; shards and gradients stay float32
        cpu_offload: of fsdp2: keep the shards in the memory of the CPU
    """

    name: Literal["ddp", "fsdp2"] = "ddp"
    reshard_after_forward: bool = True
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    cpu_offload: bool = False

    @field_validator("name", mode="before")
    @classmethod
    def _is_exact(cls, value: Any) -> Any:
        if value == "deepspeed":
            raise ValueError("for a Trainer or a loop of your own alone (docs/support.md): use fsdp2, or ddp")
        return value

    @model_validator(mode="after")
    def _fsdp2_alone(self) -> EngineSettings:
        for key, default in type(self).model_fields.items():
            if self.name == "ddp" and getattr(self, key) != default.default:
                raise ValueError(f"engine.{key}={getattr(self, key)}: a setting of fsdp2: set engine.name=fsdp2")
        return self


class Config(Section):
    """All settings of a run.

    Args:
        task: the name of a task card, or the path of one
        terms: regularizers by name, each with its settings; null or {} for its defaults
        seed: of the weights, the order of examples and all that is drawn while training
        output: the folder of the run
    """

    known_elsewhere: ClassVar[bool] = True
    task: str
    model: Model
    data: Data = Data()
    loss: Loss = Loss()
    terms: dict[str, dict[str, Any] | None] = {}
    optimisation: Optimisation
    generation: Generation = Generation()
    evaluation: EvaluationSettings = EvaluationSettings()
    logging: Logging = Logging()
    checkpoints: Checkpoints = Checkpoints()
    engine: EngineSettings = EngineSettings()
    seed: Natural = 1
    output: str

    @model_validator(mode="after")
    def _best_needs_checkpoints(self) -> Config:
        every, saved = self.evaluation.eval_steps, self.checkpoints.save_steps
        if self.evaluation.load_best_model_at_end and (not every or not saved or saved % every):
            raise ValueError(
                "evaluation.load_best_model_at_end=true: set evaluation.eval_steps, and checkpoints.save_steps to a "
                f"multiple of it (they are {every} and {saved})"
            )
        if self.logging.projector and not self.evaluation.drift_examples:
            raise ValueError("logging.projector=true needs examples: set evaluation.drift_examples > 0")
        if self.evaluation.early_stopping_patience and not every:
            raise ValueError(
                f"evaluation.early_stopping_patience={self.evaluation.early_stopping_patience} needs "
                "evaluation.eval_steps > 0"
            )
        if self.optimisation.ema_decay is not None and self.model.lora is not None:
            raise ValueError(
                f"optimisation.ema_decay={self.optimisation.ema_decay:g}: adapters are not averaged: set it to "
                "null, or model.lora"
            )
        if self.optimisation.ema_decay is not None and self.model.head == "r4f":
            raise ValueError(
                f"optimisation.ema_decay={self.optimisation.ema_decay:g}: an average of a normalised head is none: set "
                "it to null, or model.head=plain"
            )
        return self

    @model_validator(mode="after")
    def _stream_is_enough(self) -> Config:
        if not self.data.streaming:
            return self
        if self.optimisation.max_steps is None:
            raise ValueError("data.streaming=true: the examples are not counted: set optimisation.max_steps")
        if self.model.name is None and (self.model.tokenizer is None or self.model.has_symbols):
            raise ValueError(
                "data.streaming=true: the tokenizer of this model is made of all its text: set model.tokenizer=NAME"
            )
        return self

    @model_validator(mode="after")
    def _can_be_sharded(self) -> Config:
        if self.engine.name == "ddp":
            return self
        model, optimisation = self.model, self.optimisation
        refused = {
            "model.lora": model.lora is not None and "adapters are not taken into weights in shards: set it to null",
            "model.head=r4f": model.head == "r4f" and "a normalised head is not saved from shards: set it to plain",
            "optimisation.ema_decay": optimisation.ema_decay is not None
            and "weights in shards are not averaged: set it to null",
            "optimisation.update": optimisation.update is not None and "it needs whole gradients: set it to null",
            "optimisation.optim=adafactor": optimisation.optim == "adafactor"
            and "it averages rows and columns, which are cut: set it to adamw",
            "optimisation.precision=fp16": optimisation.precision == "fp16"
            and "its scale has not been tested on shards: set it to bf16 or fp32",
        }
        for key, reason in refused.items():
            if reason:
                raise ValueError(f"{key}: {reason}, or engine.name=ddp")
        return self

    @property
    def method(self) -> str:
        """What tables call the run: its terms, R4F for R3F with a normalised head, RoAST for its FreeLB, and DFT."""
        names = ["roast" if keys and keys.get("preset") == "roast" else name for name, keys in self.terms.items()]
        if self.model.head == "r4f":
            names = ["r4f"] if names == ["r3f"] else [*names, "r4f"]
        return "+".join([*names, *(["dft"] if self.loss.loss == "dft" else [])]) or "baseline"

    def for_evaluation(self, model: str) -> Config:
        """The same for a trained model that is only evaluated: no terms, no checkpoints, no evaluation by steps."""
        evaluation = self.evaluation.updated(eval_steps=0, load_best_model_at_end=False, early_stopping_patience=0)
        plain = {"terms": {}, "evaluation": evaluation, "checkpoints": Checkpoints(), "engine": EngineSettings()}
        return self.updated(model=Model(name=model), logging=self.logging.updated(report_to=[]), **plain)

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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; an empty mapping is a value."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        pairs |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return pairs


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, with the default of those that are not there: they are newer than what has written them.

    >>> with_defaults({"data.limit.train": 5})["evaluation.drift_examples"]
    200
    """
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    defaults = flat({
        name: section.model_construct().model_dump(mode="json")
        for name, section in sections.items() if isinstance(section, type) and issubclass(section, Section)
    })  # fmt: skip
    missing = {key: value for key, value in defaults.items() if not any(k.startswith(f"{key}.") for k in settings)}
    return {**missing, **settings}
