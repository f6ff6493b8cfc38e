"""The record of a criterion: in checkpoints, the model card and TensorBoard, and what a run that resumes says of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from seqreg import BadInput, Criterion, attach
from seqreg.integrations.hf import record
from seqreg.schedules import Warmup
from seqreg.selective_update import StochasticUpdate
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from tests.integrations.test_attach import made, trained

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
WEAK = Criterion(R3F(weight=0.1), label_smoothing=0.1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of R3F, and of a plain trainer."""
    folder = tmp_path_factory.mktemp("runs")
    trained(attach(made("roberta", folder / "r3f", **SAVED), WEAK))
    trained(made("roberta", folder / "plain", **SAVED))
    return folder


def resumed(home: Path, out: Path, kind: str, *terms: Any, **options: Any) -> list[str]:
    """Resume from the checkpoint of step 2 with other terms; returns what was warned of."""
    one = attach(made("roberta", out, **SAVED), Criterion(*terms, label_smoothing=0.1), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.train(resume_from_checkpoint=str(home / kind / "checkpoint-2"))
    return [str(one.message) for one in caught if "criterion" in str(one.message)]


def test_every_checkpoint_has_the_criterion_with_all_settings(home: Path) -> None:
    for step in (2, 4):
        written = json.loads((home / "r3f" / f"checkpoint-{step}" / record.FILE).read_text())
        assert written["base"]["label_smoothing"] == 0.1
        assert written["terms"]["r3f"]["weight"] == 0.1
        assert written["terms"]["r3f"]["scale"] == R3F().scale  # defaults too: they may be others one day
        assert written["terms"]["r3f"]["class"] == "seqreg.terms.r3f.R3F"
        assert "seqreg" in written
    assert not (home / "plain" / "checkpoint-2" / record.FILE).exists()


def test_a_checkpoint_without_an_optimizer_has_it_and_a_model_for_others_has_not(tmp_path: Path) -> None:
    one = trained(attach(made("roberta", tmp_path, **SAVED, save_only_model=True), WEAK))
    assert (tmp_path / "checkpoint-4" / record.FILE).is_file()
    one.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / record.FILE).exists()


def test_the_same_criterion_resumes_without_a_word(home: Path, tmp_path: Path) -> None:
    assert resumed(home, tmp_path, "r3f", R3F(weight=0.1), strict=True) == []


def test_another_criterion_is_named_in_one_line(home: Path, tmp_path: Path) -> None:
    (said,) = resumed(home, tmp_path, "r3f", R3F(weight=0.5, noise="uniform"), RDrop())
    assert "terms.r3f.weight 0.1 there, 0.5 now" in said
    assert 'terms.r3f.noise "normal" there, "uniform" now' in said
    assert "terms.rdrop none there, seqreg.terms.rdrop.RDrop now" in said
    assert "\n" not in said
    (said,) = resumed(home, tmp_path / "less", "r3f")
    assert "terms.r3f seqreg.terms.r3f.R3F there, none now" in said


def test_a_checkpoint_without_a_criterion_is_said(home: Path, tmp_path: Path) -> None:
    (said,) = resumed(home, tmp_path, "plain", R3F(weight=0.1))
    assert f"checkpoint-2 has no {record.FILE}: trained without a criterion" in said


@pytest.mark.parametrize(("kind", "said"), [("r3f", "terms.r3f.weight 0.1 there, 0.5 now"), ("plain", "has no")])
def test_strict_refuses_both(kind: str, said: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        resumed(home, tmp_path, kind, R3F(weight=0.5), strict=True)
    assert len(caught.value.lines) == 1
    assert "without strict=True" in str(caught.value)


def test_schedules_attacks_and_updates_are_settings_too() -> None:
    one = record.described(Criterion(SMART(weight=Warmup(0.1, steps=9))), StochasticUpdate())
    other = record.described(Criterion(SMART(weight=Warmup(0.1, steps=8))), StochasticUpdate(0.5))
    assert record.differences(one, one) == []
    assert record.differences(json.loads(json.dumps(one)), one) == []
    first, second = record.differences(one, other)
    assert first == "terms.smart.weight.steps 9 there, 8 now"
    assert second.startswith("update.")
    assert second.endswith("there, 0.5 now")


def test_functions_are_told_by_their_names() -> None:
    one = record.described(Criterion(R3F(weight=_rising)), None)
    assert one["terms"]["r3f"]["weight"] == "tests.integrations.test_record._rising"


def _rising(step: int) -> float:
    return step / 10


def test_the_model_card_has_the_criterion_once(tmp_path: Path) -> None:
    one = trained(attach(made("roberta", tmp_path), WEAK))
    for _ in range(2):
        one.create_model_card(model_name="mine")
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("---")
    assert page.count("## Training criterion") == 1
    assert json.loads(page.partition("```json\n")[2].partition("```")[0])["terms"]["r3f"]["weight"] == 0.1


def test_the_model_card_has_no_path_of_the_machine(tmp_path: Path) -> None:
    found = record._without_places({"terms": {"anchor": {"reference": str(tmp_path / "base")}}})
    assert found == {"terms": {"anchor": {"reference": "base"}}}


def test_tensorboard_has_the_criterion_as_text(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(attach(made("roberta", tmp_path, report_to=["tensorboard"]), WEAK))
    (events,) = tmp_path.rglob("events.out*")
    log = accumulator.EventAccumulator(str(events))
    log.Reload()
    (text,) = log.Tensors("criterion/text_summary")
    assert '"weight": 0.1' in text.tensor_proto.string_val[0].decode()
