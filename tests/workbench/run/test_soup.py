"""Averages, soups and interpolations: the arithmetic by hand, the folders, what is refused, and kills."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from seqreg.errors import BadInput, DiskError
from seqreg.workbench.run import blend, ema
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.soup import SourceRun, check_alike
from seqreg.workbench.scores.evaluate import Scored
from tests.helpers import forked_process
from tests.helpers.tiny_tasks import SHORT, bert, seqreg, task


def weights(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a run from a small pretrained BERT, with averages; one of another start; one from scratch."""
    folder = tmp_path_factory.mktemp("soup")
    bert(folder / "bert"), bert(folder / "other", seed=1)
    card = task(folder, "colour")
    common = ["train", "glue", f"task={card}", f"data.path={folder / 'colour'}", *SHORT, "optimisation.ema_decay=0.9"]
    for name, start, seed in (("one", "bert", 1), ("two", "bert", 2), ("else", "other", 1)):
        seqreg(*common, f"model.name={folder / start}", f"seed={seed}", f"output={folder / name}", cwd=folder)
    for name, change in (("plainly", {"files": {}}), ("moved", {"pretrained": "0" * 64})):
        shutil.copytree(folder / "one", folder / name)
        record(folder / name, **change)
    (folder / "plainly" / ema.FILE).unlink()
    return folder


def record(folder: Path, **change: Any) -> None:
    """Change the record of a run."""
    stored = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**stored, **change}))


