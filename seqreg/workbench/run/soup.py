"""`seqreg soup`: a model made of the weights of finished runs, without training, in a folder of its own."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.spectral_norm import fold
from seqreg.workbench.config import run_config
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import loading, models, weights
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import blend as blending
from seqreg.workbench.run import checkpoints, ema
from seqreg.workbench.run.blend import BEST, Blend, Blended, ToScored, Weights
from seqreg.workbench.run.record import RunRecord, versions
from seqreg.workbench.run.run_directory import check_links, check_output, written
from seqreg.workbench.run.train import LoadedRun, make_trainer, measure, trained
from seqreg.workbench.scores import results
from seqreg.workbench.scores.evaluate import Scored, evaluate, with_average
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED, finish, staged_folder, to_json, write_text
from seqreg.workbench.text.terminal import say

SOUP = "soup.json"
MADE_OF = "soup.runs"
"""Key of a record: the names of the runs that a model is made of."""


@dataclass(frozen=True)
class SourceRun:
    """A finished run, with its settings while it was trained, and those for the evaluation of its model."""

    folder: Path
    run: Run
    final: Run
    record: RunRecord

    @classmethod
    def read(cls, folder: Path, trust: bool, trust_changes: bool = False) -> SourceRun:
        final, record = trained(folder, trust=trust, trust_changes=trust_changes), RunRecord.read(folder)
        if record is None or not record.finished:
            raise BadInput(f"{folder}: its run has not finished: run the same seqreg train again")
        return cls(folder, run_config.load(folder, trust=trust, build_terms=False), final, record)

    @cached_property
    def tokenizer(self) -> Any:
        return models.load_tokenizer(self.final.config, trust=self.final.trust)

    def model(self) -> Any:
        run = self.final
        return models.load_model(run.config, run.card, self.tokenizer, trust=run.trust, trained=True)

    def weights(self, average: bool) -> Weights:
        """Its last weights by name, or the average of them; a weight that was not trained is as it ended."""
        last = {name: value.detach().clone() for name, value in self.model().named_parameters()}
        if not average:
            return last
        if not (self.folder / ema.FILE).is_file():
            raise BadInput(f"{self.folder}: it has no {ema.FILE}: train it with optimisation.ema_decay=0.999")
        kept, _ = ema.load(self.folder)
        if any(name not in last or last[name].shape != value.shape for name, value in kept.items()):
            raise BadInput(f"{self.folder / ema.FILE}: the average of another model")
        return {**last, **kept}

    def start(self) -> tuple[Weights, set[str]]:
        """The weights that it started from, and the names of those that were drawn: they have no start."""
        config, trust = self.run.config, self.run.trust
        if config.model.name is None:
            raise BadInput(f"{self.folder}: trained from scratch: there is no pretrained model to interpolate with")
        tokenizer = models.load_tokenizer(config, trust=trust)
        model = models.load_model(config, self.run.card, tokenizer, trust=trust)
        if models.pretrained_digest(model, config) != self.record.pretrained:
            raise BadInput(
                f"{self.folder}: model.name={config.model.name} is not what it started from (the SHA-256 of the "
                "weights is another than in its run.json): bring that model back, or train the run again"
            )
        drawn = set(models.drawn_anew(model))
        if config.model.head == "r4f":
            drawn |= {name for name, _ in fold(model).named_parameters() if not weights.in_body(model, name)}
        return {name: value.detach().clone() for name, value in model.named_parameters()}, drawn


def check_alike(runs: Sequence[SourceRun], several: Sequence[Weights]) -> None:
    """Refuse runs of other tasks, other shapes or other starting models: their weights have no mean."""
    first = runs[0]
    for run, values in zip(runs[1:], several[1:], strict=True):
        pair = f"{first.folder} and {run.folder}"
        if first.run.card != run.run.card:
            raise BadInput(f"{pair}: their tasks are not the same, so that their weights have no mean")
        shapes = [{name: list(value.shape) for name, value in some.items()} for some in (several[0], values)]
        if shapes[0] != shapes[1]:
            names = sorted(shapes[0].keys() | shapes[1].keys())
            name = next(name for name in names if shapes[0].get(name) != shapes[1].get(name))
            sizes = " and ".join(str(some.get(name, "missing")) for some in shapes)
            raise BadInput(f"{pair}: models of different shapes ({name}: {sizes}): their weights have no mean")
        if first.record.pretrained != run.record.pretrained or not run.record.pretrained:
            starts = " and ".join(str(some.run.config.model.name or "from scratch") for some in (first, run))
            raise BadInput(f"{pair}: not started from one pretrained model ({starts}): their weights have no mean")


def make_soup(
    folders: Sequence[Path], output: Path, blend: Blend, *, judge: bool = False, overwrite: bool = False,
    trust: bool = False, trust_changes: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the model that `blend` makes of those of runs; returns what is in its soup.json.

    The folder is one for `from_pretrained`, and for `seqreg evaluate` and the studies. A command that was stopped
    starts again; one that is finished does nothing.

    Args:
        judge: also score it, as a run is scored, and write metrics.json and the predictions
    """
    blend.check(len(folders))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise BadInput(f"{', '.join(map(str, folders))}: the same run twice")
    runs = [SourceRun.read(folder, trust, trust_changes) for folder in folders]
    settings = {**runs[0].record.settings, **blend.settings(), MADE_OF: [run.record.run for run in runs]}
    first, new = runs[0].record, RunRecord.of(runs[0].run)
    record = replace(new, settings=settings, versions=versions(), start=first.start, pretrained=first.pretrained)
    check_output(output)
    check_links(output)
    finish(output)
    if _is_finished(output, record, judge) and not overwrite:
        say(f"{output}: finished, nothing to do (--overwrite makes it again)")
        return dict(json.loads((output / SOUP).read_text(encoding="utf-8")))
    begin = time.process_time(), time.perf_counter()
    parts = _Parts.load(runs, blend, judge)  # whatever is refused is refused before anything is written
    old = [name for name in written(output) if not name.startswith((ASIDE, "evidence/"))]
    size = sum(value.nbytes for value in parts.several[0].values())
    with staged_folder(output, old, size) as stage:
        return _make(parts, stage, record, blend, judge, begin)


