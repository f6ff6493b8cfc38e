"""`python -m research`: files of studies, their commands, archives and pages."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from research import __main__ as research_main
from research import archive as archived
from research import figures, index, measurements, page, study_file
from research import study as studies
from research.study_file import Study
from seqreg.cli import main as cli
from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.studies.common.findings import FOLDER, Finding
from seqreg.studies.compare.conclusions import judge
from seqreg.workbench.config import cards, lookup, overlay
from tests.helpers import fake_comparison
from tests.helpers.tiny_tasks import seqreg
from tests.research import toy_study

research = functools.partial(seqreg, app=research_main.app)
ROOT = Path(__file__).parents[2]
NAMES = study_file.names()
RESULTS = ROOT / "docs" / "results"


def first_method_alone(study: Study) -> Study:
    """A study cut to the baseline and one method, without search and arms: what is tried is that every command runs."""
    steps = [step.updated(methods=step.methods[:1], agreement=[], arms=[], search=0, grid=[]) for step in study.steps]
    cut = study.updated(steps=steps)
    names = {name for step in steps if step.of is None for name in study_file.method_names(cut, step)}
    return cut.updated(
        primary=[name for name in study.primary if name in names],
        steps=[
            step.updated(primary=[n for n in step.primary if n in study_file.method_names(cut, step)])
            if step.primary
            else step
            for step in steps
        ],
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_a_study(name: str) -> None:
    """Recipes, variants, methods and settings are known, in every size; the header says what it mirrors."""
    from seqreg.studies.compare import plan as comparison

    study = study_file.read(name)
    header = lookup.header(study_file.path_of(name))
    assert f"bash research/run.sh {name} " in header
    assert "Mirrors: " in header
    for size in study.sizes:
        run = studies.StudyRun(name, study, size, {k: Path(k) for k in ("models", "data", "output")})
        for step in run.steps():
            if step.command == "compare":
                methods = run.study.methods(step)
                assert study.primary_of(study.step(step.name)), f"{step.name} would test everything"
                comparison.make(
                    str(step.recipe), methods, "2", variants=run.variants_of(step), settings=run.settings_of(step),
                    baseline=step.baseline, primary=run.study.primary_of(step), search=step.search if step.grid else 0,
                    grid=step.grid,
                )  # fmt: skip
            elif step.to is not None:
                cards.load(step.to)
            for task in step.tasks:
                cards.load(task["task"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    toy_study.data(folder / "data")
    toy_study.models(folder / "models")
    return folder


def run_toy(name: str, study: Study, place: Path, output: Path, *settings: str) -> studies.StudyRun:
    run = studies.make(
        name, study, models=place / "models", data=place / "data", output=output, size="small", seeds=[1, 2],
        settings=[*toy_study.SHORT, *settings],
    )  # fmt: skip
    studies.run(run)
    return run


TOY = """
title: A toy
question: Does every kind of step run?
mirrors: nothing
primary: [r3f]
sizes: {small: {note: a toy, seeds: 2, minutes: 0.5, settings: ["model.name={models}/bert-mini"], variants: [tiny]}}
steps:
  - {name: sst2, command: compare, recipe: glue, variants: [sst2], settings: ["data.path={data}/glue/SST-2"],
     methods: [r3f, "other=r3f:scale=0.1"], keep_models: all, agreement: [[r3f, other]],
     measures: [scores.validation.loss]}
  - {name: calibration, command: calibrate, of: sst2, options: [--limit, "20"], measures: [ece *], judged: [ece before]}
  - {name: perturbed, command: robustness, of: sst2, options: [--noise, order, --limit, "8", --draws, "1"]}
  - {name: probes, command: probe, of: sst2, options: [--examples, "20"],
     tasks: [{task: glue/cola, data: {path: "{data}/glue/CoLA", max_source_length: 24}}]}
  - {name: moved, command: shift, of: sst2, to: glue/sst2, settings: ["data.path={data}/glue/SST-2"], shares: [0.0]}
