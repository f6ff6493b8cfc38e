"""Pages about studies, from their archives alone: docs/results/*.md."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from research import figures, measurements
from research.archive import ENDING, Archive, ArchivedStep, answers, restore
from research.measurements import MethodMean, RankCorrelation
from research.study_file import Curve, Relation, Study, StudyStep, method_names
from seqreg.errors import BadInput
from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.common.markdown import markdown_table
from seqreg.studies.common.seeds import write_seeds
from seqreg.workbench.text.escape import fenced, prose

Judge = Callable[[Path], Finding]
"""Judges the folder of a comparison: `seqreg.studies.compare.conclusions.judge`."""
PROSE = ("title", "question", "mirrors", "differs", "curves", "not_shown", "notes")
"""What a page takes from the study's file as it is now; the rest must be as it was when the study was run."""
_MANY = 8
"""Methods above which a comparison has a panel for what they cost."""
_CAPTION = (
    "In the figure a dot is a run; beside the dots of a method are its mean and the mean's 95% interval, hollow where "
    "the difference is described and not tested; dotted is the baseline's mean. Tests are of differences: see the "
    "tables."
)
_CAPTION_OF_MEASURES = (
    " Panels of other numbers show differences to the baseline in the units of the number. Up is more, which is worse "
    "of losses and errors."
)
_COLUMNS = ("method", "seeds", "failed", "mean", "sd", "median", "max", "95% interval of it", "p (Holm)",
            "found with 80% power", "verdict")  # fmt: skip


@dataclass(frozen=True)
class StepResults:
    """What a step found.

    Args:
        finding: of a comparison, judged again
        means: of everything else, by measure
        left_out: why it was not run
    """

    step: StudyStep
    finding: Finding | None = None
    means: dict[str, list[MethodMean]] | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class StudyResults:
    """A study, its archive, and what its steps found."""

    archive: Archive
    study: Study
    steps: list[StepResults]
    relations: list[tuple[Relation, RankCorrelation | None]]


def check_unchanged(archive: Archive, study: Study) -> None:
    """Refuse a study's file whose methods, seeds, settings or primary comparisons are not those that were run."""
    then, now = (_fixed(one, archive) for one in (archive.parsed(), study))
    for key in then:
        if then[key] != now[key]:
            raise BadInput(
                f"research/studies/{archive.name}.yaml: {key}: not what was run: no page can be made from the archive; "
                "run the study again, or bring the file back"
            )


def _fixed(study: Study, archive: Archive) -> dict[str, Any]:
    """What must not change once steps of a study were run: all but words, minutes, and other sizes, steps and files.

    The radius of VAT was a setting of the term, and is one of its attack.
    """
    fixed, size, done = study.model_dump(exclude={*PROSE, "sizes"}), archive.size, archive.done()
    then = {file.to for file in archive.parsed().files}
    fixed["files"] = [file for file in fixed["files"] if file["to"] in then]
    fixed["steps"] = [step for step in fixed["steps"] if step["name"] in done]
    for step in fixed["steps"]:
        own = step.pop("sizes").get(size, {})
        step |= {"title": "", "size": {key: value for key, value in own.items() if key != "minutes"}}
        step["grid"] = [text.replace("terms.vat.radius=", "terms.vat.attack.radius=") for text in step["grid"]]
    described = study.sizes[size].model_dump(exclude={"note", "minutes"}) if size in study.sizes else None
    return {**fixed, "sizes": described}


def results(archive: Archive, study: Study, judge: Judge) -> StudyResults:
    """Judge everything in an archive."""
    check_unchanged(archive, study)
    steps = []
    for step in study.steps:
        kept = archive.steps.get(step.name)
        if kept is None or not _has_results(study, step, kept):
            why = study.left_out(step, archive.size) or "not finished yet"
            steps.append(StepResults(step, left_out=why))
            continue
        finding = _judged(kept, judge, study.primary_of(step)) if step.command == "compare" else None
        wanted = step.command != "compare" or step.measures
        methods = [*method_names(study, step), *step.arms] if step.command != "train" else []
        found = measurements.numbers(step.command, kept.files, methods, step.measures) if wanted else {}
        baseline = methods[0] if methods else ""
        means = measurements.compared(found, baseline, study.primary_of(step), step.judged) if found else None
        steps.append(StepResults(step, finding, means))
    relations = [(relation, _correlation(archive, study, relation)) for relation in study.relations]
    return StudyResults(archive, study, steps, relations)


