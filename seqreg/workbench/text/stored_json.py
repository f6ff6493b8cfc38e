"""JSON files of a run, read and checked; an error is one line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from seqreg.errors import BadInput

T = TypeVar("T")


def read(kind: type[T], path: Path, fix: str) -> T:
    """The contents of a JSON file as a `kind`: a dataclass, or a model of pydantic.

    Args:
        fix: what to do about a file that cannot be read
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        reason = f"{where[:100]}: {str(first['msg'])[:200]}"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise BadInput(f"{path}: cannot be read ({reason}): {fix}")


class Before(TypedDict, total=False):
    """Scores of the untrained model in run.json, with evaluation.eval_before_training."""

    metrics: dict[str, float | None]
    intervals: dict[str, list[float | None]]
    signature: str


class Outline(TypedDict):
    """A split of the data in run.json: how many examples, and short hashes of blocks of `size` of them."""

    count: int
    size: int
    blocks: list[str]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="allow")


class NonfiniteState(_Stored):
    """Of `NonfiniteSteps.state`."""

    streak: int
    window: tuple[int, int]
    skipped: int
    dropped: dict[str, int]


class CurveState(_Stored):
    """Of `TensorBoardWriter.state`; a run without one has none."""

    epochs: list[str] = []
    loss: float = float("nan")


class Progress(_Stored):
    """Of `FaultTolerantTrainer._progress`; the second names are those of earlier versions."""

    loss: float
    total: float
    logged: int
    sums: dict[str, float]
    shares: dict[str, float]
    diagnostics: dict[str, float] = {}
    evaluation_due: bool = Field(validation_alias=AliasChoices("evaluation_due", "owed"))
    nonfinite: NonfiniteState = Field(validation_alias=AliasChoices("nonfinite", "health"))
    seconds: float
    spent: tuple[float, float]
    not_better: int = Field(default=0, ge=0)
    tensorboard: CurveState = Field(validation_alias=AliasChoices("tensorboard", "monitor"))


class TrainerFile(_Stored):
    """What is relied upon in transformers' trainer_state.json."""

    epoch: float | None
    global_step: int = Field(ge=0, le=2**53)
    max_steps: int
    train_batch_size: int
    num_input_tokens_seen: int
    total_flos: float
    log_history: list[dict[str, Any]]
    best_metric: float | None
    best_global_step: int | None
    best_model_checkpoint: str | None
    stateful_callbacks: dict[str, Any]


class CrashReport(_Stored):
    """Contents of crash.json."""

    run: str
    configuration: str
    step: int = Field(ge=0)
    rows: list[int]
    not_finite: list[str]
    batches: int = Field(ge=1)
