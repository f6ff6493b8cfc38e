"""The `seqreg` command, from the shell."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
import typer
from rouge_score.rouge_scorer import RougeScorer

from seqreg.cli import main as cli
from seqreg.cli import predict
from seqreg.errors import BadInput
from seqreg.metrics import rouge
from seqreg.workbench.config import cards
from tests.helpers import sample_files

ROOT = Path(__file__).parents[2]


def seqreg(*words: str | Path, cwd: Path, code: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a shell of its own."""
    further = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **further}
    command = [sys.executable, "-m", "seqreg", *map(str, words)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, input=text)
    assert result.returncode == code, result.stderr
    return result


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_no_traceback(closed: int, tmp_path: Path) -> None:
    """Cron and `>&-` close them."""
    program = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = ["-m", "seqreg", "new-task", "pairs.csv"]
    (tmp_path / "pairs.csv").write_text("source,target\na b,c\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert (tmp_path / "pairs.yaml").read_text().startswith("# pairs.csv\n")


def test_predicting_from_or_to_a_closed_stream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("stdin", "the standard input is closed"), ("__stdout__", "the standard output is closed")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, None)
            with pytest.raises(BadInput, match=message):
                predict.predict(tmp_path, "-", "-")


def test_gigaword_from_a_local_file_to_a_plain_transformers_model(tmp_path: Path) -> None:
    card, _ = cards.load("gigaword")
    sample_files.write(tmp_path / "pairs.jsonl", sample_files.rows(card, 60))
    settings = [
        "data.path=pairs.jsonl",
        "optimisation.max_steps=4",
        "optimisation.warmup_steps=1",
        "evaluation.eval_steps=2",
    ]
    trained = seqreg("train", "gigaword", "--terms", "r3f", "--variant", "tiny", *settings, "output=out", cwd=tmp_path)
    assert "rougeLsum" in trained.stdout
    assert "tensorboard --logdir out" in trained.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    evaluated = seqreg("evaluate", "out", cwd=tmp_path)
    assert "rougeLsum" in evaluated.stdout
    again = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert again["scores"]["test"]["rouge1"] == pytest.approx(metrics["scores"]["test"]["rouge1"], abs=1e-4)
    assert again["train"] == metrics["train"]
    seqreg("predict", "out", "pairs.jsonl", "-o", "predictions.jsonl", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    assert list(rows[0]) == ["document", "summary", "prediction"]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(model.generate(**tokenizer(rows[0]["document"], return_tensors="pt"))) == 1


FAULTS = {
    ("train", "gigawrd"): "unknown recipe 'gigawrd'; did you mean 'gigaword'?",
    ("train", "../gigaword"): "unknown recipe '../gigaword'",
    ("train", "gigaword", "sed=1"): "command line: sed=1: unknown key; did you mean 'seed'?",
    ("train", "gigaword", "--terms", "r3"): "unknown term recipe 'r3'; did you mean 'r3f'?",
    ("train", "nothing.yaml"): "nothing.yaml: no such file",
    ("evaluate", "runs/gone"): "runs/gone: no such folder",
    ("replay", "runs/gone/crash/step-1"): "step-1: no such folder; a run writes one as RUN/crash/step-N",
    (
        "train",
        "quickstart",
        "evaluation.resamples=0",
    ): "command line: evaluation.resamples=0: texts are scored with",
    ("shift",): "Missing argument 'RUNS'",
    ("evaluate", "."): ".: not a run of seqreg: it has no config.yaml",
    ("show", "r3"): "'r3' is no term, task, recipe or folder; did you mean 'r3f'?",
    ("rouge", "a.txt", "b.txt"): "a.txt: cannot be read: No such file or directory",
}


@pytest.mark.parametrize("words", FAULTS, ids=" ".join)
def test_faults_are_one_line_and_exit_code_2(words: tuple[str, ...], tmp_path: Path) -> None:
    result = seqreg(*words, cwd=tmp_path, code=2)
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert FAULTS[words] in result.stderr
    assert not list(tmp_path.iterdir())


def test_help_is_quick_and_teaches(tmp_path: Path) -> None:
    begin = time.perf_counter()
    text = seqreg("--help", cwd=tmp_path).stdout
    assert time.perf_counter() - begin < 5
    assert "seqreg quickstart" in text
    for command in ("train", "evaluate", "predict", "rouge", "check", "list", "show"):
        assert f"seqreg {command}" in seqreg(command, "--help", cwd=tmp_path).stdout
    code = "import sys, seqreg.cli.main; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_list_and_show(tmp_path: Path) -> None:
    text = seqreg("list", cwd=tmp_path).stdout
    assert all(name in text for name in ("cnn_dailymail", "glue/mnli", "jachess"))
    assert "abisee/cnn_dailymail" in seqreg("show", "cnn_dailymail", cwd=tmp_path).stdout
    assert "arXiv 2008.03156" in seqreg("show", "r3f", cwd=tmp_path).stdout


@pytest.mark.filterwarnings("ignore:.*mostly in a script")
def test_the_folder_for_fairseq(tmp_path: Path) -> None:
    folder = Path(seqreg("fairseq-dir", cwd=tmp_path).stdout.strip())
    assert (folder / "__init__.py").exists()
    assert folder.name == "fairseq_plugin"


def test_rouge_equals_rouge_score_on_three_thousand_pairs(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = "the a Running runs ran 3.5 U.S. naïve дом 東京 e-mail it's studies study -- caresses".split()

    def text() -> str:
        lines = [" ".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(rng.randint(1, 3))]
        return "\n".join(lines) if rng.random() > 0.05 else ""

    pairs = [(text(), text()) for _ in range(3000)]
    for name, column in (("predictions.txt", 0), ("references.txt", 1)):
        lines = "".join(pair[column].replace("\n", "<n>") + "\n" for pair in pairs)
        (tmp_path / name).write_text(lines, encoding="utf-8")
    found = seqreg("rouge", "predictions.txt", "references.txt", "--split", "newline", "--json", cwd=tmp_path)
    means = json.loads(found.stdout)["means"]
    scorer = RougeScorer(list(means), use_stemmer=True)
    slow = [scorer.score(reference, prediction) for prediction, reference in pairs]
    with pytest.warns(UserWarning, match="mostly in a script"):
        fast = rouge(*zip(*pairs, strict=True), split="newline").scores
    for kind, mean in means.items():
        exact = [one[kind].fmeasure for one in slow]
        assert [row[2] for row in fast[kind].tolist()] == exact
        assert mean == pytest.approx(sum(exact) / 3000, abs=1e-12)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "seqreg: stopped"),
        (typer.Abort(), 130, "seqreg: stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "out.txt"), 4, "seqreg: out.txt: No space left on device"),
    ],
)
def test_what_stops_any_command_is_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def struck(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", struck)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == code
    assert capsys.readouterr().err == f"{line}\n"


def test_an_interrupt_inside_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """typer gives it back as an exit code."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seqreg.workbench.config.lookup.names", struck)
    monkeypatch.setattr(sys, "argv", ["seqreg", "list"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == "seqreg: stopped"