def _has_results(study: Study, step: StudyStep, kept: ArchivedStep) -> bool:
    """Whether there is something to show: a run of the baseline, or a finding."""
    if step.command == "compare":
        baseline = method_names(study, step)[0]
        return any(path.startswith(f"{baseline}/seed-") and path.endswith("/metrics.json") for path in kept.files)
    return any("kind" in values for values in kept.files.values()) or (step.command == "train" and bool(kept.files))


def _judged(kept: ArchivedStep, judge: Judge, primary: Sequence[str]) -> Finding:
    """The verdict on a comparison; where its plan has no primary comparisons, the study's count, and it says so."""
    plan = kept.files["comparison.json"]
    if primary and not plan.get("primary"):
        plan = {**plan, "primary": list(primary), "primary_late": True}
    with tempfile.TemporaryDirectory() as name:
        restore(replace(kept, files={**kept.files, "comparison.json": plan}), Path(name))
        return judge(Path(name))


def _correlation(archive: Archive, study: Study, relation: Relation) -> RankCorrelation | None:
    points: dict[str, list[tuple[float, float]]] = {}
    for step in (study.step(name) for name in relation.of):
        methods = method_names(study, step)
        across, up = (_values(archive, study, step, keys) for keys in ([relation.x], relation.alternatives))
        for method in methods:
            seeds = [seed for seed in across.get(method, {}) if seed in up.get(method, {})]
            points[f"{step.name}: {method}"] = [(across[method][seed], up[method][seed]) for seed in seeds]
    return measurements.correlation(points)


def _values(archive: Archive, study: Study, step: StudyStep, keys: Sequence[str]) -> dict[str, dict[int, float]]:
    """A number of every run of a step, by method and seed: of metrics.json, or of a step that measured its models."""
    for measuring in (step, *(other for other in study.steps if other.of == step.name)):
        kept = archive.steps.get(measuring.name, ArchivedStep())
        by_measure = measurements.numbers(measuring.command, kept.files, method_names(study, step), keys)
        if by_measure:
            return next(iter(by_measure.values()))
    return {}


def page(found: StudyResults, figure: str) -> str:
    """The page of a study as Markdown."""
    archive, study = found.archive, found.study
    size = study.sizes[archive.size]
    data = f"research/archives/{archive.name}{ENDING}"
    note = (
        f"Generated by `python -m research --pages docs/results` from [{data}](../../{data}) "
        f"and research/studies/{archive.name}.yaml: change the study's file, not this page."
    )
    parts = [f"# {prose(study.title)}", f"*{note}*", f"**Question.** {prose(study.question)}"]
    parts.append(f"**Mirrors.** {prose(study.mirrors)}")
    parts += [f"**Differs.** {prose(study.differs)}"] if study.differs else []
    parts.append(f"**Run.** Size `{archive.size}`: {prose(size.note)}.")
    if study.primary:
        parts.append(_primary(found))
    parts += [study.notes.strip()] if study.notes.strip() else []
    parts.append(f"![{prose(study.title)}: every step of the study]({figure})")
    parts.append(_CAPTION + (_CAPTION_OF_MEASURES if any(step.means for step in found.steps) else ""))
    for step in found.steps:
        parts += _section(found, step)
    if found.relations:
        parts += ["## Rank correlations", _RELATIONS, markdown_table(relations_table(found.relations))]
    parts += ["## What was not shown", "\n".join(f"- {line}" for line in _not_shown(found))]
    parts += ["## To repeat it", fenced(command(archive), "bash"), _provenance(archive)]
    return "\n\n".join(parts) + "\n"


def _primary(found: StudyResults) -> str:
    """The comparisons that are tested: of the study, and of steps that have others."""
    study, archive = found.study, found.archive
    plans = [kept.files.get("comparison.json", {}) for kept in archive.steps.values()]
    late = any(plan and (plan.get("primary_late") or not plan.get("primary")) for plan in plans)
    others = [
        f"of {result.step.heading}: {', '.join(result.step.primary)}"
        for result in found.steps if result.step.primary and result.step.primary != study.primary
    ]  # fmt: skip
    when = "" if late else ", fixed before the first run of their step"
    return (
        f"**Primary comparisons{when}.** {prose('; '.join([', '.join(study.primary), *others]))}, against the baseline."
    )


def _section(found: StudyResults, result: StepResults) -> list[str]:
    step = result.step
    if step.command == "train":
        return []
    parts = [f"## {prose(step.heading)}"]
    if result.left_out is not None:
        return [*parts, f"Not run: {prose(result.left_out)}."]
    if result.finding is not None:
        parts.append("\n".join(f"- {prose(line)}" for line in result.finding.summary))
        parts.append(markdown_table(quality_table(result.finding)))
        kept = found.archive.steps[step.name]
        if step.agreement:
            parts.append(markdown_table(agreement_table(kept, step, list(result.finding.values["methods"]))))
    if result.means:
        parts += [f"**{prose(_means_title(found.study, step))}**", markdown_table(means_table(result.means))]
    return parts


