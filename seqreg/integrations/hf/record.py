"""The criterion of a trainer, kept in its checkpoints, its model card and TensorBoard, and compared when it resumes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from seqreg.errors import BadInput
from seqreg.version import __version__

if TYPE_CHECKING:
    from seqreg.criterion import Criterion
    from seqreg.integrations.hf.trainer import RegularizedTrainer
    from seqreg.selective_update import Update

FILE = "seqreg_criterion.json"
_HEADING = "## Training criterion"


def described(criterion: Criterion, update: Update | None) -> dict[str, Any]:
    """All settings of a criterion and an update, as JSON has them."""
    terms = {term.name: _plain(term) for term in criterion.terms}
    base = {key: getattr(criterion, key) for key in ("loss", "label_smoothing", "smoothing", "per")}
    return {"base": base, "terms": terms, "update": None if update is None else _plain_update(update)}


def _plain(value: Any) -> Any:
    """A setting as JSON has it: of an object that is no dataclass, such as a function, the name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        settings = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _name(type(value)), **settings}
    return _name(value if inspect.isfunction(value) or isinstance(value, type) else type(value))


def _plain_update(update: Update) -> dict[str, Any]:
    settings = [name for name in inspect.signature(type(update)).parameters if hasattr(update, name)]
    return {"class": _name(type(update)), **{name: _plain(getattr(update, name)) for name in settings}}


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def differences(there: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two descriptions of a criterion, in a few words for each setting."""
    if isinstance(there, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*there, *now])
        pairs = ((f"{path}.{key}" if path else key, there.get(key), now.get(key)) for key in keys)
        return [line for key, was, value in pairs for line in differences(was, value, key)]
    return [] if there == now else [f"{path} {_shown(there)} there, {_shown(now)} now"]


def _shown(value: Any) -> str:
    """A setting in a message; of a term and of another object with settings, the class."""
    if isinstance(value, dict) and "class" in value:
        return str(value["class"])
    return "none" if value is None else json.dumps(value)


class CriterionRecord(TrainerCallback):
    """Callback: write the criterion to every checkpoint and to TensorBoard; compare it with that of a checkpoint.

    Args:
        strict: refuse to resume with another criterion, instead of a warning
    """

    def __init__(self, trainer: RegularizedTrainer, strict: bool) -> None:
        self.trainer, self.strict = trainer, strict

    def text(self) -> str:
        """The contents of the file; what is changed in the trainer before it trains counts."""
        now = described(self.trainer.criterion, self.trainer.update)
        return json.dumps({"seqreg": __version__, **now}, indent=1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            writer = getattr(callback, "tb_writer", None)
            if writer is not None and state.is_world_process_zero:
                writer.add_text("criterion", f"```json\n{self.text()}\n```")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and folder.is_dir() and not (folder / FILE).exists():  # where FSDP writes shards
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the file to a checkpoint; a folder for others has none, as settings may be paths."""
        if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            (folder / FILE).write_text(self.text() + "\n", encoding="utf-8")

    def check(self, checkpoint: str) -> None:
        """Warn where a checkpoint was trained with another criterion, or without one; `strict` refuses it."""
        path = Path(checkpoint) / FILE
        if not path.is_file():
            line = f"{checkpoint} has no {FILE}: trained without a criterion, or by an earlier version of seqreg"
        else:
            try:
                there = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise BadInput(f"{path}: cannot be read ({error}): remove it to resume without a comparison") from None
            there = {key: value for key, value in there.items() if key != "seqreg"}
            found = differences(there, described(self.trainer.criterion, self.trainer.update))
            if not found:
                return
            line = f"{checkpoint} was trained with another criterion: {'; '.join(found)}"
        if self.strict:
            raise BadInput(f"{line}: resume with the criterion of the checkpoint, or without strict=True")
        if self.trainer.is_world_process_zero():
            warnings.warn(line, stacklevel=2)

    def add_to_card(self) -> None:
        """Add the criterion to the model card that the trainer has written; folders by their last name."""
        path = Path(self.trainer.args.output_dir) / "README.md"
        if not self.trainer.is_world_process_zero() or not path.is_file():
            return
        page = path.read_text(encoding="utf-8").partition(f"\n{_HEADING}\n")[0].rstrip()
        settings = json.dumps(_without_places(json.loads(self.text())), indent=1)
        path.write_text(f"{page}\n\n{_HEADING}\n\n```json\n{settings}\n```\n", encoding="utf-8")


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_places(inner) for key, inner in value.items()}
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
