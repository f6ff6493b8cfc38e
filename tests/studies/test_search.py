"""Searches with equal coverage: which trials there are, what they may see, what is chosen, in which order they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from seqreg.cli import main as cli
from seqreg.errors import BadInput
from seqreg.studies.compare import jobs, search
from seqreg.studies.compare import plan as plans
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.studies.compare.search import FACTORS, LEARNING_RATE, TRIAL_SEED
from seqreg.studies.compare.study import compare
from seqreg.workbench.config import run_config
from seqreg.workbench.run import train
from seqreg.workbench.run.record import settings_of
from tests.helpers.tiny_tasks import SHORT, bert, seqreg, task

ROOT = Path(__file__).parents[2]


RATES = [float(f"{factor * 3e-3:.3g}") for factor in FACTORS]
"""Learning rates of the recipe `quickstart`, which has 3e-3."""
DROPOUT = "model.settings.dropout"


def tried(recipe: str, budget: int, *grid: str, overrides: tuple[str, ...] = ()) -> list[list[str]]:
    """The settings of all trials of one method, the third learning rate being the best."""
    run = run_config.resolve("quickstart", terms=[recipe], overrides=overrides)
    begun = search.begun({"m": run}, budget, grid, [1])
    trials = begun.trials["m"]
    best = trials[min(2, len(trials) - 1)]
    trials = [*trials, *search.further(begun.spaces["m"], best, "m", budget)]
    assert {trial.seed for trial in trials} == {TRIAL_SEED}
    assert len({tuple(trial.settings) for trial in trials}) == len(trials)  # none comes twice
    return [trial.settings for trial in trials]


def test_every_method_tries_all_learning_rates_then_every_value_then_combinations() -> None:
    rates = [[f"{LEARNING_RATE}={json.dumps(rate)}"] for rate in RATES]
    assert tried("baseline", 20) == rates
    values = ["terms.r3f.weight=0.5", "terms.r3f.weight=1.0", "terms.r3f.weight=5.0", 'terms.r3f.noise="uniform"']
    assert tried("r3f", 8) == [*rates, *([*rates[2], value] for value in values)]
    everything = tried("r3f", 100)
    assert everything[:8] == tried("r3f", 8)  # a larger budget adds to a smaller one
    assert sorted(map(len, everything[8:])) == [3, 3, 3]  # both settings changed
    assert everything == tried("r3f", 100)


def test_a_budget_that_does_not_cover_the_grid_is_refused() -> None:
    with pytest.raises(
        BadInput, match="--search 7: m has 4 learning rates and 4 other values to try: expected at least 8"
    ):
        tried("r3f", 7)
    with pytest.raises(BadInput, match="--search 3: m has 4 learning rates and 0 other values to try"):
        tried("baseline", 3)


def test_a_grid_reaches_the_methods_that_have_its_key() -> None:
    runs = {name: run_config.resolve("quickstart", terms=[name]) for name in ("baseline", "r3f")}
    grid = [f"{LEARNING_RATE}=[1e-4, 2e-4]", f"baseline:{DROPOUT}=[0.1, 0.2, 0.3]", "terms.r3f.weight=[0.1, 5.0, 20.0]"]
    spaces = search.begun(runs, 9, grid, [1]).spaces
    assert spaces["baseline"] == {LEARNING_RATE: [1e-4, 2e-4], DROPOUT: [None, 0.1, 0.2, 0.3]}  # None: the model's own
    assert spaces["r3f"] == {
        LEARNING_RATE: [1e-4, 2e-4], "terms.r3f.weight": [0.1, 5.0, 20.0], "terms.r3f.noise": ["normal", "uniform"]
    }  # fmt: skip
    several = search.begun(runs, 10, ["r3f:model.settings=[{}, {dropout: 0.2, attention_dropout: 0.2}]"], [1]).spaces
    assert several["r3f"]["model.settings"][1:] == [{}, {"dropout": 0.2, "attention_dropout": 0.2}]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("loss.label_smoothing=0.1", r"expected \[METHOD:\]KEY=\[different values\]"),
        ("loss.label_smoothing=[0.1, 0.1]", "different values"),
        ("loss.label_smoothing=[]", "different values"),
        ("=[1]", "different values"),
        ("r4f:loss.label_smoothing=[0.1]", "no method 'r4f'; choose from m"),
        ("terms.smart.weight=[0.1]", "no method has the term 'smart'"),
    ],
)
def test_a_grid_that_says_nothing_is_refused(grid: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        tried("r3f", 20, grid)


def test_what_a_person_has_set_is_not_searched() -> None:
    for recipe, overrides in (("r3f:weight=2.0,noise=uniform", ()), ("r3f", ("terms.r3f.weight=2.0",))):
        texts = {text for settings in tried(recipe, 9, overrides=overrides) for text in settings}
        assert not any(text.startswith("terms.r3f.weight") for text in texts)
    assert tried(f"x=baseline:{LEARNING_RATE}=2e-4", 3) == [[f"{LEARNING_RATE}=0.0002"]]
    assert tried(f"x=baseline:{LEARNING_RATE}=2e-4", 3, f"{LEARNING_RATE}=[1e-4, 3e-4]") == [
        [f"{LEARNING_RATE}=0.0002"]
    ]


def test_the_best_validation_score_is_chosen() -> None:
    assert search.best("m", [70.0, 72.0, 72.0, 71.0]) == 1
    assert search.best("m", [70.0, 69.0, 75.0], greater_is_better=False) == 1
    assert search.best("m", [None, 60.0, None, 61.0]) == 3
    with pytest.raises(BadInput, match="all trials of m failed"):
        search.best("m", [None] * 4)


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: dict[str, int] | None = None) -> list[str]:
    """Runs, trials and arms that leave their files at once; a trial is the better the later it is."""
    started: list[str] = []

    def start(plan: ComparisonPlan, job: Job, trust: bool = False) -> subprocess.Popen[bytes]:
        started.append(job.title)
        failed = (code or {}).get(job.title, 0)
        if not failed:
            finish(plan, job)
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({failed})"])

    monkeypatch.setattr(jobs, "start", start)
    return started


def finish(plan: ComparisonPlan, job: Job) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    settings = {**plan.settings_of(job.method), "seed": job.seed}
    if job.trial:
        run = plans._resolved(plan, job.method, [*job.settings, *search.ONLY_VALIDATION])
        settings = {**settings_of(run), "seed": job.seed}
    found = {"score": 50.0 + job.trial, "rougeL": 50.0 + job.trial, "intervals": {}}
    scores = {"validation": found} if job.trial else {"validation": found, "test": found}
    for name, content in (
        ("run.json", {"run": job.title, "settings": settings, "versions": {}, "finished": True}),
        ("metrics.json", {"scores": scores, "method": job.method}),
        ("config.json", {}),
    ):
        (job.folder / name).write_text(json.dumps(content))
    (job.folder / "model.safetensors").touch()


@pytest.fixture
def pretrained(tmp_path: Path) -> list[str]:
    """Settings of a task with a pretrained model."""
    card = task(tmp_path, "colour", train=64, test=20)
    return [f"task={card}", f"data.path={tmp_path / 'colour'}", f"model.name={bert(tmp_path / 'bert')}", *SHORT]


GRID = [f"{LEARNING_RATE}=[1e-4, 3e-4]", "terms.r3f.weight=[0.1, 1.0]", "terms.r3f.noise=[normal]"]
"""Two learning rates, and one further trial of R3F."""


def test_trials_come_first_then_runs_then_arms_and_models_stay_until_arms_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretrained: list[str]
) -> None:
    started, folder = pretend(monkeypatch, tmp_path), tmp_path / "c"
    options: dict[str, Any] = {"settings": pretrained, "arms": ["wise", "soup"], "search": 3, "grid": GRID}
    seen: list[list[bool]] = []
    begin = jobs.start

    def watched(plan: ComparisonPlan, job: Job, trust: bool = False) -> Any:
        if job.sources:
            seen.append([(source.folder / "config.json").exists() for source in job.sources])
        return begin(plan, job, trust)

    monkeypatch.setattr(jobs, "start", watched)
    plan = compare("glue", ["r3f"], "2", folder, **options)
    assert plan is not None
    assert started == [
        *(f"{method}, trial {place}" for place in (1, 2) for method in ("baseline", "r3f")),
        "r3f, trial 3",
        *(f"{method}, seed {seed}" for seed in (1, 2) for method in ("baseline", "r3f")),
        "wise, seed 1", "wise, seed 2", "soup of 2 seeds",
    ]  # fmt: skip
    assert seen == [[True], [True], [True, True]]
    stored = json.loads((folder / plans.PLAN).read_text())["search"]
    assert stored["budget"] == 3
    assert stored["scores"] == {"baseline": [51.0, 52.0], "r3f": [51.0, 52.0, 53.0]}
    assert stored["rates"] == {"baseline": 1, "r3f": 1}
    assert stored["chosen"] == {"baseline": 1, "r3f": 2}
    assert stored["trials"]["r3f"][2]["settings"] == [f"{LEARNING_RATE}=0.0003", "terms.r3f.weight=1.0"]
    for job in plan.jobs(folder):
        words = plan.words(job)
        if not job.sources:
            assert set(plan.search.trials[job.method][-1].settings) <= set(words)
            assert not any("test_sets" in word for word in words)
    kept = [job.title for job in [*plan.trials(folder), *plan.jobs(folder)] if (job.folder / "config.json").exists()]
    assert kept == ["baseline, seed 1", "r3f, seed 1", "wise, seed 1", "soup of 2 seeds"]
    started.clear()
    assert compare("glue", ["r3f"], "2", folder, **options) == plan
    assert started == []
    for change, said in (
        ({"search": 4}, "search: 3 there, 4 now"),
        ({"search": 0, "grid": ()}, "search: 3 there, 0 now"),
        ({"grid": [GRID[0], "terms.r3f.weight=[0.1, 5.0]", GRID[2]]}, "r3f: grid: .* there, .* now"),
        ({"arms": ["wise"]}, 'methods: \\["baseline", "r3f", "wise", "soup"\\] there'),
    ):
        with pytest.raises(BadInput, match=said):
            compare("glue", ["r3f"], "2", folder, **{**options, **change})
    with pytest.raises(BadInput, match=r"optimisation\.ema_decay: null there, 0\.999 now"):
        compare("glue", ["r3f"], "2", folder, extend=True, **{**options, "arms": ["wise", "soup", "ema"]})
    with pytest.raises(BadInput, match="the model of baseline, seed 2 was not kept"):
        compare("glue", ["r3f"], "2", folder, extend=True, **{**options, "arms": ["wise", "soup", "greedy-soup"]})


def test_a_launcher_is_given_one_phase_after_the_other(
    tmp_path: Path, pretrained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    options: dict[str, Any] = {"settings": pretrained, "arms": ["wise"], "search": 3, "grid": GRID}

    def launched() -> list[str]:
        assert compare("glue", ["r3f"], "1", folder, launcher="print", **options) is None
        return capsys.readouterr().out.splitlines()

    lines = launched()
    assert len(lines) == 4
    assert all("evaluation.test_sets=false" in line and "seed=100001" in line for line in lines)
    assert compare("glue", ["r3f"], "1", folder, collect=True, **options) is None
    plan = plans.read(folder)
    for job in plan.trials(folder):
        finish(plan, job)
    (line,) = launched()
    assert "terms.r3f.weight=1.0" in line
    plan = plans.read(folder)
    finish(plan, plan.trials(folder)[-1])
    lines = launched()
    assert [" seqreg train " in line for line in lines] == [True, True]
    assert not any("test_sets" in line for line in lines)
    plan = plans.read(folder)
    for job in plan.jobs(folder)[:2]:
        finish(plan, job)
    (line,) = launched()
    assert f"seqreg soup {folder}/baseline/seed-1 --interpolate best --evaluate --output {folder}/wise/seed-1" in line
    finish(plan, plan.jobs(folder)[2])
    assert compare("glue", ["r3f"], "1", folder, launcher="print", **options) is not None


def test_failed_trials_count_and_a_failed_run_takes_its_arms_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretrained: list[str]
) -> None:
    pretend(monkeypatch, tmp_path, {"r3f, trial 2": 3, "baseline, seed 2": 3})
    plan = compare(
        "glue", ["r3f"], "2", tmp_path / "c", settings=pretrained, arms=["wise", "soup"], search=3, grid=GRID
    )
    assert plan is not None
    assert plan.search.scores["r3f"] == [51.0, None, 53.0]
    assert plan.search.rates == {"baseline": 1, "r3f": 0}
    assert plan.search.chosen == {"baseline": 1, "r3f": 2}
    kinds = {job.title: jobs.state(job).kind for job in plan.jobs(tmp_path / "c")}
    assert kinds["wise, seed 1"] == jobs.FINISHED
    assert kinds["wise, seed 2"] == kinds["soup of 2 seeds"] == jobs.FAILED


def test_a_trial_never_computes_a_test_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretrained: list[str]
) -> None:
    scored, evaluate = [], train.evaluate

    def noted(trainer: Any, run: Any, tokenizer: Any, examples: Any, name: str, **options: Any) -> Any:
        scored.append(name)
        return evaluate(trainer, run, tokenizer, examples, name, **options)

    monkeypatch.setattr(train, "evaluate", noted)
    plan, _ = plans.make("glue", ["r3f"], "1", settings=pretrained, search=3, grid=GRID)
    for job in plan.trials(tmp_path / "c")[1:2]:
        seqreg(*plan.words(job), cwd=tmp_path)
        assert scored == ["validation"]
        assert list(json.loads((job.folder / "metrics.json").read_text())["scores"]) == ["validation"]
        assert sorted(path.name for path in job.folder.glob("predictions*")) == ["predictions.jsonl"]
        lines = (job.folder / "predictions.jsonl").read_text().splitlines()
        assert len(lines) == 40  # of the validation set: the test set has 20
        record = jobs.finished_record(job)
        assert record is not None
        plans.check_record(plan, job, record)
        with pytest.raises(BadInput, match=r"was trained with .*, and is filed under r3f"):
            plans.check_record(plan, plan.jobs(tmp_path / "c")[1], record)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("{wieght: [1.0]}", "search: terms.r3f.wieght=1.0: R3F: unknown setting 'wieght'"),
        ("{weight: [-1.0]}", "terms.r3f.weight=-1.0"),
        ("{weight: 1.0}", "search.weight=1.0: expected a list of different values to try"),
        ("{weight: [1.0, 1.0]}", "expected a list of different values to try"),
        ("{optimisation.lr: [1.0]}", "optimisation.lr=1.0: unknown key; did you mean"),
        ("[weight]", "search=['weight']: expected a mapping"),
    ],
)
def test_a_search_block_is_checked_and_otherwise_ignored_by_train(block: str, said: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("terms: {r3f: {}}\nsearch: {weight: [0.3], optimisation.learning_rate: [1.0e-4, 2.0e-4]}\n")
    run = run_config.resolve("quickstart", terms=[str(recipe)])
    assert (
        run.config == run_config.resolve("quickstart", terms=["r3f"], overrides=[f"output={run.config.output}"]).config
    )
    assert search.begun({"m": run}, 9, (), [1]).spaces["m"] == {
        LEARNING_RATE: [1e-4, 2e-4], "terms.r3f.weight": [0.1, 0.3]
    }  # fmt: skip
    recipe.write_text(f"terms: {{r3f: {{}}}}\nsearch: {block}\n")
    with pytest.raises(BadInput) as error:
        run_config.resolve("quickstart", terms=[str(recipe)])
    assert said in str(error.value)
    assert len(error.value.lines) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"search": 1}, "--search 1: baseline has 4 learning rates"),
        ({"grid": GRID}, f"--grid {GRID[0]}: says what --search tries: add --search"),
        ({"search": 9, "seeds": "100001,"}, "--seeds 100001: --search tries settings with the seed 100001"),
        ({"arms": ["wize"]}, "--arm wize: unknown; did you mean 'wise'"),
        ({"arms": ["wise"]}, "--arm wise: the model is trained from scratch"),
        ({"arms": ["soup"], "seeds": "1"}, "--arm soup: a soup needs at least 2 seeds"),
        ({"arms": ["ema"], "methods": ["ema=r3f"]}, "--arm ema: a method is called so too"),
        ({"methods": ["search=r3f"]}, "'search' cannot name a folder"),
    ],
)
def test_what_cannot_be_searched_or_made_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    asked = {"recipe": "quickstart", "methods": ["r3f"], "seeds": "2", "folder": tmp_path / "x", **options}
    with pytest.raises(BadInput) as error:
        compare(**asked)
    assert said in str(error.value)
    assert not (tmp_path / "x").exists()


def test_a_task_that_is_judged_by_its_validation_set_cannot_choose(tmp_path: Path, pretrained: list[str]) -> None:
    (tmp_path / "colour" / "test.jsonl").unlink()
    for options in ({"search": 8}, {"arms": ["wise"]}):
        with pytest.raises(BadInput, match="judged by its validation set, which cannot choose"):
            compare("glue", ["r3f"], "2", tmp_path / "x", settings=pretrained, **options)


@pytest.mark.slow
def test_a_kill_in_trials_and_in_arms_changes_nothing(tmp_path: Path, pretrained: list[str]) -> None:
    words = "compare glue -t r3f --arm wise --search 3 --seeds 1".split() + pretrained
    words += [word for text in GRID for word in ("--grid", text)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def begin(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "seqreg", *words, "-o", str(folder), "--keep-models", "all"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for place in (killed / "search" / "baseline" / "trial-1" / "run.json", killed / "wise" / "seed-1" / "run.json"):
        process, end = begin(killed), time.monotonic() + 200
        while not place.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for folder in (killed, whole):
        process = begin(folder)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
    plan = plans.read(killed)
    assert plan.search == plans.read(whole).search
    for job in plan.jobs(killed):
        other = whole / job.folder.relative_to(killed)
        for name in ("predictions.jsonl", "model.safetensors"):
            assert (job.folder / name).read_bytes() == (other / name).read_bytes()


def test_the_plan_is_printed_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "quickstart", "-t", "r3f", "-t", "smart", "--arm", "ema", "--search", "9", "--seeds", "8"]
    words += ["--plan", "-o", str(tmp_path / "x")]
    cli.app([*words, "--sd", "0.9", "--json"], standalone_mode=False)
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["trials"], numbers["runs"], numbers["evaluations"], numbers["tests"]) == (4 + 9 + 7, 24, 8, 3)
    cli.app(words, standalone_mode=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "an assumption: --sd gives another" in said
    assert not (tmp_path / "x").exists()
