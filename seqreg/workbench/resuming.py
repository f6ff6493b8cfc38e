"""A trainer that takes up where another process stopped, also with settings that were allowed to change."""

from __future__ import annotations

import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqreg.errors import BadInput
from seqreg.integrations.hf import RegularizedTrainer
from seqreg.workbench import checkpoints
from seqreg.workbench.console import warn
from seqreg.workbench.health import Health


class ResumingTrainer(RegularizedTrainer):
    """Loads what a `SteadyTrainer` saved.

    `changed` are settings that a resumed run was allowed to change; `loaded` is called when everything could be loaded.
    """

    health: Health
    clock: float
    saved: float
    seconds = cpu_seconds = step_seconds = 0.0
    monitor: Any = None
    changed: tuple[str, ...] = ()
    loaded: Callable[[], None] = staticmethod(lambda: None)
    _owed = False
    _restored: dict[str, Any] = {}

    def _folder(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{checkpoints.PREFIX}{step}"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except pickle.UnpicklingError:
            raise BadInput(f"{checkpoint}: the optimizer's state holds more than numbers: it is not loaded") from None
        except BadInput:
            raise
        except ValueError as error:
            raise BadInput(f"{checkpoint}: the optimizer's state is of another model: {error}") from None
        if checkpoint is None:
            return
        if self._has_changed("optimisation"):
            self._take_over(hyper)
        path = Path(checkpoint) / f"progress_{self.args.process_index}.json"
        self._restored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _has_changed(self, *keys: str) -> bool:
        """Whether one of these settings, or one below it, was allowed to change."""
        return any(name == key or name.startswith(f"{key}.") for key in keys for name in self.changed)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            what = str(error).splitlines()[-1].strip()
            if "size mismatch" not in what:
                raise
            raise BadInput(f"{resume_from_checkpoint}: its weights are of another model: {what}") from None

    def _load_terms(self, checkpoint: str, *, changed: bool = False) -> None:
        changed = changed or self._has_changed("terms", "logging.smoothness_steps")
        super()._load_terms(checkpoint, changed=changed)

    def _take_over(self, hyper: list[dict[str, Any]]) -> None:
        """Settings of the optimizer that were allowed to change: a loaded state brings the old ones."""
        schedule = self.lr_scheduler
        if self._has_changed("optimisation.optimizer"):
            warn("another optimizer than before: it begins without what the other one remembered")
            self.optimizer.state.clear()
        schedule.base_lrs = [group["initial_lr"] for group in hyper]
        for group, mine, factor in zip(self.optimizer.param_groups, hyper, schedule.lr_lambdas, strict=True):
            group.update(mine, lr=mine["initial_lr"] * factor(schedule.last_epoch))
        schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def restore(self) -> None:
        """Take up what `_progress` wrote, when transformers has set everything to zero."""
        step, last = self.state.global_step, self.state.max_steps
        if step > last:
            raise BadInput(f"{self._folder(step)}: {step} steps are made, and the run is to end after {last}")
        self.loaded()
        self.clock = self.saved = time.monotonic()
        self.state.compute_steps(self.args, self.state.max_steps)  # a loaded state brings the old intervals
        found, self._restored = self._restored, {}
        if not found:
            return
        device = self.args.device
        self._tr_loss = torch.tensor(found["loss"], device=device)
        self._total_loss_scalar, self._globalstep_last_logged = found["total"], found["logged"]
        self._window.sums = {key: torch.tensor(value, device=device) for key, value in found["sums"].items()}
        self._window.steps = defaultdict(float, found["shares"])
        self._anatomy, self._owed, self.seconds = found["anatomy"], found["owed"], found["seconds"]
        self.cpu_seconds, self.step_seconds = found.get("spent", (0.0, 0.0))
        self.health.load(found["health"])
        if self.monitor is not None and found["monitor"]:
            self.monitor.load(found["monitor"])
        self._find_best()

    def _find_best(self) -> None:
        """The best checkpoint, where the folder is now; a spoilt one is named, and another may become the best."""
        state = self.state
        if state.best_global_step is None or not self.args.load_best_model_at_end:
            return
        best = self._folder(state.best_global_step)
        wrong = checkpoints.fault(best)
        state.best_model_checkpoint = str(best) if wrong is None else None
        if wrong is not None:
            warn(f"{best}, the best checkpoint, is passed over: {wrong}")
            state.best_metric = state.best_global_step = None

    def _load_best_model(self) -> None:
        """The same at the end: transformers would take what is on the disk, or silently nothing."""
        best = Path(str(self.state.best_model_checkpoint))
        wrong = checkpoints.fault(best)
        if wrong is None:
            super()._load_best_model()
        else:
            warn(f"{best}, the best checkpoint, is passed over: {wrong}; the last weights are kept")
