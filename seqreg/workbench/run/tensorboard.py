"""Callback: the TensorBoard curves of a run, grouped so that the first page has what matters."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from transformers import TrainerCallback

from seqreg.build import term_names
from seqreg.schedules import weight_at
from seqreg.workbench.config import overlay
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.examples import Example, tag_text
from seqreg.workbench.scores.evaluate import Scored, Scorer
from seqreg.workbench.scores.results import BEFORE, drift_numbers, main_split, score_lines
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.escape import code, fenced, prose
from seqreg.workbench.text.terminal import warn

CHANGE = "trained_retention/score_change"
"""The score on the tasks of data.also after training minus before, in points: their mean."""
RESULTS = (
    "eval/score", "trained/test/score", CHANGE, "trained_drift/kl_trained_start", "trained_drift/weight_distance",
    "trained_drift/cka",
)  # fmt: skip
"""What the table of hparams shows of every run: scores, then what training has changed."""
PROJECTED = "encoder_states"
"""The tag of the projector."""
LABEL = 100
"""Characters of the label of a point."""
_UNUSED = ("epoch", "num_input_tokens_seen", "total_flos", "train_runtime", "train_loss", "train_tokens_per_second")
_NOT_SHOWN = ("epoch", "runtime", "per_second", "preparation_time", "_references", "_reference")


def tag_of_log(key: str) -> str:
    """The tag of a number that is logged in training.

    >>> tag_of_log("part/r3f"), tag_of_log("diagnostics/r3f/noise_over_value")
    ('train/part/r3f', 'train_diagnostics/r3f/noise_over_value')
    """
    head, slash, _ = key.partition("/")
    return f"train/{key}" if not slash or head in ("part", "task", "value", "weight") else f"train_{key}"


def tag_of_score(key: str, metrics: Sequence[str]) -> str:
    """The tag of a score on the validation set; `metrics` are those of the card.

    >>> [tag_of_score(key, ["rouge"]) for key in ("rougeL", "rougeL_low", "gen_len")]
    ['eval/rougeL', 'validation_intervals/rougeL_low', 'validation_outputs/gen_len']
    """
    if key.endswith(("_low", "_high")):
        return f"validation_intervals/{key}"
    shown = key in ("loss", "score", *metrics) or key.startswith("rouge")
    return f"eval/{key}" if shown else f"validation_outputs/{key}"


class TensorBoardWriter(TrainerCallback):
    """Writes the event files of a run.

    TensorBoard opens with the first two groups of scalars, by name: eval/ has the scores, train/ the loss and its
    parts. What is looked at less often is in groups that come after them (`tag_of_log`, `tag_of_score`). The size on
    disk is that of the points, of `logging.samples` texts at every evaluation, and of nothing else: neither weights nor
    histograms.
    """

    def __init__(self, folder: Path, run: Run, scorer: Scorer) -> None:
        self.folder, self.run, self.scorer = folder, run, scorer
        self.writer: Any = None
        self.epochs: list[str] = []
        self._last_log = (time.perf_counter(), 0)
        self.loss = float("nan")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        later = state.global_step + 1 if state.global_step else 0
        with self._or_give_up():
            threading.excepthook = _unless_writing
            self.writer = SummaryWriter(str(self.folder), purge_step=later if self.folder.exists() else None)
            self.writer.add_custom_scalars(layout(self.run))
            self.writer.add_text("settings", fenced(overlay.dump(self.run.config.model_dump(mode="json")), "yaml"))
            experiment, start, _ = _hparams(self.run)
            self.writer.file_writer.add_summary(experiment)
            self.writer.file_writer.add_summary(start)
        self._last_log = (time.perf_counter(), state.num_input_tokens_seen)

    @contextlib.contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Give up curves that cannot be written, with one warning: the run continues."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.writer = None
            warn(f"{self.folder}: curves are no longer written ({error}); the run continues")

    def state(self) -> dict[str, Any]:
        """What a resumed run continues the table of epochs with."""
        return {"epochs": self.epochs, "loss": self.loss}

    def load(self, state: stored_json.CurveState) -> None:
        self.epochs, self.loss = state.epochs, state.loss

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.writer is None or not logs or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), state.num_input_tokens_seen
        speed = (tokens - self._last_log[1]) / max(now - self._last_log[0], 1e-9)
        self._last_log, self.loss = (now, tokens), float(logs["loss"])
        with self._or_give_up():
            for key, value in {**logs, "tokens_per_second": speed}.items():
                if key not in _UNUSED and isinstance(value, (int, float)):
                    self.writer.add_scalar(tag_of_log(key), value, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self.writer is None:
            return
        shown = samples(self.scorer, self.run.config.logging.samples)
        with self._or_give_up():
            for key, value in (metrics or {}).items():
                name = key.removeprefix("eval_")
                if not name.endswith(_NOT_SHOWN):
                    self.writer.add_scalar(tag_of_score(name, self.run.card.metric), value, state.global_step)
            if shown:
                self.writer.add_text("samples", shown, state.global_step)
        self._last_log = (time.perf_counter(), state.num_input_tokens_seen)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.writer is None:
            return
        score = self.scorer.last.metrics.get("score")
        shown = "" if score is None else f"{score:.2f}"
        self.epochs.append(f"| {state.epoch:.2f} | {state.global_step} | {self.loss:.4g} | {shown} |")
        table = "| epoch | step | loss | last score |\n|---|---|---|---|\n" + "\n".join(self.epochs[-200:])
        with self._or_give_up():
            self.writer.add_text("scores_by_epoch", table)  # always at step 0: the newest replaces the others

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.writer is not None:
            with self._or_give_up():
                self.writer.flush()

    def project(self, states: Mapping[str, Tensor], examples: Sequence[Example]) -> None:
        """Write representations of examples for the projector.

        Args:
            states: by model, [examples, D] each
        """
        if self.writer is None:
            return
        columns = ["model", "label" if self.run.card.columns.target is None else "target", "source"]
        rows = [[name, *described(example, self.run.card)] for name in states for example in examples]
        with self._or_give_up():
            shutil.rmtree(self.folder / "00000", ignore_errors=True)  # of a run that was stopped at this place
            (self.folder / "projector_config.pbtxt").unlink(missing_ok=True)
            self.writer.add_embedding(
                torch.cat(list(states.values())), metadata=rows, metadata_header=columns, tag=PROJECTED
            )

    def close(self, scores: dict[str, Scored], metrics: Mapping[str, Any], step: int) -> None:
        """Add the final scores, drift and retention, and end the hparams session.

        Args:
            metrics: contents of metrics.json
            step: the last one
        """
        if self.writer is None:
            return
        with self._or_give_up():
            judged = main_split(scores, texts=True)
            for name, scored in scores.items():
                for key, value in scored.metrics.items():
                    split, when = (judged, 0) if name == BEFORE else (name, step)
                    self.writer.add_scalar(f"trained/{split}/{key}", value, when)
            for key, value in drift_numbers(metrics).items():
                for at, number in ((0, 1.0 if key == "cka" else 0.0), (step, value)):  # the start is itself
                    self.writer.add_scalar(f"trained_drift/{key}", number, at)
            for task, numbers in metrics.get("retention", {}).items():
                for key, pair in numbers.items():
                    for at, value in ((0, pair["before"]), (step, pair["after"])):
                        if value is not None:
                            self.writer.add_scalar(f"trained_retention/{task}/{key}", value, at)
            changes = score_changes(metrics, self.run.card.score)
            if changes:
                self.writer.add_scalar(CHANGE, sum(changes) / len(changes), step)
            self.writer.add_text("result", result(self.run, metrics))  # the first of all texts, by its name
            _, _, end = _hparams(self.run)
            self.writer.file_writer.add_summary(end)
            self.writer.close()


_default_hook = threading.excepthook


def _unless_writing(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread prints its exception; `TensorBoardWriter` says it in a line at the next point instead."""
    if not isinstance(failed.exc_value, OSError):
        _default_hook(failed)