def quality_table(finding: Finding) -> Table:
    """The table of a comparison's quality, with what a method costs beside it."""
    full, values = finding.tables[0], finding.values
    base = f"minus {values['baseline']}"
    wanted = [name for name in full.columns if name in _COLUMNS or name == base]
    rows = []
    for row in full.rows:
        cells = dict(zip(full.columns, row, strict=True))
        time = values["methods"].get(row[0], {}).get("time")
        rows.append([*(cells[name] for name in wanted), "" if time is None else f"{time:.2f}x"])
    return Table(full.title, [*wanted, "cost"], rows)


def agreement_table(kept: ArchivedStep, step: StudyStep, methods: Sequence[str]) -> Table:
    """Shares of equal predictions in percent: of pairs of methods with equal seeds, and of two seeds of one method."""
    rows: list[list[Any]] = []
    by_method = {name: answers(kept, name) for name in methods}
    for first, second in step.agreement:
        one, other = by_method.get(first, {}), by_method.get(second, {})
        shares = [_equal(one[seed], other[seed]) for seed in one if seed in other]
        rows.append([f"{first} and {second}, equal seeds", *_range(shares)])
    for name, seeds in by_method.items():
        rows.append([f"two seeds of {name}", *_range([_equal(*both) for both in combinations(seeds.values(), 2)])])
    return Table(
        "Equal predictions", ["equal predictions on the test set (%)", "pairs", "mean", "lowest", "highest"], rows
    )


def _equal(first: Sequence[int], second: Sequence[int]) -> float:
    return 100 * float(np.mean(np.array(first) == np.array(second)))


def _range(shares: Sequence[float]) -> list[Any]:
    return [len(shares), *(float(kind(shares)) if shares else None for kind in (np.mean, np.min, np.max))]


def _means_title(study: Study, step: StudyStep) -> str:
    of = "" if step.of is None else f" of the models of {study.step(step.of).heading}"
    return f"{'Other numbers' if step.command == 'compare' else step.command.capitalize()}{of}: means over seeds"


def means_table(means: Mapping[str, Sequence[MethodMean]]) -> Table:
    """Every measure and method; a difference that is not tested has an interval and no p."""
    columns = [
        "measure",
        "method",
        "seeds",
        "mean",
        "sd",
        "minus baseline",
        "95% interval of it",
        "p (Holm)",
        "verdict",
    ]
    rows: list[list[Any]] = []
    for name, some in means.items():
        for mean in some:
            change = mean.difference
            ends = "" if change is None or change.interval is None else " to ".join(map(_number, change.interval))
            plus = "" if change is None else f"{'+' if change.difference >= 0 else ''}{_number(change.difference)}"
            p = "" if mean.holm is None else f"{mean.holm:.2g}"
            sd = "" if mean.sd is None else _number(mean.sd)
            rows.append([name, mean.method, mean.n, _number(mean.mean), sd, plus, ends, p, mean.verdict()])
    return Table("", columns, rows)


def _number(value: float) -> str:
    """Two decimals for a percentage, three digits for something small; what rounding leaves of 0 is 0.

    >>> _number(-1.4e-14), _number(0.0162), _number(71.849)
    ('0', '0.0162', '71.85')
    """
    value = round(value, 9) or 0.0  # no -0
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def relations_table(relations: Sequence[tuple[Relation, RankCorrelation | None]]) -> Table:
    """Rank correlations over the runs of several steps."""
    rows = []
    for relation, found in relations:
        numbers = ["not measured", "", ""]
        if found is not None:
            within = "" if found.within is None else f"{found.within:.2f}{_interval(found.within_interval)}"
            numbers = [f"{found.overall:.2f}{_interval(found.interval)}", within, str(found.runs)]
        rows.append([relation.title, relation.x, " or ".join(relation.alternatives), *numbers])
    columns = ["relation", "of", "and", "correlation", "between seeds of one method", "runs"]
    return Table("Rank correlations", columns, rows)


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"


_RELATIONS = """Spearman's correlation over all runs, ranks inside every step, with a 95% interval by a bootstrap over
methods; and its mean inside methods, over seeds alone. Above 0 a run that is higher in one number tends to be higher in
the other."""


