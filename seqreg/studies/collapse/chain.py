"""Tasks one after the other, each from the encoder of the one before: what is left of the first, and of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from seqreg.errors import BadInput
from seqreg.studies.collapse import figures as collapse_figures
from seqreg.studies.collapse.probe import PRETRAINED, Lens, Probed, shown
from seqreg.studies.common.encoders import Pooling
from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.common.scoring import train
from seqreg.studies.common.study_files import Plan, Step, Task
from seqreg.workbench.config import methods as named
from seqreg.workbench.config import run_config
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.run.launch import processes
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.text.terminal import say


@dataclass(frozen=True)
class Link:
    """One training of a chain."""

    method: str
    seed: int
    title: str
    run: Run

    @property
    def folder(self) -> Path:
        return Path(self.run.config.output)


@dataclass(frozen=True)
class Chain:
    """All trainings of a study, resolved and checked before the first begins; by method and seed."""

    links: dict[tuple[str, int], list[Link]]
    tasks: list[Task]
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
        raise BadInput("a study of several trainings runs in one process: leave out torchrun")


def _resolve(where: str, step: Step, name: str, given: str, settings: Sequence[str], trust: bool) -> Run:
    try:
        return run_config.resolve_method(step.recipe, name, given, step.variants, settings, trust)
    except BadInput as error:
        raise BadInput(f"{where}: step {step.title}: {str(error).removeprefix('command line: ')}") from None


def lay(
    plan: Plan, where: str, output: Path, methods: Sequence[str], cycles: int, further: Sequence[str], rows: int,
    trust: bool = False,
) -> Chain:  # fmt: skip
    """Resolve every training, and load the rows of every task: all that can be wrong is found here."""
    one_process()
    links: dict[tuple[str, int], list[Link]] = {}
    for method, given in named.several([BASELINE, *methods]).items():
        for seed in dict.fromkeys(plan.seeds):
            made: list[Link] = []
            links[method, seed] = made
            for number, step in enumerate(plan.steps * cycles, start=1):
                own = [f"seed={seed}", assigned("output", output / method / f"seed-{seed}" / f"{number}-{step.title}")]
                if made:
                    own += [assigned("model.name", made[-1].folder), "model.tokenizer=null", "model.architecture=null"]
                    own += ["model.new_head=true"]
                settings = [*plan.settings, *step.settings, *further, *own]
                made.append(Link(method, seed, step.title, _resolve(where, step, method, given, settings, trust)))
    terms = {term for row in links.values() for link in row for term in link.run.config.terms}
    named.check_reach([*plan.settings, *(one for step in plan.steps for one in step.settings), *further], terms)
    first = next(iter(links.values()))[: len(plan.steps)]
    begins = first[0].run.config.model.name
    if begins is None:
        raise BadInput(f"{where}: step {first[0].title}: a chain begins with a pretrained model: set model.name")
    kinds = {link.run.card.kind for link in first}
    if len(kinds) > 1:
        each = ", ".join(f"{link.title} is {link.run.card.kind}" for link in first)
        raise BadInput(f"{where}: a chain has steps of one kind: {each}")
    tasks = [_task(link, rows) for link in first]
    return Chain(links, tasks, begins)


def _task(link: Link, rows: int) -> Task:
    run = link.run
    return Task.of(link.title, run.card, run.config.data, rows, run if run.card.kind == "generation" else None)


Found = dict[tuple[str, int], list[Probed]]
"""By method and seed: the pretrained model, then the model after every step."""


def study(
    chain: Chain, output: Path, *, command: str, cycles: int, pooling: Pooling = "mean", trust: bool = False
) -> Finding:
    """Train what is not trained yet, probe all tasks after every step, and write down what was found."""
    lens = Lens(chain.tasks, pooling, trust=trust)
    doing = "probing" if chain.tasks[0].run is None else "scoring"
    found: Found = {}
    with Signals():
        for (method, seed), links in chain.links.items():
            for number, link in enumerate(links, start=1):
                say(f"{method}, seed {seed}, step {number} of {len(links)}: {link.title}")
                train(link.run)
        say(f"{doing} {len(chain.tasks)} tasks in {PRETRAINED} {chain.pretrained}")
        start = lens.look(chain.pretrained, chain.pretrained, PRETRAINED)
        for key, links in chain.links.items():
            found[key] = [start]
            for link in links:
                say(f"{doing} {len(chain.tasks)} tasks in {link.folder}")
                found[key].append(lens.look(str(link.folder), chain.pretrained, link.title))
    collapse_figures.chain(chain, found, output / "chain.svg", output / "chain.png")
    finding = Finding(
        "chain", "What is left of a task when others follow", command, sentences(chain, found, cycles),
        tables(chain, found), ["chain.svg"], values(chain, found),
    )  # fmt: skip
    finding.write(output)
    return finding


def series(chain: Chain, found: Found, method: str, task: str) -> np.ndarray:
    """The scores of a method on a task: [seeds, steps]."""
    return np.array([[one.probes[task].score for one in row] for key, row in found.items() if key[0] == method])


def tables(chain: Chain, found: Found) -> list[Table]:
    """What is left of the first task and of every other, then how rich and how near to the start the last layer is."""
    kind = "ROUGE-L in percent" if chain.tasks[0].run is not None else "accuracy of a linear probe in percent"
    made = []
    for index, task in enumerate(chain.tasks):
        start = next(iter(found.values()))[0].probes[task.name].majority
        common = "" if start is None else f"; most common class {start:.1f}"
        what = "source task, " if index == 0 else ""
        rows = [
            [number, step, *(_cell(found, method, number, task.name) for method in chain.methods)]
            for number, step in enumerate(chain.steps)
        ]
        title = f"{what}{task.name}: {kind}{common}"
        made.append(Table(title, ["after step", "task", *chain.methods], rows))
    columns = [f"{method} {what}" for method in chain.methods for what in ("rank", "CKA")]
    geometry = [
        [
            number,
            step,
            *(round(float(np.mean(part)), 3) for m in chain.methods for part in last_layer(found, m, number)),
        ]
        for number, step in enumerate(chain.steps)
    ]
    title = "last layer: effective rank, and CKA to the pretrained"
    return [*made, Table(title, ["after step", "task", *columns], geometry)]


def last_layer(found: Mapping[tuple[str, int], Sequence[Probed]], method: str, number: int) -> tuple[list[float], ...]:
    """Effective rank and CKA of the last layer after a step, of every seed."""
    chosen = [row[number].layers[-1] for key, row in found.items() if key[0] == method]
    return [layer.rank for layer in chosen], [layer.cka or 0.0 for layer in chosen]


def _cell(found: Found, method: str, number: int, task: str) -> str:
    probes = [row[number].probes[task] for key, row in found.items() if key[0] == method]
    if len(probes) == 1 or number == 0:
        return shown(probes[0])
    scores = [probe.score for probe in probes]
    return f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}"


def sentences(chain: Chain, found: Found, cycles: int) -> list[str]:
    """The results in words."""
    source, lines = chain.tasks[0].name, []
    seeds = len(found) // len(chain.methods)
    for method in chain.methods:
        means = series(chain, found, method, source).mean(0)
        lines.append(
            f"{method}: {source} scores {means[0]:.1f} in the pretrained model, {means[1]:.1f} after its own training "
            f"and {means[-1]:.1f} after {_more(len(means) - 2)} ({means[-1] - means[1]:+.1f})."
        )
        if cycles > 1:
            ends = [len(chain.tasks) * cycle for cycle in range(1, cycles + 1)]
            whole = np.mean([series(chain, found, method, task.name).mean(0) for task in chain.tasks], axis=0)
            shown_ends = ", ".join(f"{whole[end]:.1f}" for end in ends)
            lines.append(f"{method}: all {len(chain.tasks)} tasks score {shown_ends} on average after every cycle.")
        ranks = [float(np.mean(last_layer(found, method, number)[0])) for number in (0, len(means) - 1)]
        lines.append(f"{method}: the effective rank of the last layer goes from {ranks[0]:.1f} to {ranks[1]:.1f}.")
    if seeds == 1:
        return [*lines, "One seed: it shows trainings, not methods."]
    return [*lines, f"Means over {seeds} seeds; ± is their standard deviation, brackets are over examples."]


def _more(steps: int) -> str:
    return "one more step" if steps == 1 else f"{steps} more steps"


def values(chain: Chain, found: Found) -> dict[str, object]:
    return {
        "steps": chain.steps,
        "tasks": [task.name for task in chain.tasks],
        "models": [
            {"method": method, "seed": seed, "folders": [str(link.folder) for link in chain.links[method, seed]],
             "after": [asdict(one) for one in row]}
            for (method, seed), row in found.items()
        ],
    }  # fmt: skip