@dataclass(frozen=True)
class _Parts:
    """All that a model is made with, loaded and checked.

    Args:
        several: the weights of every run
        start: those that the first run started from, and the names of those that were drawn; None if not needed
        loaded: the model of the first run, into which candidates are put, and the splits to score them on
    """

    runs: Sequence[SourceRun]
    several: Sequence[Weights]
    start: tuple[Weights, set[str]] | None
    loaded: LoadedRun

    @classmethod
    def load(cls, runs: Sequence[SourceRun], blend: Blend, judge: bool) -> _Parts:
        first, splits = runs[0], Splits({})
        if judge or blend.chooses:
            splits = loading.load(first.final.card, first.final.config.data, needs_train=False)
            _check_validation(first.folder, splits, first.final, blend)
        several = [run.weights(blend.ema) for run in runs]
        check_alike(runs, several)
        start = None if blend.interpolate is None else first.start()
        if start is not None and {n: v.shape for n, v in start[0].items()} != {
            n: v.shape for n, v in several[0].items()
        }:
            raise BadInput(f"{first.folder}: its model has not the shapes of {first.run.config.model.name}")
        return cls(runs, several, start, LoadedRun(first.final, splits, first.tokenizer, first.model()))


def _is_finished(output: Path, record: RunRecord, judge: bool) -> bool:
    """Whether there is nothing left to do; refuses a folder that holds something else."""
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    if not [name for name in names if not name.startswith(ASIDE)]:
        return False
    stored = RunRecord.read(output)
    if stored is None or MADE_OF not in stored.settings:
        raise BadInput(f"--output {output}: there is something else: choose another")
    if stored.settings != record.settings:
        raise BadInput(f"--output {output}: a model of other runs, or made in another way: choose another")
    whole = (output / REMOVED).is_file() or checkpoints.damage(output, stored.files) is None
    return stored.finished and whole and (not judge or (output / results.METRICS).is_file())


