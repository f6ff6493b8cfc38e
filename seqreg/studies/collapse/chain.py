"""`seqreg chain`: tasks one after the other, each from the encoder of the one before, and what is left of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.studies.collapse import figures
from seqreg.studies.collapse.encoders import Pooling
from seqreg.studies.collapse.probe import PRETRAINED, ProbedModel, Prober
from seqreg.studies.collapse.study_files import ChainPlan, ChainStep, ProbeTask
from seqreg.studies.common.findings import FOLDER, Finding, Table, command, output_folder
from seqreg.studies.common.seeds import write_seeds
from seqreg.workbench.config import methods as named
from seqreg.workbench.config import run_config
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.run import train
from seqreg.workbench.run.launch import processes
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.text.terminal import say


@dataclass(frozen=True)
class Link:
    """One run of a chain."""

    title: str
    run: Run

    @property
    def folder(self) -> Path:
        return Path(self.run.config.output)


@dataclass(frozen=True)
class Chain:
    """All runs of a study by method and seed, resolved and checked before the first begins."""

    links: dict[tuple[str, int], list[Link]]
    tasks: list[ProbeTask]
    pretrained: str

    @property
    def steps(self) -> list[str]:
        return [PRETRAINED, *(link.title for link in next(iter(self.links.values())))]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.links))


def one_process() -> None:
    """Refuse to study in several processes, which would wait for each other for ever."""
    if processes()[1] > 1:
        raise BadInput("a study runs in one process: leave out torchrun")


def train_run(run: Run) -> dict[str, Any]:
    """Train a run of a study, or resume it; advice about the options of `seqreg train` is replaced."""
    try:
        return train.train(run)
    except BadInput as error:
        if len(error.lines) == 1:
            raise
        *lines, _ = error.lines
        raise BadInput(*lines, "remove that folder and those of the steps after it, or choose another output") from None


def resolve(
    plan: ChainPlan, path: Path, output: Path, methods: Sequence[str], settings: Sequence[str], *, cycles: int = 1,
    most: int = 5000, trust: bool = False,
) -> Chain:  # fmt: skip
    """Resolve every run, and load the examples of every task: all that can be wrong is found here."""
    one_process()

    def resolve_links(method: str, given: str, seed: int) -> list[Link]:
        links: list[Link] = []
        for number, step in enumerate(plan.steps * cycles, start=1):
            folder = output / method / f"seed-{seed}" / f"{number}-{step.title}"
            chosen = [*plan.settings, *step.settings, *settings, f"seed={seed}", assigned("output", folder)]
            if links:
                chosen += [assigned("model.name", links[-1].folder), "model.tokenizer=null"]
                chosen += ["model.target_tokenizer=null", "model.architecture=null"]
                chosen += ["model.new_head=true"]
            links.append(Link(step.title, _resolve_step(path, step, method, given, chosen, trust)))
        return links

    links = {
        (method, seed): resolve_links(method, given, seed)
        for method, given in named.several([BASELINE, *methods]).items()
        for seed in dict.fromkeys(plan.seeds)
    }
    terms = {term for row in links.values() for link in row for term in link.run.config.terms}
    named.check_reach([*plan.settings, *(word for step in plan.steps for word in step.settings), *settings], terms)
    first = next(iter(links.values()))[: len(plan.steps)]
    pretrained = first[0].run.config.model.name
    if pretrained is None:
        raise BadInput(f"{path}: step {first[0].title}: a chain begins with a pretrained model: set model.name")
    if len({link.run.card.kind for link in first}) > 1:
        kinds = ", ".join(f"{link.title} is {link.run.card.kind}" for link in first)
        raise BadInput(f"{path}: a chain has steps of one kind: {kinds}")
    return Chain(links, [_task(link.title, link.run, most) for link in first], pretrained)


def _resolve_step(path: Path, step: ChainStep, name: str, given: str, settings: Sequence[str], trust: bool) -> Run:
    try:
        return run_config.resolve_method(step.recipe, name, given, step.variants, settings, trust)
    except BadInput as error:
        raise BadInput(f"{path}: step {step.title}: {str(error).removeprefix('command line: ')}") from None


def _task(title: str, run: Run, most: int) -> ProbeTask:
    return ProbeTask.load(title, run.card, run.config.data, most, run if run.card.kind == "generation" else None)


def study(
    plan: ChainPlan, path: Path, folder: Path, methods: Sequence[str], settings: Sequence[str], *, cycles: int = 1,
    most: int = 5000, pooling: Pooling = "mean", trust: bool = False,
) -> Finding:  # fmt: skip
    """Train what is not trained yet, probe all tasks after every step, and write what was found."""
    output = output_folder([folder], folder / FOLDER)
    chain = resolve(plan, path, folder, methods, settings, cycles=cycles, most=most, trust=trust)
    results = ChainResults(chain, _train_and_probe(chain, Prober(chain.tasks, pooling, trust=trust)), cycles)
    figures.chain(results, output / "chain.svg", output / "chain.png")
    words = ["chain", path, *(word for name in methods for word in ("--terms", name)), "--cycles", cycles, *settings]
    words += ["--seeds", write_seeds(list(dict.fromkeys(plan.seeds)))]
    words += ["--examples", most, "--pooling", pooling, "--output", folder]
    return Finding(
        "chain", "What is left of a task when others follow", command(*words), results.sentences(), results.tables(),
        ["chain.svg"], results.values(),
    ).write(output)  # fmt: skip


def _train_and_probe(chain: Chain, prober: Prober) -> dict[tuple[str, int], list[ProbedModel]]:
    doing = f"{'probing' if chain.tasks[0].run is None else 'scoring'} {len(chain.tasks)} tasks in"
    with Signals():
        for (method, seed), links in chain.links.items():
            for number, link in enumerate(links, start=1):
                say(f"{method}, seed {seed}, step {number} of {len(links)}: {link.title}")
                train_run(link.run)
        say(f"{doing} {PRETRAINED} {chain.pretrained}")
        start = prober.probe(chain.pretrained, chain.pretrained, PRETRAINED)
        probed = {}
        for key, links in chain.links.items():
            probed[key] = [start]
            for link in links:
                say(f"{doing} {link.folder}")
                probed[key].append(prober.probe(str(link.folder), chain.pretrained, link.title))
    return probed


@dataclass(frozen=True)
class ChainResults:
    """A chain and its probed models by method and seed: the pretrained model, then the model after every step."""

    chain: Chain
    probed: dict[tuple[str, int], list[ProbedModel]]
    cycles: int = 1

    def of(self, method: str) -> list[list[ProbedModel]]:
        """The models of a method, one list per seed."""
        return [models for (name, _), models in self.probed.items() if name == method]

    def scores(self, method: str, task: str) -> NDArray[np.float64]:
        """The scores of a method on a task: [seeds, steps]."""
        return np.array([[model.probes[task].score for model in models] for models in self.of(method)])

    def majority(self, task: str) -> float | None:
        """Percent of the most common class."""
        return next(iter(self.probed.values()))[0].probes[task].majority

    def last_layers(self, method: str, step: int) -> tuple[float, float]:
        """Effective rank and CKA of the last layer after a step, means over seeds."""
        layers = [models[step].layers[-1] for models in self.of(method)]
        return float(np.mean([layer.rank for layer in layers])), float(np.mean([layer.cka or 0.0 for layer in layers]))

    def tables(self) -> list[Table]:
        """The scores on every task, then how rich and how near to the pretrained the last layer is."""
        chain, steps = self.chain, list(enumerate(self.chain.steps))
        tables = []
        for index, task in enumerate(chain.tasks):
            score = "accuracy of a linear probe" if task.run is None else task.run.card.score_title
            majority = self.majority(task.name)
            common = "" if majority is None else f"; most common class {majority:.1f}"
            rows = [[step, title, *(self._cell(m, step, task.name) for m in chain.methods)] for step, title in steps]
            title = f"{'' if index else 'source task, '}{task.name}: {score} in percent{common}"
            tables.append(Table(title, ["after step", "task", *chain.methods], rows))
        columns = [f"{method} {what}" for method in chain.methods for what in ("rank", "CKA")]
        layers = [
            [step, title, *(round(number, 3) for m in chain.methods for number in self.last_layers(m, step))]
            for step, title in steps
        ]
        title = "last layer: effective rank, and CKA to the pretrained"
        return [*tables, Table(title, ["after step", "task", *columns], layers)]

    def _cell(self, method: str, step: int, task: str) -> str:
        probes = [models[step].probes[task] for models in self.of(method)]
        if len(probes) == 1 or step == 0:
            return str(probes[0])
        scores = [probe.score for probe in probes]
        return f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}"

    def sentences(self) -> list[str]:
        """The results in words."""
        tasks, lines = self.chain.tasks, []
        for method in self.chain.methods:
            means = self.scores(method, tasks[0].name).mean(0)
            more = "one more step" if len(means) == 3 else f"{len(means) - 2} more steps"
            lines.append(
                f"{method}: {tasks[0].name} scores {means[0]:.1f} in the pretrained model, {means[1]:.1f} after its "
                f"own run and {means[-1]:.1f} after {more} ({means[-1] - means[1]:+.1f})."
            )
            if self.cycles > 1:
                average = np.mean([self.scores(method, task.name).mean(0) for task in tasks], axis=0)
                ends = ", ".join(f"{average[len(tasks) * cycle]:.1f}" for cycle in range(1, self.cycles + 1))
                lines.append(f"{method}: all {len(tasks)} tasks score {ends} on average after every cycle.")
            ranks = [self.last_layers(method, step)[0] for step in (0, len(means) - 1)]
            lines.append(f"{method}: the effective rank of the last layer goes from {ranks[0]:.1f} to {ranks[1]:.1f}.")
        seeds = len(self.probed) // len(self.chain.methods)
        if seeds == 1:
            return [*lines, "One seed: it shows runs, not methods."]
        return [*lines, f"Means over {seeds} seeds; ± is their standard deviation, brackets are over examples."]

    def values(self) -> dict[str, Any]:
        return {
            "steps": self.chain.steps,
            "tasks": [task.name for task in self.chain.tasks],
            "models": [
                {"method": key[0], "seed": key[1], "folders": [str(link.folder) for link in self.chain.links[key]],
                 "after": [asdict(model) for model in models]}
                for key, models in self.probed.items()
            ],
        }  # fmt: skip
