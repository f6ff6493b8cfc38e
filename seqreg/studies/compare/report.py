"""`seqreg report`: one page about a comparison that needs nothing beside itself."""

from __future__ import annotations

import base64
import difflib
import re
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from seqreg.errors import BadInput
from seqreg.metrics.texts import PSEUDOVALUE
from seqreg.studies.common.findings import FOLDER, Finding, findings
from seqreg.studies.common.markdown import cell
from seqreg.studies.compare import conclusions, drift, figures, results
from seqreg.studies.compare.arms import SOUPS
from seqreg.studies.compare.export import latex_page, markdown_page
from seqreg.studies.compare.jobs import finished_record
from seqreg.studies.compare.results import Results
from seqreg.version import __version__
from seqreg.workbench.config.lookup import inside
from seqreg.workbench.run import disk
from seqreg.workbench.run.run_directory import RECORD
from seqreg.workbench.text.atomic_files import writable, write_text

TEMPLATE = "report.html"
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
Words = tuple[str, bool]
"""Some words of a text, and whether they differ from the reference."""


@dataclass(frozen=True)
class AttachedFinding:
    """The finding of another study, and what it is about: the comparison, or one of its runs."""

    about: str
    finding: Finding
    folder: Path

    @property
    def figures(self) -> list[str]:
        """Each figure once, though it may be there in two forms."""
        names = {Path(name).stem: name for name in self.finding.figures}
        names |= {Path(name).stem: name for name in self.finding.figures if name.endswith(".svg")}
        return [picture(inside(self.folder, name)) for name in names.values()]


def report(folder: Path, output: Path | None, *, markdown: bool = False, latex: bool = False) -> Path:
    """Judge a comparison again and write its page; returns where it is."""
    if markdown and latex:
        raise BadInput("--markdown and --latex: choose one, and run the command twice for both")
    target = output or folder / ("report.md" if markdown else "report.tex" if latex else "report.html")
    writable(target, "--output ")
    if target.is_dir():
        raise BadInput(f"--output {target}: is a folder: name a file")
    compared = results.load(folder)
    with disk.writing(folder):
        finding, others = conclusions.judge(folder), attached_findings(compared)
        if markdown:
            page = markdown_page(finding, [(other.about, other.finding) for other in others], commands(compared))
        elif latex:
            page = latex_page(finding, [(other.about, other.finding) for other in others])
        else:
            page = html(compared, finding, others)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, page)
    return target


def attached_findings(compared: Results) -> list[AttachedFinding]:
    """The findings of other studies of the comparison and of its runs."""
    places = [("all methods", compared.folder)]
    places += [(job.title, job.folder) for job in compared.plan.jobs(compared.folder)]
    return [
        AttachedFinding(about, finding, place / FOLDER)
        for about, place in places
        for finding in findings(place)
        if finding.kind != conclusions.KIND
    ]


def commands(compared: Results) -> list[str]:
    """What repeats every number: the comparison, its page, and every run alone."""
    plan, folder = compared.plan, compared.folder
    lines = [["report", str(folder)], *(plan.words(job) for job in [*plan.trials(folder), *plan.jobs(folder)])]
    return [plan.command(folder), *(shlex.join(["seqreg", *words]) for words in lines)]


def html(compared: Results, finding: Finding, others: list[AttachedFinding]) -> str:
    """The page."""
    place, values, plan = compared.folder / FOLDER, finding.values, compared.plan
    curves = {
        name: [figures.read_curves(compared.folder / name / f"seed-{seed}") for seed in method.metrics]
        for name, method in compared.methods.items()
    }
    drawn = [
        figures.scores(values, place), figures.differences(values, place), figures.cost(values, place),
        figures.validation(curves, compared.metric, place), figures.loss_parts(curves, place),
        figures.diagnostics(curves, place),
    ]  # fmt: skip
    seed, metrics = next(iter(compared.baseline.metrics.items()))
    recipe = compared.folder / plan.baseline / f"seed-{seed}" / "config.yaml"
    return page(
        finding=finding, values=values, plan=plan, studies=others, samples=samples(compared),
        pictures={name: picture(place / f"{name}.svg") for name in drawn if name},
        commands=commands(compared), about=_about(compared), version=__version__,
        recipe=recipe.read_text(encoding="utf-8"), versions=metrics.get("versions", {}),
        changes=next(table for table in finding.tables if table.title == conclusions.CHANGES),
        others=[table for table in finding.tables[2:] if table.title not in (conclusions.CHANGES, drift.TITLE)],
        drift=[table for table in finding.tables if table.title == drift.TITLE],
        failures=[run for method in compared.methods.values() for run in method.failed],
    )  # fmt: skip


