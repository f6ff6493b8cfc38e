"""`seqreg report`: one page about a comparison that needs nothing beside itself."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from seqreg.errors import BadInput
from seqreg.studies.common import findings
from seqreg.studies.common.curves import curves
from seqreg.studies.common.findings import Finding
from seqreg.studies.compare import conclusions, samples
from seqreg.studies.compare import figures as report_figures
from seqreg.studies.compare.export import latex_page, markdown_page
from seqreg.studies.compare.jobs import record_of
from seqreg.studies.compare.results import Gathered, gather
from seqreg.version import __version__
from seqreg.workbench.config.lookup import inside
from seqreg.workbench.run import disk
from seqreg.workbench.run.run_directory import RECORD
from seqreg.workbench.text.atomic_files import writable, write_text

TEMPLATE = "report.html"
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Study:
    """A finding and what it is about: the comparison, or one of its runs."""

    about: str
    finding: Finding
    folder: Path

    @property
    def figures(self) -> list[str]:
        """Each figure once, though it may be there in two forms."""
        chosen = {Path(name).stem: name for name in sorted(self.finding.figures, key=lambda one: one.endswith(".svg"))}
        stems = dict.fromkeys(Path(name).stem for name in self.finding.figures)
        return [picture(inside(self.folder, chosen[stem])) for stem in stems]


def report(folder: Path, output: Path | None, *, markdown: bool = False, latex: bool = False) -> Path:
    """Judge a comparison again and write its page; returns where it is."""
    if markdown and latex:
        raise BadInput("--markdown and --latex: choose one, and run the command twice for both")
    target = output or folder / ("report.md" if markdown else "report.tex" if latex else "report.html")
    writable(target, "--output ")
    if target.is_dir():
        raise BadInput(f"--output {target}: is a folder: name a file")
    found = gather(folder)
    with disk.writing(folder):
        finding = conclusions.judge(folder)
        studied = studies(found)
        if markdown:
            page = markdown_page(finding, [(one.about, one.finding) for one in studied], commands(found))
        elif latex:
            page = latex_page(finding, [(one.about, one.finding) for one in studied])
        else:
            page = html(found, finding, studied)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, page)
    return target


def studies(found: Gathered) -> list[Study]:
    """What else was found out about the comparison and its runs."""
    places = [("all methods", found.folder)]
    places += [(f"{job.method}, seed {job.seed}", job.folder) for job in found.plan.jobs(found.folder)]
    return [
        Study(about, finding, place / findings.FOLDER)
        for about, place in places
        for finding in findings.findings(place)
        if finding.kind != conclusions.KIND
    ]


def commands(found: Gathered) -> list[str]:
    """What repeats every number."""
    import shlex

    whole = [found.plan.command(found.folder), shlex.join(["seqreg", "report", str(found.folder)])]
    return whole + [shlex.join(["seqreg", *found.plan.words(job)]) for job in found.plan.jobs(found.folder)]


def html(found: Gathered, finding: Finding, studied: list[Study]) -> str:
    """The page."""
    place, values = found.folder / findings.FOLDER, finding.values
    traced = {
        name: [curves(found.folder / name / f"seed-{seed}") for seed in method.metrics]
        for name, method in found.methods.items()
    }
    drawn = {
        "scores": report_figures.scores(values, place),
        "differences": report_figures.differences(values, place),
        "cost": report_figures.cost(values, place),
        "validation": report_figures.validation(traced, found.metric, place),
        "parts": report_figures.loss_parts(traced, place),
        "diagnostics": report_figures.diagnostics(traced, place),
    }
    pictures = {name: picture(place / f"{name}.svg") for name, file in drawn.items() if file}
    first = found.folder / found.plan.baseline / f"seed-{next(iter(found.methods[found.plan.baseline].metrics))}"
    return page(
        finding=finding, values=values, plan=found.plan, pictures=pictures, studies=studied,
        samples=samples.samples(found), commands=commands(found), about=_about(found), version=__version__,
        recipe=(first / "config.yaml").read_text(encoding="utf-8"),
        changes=next(table for table in finding.tables if table.title == conclusions.CHANGES),
        others=[table for table in finding.tables[2:] if table.title != conclusions.CHANGES],
        versions=next(iter(found.methods[found.plan.baseline].metrics.values())).get("versions", {}),
        failures=[one for method in found.methods.values() for one in method.failed],
    )  # fmt: skip


def _about(found: Gathered) -> list[tuple[str, str]]:
    """What a reader wants to know first: the model, the task, how large the test set is, and when it was trained."""
    settings = found.plan.resolved.get(found.plan.baseline, {})
    name, made = settings.get("model.name"), settings.get("model.architecture")
    ended = [(job.folder / RECORD).stat().st_mtime for job in found.plan.jobs(found.folder) if record_of(job)]
    days = sorted({datetime.fromtimestamp(time).date().isoformat() for time in ended})
    return [
        ("model", str(name) if name else f"{made} from scratch"),
        ("task", str(settings.get("task.title", found.plan.recipe))),
        ("test set", f"{found.examples} examples ({found.split})"),
        ("trained", " to ".join(dict.fromkeys([days[0], days[-1]]))),
    ]


def page(**known: Any) -> str:
    """Fill in the template. All text is escaped by jinja: what a model wrote cannot become markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = conclusions.cell
    return environment.get_template(TEMPLATE).render(**known)


def picture(path: Path) -> str:
    """A figure as an address that holds it whole; inside <img> nothing in it can run."""
    kind = _KINDS.get(path.suffix)
    if kind is None or not path.is_file():
        raise BadInput(f"{path}: expected a figure that is there, {' or '.join(_KINDS)}")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