def _not_shown(found: StudyResults) -> list[str]:
    """What a reader must not take home: differences that were not shown, steps and sizes that were not run."""
    lines = []
    for result in found.steps:
        if result.left_out is not None and result.step.command != "train":
            lines.append(f"{prose(result.step.heading)}: not run: {prose(result.left_out)}.")
        if result.finding is None:
            continue
        values = result.finding.values
        tested = {name: s for name, s in values["methods"].items() if "difference" in s and not s.get("described")}
        open_ = [name for name, s in tested.items() if s["holm"] is None or s["holm"] > values["alpha"] or s["missing"]]
        if open_:
            ends = [tested[name]["difference"]["interval"] for name in open_ if tested[name]["difference"]["interval"]]
            reach = (
                f"; with these seeds differences from {min(e[0] for e in ends):+.2f} to {max(e[1] for e in ends):+.2f} "
                "cannot be excluded"
                if ends else ""
            )  # fmt: skip
            lines.append(f"{prose(result.step.heading)}: no difference was shown for {prose(', '.join(open_))}{reach}.")
    for name, size in found.study.sizes.items():
        if name != found.archive.size:
            lines.append(f"Nothing about the size `{name}`: {prose(size.note)}.")
    return [*lines, *map(prose, found.study.not_shown)] or ["Nothing beyond one model and these datasets."]


def command(archive: Archive) -> str:
    """What repeats the study."""
    words = [
        "bash",
        "research/run.sh",
        archive.name,
        "--models",
        "FOLDER",
        "--data",
        "FOLDER",
        "--size",
        archive.size,
    ]
    words += ["--seeds", write_seeds(archive.seeds)] if archive.seeds is not None else []
    return shlex.join([*words, *archive.settings])


def _provenance(archive: Archive) -> str:
    commits = (
        ", ".join(f"`{name[:12]}{'+' if name.endswith('+') else ''}`" for name in archive.commits) or "not recorded"
    )
    versions = ", ".join(f"{name} {version}" for name, version in sorted(archive.versions.items()))
    hours = f"{archive.cpu_hours():.1f} CPU hours of training steps; evaluation comes on top"
    return f"{hours}. Commit: {commits}. {prose(versions)}."


def _relation_panel(
    found: StudyResults, step: StudyStep, relation: Relation, correlation: RankCorrelation
) -> figures.Panel:
    """The runs of one step: those of others may have another scale."""
    measured = (key for key in relation.alternatives if _values(found.archive, found.study, step, [key]))
    title = f"{relation.title}: {step.heading}"
    prefix = f"{step.name}: "
    points = {name.removeprefix(prefix): some for name, some in correlation.points.items() if name.startswith(prefix)}
    return title, figures.RelationPanel(points, relation.x, next(measured, ""))


def _order(study: Study) -> list[str]:
    """All methods and arms of a study, as they are first named: their places give them their colours."""
    steps = [step for step in study.steps if step.command in ("compare", "chain")]
    return list(dict.fromkeys(name for step in steps for name in (*method_names(study, step), *step.arms)))


def _curve_panel(found: StudyResults, curve: Curve) -> figures.CurvePanel:
    """The differences of the steps of a curve that were run."""
    points: dict[str, list[figures.CurvePoint]] = {}
    for result in found.steps:
        if result.step.name not in curve.of or result.finding is None:
            continue
        values = result.finding.values
        numbers = _values(found.archive, found.study, result.step, [curve.x]).get(values["baseline"], {})
        for name, stats in values["methods"].items() if numbers else ():
            if "difference" in stats:
                change, label = stats["difference"], curve.of[result.step.name]
                x, tested = float(np.mean(list(numbers.values()))), not stats.get("described")
                point = figures.CurvePoint(x, change["difference"], change["interval"], tested, label)
                points.setdefault(name, []).append(point)
    for some in points.values():
        some.sort(key=lambda point: point.x)
    return figures.CurvePanel(points, curve.x, _order(found.study))


def draw(found: StudyResults, path: Path) -> None:
    """The figure of a study."""
    panels: list[figures.Panel] = [(curve.title, _curve_panel(found, curve)) for curve in found.study.curves]
    order = _order(found.study)
    for result in found.steps:
        if result.finding is not None:
            panels.append((result.step.heading, result.finding.values))
            if len(result.finding.values["methods"]) > _MANY:
                panels.append((f"{result.step.heading}: cost", figures.CostPanel(result.finding.values)))
        if result.means:
            panels += [
                (f"{result.step.heading}: {figures.words(name)}", figures.MeasurePanel(name, means, order))
                for name, means in result.means.items() if any(mean.difference for mean in means)
            ]  # fmt: skip
    panels += [
        _relation_panel(found, found.study.step(step), relation, correlation)
        for relation, correlation in found.relations if correlation is not None and relation.drawn
        for step in relation.of
    ]  # fmt: skip
    if panels:
        figures.draw(panels, path)