def _about(compared: Results) -> list[tuple[str, str]]:
    """What a reader wants to know first: the model, the task, how large the test set is, and when it was trained."""
    plan = compared.plan
    settings = plan.settings_of(plan.baseline)
    name, architecture = settings.get("model.name"), settings.get("model.architecture")
    ended = [(job.folder / RECORD).stat().st_mtime for job in plan.jobs(compared.folder) if finished_record(job)]
    days = sorted({datetime.fromtimestamp(time).date().isoformat() for time in ended})
    return [
        ("model", str(name) if name else f"{architecture} from scratch"),
        ("task", str(settings.get("task.title", plan.recipe))),
        ("test set", f"{compared.examples} examples ({compared.split})"),
        ("trained", " to ".join(dict.fromkeys([days[0], days[-1]]))),
    ]


@dataclass(frozen=True)
class SampleOutput:
    """One text of a method, with its score."""

    method: str
    seed: int
    pieces: list[Words]
    score: float


@dataclass(frozen=True)
class Sample:
    """One example, and what every method and seed made of it."""

    index: int
    reference: str
    outputs: list[SampleOutput]


def samples(compared: Results, count: int = 8) -> list[Sample]:
    """Half of them the first examples, half those on which the methods' first seed differs most."""
    if not compared.texts:
        return []
    firsts = [next(iter(method.predictions.values())) for method in compared.scored]
    scores = [[_shown_score(line, compared.metric) for line in lines] for lines in firsts]
    spread = [max(example) - min(example) for example in zip(*scores, strict=True)]
    places = range(len(spread))
    apart = sorted(places, key=lambda place: -spread[place])
    chosen = list(dict.fromkeys([*places[: count // 2], *apart]))[:count]
    return [_sample(compared, place, str(firsts[0][place]["reference"])) for place in chosen]


def _sample(compared: Results, place: int, reference: str) -> Sample:
    outputs = []
    for method in compared.scored:
        one_model = method.name in SOUPS and method.name in compared.plan.arms  # shown beside every seed
        shown = dict.fromkeys(compared.plan.seeds, next(iter(method.predictions.values()))) if one_model else None
        for seed, predictions in (shown or method.predictions).items():
            line = predictions[place]
            words = marked(str(line["prediction"]), reference)
            outputs.append(SampleOutput(method.name, seed, words, 100 * _shown_score(line, compared.metric)))
    return Sample(place, reference, outputs)


def _shown_score(line: dict[str, Any], metric: str) -> float:
    """The score of one example; of BLEU and chrF, which none has alone, its pseudo-value."""
    return float(line[metric] if metric in line else line[f"{metric}{PSEUDOVALUE}"])


def marked(text: str, reference: str) -> list[Words]:
    """A text in pieces: words in the order of the reference, and words that are not.

    >>> marked("the cat sat", "the dog sat")
    [('the ', False), ('cat ', True), ('sat', False)]
    """
    words, wanted = (re.findall(r"\S+\s*", some) for some in (text, reference))
    plain = [[word.strip().lower() for word in some] for some in (words, wanted)]
    matcher = difflib.SequenceMatcher(None, plain[0], plain[1], autojunk=False)
    return [("".join(words[a:b]), kind != "equal") for kind, a, b, _, _ in matcher.get_opcodes() if b > a]


def page(**known: Any) -> str:
    """Fill in the template. All text is escaped by jinja: what a model wrote cannot become markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = cell
    return environment.get_template(TEMPLATE).render(**known)


def picture(path: Path) -> str:
    """A figure as an address that holds it whole; inside <img> nothing in it can run."""
    kind = _KINDS.get(path.suffix)
    if kind is None or not path.is_file():
        raise BadInput(f"{path}: expected a figure that is there, {' or '.join(_KINDS)}")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