def test_an_average_is_the_formula_and_forgets_its_start_at_any_length(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    average = ema.WeightEMA(0.4)  # the bound counts up to step 4, the decay from step 5 on
    average.begin(model, None)
    by_hand = model.weight.detach().clone()
    for step in range(1, 8):
        with torch.no_grad():
            model.weight += step
        decay = min(0.4, (1 + step) / (10 + step))
        by_hand = decay * by_hand + (1 - decay) * model.weight.detach()
        average.update(model)
    average.save(tmp_path)
    stored, steps = ema.load(tmp_path)
    torch.testing.assert_close(stored["weight"], by_hand)
    assert steps == 7
    with pytest.raises(BadInput, match="the trained parameters are not those that it keeps"):
        average.begin(nn.Linear(3, 1, bias=False), tmp_path)


def test_training_is_the_same_bit_by_bit_with_and_without_an_average(runs: Path) -> None:
    words = [f"model.name={runs / 'bert'}", "seed=1", f"output={runs / 'plain'}"]
    seqreg("train", "glue", f"task={runs / 'colour.yaml'}", f"data.path={runs / 'colour'}", *SHORT, *words, cwd=runs)
    assert (runs / "plain" / "model.safetensors").read_bytes() == (runs / "one" / "model.safetensors").read_bytes()
    assert not (runs / "plain" / ema.FILE).exists()
    average, steps = ema.load(runs / "one")
    assert steps == 3
    assert any(not torch.equal(value, weights(runs / "one")[key]) for key, value in average.items())


def test_a_killed_run_ends_with_the_same_average(tmp_path: Path) -> None:
    settings = ["optimisation.max_steps=12", "checkpoints.save_steps=3", "optimisation.ema_decay=0.9"]
    whole = forked_process.train(tmp_path / "whole", *settings)
    assert whole.wait() == 0, whole.text()
    killed = forked_process.train(tmp_path / "killed", *settings)
    killed.until(lambda: (tmp_path / "killed" / "checkpoint-6" / "manifest.json").exists())
    killed.kill()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    again = forked_process.train(tmp_path / "killed", *settings)
    assert again.wait() == 0, again.text()
    assert "resumes from" in again.text()
    for name in (ema.FILE, "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_interpolation_is_the_hand_arithmetic_and_a_new_head_is_kept(runs: Path) -> None:
    said = seqreg("soup", runs / "one", "--interpolate", "0.25", "-o", runs / "quarter", cwd=runs)
    start, end, made = weights(runs / "bert"), weights(runs / "one"), weights(runs / "quarter")
    assert set(made) == set(end)
    head = {"classifier.weight", "classifier.bias"}
    about = json.loads((runs / "quarter" / "soup.json").read_text())
    assert set(about["kept_as_trained"]) == head
    for name, value in made.items():
        key = name.removeprefix("bert.")
        by_hand = end[name] if name in head else 0.75 * start[key] + 0.25 * end[name]
        torch.testing.assert_close(value, by_hand, rtol=1e-6, atol=1e-7)
    assert about["start"]["sha256"] == RunRecord.read(runs / "two").pretrained  # type: ignore[union-attr]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(runs / "quarter")
    assert len(transformers.AutoTokenizer.from_pretrained(runs / "quarter")) == model.config.vocab_size
    assert "interpolated, alpha 0.25" in said.stderr
    assert "nothing to do" in seqreg("soup", runs / "one", "--interpolate", "0.25", "-o", "quarter", cwd=runs).stderr


def test_a_soup_is_the_mean_of_all_weights_and_is_scored_like_a_run(runs: Path) -> None:
    words = ["soup", runs / "one", runs / "two", "--evaluate", "-o", runs / "mean"]
    seqreg(*words, cwd=runs)
    one, two, made = (weights(runs / name) for name in ("one", "two", "mean"))
    for name, value in made.items():
        torch.testing.assert_close(value, (one[name] + two[name]) / 2, rtol=1e-6, atol=1e-7)
    metrics, like = (json.loads((runs / name / "metrics.json").read_text()) for name in ("mean", "one"))
    assert metrics["scores"].keys() == like["scores"].keys() == {"validation", "test"}
    assert metrics["scores"]["test"].keys() == like["scores"]["test"].keys()
    lines = [(runs / name / "predictions.jsonl").read_text().splitlines() for name in ("mean", "one")]
    assert [json.loads(line)["reference"] for line in lines[0]] == [json.loads(line)["reference"] for line in lines[1]]
    again = seqreg("evaluate", runs / "mean", "--json", cwd=runs)  # a folder that every command takes
    assert json.loads(again.stdout)["scores"]["test"]["score"] == metrics["scores"]["test"]["score"]
    assert "not measured again" not in again.stderr
    drift, drift_again = metrics["drift"], json.loads(again.stdout)["drift"]
    assert {**drift, "seconds": 0} == {**drift_again, "seconds": 0}
    assert drift_again["seconds"] != drift["seconds"]  # measured, and not what was there
    record(runs / "mean", finished=False)  # as a kill before the last write leaves it
    (runs / "mean" / "metrics.json").unlink()
    seqreg(*words, cwd=runs)
    made_again = json.loads((runs / "mean" / "metrics.json").read_text())
    assert made_again["scores"]["test"]["score"] == metrics["scores"]["test"]["score"]


def test_files_of_the_user_stay_in_the_folder_of_a_soup(runs: Path) -> None:
    words = ["soup", runs / "one", runs / "two", "-o", runs / "noted"]
    seqreg(*words, cwd=runs)
    (runs / "noted" / "evidence").mkdir()
    mine = [runs / "noted" / name for name in ("notes.txt", "evidence/calibrate.json", ".tmp-mine")]
    for path in mine:
        path.write_text("mine")
    seqreg(*words, "--evaluate", cwd=runs)
    assert (runs / "noted" / "metrics.json").is_file()
    seqreg(*words, "--overwrite", cwd=runs)
    assert not (runs / "noted" / "metrics.json").exists()  # of the model that was there
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_soup_that_cannot_be_made_again_is_still_there(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["soup", runs / "one", runs / "two", "-o", runs / "kept"]
    seqreg(*words, cwd=runs)
    before = {path.name: path.read_bytes() for path in (runs / "kept").iterdir()}
    monkeypatch.setattr("seqreg.workbench.run.soup.write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(DiskError, match=r"kept: No space left on device: [\d,]+ bytes free, about [\d,]+ needed"):
        seqreg(*words, "--overwrite", cwd=runs)
    assert {path.name: path.read_bytes() for path in (runs / "kept").iterdir()} == before


def test_a_soup_is_called_by_all_methods_that_it_is_made_of(runs: Path) -> None:
    words = [f"model.name={runs / 'bert'}", "seed=3", f"output={runs / 'r3f'}", "terms={r3f: {}}"]
    seqreg("train", "glue", f"task={runs / 'colour.yaml'}", f"data.path={runs / 'colour'}", *SHORT, *words, cwd=runs)
    seqreg("soup", runs / "one", runs / "two", runs / "r3f", "--evaluate", "-o", runs / "mixed", cwd=runs)
    assert json.loads((runs / "mixed" / "metrics.json").read_text())["method"] == "soup of baseline, r3f"
    assert "soup of baseline, r3f" in seqreg("evaluate", runs / "mixed", "--json", cwd=runs).stdout


def test_an_average_becomes_a_model_by_itself(runs: Path) -> None:
    seqreg("soup", runs / "one", "--ema", "-o", runs / "average", cwd=runs)
    made, (average, _) = weights(runs / "average"), ema.load(runs / "one")
    assert all(torch.equal(made[name], value) for name, value in average.items())


def scorer(table: dict[float, float]) -> tuple[Any, list[float]]:
    """Scores of models of one number, and which were asked for."""
    asked: list[float] = []

    def score(some: dict[str, Tensor]) -> Scored:
        asked.append(round(float(some["w"]), 4))
        return Scored({"score": table[asked[-1]]})

    return score, asked


def models(*values: float) -> Sequence[dict[str, Tensor]]:
    return [{"w": torch.tensor(value)} for value in values]


def test_a_greedy_soup_adds_the_best_first_and_keeps_what_does_not_harm() -> None:
    score, asked = scorer({1.0: 60.0, 2.0: 80.0, 6.0: 70.0, 4.0: 75.0, 1.5: 80.0})
    found = blend.greedy_soup(models(1.0, 2.0, 6.0), score)
    assert asked == [1.0, 2.0, 6.0, 4.0, 1.5]  # alone; then 2 with 6, which is worse; then 2 with 1, which is as good
    assert (float(found.weights["w"]), found.choice["members"]) == (1.5, [1, 0])


def test_the_best_share_is_chosen_by_validation_and_of_equal_ones_the_largest() -> None:
    score, asked = scorer({share: 70.0 if share in (0.6, 0.8) else 60.0 for share in blend.GRID})
    found = blend.best_interpolation(*models(0.0, 1.0), (), score)
    assert asked == list(blend.GRID)
    assert found.choice["alpha"] == 0.8
    assert float(found.weights["w"]) == pytest.approx(0.8)


def test_error_rates_choose_the_lowest() -> None:
    score, asked = scorer({1.0: 60.0, 2.0: 80.0, 6.0: 70.0, 3.5: 59.0, 3.0: 61.0})
    found = blend.greedy_soup(models(1.0, 2.0, 6.0), score, greater_is_better=False)
    assert asked == [1.0, 2.0, 6.0, 3.5, 3.0]  # the lowest first
    assert found.choice["members"] == [0, 2]
    score, _ = scorer({share: 5.0 if share == 0.3 else 60.0 for share in blend.GRID})
    assert blend.best_interpolation(*models(0.0, 1.0), (), score, greater_is_better=False).choice["alpha"] == 0.3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one"], "one run: a soup needs at least two"),
        (["one", "one"], "the same run twice"),
        (["one", "else"], "not started from one pretrained model"),
        (["one", "--interpolate", "2"], "--interpolate 2.0: expected a number from 0 to 1, or 'best'"),
        (["one", "--interpolate", "x"], "--interpolate x: expected a number from 0 to 1, or 'best'"),
        (["one", "nowhere"], "nowhere: no such folder"),
        (["one", "two", "-o", "bert"], "there is something else: choose another"),
        (["plainly", "--ema"], "it has no ema.safetensors"),
        (["moved", "--interpolate", "0.5"], "is not what it started from"),
    ],
)
def test_what_has_no_mean_is_refused_in_one_line(words: list[str], said: str, runs: Path) -> None:
    output = [] if "-o" in words else ["-o", "made"]
    assert said in seqreg("soup", *words, *output, cwd=runs, code=2).stderr
    assert not (runs / "made").exists()


def test_shapes_and_starts_are_compared(runs: Path) -> None:
    one = SourceRun.read(runs / "one", trust=False)
    several = [{"w": torch.zeros(2)}, {"w": torch.zeros(3)}]
    with pytest.raises(BadInput, match=r"different shapes \(w: \[2\] and \[3\]\)"):
        check_alike([one, one], several)
    scratch = replace(one, record=replace(one.record, pretrained=""))
    with pytest.raises(BadInput, match="not started from one pretrained model"):
        check_alike([scratch, scratch], several[:1] * 2)