def _make(
    parts: _Parts, output: Path, record: RunRecord, blend: Blend, judge: bool, begin: tuple[float, float]
) -> dict[str, Any]:
    """Choose the weights, write the model, score it, and write that it is finished; `begin` is when the work did."""
    first, loaded = parts.runs[0], parts.loaded
    splits = loaded.splits
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(loaded, Path(scratch))

        def scored(candidate: Weights, split: str = "validation") -> Scored:
            _put(loaded.model, candidate)
            return evaluate(trainer, first.final, first.tokenizer, splits.sets[split], split)

        blended, about = _blended(parts, blend, scored)
        _put(loaded.model, blended.weights)
        files = _write_model(loaded, output)
        scores: dict[str, Scored] = {}
        if judge:
            names = [name for name in splits.evaluations(first.final.card) if name != "validation"]
            scores = {"validation": blended.scored or scored(blended.weights)}
            scores |= {name: scored(blended.weights, name) for name in names}
        device = trainer.args.device.type
    for name in ("config.yaml", "task.yaml"):
        write_text(output / name, (first.folder / name).read_text(encoding="utf-8"))
    cpu, seconds = time.process_time() - begin[0], time.perf_counter() - begin[1]
    if judge:
        cost = {"steps": 0, "seconds": seconds, "cpu_seconds": cpu, "step_seconds": seconds, "device": device}
        methods = dict.fromkeys(run.run.config.method for run in parts.runs)
        method = f"{about['kind']} of {', '.join(methods)}"
        sections: dict[str, Any] = measure(output, first.folder, trust=first.final.trust)
        scores = with_average(scores, first.final.card)
        path = output / results.METRICS
        results.write_scores(path, first.final, scores, method=method, train=cost, soup=about, **sections)
    write_text(output / SOUP, to_json(about, indent=1) + "\n")
    replace(record, finished=True, files=files).write(output)
    return about


def _check_validation(folder: Path, splits: Splits, run: Run, blend: Blend) -> None:
    """Refuse to choose by the very examples that the choice is judged by."""
    if blend.chooses and "validation" not in splits.sets:
        raise BadInput(f"{folder}: its task has no validation set to choose by")
    if blend.chooses and "validation" in splits.evaluations(run.card):
        raise BadInput(f"{folder}: its task is judged by its validation set, which cannot choose too: add a test set")


def _blended(parts: _Parts, blend: Blend, scored: ToScored) -> tuple[Blended, dict[str, Any]]:
    """The weights, and the record of what they are made of."""
    runs, several = parts.runs, parts.several
    about: dict[str, Any] = {
        "kind": blend.title(len(runs)),
        "runs": [{"folder": str(run.folder), "run": run.record.run, "seed": run.run.config.seed} for run in runs],
        "start": {"model": runs[0].run.config.model.name, "sha256": runs[0].record.pretrained},
    }
    way = {"greater_is_better": runs[0].final.card.greater_is_better}
    blended = blending.greedy_soup(several, scored, **way) if blend.greedy else Blended(blending.mean_weights(several))
    about |= blended.choice
    if parts.start is not None:
        start, drawn = parts.start
        if blend.interpolate == BEST:
            blended = blending.best_interpolation(start, blended.weights, drawn, scored, **way)
        else:
            share = float(blend.interpolate or 0)
            blended = Blended(blending.interpolated(start, blended.weights, share, drawn), None, {"alpha": share})
        about |= {**blended.choice, "kept_as_trained": sorted(drawn)}
    return blended, about


def _put(model: Any, values: Weights) -> None:
    """Give a model other weights."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])


def _write_model(loaded: LoadedRun, output: Path) -> dict[str, Any]:
    """Write the model and its tokenizer for `from_pretrained`; returns the listing of the files."""
    if bad := weights.not_finite(loaded.model):
        raise BadInput(f"{bad}: the weights of these runs cannot be blended")
    loaded.model.save_pretrained(output)
    loaded.tokenizer.save_pretrained(output)
    return checkpoints.listing(output)
