"""A stand-in for what axolotl documents of its plug-ins, and does with them in one run.

Written from the documented interface: `BasePlugin` with its methods, a manager that loads a plug-in by its dotted name,
merges its settings into the configuration by inheritance, and tells it when the trainer has been made. A trainer there
does bookkeeping in `compute_loss`, and then calls that of transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import transformers
from pydantic import BaseModel


class BasePlugin:
    """All methods of the interface that are called in a run; each does nothing."""

    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def get_trainer_cls(self, cfg: Any) -> Any: ...

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...


class DictDefault(dict):  # type: ignore[type-arg]
    """Keys are attributes; those that are not there are None."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return DictDefault(value) if isinstance(value, dict) else value


class AxolotlTrainer(transformers.Trainer):  # type: ignore[misc]
    """Counts tokens, then asks transformers for the loss."""

    tokens = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.tokens += int((inputs["labels"] != -100).sum())
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)


class InputConfig(BaseModel):
    """The configuration without plug-ins."""

    plugins: list[str]
    sample_packing: bool = False


def install(monkeypatch: Any) -> None:
    """Make `axolotl.integrations.base` importable, and forget the plug-in at the end."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "axolotl_plugin", raising=False)


def configured(settings: dict[str, Any]) -> tuple[DictDefault, list[Any]]:
    """A configuration, checked with the settings of its plug-ins, and the plug-ins."""
    plugins, bases = [], [InputConfig]
    for dotted in settings["plugins"]:
        module, _, name = dotted.rpartition(".")
        plugins.append(getattr(importlib.import_module(module), name)())
        plugins[-1].register(settings)
        module, _, name = plugins[-1].get_input_args().rpartition(".")
        bases.append(getattr(importlib.import_module(module), name))
    merged = type("AxolotlInputConfig", tuple(bases), {})
    return DictDefault(merged(**settings).model_dump(exclude_none=True)), plugins