def _hparams(run: Run) -> Any:
    """Summaries that declare the settings, start the session and end it, for the event file of the run itself."""
    return hparams(hyperparameters(run), dict.fromkeys(RESULTS, 0))  # type: ignore[no-untyped-call]


def layout(run: Run) -> dict[str, dict[str, list[Any]]]:
    """The grouped first page: `Custom scalars` in TensorBoard."""
    main = [name for name in run.card.scores if name != "rougeLsum"]
    margins = {
        name: ["Margin", [f"eval/{name}", f"validation_intervals/{name}_low", f"validation_intervals/{name}_high"]]
        for name in reversed(main)  # TensorBoard shows the last one first
    }
    return {
        "1 Scores on the validation set, with intervals": margins,
        "2 What training has changed: drift and retention": {
            "scores on other tasks, before and after": ["Multiline", ["trained_retention/.+/(?!loss$).*"]],
            "losses on other tasks, before and after": ["Multiline", ["trained_retention/.+/loss$"]],
            "KL to the start, in both directions": ["Multiline", [".*drift/.*kl_.*"]],
            "relative distance of the weights": ["Multiline", [".*drift/weight_distance$"]],
            "CKA to the start": ["Multiline", [".*drift/cka$"]],
        },
        "3 Loss": {
            "loss and its parts": ["Multiline", ["train/loss$", "train/part/.*"]],
            "terms, unweighted": ["Multiline", ["train/value/.*"]],
            "validation loss": ["Multiline", ["eval/loss$"]],
        },
        "4 What the terms do": {
            "part over base loss": ["Multiline", ["train_diagnostics/.*/part_over_base$"]],
            "diagnostics": ["Multiline", ["train_diagnostics/.*"]],
            "weights of the terms": ["Multiline", ["train/weight/.*"]],
            "smoothness": ["Multiline", ["train_smoothness/.*"]],
        },
        "5 What the model says": {
            "words of an output": ["Multiline", ["validation_outputs/gen_len$"]],
            "novelty and repetition": ["Multiline", ["validation_outputs/novelty$", "validation_outputs/repetition$"]],
            "distinct predictions and the most common one (%)": [
                "Multiline",
                ["validation_outputs/distinct$", "validation_outputs/most_common$"],
            ],
        },
        "6 Optimisation": {
            "gradient norm": ["Multiline", ["train/grad_norm$"]],
            "learning rate": ["Multiline", ["train/learning_rate$"]],
            "tokens per second": ["Multiline", ["train/tokens_per_second$"]],
        },
    }


