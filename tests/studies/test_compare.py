"""`seqreg compare`: what is refused, what is trained, what is counted, and that a kill costs nothing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from seqreg.cli import main as cli
from seqreg.errors import BadInput, Interrupted
from seqreg.studies.compare import jobs
from seqreg.studies.compare import plan as comparison
from seqreg.studies.compare import study as compares
from seqreg.studies.compare.study import compare
from seqreg.workbench.config import run_config
from tests.helpers import fake_comparison
from tests.helpers.forked_process import TINY

ROOT = Path(__file__).parents[2]


def pretend(monkeypatch: pytest.MonkeyPatch, script: str = "exit 0") -> list[tuple[str, int]]:
    """Runs are a line of shell; what was started is noted."""
    started: list[tuple[str, int]] = []

    def start(plan: comparison.ComparisonPlan, job: comparison.Job, trust: bool = False) -> subprocess.Popen[bytes]:
        started.append((job.method, job.seed))
        job.folder.mkdir(parents=True, exist_ok=True)
        settings = {**plan.resolved[job.method], "seed": job.seed}
        finished = json.dumps({"run": "x", "settings": settings, "versions": {}, "finished": True})
        done = f"echo {shlex.quote(finished)} > {shlex.quote(str(job.folder / 'run.json'))}"
        line = script.replace("DONE", done).replace("METHOD", job.method)
        with job.log.open("ab") as log:
            return subprocess.Popen(["sh", "-c", line], stdout=log, stderr=log)

    monkeypatch.setattr(jobs, "start", start)
    return started


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": "quikstart"}, "unknown recipe 'quikstart'; did you mean 'quickstart'"),
        ({"methods": ["r3"]}, "unknown term recipe 'r3'; did you mean 'r3f'"),
        ({"methods": []}, "nothing to compare with the baseline"),
        ({"methods": ["../r3f"]}, "unknown term recipe '../r3f'"),
        ({"methods": [".."]}, "cannot name a folder: give the method a name, such as mine=.."),
        ({"methods": ["r3f:weight"]}, "expected [NAME=]RECIPE[:key=value,...]"),
        ({"methods": ["evidence=r3f"]}, "'evidence' cannot name a folder"),
        ({"methods": ["baseline=r3f"]}, "'baseline' is what has no terms"),
        ({"methods": ["x=r3f", "x=rdrop"]}, "--terms x=r3f and --terms x=rdrop: both would be called 'x'"),
        ({"methods": ["r3f:wieght=1"]}, "--terms r3f:wieght=1: terms.r3f.wieght=1: R3F: unknown setting 'wieght'"),
        ({"methods": ["r3f:data.path=x"]}, "unknown setting 'data'"),
        ({"methods": ["r3f:seed=3"]}, "unknown setting 'seed'"),
        ({"methods": ["x=baseline:weight=1"]}, "--terms baseline:weight=1: weight: baseline has no term"),
        ({"settings": ["terms.smart.weight=1"]}, "no method has the term 'smart': add --terms smart"),
        ({"settings": ["terms.r3f=null"]}, "it would make methods what their names do not say"),
        ({"settings": ["terms={r3f: {weight: 1}}"]}, "it would make methods what their names do not say"),
        ({"settings": ["model.head=r4f"], "recipe": "glue"}, "the baseline would be trained as r4f"),
        ({"seeds": "0"}, "--seeds 0: expected how many"),
        ({"seeds": "3,3"}, "--seeds 3,3: expected how many"),
        ({"seeds": "five"}, "--seeds five: expected how many"),
        ({"settings": ["seed=2"]}, "a comparison sets it itself; --seeds says which"),
        ({"settings": ["output=x"]}, "a comparison sets it itself; --output says which"),
        ({"settings": ["optimisation.step=5"]}, "did you mean 'max_steps'"),
        ({"settings": ["data.path=nowhere.jsonl"]}, "data.path=nowhere.jsonl: no such file or folder"),
        ({"alpha": 5.0}, "--alpha 5.0: expected a number between 0 and 1"),
        ({"at_a_time": 0}, "--jobs 0"),
        ({"collect": True}, "has no comparison yet"),
        ({"launcher": "sbatch"}, "expected 'print', or a command with {}"),
        ({"launcher": "sbatch --wrap='{}"}, "expected 'print', or a command with {}"),
        ({"launcher": "no-such-program {}"}, "no-such-program: no such program"),
        ({"launcher": "false {}"}, "false ended with exit code 1: 0 of 4 runs are submitted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pretend(monkeypatch)
    asked = {"recipe": "quickstart", "methods": ["r3f"], "seeds": "2", "folder": tmp_path / "x", **change}
    with pytest.raises(BadInput) as error:
        compare(**asked)
    assert said in str(error.value)
    assert started == []
    assert change == {"launcher": "false {}"} or not (tmp_path / "x").exists()


def test_every_method_has_every_seed_and_finished_ones_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pretend(monkeypatch, "DONE")
    chosen = compare("quickstart", ["r3f", "r3f+rdrop"], "3,7", tmp_path, at_a_time=2)
    assert chosen is not None
    assert sorted(started) == sorted((m, s) for m in ("baseline", "r3f", "r3f+rdrop") for s in (3, 7))
    started.clear()
    compare("quickstart", ["r3f", "r3f+rdrop"], "3,7", tmp_path)
    assert started == []
    assert chosen.words(chosen.jobs(tmp_path)[2])[:6] == ["train", "quickstart", "--terms", "r3f", "--terms", "rdrop"]


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pretend(monkeypatch, "DONE")
    compare("quickstart", ["r3f"], "2", tmp_path)
    with pytest.raises(BadInput) as error:
        compare(
            "quickstart", ["r3f"], "2", tmp_path, settings=["optimisation.max_steps=9", "optimisation.warmup_steps=1"]
        )
    assert any("baseline: optimisation.max_steps: 240 there, 9 now" in line for line in error.value.lines)
    assert error.value.lines[-1] == "choose another output"
    with pytest.raises(
        BadInput, match=r"seeds: \[1, 2\] there, \[1, 2, 3\] now(.|\n)*add seeds and methods with --extend"
    ):
        compare("quickstart", ["r3f"], "3", tmp_path)
    started.clear()
    compare("quickstart", ["r3f"], "3", tmp_path, extend=True)
    assert started == [("baseline", 3), ("r3f", 3)]
    assert comparison.read(tmp_path).extended == [{"seeds": [1, 2], "methods": ["baseline", "r3f"]}]
    with pytest.raises(BadInput, match="other settings"):
        compare("quickstart", ["smart"], "3", tmp_path, extend=True)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "x").touch()
    with pytest.raises(BadInput, match="there is something else"):
        compare("quickstart", ["r3f"], "2", tmp_path / "else")


def test_an_edited_recipe_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "DONE")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((ROOT / "recipes" / "quickstart.yaml").read_text())
    compare(str(recipe), ["r3f"], "2", tmp_path / "x")
    recipe.write_text(recipe.read_text().replace("label_smoothing: 0.1", "label_smoothing: 0.2"))
    with pytest.raises(BadInput, match=r"r3f: loss\.label_smoothing: 0\.1 there, 0\.2 now"):
        compare(str(recipe), ["r3f"], "2", tmp_path / "x")


def test_failures_are_kept_and_only_retried_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = 'if [ METHOD = r3f ]; then echo "seqreg: not finite"; exit 3; else DONE; fi'
    started = pretend(monkeypatch, fails)
    chosen = compare("quickstart", ["r3f"], "2", tmp_path)
    assert chosen is not None
    states = {(job.method, job.seed): jobs.state(job) for job in chosen.jobs(tmp_path)}
    assert states["r3f", 2] == jobs.JobState(jobs.FAILED, 3, "seqreg: not finite")
    assert states["baseline", 2].kind == jobs.FINISHED
    started.clear()
    compare("quickstart", ["r3f"], "2", tmp_path)
    assert started == []
    compare("quickstart", ["r3f"], "2", tmp_path, retry=True)
    assert started == [("r3f", 1), ("r3f", 2)]


@pytest.mark.parametrize("code", [4, 137, 143])
def test_what_was_stopped_from_outside_is_tried_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pretend(monkeypatch, f"exit {code}")
    for _ in range(2):
        compare("quickstart", ["r3f"], "1", tmp_path)
    assert started == [("baseline", 1), ("r3f", 1)] * 2


def test_a_crash_is_known_by_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "echo 'seqreg: stopped'; echo Traceback; echo 'RuntimeError: out of memory'; exit 1")
    chosen = compare("quickstart", ["r3f"], "1", tmp_path)
    assert chosen is not None
    assert jobs.state(chosen.jobs(tmp_path)[0]) == jobs.JobState(jobs.FAILED, 1, "RuntimeError: out of memory")


def test_input_that_a_training_refuses_stops_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = pretend(monkeypatch, "echo 'seqreg: no such model'; echo '  detail'; exit 2")
    with pytest.raises(BadInput, match="baseline, seed 1: no such model"):
        compare("quickstart", ["r3f"], "2", tmp_path)
    assert started == [("baseline", 1)]


def test_a_launcher_takes_lines_of_shell_and_collect_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "with space"
    assert compare("quickstart", ["r3f"], "2", folder, launcher="print") is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert not any("trust" in line for line in lines)
    assert compare("quickstart", ["r3f"], "2", folder, launcher="print", trust=True) is None
    assert all(" --trust-remote-code >> " in line for line in capsys.readouterr().out.splitlines())
    assert "trust" not in (folder / comparison.PLAN).read_text()
    stub = tmp_path / "bin" / "seqreg"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}{os.pathsep}{os.environ['PATH']}")
    assert compare("quickstart", ["r3f"], "2", folder, launcher="sh -c {}") is None
    assert (folder / "r3f" / "seed-2.code").read_text() == "3\n"
    assert f"output={folder / 'r3f' / 'seed-2'}" in (folder / "r3f" / "seed-2.log").read_text()
    started = pretend(monkeypatch)
    chosen = compare("quickstart", ["r3f"], "2", folder, collect=True)
    assert chosen is not None
    assert started == []
    assert [jobs.state(job).kind for job in chosen.jobs(folder)] == [jobs.FAILED] * 4


def test_sigterm_ends_the_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "exec sleep 60")
    running = jobs.start
    pids = []

    def start(chosen: comparison.ComparisonPlan, job: comparison.Job, trust: bool = False) -> subprocess.Popen[bytes]:
        process = running(chosen, job)
        pids.append(process)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return process

    monkeypatch.setattr(jobs, "start", start)
    kept = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(Interrupted) as stop:
            compare("quickstart", ["r3f"], "1", tmp_path)
    finally:
        signal.signal(signal.SIGALRM, kept)
    assert stop.value.code == 143
    assert pids[0].poll() == -signal.SIGTERM


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    held = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    held += "; file.write('process 7 on x'); file.flush(); print(1, flush=True); time.sleep(60)"
    words = [sys.executable, "-c", held, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BadInput, match="process 7 on x is working there"):
            compare("quickstart", ["r3f"], "1", tmp_path)
        other.kill()


def seqreg(*words: str | Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    return subprocess.Popen([sys.executable, "-m", "seqreg", *map(str, words)], env=environment, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_comparison_takes_its_runs_along_and_is_resumed(tmp_path: Path) -> None:
    folder, end = tmp_path / "c", time.monotonic() + 200
    words = ["compare", "quickstart", "-t", "r3f", *TINY, "optimisation.max_steps=60", "--seeds", "1", "-o", folder]
    first, begun = seqreg(*words), folder / "baseline" / "seed-1"
    while not (begun / "run.json").exists() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    assert jobs.lock_holder(begun)
    first.kill()
    first.communicate()
    while jobs.lock_holder(begun) and time.monotonic() < end:
        time.sleep(0.01)
    assert not jobs.lock_holder(begun)
    assert "run the same command to resume" in begun.with_name("seed-1.log").read_text()
    again = seqreg(*words)
    printed, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    assert "r3f against baseline: the output of both has collapsed, so a verdict" in " ".join(printed.decode().split())
    assert "significant" not in printed.decode()
    rows = [json.loads(line) for line in (folder / "evidence" / "examples.jsonl").read_text().splitlines()]
    assert [list(row["methods"]) for row in rows] == [["baseline", "r3f"]] * 4


def test_made_comparisons_are_what_the_command_would_find(tmp_path: Path) -> None:
    """The files that other tests make up pass for finished runs."""
    chosen = fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="2", curves=False)
    assert all(jobs.state(job).kind == jobs.FINISHED for job in chosen.jobs(tmp_path))
    assert compares.compare("quickstart", ["r3f"], "2", tmp_path) == chosen


@pytest.mark.parametrize("name", ["a #1", "a: b", "[x]", "'quoted'", "null", "日本 😀", "-", 'a $HOME `ls` "q"'])
def test_folders_may_have_any_name(name: str, tmp_path: Path) -> None:
    """What a training reads is what was meant: an output is YAML on its way there, and a word of shell."""
    plan, _ = comparison.make("quickstart", ["r3f"], "1")
    folder = Path(name) if name == "null" else tmp_path / name
    for job in plan.jobs(folder):
        words = shlex.split(jobs.shell_lines(plan, [job])[0].partition("; seqreg ")[2].partition(" >> ")[0])
        assert words == plan.words(job)
        run = run_config.resolve("quickstart", overrides=[word for word in words if "=" in word])
        assert (run.config.output, run.config.seed) == (str(job.folder), 1)


@pytest.mark.parametrize(
    ("methods", "baseline", "seeds"),
    [(["r3f"], "baseline", "3"), (["baseline", "smart"], "r3f", "3,7"), (["baseline"], "r3f", "5,")],
)
def test_the_command_of_a_plan_makes_the_same_plan(
    methods: list[str], baseline: str, seeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = comparison.make("quickstart", methods, seeds, baseline=baseline, alpha=0.01)
    asked: list[Any] = []
    monkeypatch.setattr(compares, "compare", lambda *words, **ways: asked.append((words, ways)))
    cli.app(shlex.split(plan.command(tmp_path))[1:], standalone_mode=False)
    (recipe, again, count, folder), ways = asked[0]
    made_again, _ = comparison.make(recipe, again, count, baseline=ways["baseline"], alpha=ways["alpha"])
    assert (made_again, folder) == (plan, tmp_path)


def test_runs_in_several_processes(tmp_path: Path) -> None:
    """`--nproc` reaches every run, not the arms that are made of them; it is part of the plan."""
    plan, _ = comparison.make("quickstart", ["r3f"], "1", arms=["ema"], nproc=2)
    *runs, arm = plan.jobs(tmp_path)
    assert [plan.words(job)[:4] for job in runs] == [["launch", "--nproc", "2", "train"]] * 2
    assert plan.words(arm)[0] == "soup"
    assert "--nproc 2" in plan.command(tmp_path)
    assert "; seqreg launch --nproc 2 train quickstart" in jobs.shell_lines(plan, runs)[0]
    plan.write(tmp_path)
    one, _ = comparison.make("quickstart", ["r3f"], "1", arms=["ema"])
    with pytest.raises(BadInput, match="nproc: 2 there, 1 now"):
        comparison.settle(tmp_path, one, extend=True)


def test_a_launched_training_leaves_no_old_exit_code_while_it_runs(tmp_path: Path) -> None:
    plan, _ = comparison.make("quickstart", ["r3f"], "1")
    job = plan.jobs(tmp_path)[0]
    job.folder.mkdir(parents=True)
    job.code.write_text("3\n")
    assert jobs.state(job).kind == jobs.FAILED
    begun = jobs.shell_lines(plan, [job])[0].partition("; seqreg ")[0]
    subprocess.run(["sh", "-c", begun], check=True)
    assert jobs.state(job).kind == jobs.OPEN
    job.code.write_text("")  # the disk was full
    assert jobs.state(job).kind == jobs.OPEN


def test_what_a_log_says_cannot_steer_a_terminal(tmp_path: Path) -> None:
    job = comparison.Job("r3f", 1, tmp_path / "seed-1")
    job.log.write_text("\x1b]0;owned\x07 out of memory\n")
    job.code.write_text("1\n")
    assert jobs.state(job).line == "\\x1b]0;owned\\x07 out of memory"
