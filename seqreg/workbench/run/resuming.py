"""A trainer that takes up where another process stopped, also with settings that were allowed to change."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqreg.errors import BadInput, Stopped
from seqreg.integrations.hf import RegularizedTrainer
from seqreg.workbench.data import weights
from seqreg.workbench.run import checkpoints
from seqreg.workbench.run.nonfinite import Health
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.terminal import warn


@contextlib.contextmanager
def _reading(checkpoint: str | None, what: str) -> Iterator[None]:
    """Turn a checkpoint that cannot be loaded into one line: about the file that cannot be read, or `what` differs."""
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:  # torch, pickle, safetensors and json have kinds of their own
        if not checkpoint:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        differs = f"{checkpoint}: {what} is of another model: {lines[-1][:200]}".replace("weights is", "weights are")
        raise BadInput(checkpoints.unreadable(Path(checkpoint)) or differs) from None


class ResumingTrainer(RegularizedTrainer):
    """Loads what a `FaultTolerantTrainer` saved.

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
    _restored: stored_json.Progress | None = None
    _source = ""

    def _folder(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{checkpoints.PREFIX}{step}"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        with _reading(checkpoint, "the optimizer's state"):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._has_changed("optimisation"):
            self._take_over(hyper)
        path = Path(checkpoint) / f"progress_{self.args.process_index}.json"
        fix = f"move {path.parent.name} away to go on from the checkpoint before it"
        self._restored = stored_json.read(stored_json.Progress, path, fix) if path.exists() else None

    def _has_changed(self, *keys: str) -> bool:
        """Whether one of these settings, or one below it, was allowed to change."""
        return any(name == key or name.startswith(f"{key}.") for key in keys for name in self.changed)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._source = resume_from_checkpoint
        with _reading(resume_from_checkpoint, "its weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            warn(f"{checkpoint}: {name} is missing: random numbers will be others than in a run that was not stopped")
        with _reading(checkpoint, "the state of the generators"):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint, "the state of the scaler"):
            super()._load_scaler(checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        with _reading(self._source, "its trainer_state.json"):
            return super()._init_training_state(*args, **kwargs)

    def train(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / "trainer_state.json"
            fix = f"move {path.parent.name} away to go on from the checkpoint before it"
            stored_json.read(stored_json.TrainerFile, path, fix)
            self._source = resume_from_checkpoint
        return super().train(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse what transformers only logs: weights that are missing stay as they were drawn."""
        super()._issue_warnings_after_load(load_result)
        wrong = weights.misfit(self.model, load_result.missing_keys, load_result.unexpected_keys)
        if wrong:
            raise BadInput(f"{self._source}: its weights are of another model: {wrong}")

    def _load_terms(self, checkpoint: str, *, changed: bool = False) -> None:
        changed = changed or self._has_changed("terms", "logging.smoothness_steps", "optimisation.update")
        update = self.update
        if self._has_changed("optimisation.update"):
            self.update = None  # what it remembered is of another: it begins anew
        super()._load_terms(checkpoint, changed=changed)
        self.update = update

    def _take_over(self, hyper: list[dict[str, Any]]) -> None:
        """Settings of the optimizer that were allowed to change: a loaded state brings the old ones."""
        schedule = self.lr_scheduler
        if self._has_changed("optimisation.optim"):
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
        found, self._restored = self._restored, None
        if found is None:
            return
        device = self.args.device
        self._tr_loss = torch.tensor(found.loss, device=device)
        self._total_loss_scalar, self._globalstep_last_logged = found.total, found.logged
        self._window.sums = {key: torch.tensor(value, device=device) for key, value in found.sums.items()}
        self._window.steps = defaultdict(float, found.shares)
        self._diagnostics, self._owed, self.seconds = found.diagnostics, found.owed, found.seconds
        self.cpu_seconds, self.step_seconds = found.spent
        self.health.load(found.health.model_dump())
        if self.monitor is not None:
            self.monitor.load(found.monitor.model_dump())
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
            self._source = str(best)
            super()._load_best_model()
        else:
            warn(f"{best}, the best checkpoint, is passed over: {wrong}; the last weights are kept")