def score_changes(metrics: Mapping[str, Any], score: str) -> list[float]:
    """How much the score on every task of data.also has changed, as far as it is known before and after."""
    pairs = [numbers[score] for numbers in metrics.get("retention", {}).values() if score in numbers]
    return [pair["after"] - pair["before"] for pair in pairs if None not in (pair["before"], pair["after"])]


def result(run: Run, metrics: Mapping[str, Any]) -> str:
    """What became of a run, in Markdown: what it was, its scores, drift and retention."""
    config, steps = run.config, metrics.get("train", {}).get("steps", "?")
    model = f"from {prose(config.model.name)}" if config.model.name else "from scratch"
    about = f"**{prose(run.card.title)}: {prose(config.method)}**, {model}, {steps} steps, seed {config.seed}"
    return "\n".join([about, "", *score_lines(metrics)])


def hyperparameters(run: Run) -> dict[str, Any]:
    """All settings as flat keys, the same in every run, or TensorBoard shows those of one run alone.

    TensorBoard sorts them by name and opens with five columns: these have numbers.
    """
    flat: dict[str, Any] = {}
    config = run.config.model_dump(mode="json")
    terms = config.pop("terms")
    for key, value in config.items():
        for inner, setting in value.items() if isinstance(value, dict) else [("", value)]:
            flat[f"{key}.{inner}" if inner else key] = _simple(setting)
    weights = {type(term).__name__.lower(): weight_at(term.weight, 0) for term in run.criterion.terms}
    for name in term_names():
        flat[f"weight.{name}"] = weights.get(name, 0.0)
    flat["terms"] = _simple(terms)
    first = {
        "method": run.config.method, "weights of terms": ", ".join(f"{k} {v:g}" for k, v in weights.items()) or "none",
        "learning rate": run.config.optimisation.learning_rate, "steps": run.config.optimisation.max_steps,
        "seed": run.config.seed,
    }  # fmt: skip
    return flat | {f"{place} {name}": _simple(value) for place, (name, value) in enumerate(first.items(), start=1)}


def _simple(value: Any) -> Any:
    if value is None:
        return "none"
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value, sort_keys=True)


def described(example: Example, card: Card) -> list[str]:
    """What an example is predicted as, and its source, for the labels of points: a line each, and not long."""
    if example.label is not None:
        told = str(example.label) if card.labels is None else card.labels[int(example.label)]
    else:
        told = example.target or tag_text(card, example.tags or ())
    return [" ".join(text.split())[:LABEL] for text in (told, example.source)]


def samples(scorer: Scorer, count: int) -> str:
    """The first outputs as a Markdown table; what a model writes is shown as it is, not as Markdown."""
    rows = scorer.last.predictions[:count]
    if not rows:
        return ""
    lines = ["| prediction | reference |", "|---|---|"]
    lines += [f"| {code(row['prediction'])} | {code(row['reference'])} |" for row in rows]
    return "\n".join(lines)
