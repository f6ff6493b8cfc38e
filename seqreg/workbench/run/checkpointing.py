"""A trainer that saves sealed checkpoints, and resumes exactly from them."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput, NotFinite, Stopped
from seqreg.integrations.hf import RegularizedTrainer
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import weights
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.run import checkpoints
from seqreg.workbench.run.ema import WeightEMA
from seqreg.workbench.run.nonfinite import NonfiniteSteps
from seqreg.workbench.run.record import covers
from seqreg.workbench.run.run_directory import RunDirectory
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.tensorboard import TensorBoardWriter
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.atomic_files import writing
from seqreg.workbench.text.progress import Bars
from seqreg.workbench.text.terminal import warn

MINUTE = 60.0


@dataclass(frozen=True)
class RunOptions:
    """How a run is trained, beside transformers' arguments.

    Args:
        config: for what transformers has no argument
        directory: of the run; its facts seal the checkpoints. A trainer without one is not resumed
        signals: looked at after every step, and after every batch of an evaluation
        sampler: the order of the training examples; None for transformers' own
        checkpoint_bytes: about, for the message on a full disk
        bars: progress on the terminal
        tensorboard: the curves, if they are written
    """

    config: Config
    directory: RunDirectory | None = None
    signals: Signals = field(default_factory=Signals)
    sampler: GroupedOrder | None = None
    checkpoint_bytes: int = 0
    bars: Bars = field(default_factory=Bars)
    tensorboard: TensorBoardWriter | None = None


class CheckpointingTrainer(RegularizedTrainer):
    """What a run has counted and loaded is an attribute here, and in its checkpoints."""

    keeps_record = False  # run.json has the settings of its terms

    def __init__(self, *args: Any, options: RunOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options
        self.nonfinite = NonfiniteSteps(options.config.optimisation.nonfinite_patience)
        self.clock = self.saved = time.monotonic()
        self.seconds = self.cpu_seconds = self.step_seconds = 0.0
        self._evaluation_due = False
        self.not_better = 0
        """Evaluations since the best one, of the checkpoint that is loaded."""
        self._best_loaded: int | None = None
        decay = options.config.optimisation.ema_decay
        self.ema = None if decay is None else WeightEMA(decay)
        self._source = ""
        """The folder that is loaded from."""

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        directory = self.options.directory
        return {"run": ""} if directory is None else directory.record.facts

    def _on_any_process(self, *flags: bool) -> list[bool]:
        if self.args.world_size == 1:
            return list(flags)
        sums = self.accelerator.reduce(torch.tensor(flags, dtype=torch.float32, device=self.args.device), "sum")
        return [bool(number) for number in sums.tolist()]

    def check_weights(self) -> None:
        """Stop a run whose last update made weights infinite, before they are saved or called finished."""
        bad = weights.not_finite(self.model)
        if self._on_any_process(bool(bad))[0]:
            bad = bad or "weights are not finite on another process"
            raise NotFinite(
                f"{self.args.output_dir}: after step {self.state.global_step} {bad}; they are not saved, and "
                f"{self._last_checkpoint()}. Lower optimisation.learning_rate (with --allow-change)"
            )

    # Saving

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint by the clock of the first process."""
        minutes = self.options.config.checkpoints.save_minutes
        late = minutes > 0 and time.monotonic() - self.saved > minutes * MINUTE
        return self._on_any_process(late and self.is_world_process_zero())[0] if minutes else False

    def _folder(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{checkpoints.PREFIX}{step}"

    def _last_checkpoint(self) -> str:
        sealed = checkpoints.sealed(Path(self.args.output_dir), self.facts["run"])
        return f"the last checkpoint is {sealed[-1]}" if sealed else "there is no checkpoint"

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        options, facts, final = self.options, self.facts, self._folder(self.state.global_step)
        self.check_weights()
        if options.directory is not None:
            options.directory.check_own()
        if final not in checkpoints.sealed(final.parent, facts["run"]) or checkpoints.fault(final):
            facts |= {"step": self.state.global_step}
            hint = f"; {self._last_checkpoint()}; free some space, and run the same command again"
            with writing(final, options.checkpoint_bytes, hint):
                wait = self.accelerator.wait_for_everyone
                with checkpoints.staged(final, facts, bool(self.args.should_save), wait) as aside:
                    self._write_checkpoint(aside)
        if self.args.should_save:
            limit, best = options.config.checkpoints.save_total_limit, self.state.best_model_checkpoint
            checkpoints.rotate(final.parent, facts["run"], limit, best)
        self.saved = time.monotonic()

    def _write_checkpoint(self, aside: Path) -> None:
        self.store_flos()
        if not self.sharded:  # whose weights are in shards, beside those of the optimizer
            self.save_model(str(aside), _internal_call=True)
        self._save_optimizer_and_scheduler(str(aside))
        self._save_scaler(str(aside))
        self._save_rng_state(str(aside))
        (aside / self._progress_file).write_text(json.dumps(self._progress()), encoding="utf-8")
        self.save_ema(aside)
        if self.args.should_save:
            self.state.save_to_json(str(aside / "trainer_state.json"))

    def save_ema(self, folder: Path) -> None:
        """The average of the weights, if one is kept."""
        if self.ema is not None and self.args.should_save:
            self.ema.save(folder)

    def save_weights(self, folder: Path) -> None:
        """The weights and what the terms remember."""
        self._save(str(folder))
        self._save_terms(str(folder))

    def load_weights(self, folder: Path) -> None:
        """What `save_weights` wrote, or a checkpoint."""
        self._load_from_checkpoint(str(folder))
        self._load_terms(str(folder), changed=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)  # a pickle

    @property
    def _progress_file(self) -> str:
        return f"progress_{self.args.process_index}.json"

    def _progress(self) -> dict[str, Any]:
        """What is between two logs, and what has been counted; read as `stored_json.Progress`."""
        tensorboard = self.options.tensorboard
        return {
            "loss": float(self._tr_loss), "total": self._total_loss_scalar, "logged": self._globalstep_last_logged,
            "sums": {key: float(value) for key, value in self._window.sums.items()}, "shares": dict(self._window.steps),
            "diagnostics": self._diagnostics, "evaluation_due": self._evaluation_due,
            "nonfinite": self.nonfinite.state(), "tensorboard": {} if tensorboard is None else tensorboard.state(),
            "seconds": self.seconds + time.monotonic() - self.clock, "spent": [self.cpu_seconds, self.step_seconds],
        }  # fmt: skip

    # Loading

    def train(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        self._source = resume_from_checkpoint or ""
        if self._source:
            self._read(stored_json.TrainerFile, "trainer_state.json")
        return super().train(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _read(self, kind: type[Any], name: str) -> Any:
        """A JSON file of the checkpoint that is loaded."""
        folder = Path(self._source)
        return stored_json.read(kind, folder / name, f"move {folder.name} away to resume from the checkpoint before it")

    def _has_changed(self, *keys: str) -> bool:
        """Whether a resumed run was allowed to change one of these settings, or one below it."""
        changed = [] if self.options.directory is None else self.options.directory.changed
        return any(covers(key, name) for key in keys for name in changed)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._source = resume_from_checkpoint
        with _loading(resume_from_checkpoint, "its weights are"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse what transformers only logs: weights that are missing stay as they were initialised."""
        super()._issue_warnings_after_load(load_result)
        misfit = weights.misfit(self.model, load_result.missing_keys, load_result.unexpected_keys)
        if misfit:
            raise BadInput(f"{self._source}: its weights are of another model: {misfit}")

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        with _loading(self._source, "its trainer_state.json is"):
            return super()._init_training_state(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        with _loading(checkpoint, "the optimizer's state is"):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._has_changed("optimisation"):
            return
        schedule = self.lr_scheduler  # a loaded state brings the old settings
        if self._has_changed("optimisation.optim"):
            warn("another optimizer than before: it starts without the state of the other one")
            self.optimizer.state.clear()
        schedule.base_lrs = [group["initial_lr"] for group in hyper]
        for group, new, factor in zip(self.optimizer.param_groups, hyper, schedule.lr_lambdas, strict=True):
            group.update(new, lr=new["initial_lr"] * factor(schedule.last_epoch))
        schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _load_terms(self, checkpoint: str, *, changed: bool = False) -> None:
        changed = changed or self._has_changed("terms", "logging.smoothness_steps", "optimisation.update")
        update = self.update
        if self._has_changed("optimisation.update"):
            self.update = None  # the state is that of another: this one starts without
        super()._load_terms(checkpoint, changed=changed)
        self.update = update

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _loading(checkpoint, "the state of the scaler is"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            warn(f"{checkpoint}: {name} is missing: random numbers will differ from those of an uninterrupted run")
        with _loading(checkpoint, "the state of the generators is"):
            super()._load_rng_state(checkpoint)

    def restore(self) -> None:
        """Load what `_progress` wrote, when transformers has set everything to zero."""
        step, last, options, device = self.state.global_step, self.state.max_steps, self.options, self.args.device
        if step > last:
            raise BadInput(f"{self._folder(step)}: {step} steps are made, and the run is to end after {last}")
        # a process that was not there counts on from the first: what comes next is the same in all
        names = (self._progress_file, "progress_0.json") if self._source else ()
        stored = next((name for name in names if (Path(self._source) / name).exists()), None)
        progress = self._read(stored_json.Progress, stored) if stored else None
        if options.directory is not None:
            options.directory.settle()
        if self.ema is not None:
            with _loading(self._source, "the average of the weights is"):
                self.ema.begin(self.model, Path(self._source) if self._source else None)
        self.clock = self.saved = time.monotonic()
        self.state.compute_steps(self.args, last)  # a loaded state brings the old intervals
        if progress is None:
            return
        self._tr_loss = torch.tensor(progress.loss, device=device)
        self._total_loss_scalar, self._globalstep_last_logged = progress.total, progress.logged
        self._window.sums = {key: torch.tensor(value, device=device) for key, value in progress.sums.items()}
        self._window.steps = defaultdict(float, progress.shares)
        self._diagnostics, self._evaluation_due = progress.diagnostics, progress.evaluation_due
        self.not_better = progress.not_better
        self.seconds, (self.cpu_seconds, self.step_seconds) = progress.seconds, progress.spent
        self.nonfinite.load(progress.nonfinite)
        if options.tensorboard is not None:
            options.tensorboard.load(progress.tensorboard)
        if self.state.best_global_step is not None and self.args.load_best_model_at_end:
            best = self._folder(self.state.best_global_step)  # where the folder is now
            if not self._is_intact(best):  # another may become the best
                self.state.best_metric = self.state.best_global_step = None
            self.state.best_model_checkpoint = str(best) if self.state.best_global_step is not None else None

    def _is_intact(self, best: Path, instead: str = "") -> bool:
        fault = checkpoints.fault(best)
        if fault is not None:
            warn(f"{best}, the best checkpoint, is passed over: {fault}{instead}")
        return fault is None

    def _load_best_model(self) -> None:
        """The same at the end: transformers would take what is on the disk, or silently nothing."""
        best = Path(str(self.state.best_model_checkpoint))
        if self._is_intact(best, "; the last weights are kept"):
            self._source, self._best_loaded = str(best), checkpoints.step_of(best)
            super()._load_best_model()

    @property
    def model_step(self) -> int:
        """The step that the model is of when the run has ended: the last one, or the best."""
        return self.state.global_step if self._best_loaded is None else self._best_loaded


@contextlib.contextmanager
def _loading(checkpoint: str | None, subject: str) -> Iterator[None]:
    """Turn a checkpoint that cannot be loaded into one line: on the file that cannot be read, or on what differs."""
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:  # torch, pickle, safetensors and json have kinds of their own
        if not checkpoint:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        differs = f"{checkpoint}: {subject} of another model: {lines[-1][:200]}"
        unreadable = checkpoints.unreadable(Path(checkpoint))
        fix = f"move {Path(checkpoint).name} away to resume from the checkpoint before it"
        raise BadInput(f"{unreadable}: {fix}" if unreadable else differs) from None
