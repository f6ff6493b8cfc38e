"""What a method is: its settings reach it and no other, and a training is filed under what it was trained with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.studies.collapse.study_files import ChainPlan
from seqreg.studies.compare import conclusions, effects, jobs, report, significance
from seqreg.studies.compare import figures as report_figures
from seqreg.studies.compare import plan as comparison
from seqreg.studies.compare import results as stored
from seqreg.studies.compare import study as compares
from seqreg.workbench.config import run_config
from seqreg.workbench.run.train import trained
from seqreg.workbench.text.atomic_files import REMOVED
from tests.helpers import fake_comparison, tiny_tasks
from tests.studies.test_compare import pretend

TERM = "terms:\n  r3f: {weight: 0.3}\n"


def settings(plan: comparison.ComparisonPlan, name: str) -> dict[str, object]:
    return {key: value for key, value in plan.resolved[name].items() if key.startswith("terms")}


def test_settings_of_a_term_reach_only_the_methods_that_have_it() -> None:
    asked = ["terms.r3f.weight=1.0", "optimisation.max_steps=7", "optimisation.warmup_steps=0"]
    plan, run = comparison.make("quickstart", ["rdrop", "r3f", "r3f+smart"], "1", settings=asked)
    assert run.config.method == "baseline"
    assert settings(plan, "baseline") == {"terms": {}}
    assert not any("r3f" in key for key in settings(plan, "rdrop"))
    assert settings(plan, "r3f")["terms.r3f.weight"] == settings(plan, "r3f+smart")["terms.r3f.weight"] == 1.0
    for job in plan.jobs(Path("x")):
        words = plan.words(job)
        assert ("terms.r3f.weight=1.0" in words) == ("r3f" in job.method)
        assert "optimisation.max_steps=7" in words
        terms = [words[place + 1] for place, word in enumerate(words) if word == "--terms"]
        again = run_config.resolve("quickstart", terms=terms, overrides=[word for word in words[2:] if "=" in word])
        assert list(again.config.terms) == plan.terms[job.method]


def test_methods_may_differ_in_settings(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(TERM)
    words = [
        "r3f", "r3f:weight=1.0", "strong=r3f:weight=2,scale=0.1", "half=r3f:optimisation.learning_rate=1e-4",
        "slow=r3f:weight={schedule: warmup, weight: 0.1, steps: 5},noise=normal", f"{tmp_path}/sub/mine.yaml",
        f"own={tmp_path}/sub/mine.yaml:noise=normal+rdrop:alpha=1e+0",
    ]  # fmt: skip
    plan, _ = comparison.make("quickstart", words, "1", settings=["terms.r3f.weight=0.5"])
    assert plan.methods == ["baseline", "r3f", "r3f-weight=1.0", "strong", "half", "slow", "mine", "own"]
    weights = {name: settings(plan, name).get("terms.r3f.weight") for name in plan.methods}
    assert weights == {
        "baseline": None, "r3f": 0.5, "r3f-weight=1.0": 1.0, "strong": 2, "half": 0.5, "slow": None, "mine": 0.5,
        "own": 0.5,
    }  # fmt: skip
    assert settings(plan, "slow")["terms.r3f.weight.steps"] == 5
    assert settings(plan, "own")["terms.rdrop.alpha"] == 1.0
    assert plan.resolved["half"]["optimisation.learning_rate"] == 1e-4
    assert plan.resolved["r3f"]["optimisation.learning_rate"] != 1e-4
    assert plan.words(plan.jobs(tmp_path)[3])[:4] == ["train", "quickstart", "--terms", "r3f:weight=2,scale=0.1"]
    assert "-t strong=r3f:weight=2,scale=0.1" in plan.command(tmp_path)


def test_settings_of_methods_are_in_the_tables(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"strong=r3f:weight=1.0": 4.0, "r3f": 0.0}, seeds="2", curves=False)
    finding = conclusions.judge(tmp_path)
    table = next(one for one in finding.tables if one.title == conclusions.CHANGES)
    assert [row[:2] for row in table.rows] == [["baseline"] * 2, ["strong", "strong=r3f:weight=1.0"], ["r3f", "r3f"]]
    assert "terms.r3f.weight = 1.0" in table.rows[1][2]
    page = report.report([tmp_path]).read_text()
    assert "strong=r3f:weight=1.0" in page
    assert "terms.r3f.weight = 1.0" in page


@pytest.mark.parametrize("command", [["train"], ["check"]])
def test_a_setting_does_not_add_its_term(command: list[str], tmp_path: Path) -> None:
    said = tiny_tasks.seqreg(*command, "quickstart", "terms.r3f.weight=1.0", cwd=tmp_path, code=2).stderr
    assert said == "command line: terms.r3f.weight=1.0: there is no term 'r3f' (the run has none): add --terms r3f"
    assert list(run_config.resolve("quickstart", overrides=["terms.r3f={}", "terms.r3f.weight=1.0"]).config.terms) == [
        "r3f"
    ]
    run = run_config.resolve("quickstart", terms=["strong=r3f:weight=3"])
    assert run.config.terms["r3f"] == {"weight": 3}
    assert run.config.output == "runs/quickstart/strong"


def test_chains_take_settings_of_methods(tmp_path: Path) -> None:
    file = tiny_tasks.plan(tmp_path, "colour", "size")
    plan = ChainPlan.model_validate(json.loads(file.read_text()))
    from seqreg.studies.collapse import chain

    methods, settings = ["strong=r3f:weight=2", "r3f"], ["terms.r3f.scale=0.1"]
    resolved = chain.resolve(plan, Path("plan"), tmp_path / "x", methods, settings, most=20)
    terms = {method: links[0].run.config.terms for (method, _), links in resolved.links.items()}
    assert terms["baseline"] == {}
    assert (terms["strong"]["r3f"] or {})["weight"] == 2
    assert all((terms[name]["r3f"] or {})["scale"] == 0.1 for name in ("strong", "r3f"))
    with pytest.raises(BadInput, match="no method has the term 'smart'"):
        chain.resolve(plan, Path("plan"), tmp_path / "x", ["r3f"], ["terms.smart.weight=1"], most=20)


def test_a_recipe_with_terms_of_its_own_is_no_baseline(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{run_config.lookup.find('recipes', 'quickstart').read_text()}\n{TERM}")
    with pytest.raises(BadInput, match=r"the baseline would be trained as r3f: .*--baseline NAME=baseline"):
        comparison.make(str(recipe), ["rdrop"], "1")
    plan, _ = comparison.make(str(recipe), ["rdrop"], "1", baseline="with-r3f=baseline")
    assert plan.terms == {"with-r3f": ["r3f"], "rdrop": ["r3f", "rdrop"]}


@pytest.mark.parametrize("change", [{"terms.r3f.weight": 1.0}, {"seed": 9}, {"loss.label_smoothing": 0.9}])
def test_a_training_is_not_filed_under_another_method(change: dict[str, object], tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="2", curves=False)
    path = tmp_path / "baseline" / "seed-2" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "settings": {**record["settings"], **change}}))
    key, value = next(iter(change.items()))
    said = f"seed-2: was trained with {key}={value}, and is filed under baseline and seed 2"
    with pytest.raises(BadInput, match=said):
        conclusions.judge(tmp_path)
    with pytest.raises(BadInput, match=said):
        compares.compare("quickstart", ["r3f"], "2", tmp_path)


def test_a_term_file_from_anywhere_has_a_clean_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.yaml").write_text(TERM)
    monkeypatch.chdir(tmp_path)
    started = pretend(monkeypatch, "DONE")
    plan = compares.compare("quickstart", ["sub/x.yaml"], "1", tmp_path / "c")
    assert plan is not None
    assert started == [("baseline", 1), ("x", 1)]
    assert "--terms sub/x.yaml" in " ".join(plan.words(plan.jobs(tmp_path / "c")[1]))
    with pytest.raises(BadInput, match=r"sub/y\.yaml: no such file"):
        compares.compare("quickstart", ["sub/y.yaml"], "1", tmp_path / "d")


def test_collect_works_while_compare_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="2", curves=False)
    held = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    held += "; print(1, flush=True); time.sleep(60)"
    before = (tmp_path / comparison.PLAN).stat().st_mtime_ns
    with subprocess.Popen(
        [sys.executable, "-c", held, str(tmp_path / ".lock")], stdout=subprocess.PIPE
    ) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        assert compares.compare("quickstart", ["r3f"], "2", tmp_path, collect=True) == plan
        other.kill()
    assert (tmp_path / comparison.PLAN).stat().st_mtime_ns == before
    with pytest.raises(BadInput, match="has no such comparison yet"):
        compares.compare("quickstart", ["r3f"], "3", tmp_path, collect=True, extend=True)


def test_compare_says_scores_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_comparison.comparison(tmp_path / "made", {"r3f": 1.0}, seeds="2", curves=False)

    def start(plan: comparison.ComparisonPlan, job: comparison.Job, trust: bool = False) -> subprocess.Popen[bytes]:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        source = tmp_path / "made" / job.method / job.folder.name
        return subprocess.Popen(["cp", "-r", str(source), str(job.folder)])

    monkeypatch.setattr(jobs, "start", start)
    compares.compare("quickstart", ["r3f"], "2", tmp_path / "c")
    lines = [line for line in capsys.readouterr().err.splitlines() if "rougeL" in line]
    assert len(lines) == 4
    assert lines[0].startswith("baseline, seed 1: rougeL 5")
    assert "on test  (1 of 4, about " in lines[0]
    assert lines[-1].endswith("(4 of 4, nothing left)")


@pytest.mark.parametrize(
    ("keep", "kept"), [("best", {"seed-2"}), ("all", {"seed-1", "seed-2", "seed-3"}), ("none", set())]
)
def test_models_of_a_comparison_are_kept_as_asked(keep: str, kept: set[str], tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="3", curves=False)
    for seed, score in ((1, 10.0), (2, 30.0), (3, 20.0)):
        for name in ("baseline", "r3f"):
            folder = tmp_path / name / f"seed-{seed}"
            metrics = json.loads((folder / "metrics.json").read_text())
            metrics["scores"]["validation"]["score"] = score
            (folder / "metrics.json").write_text(json.dumps(metrics))
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_text("x")
            (folder / "checkpoint-5").mkdir()
    compares.compare("quickstart", ["r3f"], "3", tmp_path, keep_models=keep)
    for name in ("baseline", "r3f"):
        assert {path.parent.name for path in (tmp_path / name).glob("*/model.safetensors")} == kept
        assert {path.parent.name for path in (tmp_path / name).glob("*/checkpoint-5")} == kept
    assert compares.compare("quickstart", ["r3f"], "3", tmp_path) is not None  # as it was begun
    assert len(list(tmp_path.glob("*/*/model.safetensors"))) == 2 * len(kept)
    assert report.report([tmp_path]).is_file()
    if keep != "all":
        gone = tmp_path / "r3f" / "seed-1"
        assert "seqreg train quickstart --terms r3f seed=1" in (gone / REMOVED).read_text()
        (gone / "config.yaml").write_text(run_config.lookup.find("recipes", "quickstart").read_text())
        with pytest.raises(BadInput, match="its comparison has not kept it"):
            trained(gone)


def test_a_new_comparison_keeps_the_best_and_an_old_one_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "DONE")
    plan = compares.compare("quickstart", ["r3f"], "1", tmp_path / "new")
    assert plan is not None
    assert plan.keep_models == "best"
    fake_comparison.comparison(tmp_path / "old", {"r3f": 1.0}, seeds="1", curves=False)
    text = json.loads((tmp_path / "old" / comparison.PLAN).read_text())
    for key in ("keep_models", "given", "terms"):
        del text[key]
    (tmp_path / "old" / comparison.PLAN).write_text(json.dumps(text))
    assert comparison.read(tmp_path / "old").keep_models == "all"
    compares.prune(comparison.read(tmp_path / "old"), tmp_path / "old")


def test_a_plan_from_before_settings_were_renamed_is_the_same_plan(tmp_path: Path) -> None:
    plan, _ = comparison.make("quickstart", ["r3f"], "1")
    plan.write(tmp_path)
    text = json.loads((tmp_path / comparison.PLAN).read_text())
    for settings in text["resolved"].values():
        settings["optimisation.clip"] = settings.pop("optimisation.max_grad_norm")
        settings["optimisation.betas"] = [settings.pop(f"optimisation.adam_beta{number}") for number in (1, 2)]
    (tmp_path / comparison.PLAN).write_text(json.dumps(text))
    assert comparison.settle(tmp_path, plan, extend=False) == plan


@pytest.mark.parametrize("launcher", ["true", "no-such-program {}", "sh '{}"])
def test_a_launcher_that_cannot_be_one_writes_nothing(launcher: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--launcher"):
        compares.compare("quickstart", ["r3f"], "1", tmp_path / "x", launcher=launcher)
    assert not (tmp_path / "x").exists()


def test_cost_is_cpu_time_and_says_so(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="4", curves=False)
    finding = conclusions.judge(tmp_path)
    assert finding.values["cost"] == "CPU time of the training steps"
    assert finding.values["methods"]["r3f"]["time"] == 1.5  # wall times are equal
    path = tmp_path / "r3f" / "seed-1" / "metrics.json"
    metrics = json.loads(path.read_text())
    del metrics["train"]["cpu_seconds"]
    path.write_text(json.dumps(metrics))
    values = conclusions.judge(tmp_path).values
    assert (values["cost"], values["methods"]["r3f"]["time"]) == ("wall time of the training", 1.0)


def test_a_run_records_the_cpu_time_of_its_steps(classifier: Path) -> None:
    train = json.loads((classifier / "metrics.json").read_text())["train"]
    assert train["device"] == "cpu"
    assert train["cpu_seconds"] > 0
    assert 0 < train["step_seconds"] <= train["seconds"]


def test_negative_parts_of_the_loss_are_drawn(tmp_path: Path) -> None:
    def drawn(part: list[float], name: str) -> int:
        curves = {"base": [(1, 5.0), (2, 4.0), (3, 3.0)], "penalty": list(enumerate(part, start=1))}
        traced = {"r3f": [{f"train/part/{key}": curve for key, curve in curves.items()}]}
        assert report_figures.loss_parts(traced, tmp_path / name) == "parts"
        picture = Image.open(tmp_path / name / "parts.png").convert("RGB")
        colours = picture.getcolors(1 << 24)
        assert colours is not None
        return sum(count for count, colour in colours if colour == (213, 94, 0))

    below, above = drawn([-1.0, -0.5, -0.1], "below"), drawn([1.0, 0.5, 0.1], "above")
    assert below > above / 2  # as much of its colour as of a part that is positive


@pytest.mark.parametrize("kind", ["texts", "classes"])
def test_a_verdict_between_collapsed_methods_means_nothing(kind: str, tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path / "both", {"r3f": 30.0}, kind=kind, collapsed=("baseline", "r3f"), curves=False)
    finding = conclusions.judge(tmp_path / "both")
    said = next(one for one in finding.summary if one.startswith("r3f "))
    assert "the output of both has collapsed, so a verdict between them means nothing" in said
    assert "significant" not in said
    assert next(row for row in finding.tables[0].rows if row[0] == "r3f")[-1] == "means nothing: both collapsed"
    assert any(one.startswith("The output of baseline has collapsed with 5 of 5 seeds") for one in finding.summary)
    fake_comparison.comparison(tmp_path / "one", {"r3f": 30.0}, kind=kind, collapsed=("r3f",), curves=False)
    finding = conclusions.judge(tmp_path / "one")
    assert any("; but the output of r3f has collapsed" in one for one in finding.summary)
    assert next(row for row in finding.tables[0].rows if row[0] == "r3f")[-1].endswith("(it collapsed)")
    head, row = finding.tables[1].columns, finding.tables[1].rows[1]
    assert row[head.index("collapsed")] == "5 of 5"
    assert row[head.index("most common prediction (%)")] > 95
    assert "has collapsed with 5 of 5 seeds" in report.report([tmp_path / "one"]).read_text()


def test_collapse_is_said_before_too_few_seeds(tmp_path: Path) -> None:
    """More seeds would not help."""
    fake_comparison.comparison(tmp_path, {"r3f": 30.0}, seeds="2", collapsed=("baseline", "r3f"), curves=False)
    finding = conclusions.judge(tmp_path)
    said = next(one for one in finding.summary if one.startswith("r3f "))
    assert "the output of both has collapsed, so a verdict between them means nothing" in said
    assert "more needed" not in said
    assert next(row for row in finding.tables[0].rows if row[0] == "r3f")[-1] == "means nothing: both collapsed"
    page = report.report([tmp_path]).read_text()
    assert "The output of baseline has collapsed, and that of r3f too." in page
    fake_comparison.comparison(tmp_path / "one", {"r3f": 30.0}, seeds="2", collapsed=("r3f",), curves=False)
    said = next(one for one in conclusions.judge(tmp_path / "one").summary if one.startswith("r3f "))
    assert "not enough seeds for a verdict" in said


def test_the_scale_of_methods_that_do_not_differ_is_readable(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 0.0}, seeds="3", curves=False)
    values = significance.measure(stored.load(tmp_path))
    values["methods"]["r3f"]["difference"] |= {"difference": 0.0, "interval": (0.0, 0.0)}
    shown = effects.effects(values)
    assert shown is not None
    assert [label for _, label in shown.ticks] == ["-1", "-0.5", "0", "+0.5", "+1"]
    assert (shown.zero, shown.methods[0].place, shown.methods[0].ends) == (50.0, 50.0, (50.0, 50.0))


def test_early_stops_are_in_the_summary(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="3", curves=False)
    for seed, (steps, model) in {1: (40, 20), 3: (60, 60)}.items():
        path = tmp_path / f"r3f/seed-{seed}/metrics.json"
        metrics = json.loads(path.read_text())
        metrics.setdefault("train", {}).update(steps=steps, stopped_early=True, best_step=model, model_step=model)
        path.write_text(json.dumps(metrics))
    told = "r3f stopped early with 2 of 3 seeds, after 40 and 60 steps; their models are those of steps 20 and 60."
    assert told in conclusions.judge(tmp_path).summary
    assert told in report.report([tmp_path]).read_text()


def test_intervals_stay_within_what_a_score_can_be(tmp_path: Path) -> None:
    """Student's interval of three seeds near 0 reaches below it."""
    fake_comparison.comparison(tmp_path, {"r3f": 0.0}, seeds="3", curves=False)
    results = stored.load(tmp_path)
    for seed, score in zip((1, 2, 3), (0.1, 2.0, 5.0), strict=True):
        results.methods["r3f"].metrics[seed]["scores"][results.split][results.metric] = score
    low, high = significance._summary(results, "r3f")["student"]
    assert (low, high) == (0.0, pytest.approx(statistics.student([0.1, 2.0, 5.0])[1]))
    assert statistics.student([0.1, 2.0, 5.0])[0] < 0


@pytest.mark.parametrize("kind", ["texts", "classes"])
def test_few_test_examples_give_no_verdict(kind: str, tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 30.0}, kind=kind, examples=12, curves=False)
    finding = conclusions.judge(tmp_path)
    said = next(one for one in finding.summary if one.startswith("r3f "))
    assert "too few test examples for a verdict: 12, and " in said
    assert "significant" not in json.dumps([finding.summary, [table.rows for table in finding.tables]])
    assert next(row for row in finding.tables[0].rows if row[0] == "r3f")[-1] == "none: 12 test examples"


def test_changed_settings_of_methods_are_shown_verbatim(tmp_path: Path) -> None:
    """Also of terms that are taken with their defaults, and of an update that the baseline does not have."""
    fake_comparison.comparison(tmp_path, {"uegr": 0.0, "rdrop": 0.0}, seeds="2", curves=False)
    rows = next(one for one in conclusions.judge(tmp_path).tables if one.title == conclusions.CHANGES).rows
    assert [row[2] for row in rows] == [
        "", "terms.uegr (defaults); optimisation.update.stochastic (defaults)", "terms.rdrop (defaults)",
    ]  # fmt: skip
