"""`seqreg report`: one page about a comparison, or several, that needs nothing beside itself."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from seqreg.errors import BadInput
from seqreg.studies.common.findings import FOLDER, Finding, findings
from seqreg.studies.common.markdown import cell, numeric
from seqreg.studies.compare import conclusions, drift, figures, results
from seqreg.studies.compare.effects import effects
from seqreg.studies.compare.export import latex_page, markdown_page
from seqreg.studies.compare.jobs import finished_record
from seqreg.studies.compare.reader import BINS, reader
from seqreg.studies.compare.results import Results
from seqreg.version import __version__
from seqreg.workbench.config import overlay
from seqreg.workbench.run.record import RECORD
from seqreg.workbench.text.atomic_files import inside, writable, write_text
from seqreg.workbench.text.escape import places, without_places

TEMPLATE = "report.html"
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


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


def report(
    folders: Sequence[Path], output: Path | None = None, *, markdown: bool = False, latex: bool = False,
    trust_changes: bool = False,
) -> Path:  # fmt: skip
    """Judge comparisons again and write their page; returns where it is."""
    if markdown and latex:
        raise BadInput("--markdown and --latex: choose one, and run the command twice for both")
    if len(folders) > 1 and output is None:
        raise BadInput(f"{len(folders)} comparisons: say where their page is written with --output FILE")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise BadInput(f"{', '.join(map(str, folders))}: the same comparison twice")
    target = output or folders[0] / ("report.md" if markdown else "report.tex" if latex else "report.html")
    writable(target, "--output ")
    if target.is_dir():
        raise BadInput(f"--output {target}: is a folder: name a file")
    loaded = [results.load(folder, trust_changes=trust_changes) for folder in folders]
    pages: list[Any] = []
    for compared in loaded:
        finding, others = conclusions.write_verdict(compared), attached_findings(compared)
        named = [(other.about, other.finding) for other in others]
        if markdown:
            pages.append(markdown_page(finding, named, commands(compared)))
        elif latex:
            pages.append(latex_page(finding, named))
        else:
            prefix = f"c{len(pages) + 1}-" if len(folders) > 1 else ""
            pages.append(_comparison(compared, finding, others, prefix))
    text = "\n".join(pages) if markdown or latex else page(comparisons=pages, version=__version__)
    write_text(target, without_places(text, [place for compared in loaded for place in _places(compared)]))
    return target


def _places(compared: Results) -> list[str]:
    """Paths of this machine in the settings and commands of a comparison: a page is given to others."""
    lines = [*commands(compared), *(other.finding.command for other in attached_findings(compared))]
    return places([word for line in lines for word in shlex.split(line)], overlay.read(_recipe(compared)))


def _recipe(compared: Results) -> Path:
    """The settings of the first run of the baseline."""
    return compared.folder / compared.plan.baseline / f"seed-{next(iter(compared.baseline.metrics))}" / "config.yaml"


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


def _comparison(compared: Results, finding: Finding, others: list[AttachedFinding], prefix: str) -> dict[str, Any]:
    """What the template shows of one comparison; `prefix` begins the names of its parts."""
    place, values, plan = compared.folder / FOLDER, finding.values, compared.plan
    curves = {
        name: [figures.read_curves(compared.folder / name / f"seed-{seed}") for seed in method.metrics]
        for name, method in compared.methods.items()
    }
    drawn = [
        figures.scores(values, place), figures.cost(values, place), figures.validation(curves, compared.metric, place),
        figures.loss_parts(curves, place), figures.diagnostics(curves, place),
    ]  # fmt: skip
    figures.differences(values, place)  # for papers: the page has its own, from `effects`
    metrics = next(iter(compared.baseline.metrics.values()))
    tables = {table.title: table for table in finding.tables[2:]}
    return {
        "prefix": prefix, "finding": finding, "numbers": values, "plan": plan, "studies": others,
        "effects": effects(values), "reader": reader(compared), "about": _about(compared),
        "pictures": {name: picture(place / f"{name}.svg") for name in drawn if name}, "commands": commands(compared),
        "recipe": _recipe(compared).read_text(encoding="utf-8"), "versions": metrics.get("versions", {}),
        "changes": tables.pop(conclusions.CHANGES), "drift": tables.pop(drift.TITLE, None),
        "others": list(tables.values()),
        "failures": [run for method in compared.methods.values() for run in method.failed],
    }  # fmt: skip


def _about(compared: Results) -> list[tuple[str, str]]:
    """What a reader wants to know first: the model, the task, how large the test set is, and when it was trained."""
    plan = compared.plan
    settings = plan.settings_of(plan.baseline)
    name, architecture = settings.get("model.name"), settings.get("model.architecture")
    ended = [(job.folder / RECORD).stat().st_mtime for job in plan.jobs(compared.folder) if finished_record(job)]
    days = sorted({datetime.fromtimestamp(time).date().isoformat() for time in ended})
    return [
        ("model", (Path(name).name if os.path.isabs(name) else name) if name else f"{architecture} from scratch"),
        ("task", str(settings.get("task.title", plan.recipe))),
        ("test set", f"{compared.examples:,} examples ({compared.split})"),
        ("seeds", f"{len(plan.seeds)} per method"),
        ("trained", " to ".join(dict.fromkeys([days[0], days[-1]]))),
    ]


def page(**known: Any) -> str:
    """Fill in the template. All text is escaped by jinja: what a model wrote cannot become markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"cell": cell, "numeric": numeric}
    environment.globals |= {"bins": BINS}
    return environment.get_template(TEMPLATE).render(**known)


def picture(path: Path) -> str:
    """A figure as an address that holds it whole; inside <img> nothing in it can run."""
    kind = _KINDS.get(path.suffix)
    if kind is None or not path.is_file():
        raise BadInput(f"{path}: expected a figure that is there, {' or '.join(_KINDS)}")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