relations: [{title: Probe and loss, x: probe of *, y: scores.test.loss, of: [sst2]}]
"""


def test_a_study_runs_resumes_is_packed_and_shown(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command; a second one finds everything finished; the archive alone gives the same verdict and the page."""
    commands = toy_study.in_this_process(monkeypatch)
    file = tmp_path / "toy.yaml"
    file.write_text(TOY)
    words = [file, "--models", place / "models", "--data", place / "data", "-o", tmp_path / "out"]
    settings = toy_study.SHORT
    plan = json.loads(research(*words, "--plan", "--json", *settings, cwd=tmp_path).stdout)
    assert (plan["runs"], plan["hours"], len(plan["commands"])) == (6, 0.05, 1 + 6 + 2 + 2 + 2)
    assert not (tmp_path / "out").exists()
    research(*words, *settings, cwd=tmp_path)
    assert len(commands) == 13
    research(*words, *settings, cwd=tmp_path)
    assert [line[0] for line in commands[13:]] == ["compare"]
    target = tmp_path / "pages" / "data" / "toy.json.xz"
    research(*words, *settings, "--archive", target, cwd=tmp_path)
    content = archived.read(target)
    text = json.dumps(content.study) + json.dumps([step.files for step in content.steps.values()])
    assert str(tmp_path) not in text
    assert str(place) not in text
    verdict = Finding.read(tmp_path / "out" / "sst2" / FOLDER / "compare.json")
    found = page.results(content, study_file.read(str(file)), judge)
    assert found.steps[0].finding is not None
    assert json.loads(json.dumps(found.steps[0].finding.values)) == verdict.values
    shown = page.page(found, "toy.png")
    for said in (
        "**Primary comparisons, fixed before the first run of their step.** r3f, against the baseline.",
        "r3f against baseline",
        "two seeds of other",
        "ece before",
        "probe of cola",
        "sst2 with 0%",
        "| order |",
        "| Probe and loss | probe of \\* | scores.test.loss |",
        "|  | 6 |",
    ):
        assert said in shown, said
    page.draw(found, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").stat().st_size > 10_000


def test_texts_are_not_in_an_archive_and_the_verdict_is_the_same(tmp_path: Path) -> None:
    """Of generated texts scores are kept, and which are equal; the test over seeds and examples gives the same."""
    fake_comparison.comparison(tmp_path / "out" / "news", {"r3f": 4.0}, curves=False, failed=(("r3f", 2),))
    values = {
        "title": "t", "question": "q", "mirrors": "m", "sizes": {"small": {"note": "n", "seeds": 5}},
        "steps": [{"name": "news", "command": "compare", "recipe": "quickstart", "methods": ["r3f"]}],
    }  # fmt: skip
    study = study_file.parse(values, "here")
    packed = archived.pack(studies.make("x", study, models=None, data=None, output=tmp_path / "out"))
    packed.write(tmp_path / "x.json.xz")
    again = archived.read(tmp_path / "x.json.xz")
    named = study_file.parse({**values, "primary": ["r3f"]}, "here")
    late = page.results(replace(again, study={**values, "primary": ["r3f"]}), named, judge)
    assert "**Primary comparisons.** r3f, against" in page.page(late, "x.png")
    judged = late.steps[0].finding
    assert judged is not None  # begun without primary comparisons: those of the study count
    assert "The primary comparisons were named after the comparison was begun." in judged.summary
    assert "won it" not in json.dumps(again.steps["news"].values)
    assert "script" not in json.dumps(again.steps["news"].values)
    finding = page.results(again, study, judge).steps[0].finding
    assert finding is not None
    before, after = judge(tmp_path / "out" / "news").values, finding.values
    for kept in (before, after):
        for stats in kept["methods"].values():
            stats["agreement"].pop("rougeL")  # of texts: they are not there
    assert before == after
    assert any("1 of 5 runs of r3f failed" in line for line in finding.summary)


def test_a_page_is_refused_when_the_file_is_not_what_was_run(tmp_path: Path) -> None:
    values = overlay.parse(TOY, "here")
    name = values["steps"][0]["name"]
    archive = archived.Archive("toy", "small", values, {name: archived.ArchivedStep({"comparison.json": {}})})
    page.check_unchanged(archive, study_file.parse({**values, "notes": "later", "title": "Another"}, "here"))
    step, grid = values["steps"][0], {"search": 9, "grid": ["terms.vat.radius=[0.1]"]}
    old = replace(archive, study={**values, "steps": [{**step, **grid}, *values["steps"][1:]]})
    renamed = {**grid, "grid": ["terms.vat.attack.radius=[0.1]"]}
    page.check_unchanged(
        old, study_file.parse({**values, "steps": [{**step, **renamed}, *values["steps"][1:]]}, "here")
    )
    others = {
        "primary": ["other"],
        "sizes": {"small": {**values["sizes"]["small"], "seeds": 3}},
        "steps": [
            {**values["steps"][0], "methods": ["r3f:weight=9", "r3f", "other=r3f:scale=0.1"]},
            *values["steps"][1:],
        ],
    }
    for key, value in others.items():
        with pytest.raises(BadInput, match=rf"toy.yaml: {key}: not what was run"):
            page.check_unchanged(archive, study_file.parse({**values, key: value}, "here"))
    file = {"to": "a.tsv", "source": "{data}/a.tsv"}
    page.check_unchanged(archive, study_file.parse({**values, "files": [file]}, "here"))  # steps to come may need more
    with_file = replace(archive, study={**values, "files": [file]})
    for changed in ([], [{**file, "source": "{data}/b.tsv"}]):
        with pytest.raises(BadInput, match=r"toy.yaml: files: not what was run"):
            page.check_unchanged(with_file, study_file.parse({**values, "files": changed}, "here"))
    not_run = archived.Archive("toy", "small", values, {name: archived.ArchivedStep()})
    page.check_unchanged(not_run, study_file.parse({**values, "steps": others["steps"]}, "here"))


def test_steps_that_were_run_in_another_folder_stay_in_the_archive() -> None:
    first, again, second = (archived.ArchivedStep({"comparison.json": {"n": n}}) for n in (1, 2, 3))
    empty = archived.ArchivedStep()
    earlier = archived.Archive("toy", "small", {}, {"a": first, "b": empty, "c": first}, commits=["x"])
    later = archived.Archive("toy", "small", {}, {"a": again, "b": second, "c": empty}, commits=["x", "y"])
    merged = later.after(earlier)
    assert merged.steps == {"a": again, "b": second, "c": first}
    assert merged.commits == ["x", "y"]
    assert merged.done() == ["a", "b", "c"]


WRONG = {
    "primry: [r3f]": "primry=['r3f']: unknown key; did you mean 'primary'",
    "primary: [r4f]": "primary: 'r4f' is no method of any step; did you mean 'r3f'",
    "steps: [{name: a, command: comparee}]": "steps.0.command='comparee': expected 'train', 'compare'",
    "steps: [{name: a, command: compare}]": "recipe: `compare` needs it",
    "steps: [{name: a, command: probe, of: b}]": "a: of='b': no comparison before it",
    "steps: [{name: a, command: compare, recipe: glue, cycles: 2}]": "cycles: `compare` has no such key",
    "steps: [{name: A/b, command: compare, recipe: glue}]": "name='A/b': expected small letters",
    "sizes: {small: {note: n, seeds: ten}}": "sizes.small.seeds='ten': expected a valid integer",
    "files: [{to: a.tsv, source: b.tsv, lines: [9, 4]}]": "lines=[9, 4]: expected the first, and a later one",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_files_are_refused_in_one_line(line: str, tmp_path: Path) -> None:
    values = {**overlay.parse(TOY, "here"), **overlay.parse(line, "here")}
    (tmp_path / "bad.yaml").write_text(json.dumps(values))
    assert WRONG[line] in research("bad.yaml", "--plan", cwd=tmp_path, code=2).stderr


def test_bad_words_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    refused = {
        ("nois",): "unknown study 'nois'; did you mean 'noise'?",
        (): "no study: name one of ",
        ("toy.yaml",): "data.path={data}/glue/SST-2: say where that is: --data FOLDER",
        ("toy.yaml", "--data", "gone"): "--data gone: no such folder",
        ("toy.yaml", "--size", "large"): "toy has no size 'large': small: a toy",
        ("toy.yaml", "--only", "calibratoin"): "no such step; did you mean 'calibration'?",
        ("toy.yaml", "what"): "'what': expected key=value",
        ("zero_shot", "--size", "small"): "no multilingual encoder is at hand",
        ("toy.yaml", "--data", ".", "--models", ".", "--archive", "x.json"): "expected a name that ends in .json.xz",
        ("toy.yaml", "--data", ".", "--models", ".", "--archive", "x.json.xz"): "nothing of toy is there yet",
        ("toy.yaml", "--list"): "toy.yaml: --list is about all studies",
        ("--pages", "gone"): "--pages gone: no such folder",
    }
    for words, said in refused.items():
        assert said in research(*words, cwd=tmp_path, code=2).stderr, words
    assert [path.name for path in tmp_path.iterdir()] == ["toy.yaml"]


LATER = {
    "methods: [r3f, 'other=rdorp']": "unknown term recipe 'rdorp'; did you mean 'rdrop'?",
    "recipe: gleu": "unknown recipe 'gleu'; did you mean 'glue'?",
    "settings: [optimisation.max_step=2]": "optimisation.max_step=2: unknown key; did you mean 'max_steps'?",
}


@pytest.mark.parametrize("line", LATER)
@pytest.mark.parametrize("plan", [True, False])
def test_what_a_later_step_would_refuse_is_refused_before_the_first_run(line: str, plan: bool, tmp_path: Path) -> None:
    values = overlay.parse(TOY, "here")
    first = {**values["steps"][0], "settings": []}
    later = {**first, "name": "later", **overlay.parse(line, "here")}
    (tmp_path / "toy.yaml").write_text(json.dumps({**values, "steps": [first, {**later, "agreement": []}]}))
    words = ["toy.yaml", "--models", tmp_path, *(["--plan"] if plan else ["-o", tmp_path / "out"])]
    said = research(*words, cwd=tmp_path, code=2).stderr
    assert "toy: later: " in said
    assert LATER[line] in said
    assert [path.name for path in tmp_path.iterdir()] == ["toy.yaml"]


def test_the_list_of_studies_keeps_names_whole(tmp_path: Path) -> None:
    assert "few_sample_glue" in research("--list", cwd=tmp_path).stdout


def test_measures_are_tested_only_where_they_are_judged() -> None:
    rng = np.random.default_rng(0)
    far = {"baseline": 0.0, "r3f": 5.0, "smart": 5.0}
    found = {
        name: {method: {seed: shift + rng.normal() for seed in range(6)} for method, shift in far.items()}
        for name in ("ece before", "nll before", "temperature")
    }
    means = measurements.compared(found, "baseline", ["r3f"], ["ece *", "nll *"])
    words = {(name, mean.method): mean.verdict() for name, some in means.items() for mean in some}
    assert words["ece before", "r3f"] == words["nll before", "r3f"] == "significantly higher"
    assert {words["temperature", "r3f"], words["ece before", "smart"]} == {"described and not tested"}
    ps = [
        statistics.welch(list(found[name]["baseline"].values()), list(found[name]["r3f"].values())).p
        for name in ("ece before", "nll before")
    ]
    holm = {name: mean.holm for name, some in means.items() for mean in some if mean.method == "r3f"}
    assert [holm["ece before"], holm["nll before"]] == statistics.holm(ps)
    few = {
        name: {m: {s: v for s, v in seeds.items() if s < 3} for m, seeds in by.items()} for name, by in found.items()
    }
    some = measurements.compared(few, "baseline", ["r3f"], ["ece *", "nll *"])["ece before"]
    assert [mean.verdict() for mean in some if mean.method == "r3f"] == ["2 more seeds needed"]


def test_rank_correlation_over_runs_and_inside_methods() -> None:
    """Steps on other scales do not matter; what lies between methods alone is not seen between seeds."""
    rng = np.random.default_rng(0)
    points = {
        f"{step}: {method}": [
            (scale * (place + 0.1 * rng.normal()), scale * (place + 0.1 * rng.normal())) for _ in range(8)
        ]
        for step, scale in (("a", 1.0), ("b", 100.0))
        for place, method in enumerate("rstuvw")
    }
    found = measurements.correlation(points)
    assert found is not None
    assert found.overall > 0.9
    assert found.interval[0] > 0.8
    assert found.within is not None
    assert abs(found.within) < 0.4
    assert found.runs == 96
    assert measurements.correlation({"a: r": [(1.0, 2.0)]}) is None


@functools.cache
def committed(name: str) -> page.StudyResults:
    """What the archive of a study says; judged once for all tests of it."""
    return page.results(archived.read(index.ARCHIVES / f"{name}{archived.ENDING}"), study_file.read(name), judge)


@pytest.mark.parametrize(
    "name", [path.name.removesuffix(archived.ENDING) for path in archived.archives(index.ARCHIVES)]
)
def test_committed_pages_are_what_their_archives_say(name: str, tmp_path: Path) -> None:
    """Every page is rebuilt from its archive; the figure is the same but for what another matplotlib draws."""
    from matplotlib.testing.compare import compare_images

    found = committed(name)
    assert page.page(found, f"{name}.png") == (RESULTS / f"{name}.md").read_text()
    page.draw(found, tmp_path / "figure.png")
    assert compare_images(str(RESULTS / f"{name}.png"), str(tmp_path / "figure.png"), tol=5) is None
    assert (index.ARCHIVES / f"{name}{archived.ENDING}").stat().st_size < 1_100_000


def test_the_committed_index_is_what_the_archives_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "results", lambda archive, study, judge: committed(archive.name))
    monkeypatch.setattr(page, "draw", lambda results, path: None)
    index.build(tmp_path, judge)
    text = (tmp_path / "index.md").read_text()
    assert text == (RESULTS / "index.md").read_text(), "python -m research --pages docs/results"


def test_every_comparison_with_plain_fine_tuning_is_counted_once() -> None:
    found = [committed(name) for name in ("defaults", "smoothness")]
    table = index.by_term(found)
    *rows, every = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert all(every[name] == sum(row[name] for row in rows) for name in ("tested", "worse", "only described"))
    findings = [step.finding for one in found for step in one.steps if step.finding is not None]
    plain = [finding.values for finding in findings if finding.values["baseline"] == "baseline"]
    assert len(plain) < len(findings)  # smoothness has a step that compares with JacHess
    assert sum(row["tested"] + row["only described"] for row in rows) == sum(len(one["methods"]) - 1 for one in plain)
    assert all(row["tested"] == row["better"] + row["no difference shown"] + row["worse"] for row in rows)
    holm = [stats.get("holm") for one in plain for stats in one["methods"].values()]
    significant = sum(row["better"] + row["worse"] for row in rows)
    assert 0 < significant == sum(p is not None and p <= 0.05 for p in holm)
    assert "against jachess" in index.matrix(found[-1]).columns[-1]


def test_a_figure_shows_every_measure_and_which_differences_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for every other number, in its units, titles that tell panels apart, hollow for what is not tested."""
    from matplotlib.figure import Figure

    drawn: list[figures.Panel] = []
    monkeypatch.setattr(figures, "draw", lambda panels, path: drawn.extend(panels))
    for name in ("forgetting", "robustness"):
        page.draw(committed(name), Path("unused.png"))
    titles = [title for title, _ in drawn]
    assert len(set(titles)) == len(titles)
    assert "SST-2, AdvGLUE and counterfactual reviews: advglue-sst2: accuracy" in titles
    panels = dict(drawn)
    relation, costs, measures = Figure().add_subplot(), Figure().add_subplot(), Figure().add_subplot()
    figures._points(relation, panels["KL from the start and loss on the old task: From SST-2 to reviews"])
    assert (relation.get_xlabel(), relation.get_ylabel()) == (
        "KL from the start, new task",
        "old task: loss, after training",
    )
    figures._costs(costs, panels["From SST-2 to reviews: cost"].values)
    assert not costs.texts  # names at points with equal costs would overlap
    assert [text.get_text() for text in costs.get_legend().get_texts()][-2:] == ["anchor", "hard_anchor"]
    panel = panels["Similarity to the pretrained model: CKA to the pretrained"]
    figures._measure(measures, panel)
    changes = [mean.difference for mean in panel.means if mean.method not in ("baseline", "pretrained")]
    points = [line.get_ydata()[0] for line in measures.lines if len(line.get_xdata()) == 1]
    assert points == [change.difference for change in changes]  # in the units of the measure
    assert [tick.get_text() for tick in measures.get_xticklabels()] == ["uegr", "more_dropout", "smart", "freelb"]
    faces = [
        line.get_markerfacecolor()
        for line in measures.lines
        if line.get_linestyle() == "None" and len(line.get_xdata())
    ]
    assert faces.count("white") == 4 - 2  # of four methods two are tested


def test_a_curve_shows_what_methods_gain_over_a_number_of_the_baseline() -> None:
    """A point per method and step, with its interval and its label, sorted by the baseline's number."""
    from matplotlib.figure import Figure

    name = "few_sample_glue"
    archive = archived.read(index.ARCHIVES / f"{name}{archived.ENDING}")
    curve = study_file.Curve(title="c", x="train.loss", of={"sst2": "SST-2", "qnli": "QNLI"})
    study = study_file.read(name).updated(curves=[curve])
    found = page.results(archive, study, judge)
    panel = page._curve_panel(found, curve)
    assert {method: len(points) for method, points in panel.points.items()} == {
        "longer": 2, "r3f": 2, "r4f": 2, "smart": 2, "sift": 1, "freelb": 1, "rdrop": 1, "jachess": 2, "uegr": 1,
        "anchor": 1, "wise": 2,
    }  # fmt: skip
    for step in found.steps:
        if step.finding is not None:
            methods = step.finding.values["methods"]
            for method, points in panel.points.items():
                changes = [one.difference for one in points if one.label == curve.of[step.step.name]]
                assert changes == ([methods[method]["difference"]["difference"]] if method in methods else [])
    for points in panel.points.values():
        assert [one.x for one in points] == sorted(one.x for one in points)
    axes = Figure().add_subplot()
    figures._curve(axes, panel)
    assert [text.get_text() for text in axes.texts].count("QNLI") == 6
    assert axes.get_ylabel() == "minus baseline, in points of the score"
    with pytest.raises(BadInput, match="curves: no step 'sst3'"):
        study_file.parse(
            {**overlay.parse(TOY, "here"), "curves": [{"title": "c", "x": "y", "of": {"sst3": "3"}}]}, "here"
        )


def test_one_value_everywhere_is_not_measured() -> None:
    found = {"probe": {name: dict.fromkeys(range(5), 68.9) for name in ("baseline", "r3f")}}
    (_, mean) = measurements.compared(found, "baseline", ["r3f"], ["probe"])["probe"]
    assert (mean.holm, mean.verdict()) == (None, "not measured: every run has the same value")


def test_commands_are_the_words_of_the_command_line() -> None:
    """What a study calls exists: every option of every step is one of its command."""
    import typer

    commands: Any = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name in NAMES:
        study = study_file.read(name)
        for size in study.sizes:
            for command in studies.StudyRun(
                name, study, size, {k: Path(k) for k in ("models", "data", "output")}
            ).commands():
                known = {option for param in commands[command.words[0]].params for option in param.opts}
                assert {word for word in command.words if word.startswith("--")} <= known, command.line
