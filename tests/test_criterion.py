from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg import (
    BadInput,
    Context,
    Cost,
    Criterion,
    Evaluation,
    Every,
    LossReport,
    Pass,
    Term,
    Warmup,
    build_criterion,
    build_term,
)
from seqreg.integrations.hf import context, count, optimizer_steps
from seqreg.terms.bregman import Bregman
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.helpers.stubs import Played


@dataclass(frozen=True, kw_only=True)
class Odd(Term):
    """Returns what it is told to."""

    returns: Any

    @property
    def cost(self) -> Cost:
        return Cost(0, 0)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Any:
        return self.returns


@dataclass(frozen=True, kw_only=True)
class Needy(Odd):
    gamma: float


def ctx(passes: int = 2, **settings: Any) -> Context:
    logits = [torch.randn(2, 3, 5, requires_grad=True) for _ in range(passes)]
    return Context(
        Played(*logits, embeds=torch.ones(2, 4, 8)), torch.tensor([[1, 2, 3], [1, 0, -100]]), kind="tokens", **settings
    )


def test_parts_add_up_and_are_named() -> None:
    criterion = Criterion(R3F(weight=0.3), R3F(name="again", weight=0.2), label_smoothing=0.1)
    report = criterion(ctx(3))
    assert list(report.parts) == ["base", "r3f", "again"]
    assert sum(part.item() for part in report.parts.values()) == pytest.approx(report.total.item(), rel=1e-6)
    assert report.parts["r3f"].item() == pytest.approx(0.3 * report.values["r3f"].item())
    assert set(report.scalars()) == {
        "part/base", "part/r3f", "part/again", "value/nll", "value/r3f", "value/again", "weight/r3f", "weight/again",
    }  # fmt: skip
    assert not any(part.requires_grad for part in report.parts.values())
    assert str(report).startswith("loss ")


def test_a_second_task_loss_is_shown_as_one() -> None:
    report = Criterion(RDrop(weight=0.5, alpha=0.7))(ctx())
    only = Criterion(RDrop(weight=0.5, alpha=0.7, task="none"))(ctx())
    assert list(report.tasks) == ["rdrop"]
    assert not only.tasks
    assert not Criterion(RDrop(task="mean"))(ctx()).tasks
    assert re.search(r"rdrop [\d.]+ \([\d.]+ of it a second task loss\)$", str(report))
    assert report.scalars()["task/rdrop"] == float(report.tasks["rdrop"])
    assert 0 < report.tasks["rdrop"] < report.parts["rdrop"]


def test_small_parts_are_shown_with_their_digits() -> None:
    report = LossReport(torch.tensor(2.0), {"base": torch.tensor(2.0), "smart": torch.tensor(1.234567e-7)})
    assert str(report) == "loss 2 = base 2 + smart 1.235e-07"


def test_weight_is_a_function_of_the_step() -> None:
    criterion = Criterion(R3F(weight=Every(0.5, k=2)))
    assert criterion(ctx(step=2)).weights == {"r3f": 1.0}
    off = criterion(ctx(passes=1, step=3))
    assert list(off.parts) == ["base"]
    assert off.weights == {"r3f": 0.0}


def test_training_can_be_overridden() -> None:
    assert "r3f" in Criterion(R3F())(ctx(training=False), training=True).parts
    assert "r3f" not in Criterion(R3F())(ctx(), training=False).parts


def test_terms_that_evaluation_mode_switches_off_are_warned_of() -> None:
    """`from_pretrained` gives a model in evaluation mode: a loop without model.train() would train without terms."""
    with pytest.warns(UserWarning, match=r"call model\.train\(\)"):
        Criterion(R3F())(ctx(training=False))
    Criterion()(ctx(training=False))
    with torch.no_grad():
        Criterion(R3F())(ctx(training=False))


def test_every_criterion_says_that_evaluation_mode_switches_its_terms_off() -> None:
    net = tiny_models.make("bart").eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own, which says a line once
        for _ in range(3):
            criterion = Criterion(R3F())
            for _ in range(2):
                criterion(context(net, tiny_models.batch("bart")))
    assert sum("evaluation mode" in str(one.message) for one in caught) == 3


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    words = r"^WORLD_SIZE=2, and no process group connects the ranks.*init_process_group\(\) first"
    for call in (
        lambda: Criterion()(context(net, batch)),
        lambda: count(net, [batch]),
        lambda: next(iter(optimizer_steps(net, [batch]))),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    net.eval()
    with torch.no_grad():
        Criterion()(context(net, batch))  # each rank may evaluate alone


def test_a_criterion_with_a_teacher_can_be_pickled_and_copied() -> None:
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    criterion = Criterion(Bregman())
    criterion(context(net, batch, step=0))
    for other in (pickle.loads(pickle.dumps(criterion)), copy.deepcopy(criterion)):
        assert other.state_dict().keys() == criterion.state_dict().keys()
        other(context(copy.deepcopy(net), batch, step=1))  # a copy of the model is the copy's model


def test_attacks_under_inference_mode_are_refused_in_one_line() -> None:
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart"))
    with torch.inference_mode(), pytest.raises(BadInput, match=r"^smart needs torch\.autograd\.grad, which torch\.inf"):
        Criterion(SMART())(ctx)


def test_repr_shows_what_differs_from_the_defaults() -> None:
    shown = repr(Criterion(R3F(weight=0.2, scale=1e-3), label_smoothing=0.1))
    assert shown == "Criterion(R3F(weight=0.2, scale=0.001), label_smoothing=0.1, smoothing='torch', per='token')"


def test_a_bad_weight_from_a_schedule_is_named_with_its_step() -> None:
    criterion = Criterion(R3F(weight=lambda step: 1.0 - step))
    criterion(ctx(step=0))
    with pytest.raises(BadInput, match=r"weight=-4.0 at step 5"):
        criterion(ctx(step=5))


BAD: list[tuple[Any, str]] = [
    (lambda: R3F(weight=-1), "r3f: weight=-1"),
    (lambda: R3F(weight=float("nan")), "r3f: weight=nan"),
    (lambda: R3F(weight="1e-5"), "r3f: weight='1e-5' is text, not a number: in YAML write 1.0e-5, not 1e-5"),
    (lambda: R3F(weight="big"), "r3f: weight='big' is text, not a number"),
    (lambda: Criterion(fused="no"), "fused='no': expected True or False"),
    (lambda: R3F(scale=0, dropout="shared"), "scale=0"),
    (lambda: R3F(scale=-1e-5), "scale=-1e-05"),
    (lambda: R3F(scale=float("nan")), "scale=nan: expected a finite number"),
    (
        lambda: R3F(scale="1e-5"),
        "scale='1e-5': expected a finite number: in YAML write 1.0e-5, not 1e-5",
    ),
    (lambda: R3F(0.1), "takes its settings by name"),
    (lambda: Warmup("0.1"), "weight='0.1' is text"),
    (lambda: Criterion([R3F()]), "is not a term"),
    (lambda: Criterion(R3F), "is not a term"),
    (lambda: Criterion("r3f"), "is not a term"),
    (lambda: Criterion(label_smoothing="0.1"), "label_smoothing='0.1': expected a number"),
    (lambda: Criterion()({}), "takes a context, not dict"),
    (lambda: Criterion(Needy(returns=0)), "the setting 'gamma' is missing"),
    (lambda: Criterion(Odd(returns=None))(ctx()), "odd must return a scalar tensor"),
    (lambda: Criterion(Odd(returns=1.0))(ctx()), "odd must return a scalar tensor"),
    (lambda: Criterion(Odd(returns=torch.zeros(3)))(ctx()), "odd must return a scalar tensor"),
    (
        lambda: Evaluation(ctx()).reduce(torch.zeros(2, 3, 5)),
        "reduce takes one number per position, [2, 3], and was given [2, 3, 5]",
    ),
    (lambda: ctx(step=-1), "step=-1"),
    (lambda: ctx(step="3"), "step='3'"),
    (lambda: ctx(count=10), "count=10"),
    (lambda: Criterion(R3F(weight=Every(k=2)))(ctx()), "is a schedule: pass the optimizer step"),
    (lambda: build_term("r4f"), "R4F is a property of the model"),
    (lambda: build_criterion(None), "expected a mapping"),
    (lambda: build_criterion({"terms": {3: {}}}), "term 3: expected a name"),
    (lambda: build_criterion({"terms": {"r3f": {"weight": {"schedule": []}}}}), "unknown schedule []"),
    (lambda: R3F(preset=["fairseq"]), "unknown preset ['fairseq']"),
    (lambda: build_criterion({"terms": {"r3f": 0.1}}), "r3f: expected a mapping of settings"),
    (lambda: build_criterion({"terms": {"r3f": {"weight": {"warmup": {}}}}}), "a schedule is written {'schedule':"),
    (lambda: R3F(scale=True), "scale=True"),
    (lambda: R3F(relative="yes"), "relative='yes': expected true or false"),
    (lambda: R3F(noise="norml"), "noise='norml': did you mean 'normal'?"),
    (lambda: R3F(dropout="of"), "dropout='of': did you mean 'off'?"),
    (lambda: R3F(divergence="l1"), "choose from"),
    (lambda: R3F(epsilon=1e-5), "R3F: unknown setting 'epsilon'"),
    (lambda: R3F(scal=1e-5), "did you mean 'scale'?"),
    (lambda: R3F(preset="mtdnn"), "unknown preset 'mtdnn'"),
    (lambda: Criterion(label_smoothing=1.0), "label_smoothing=1.0 is outside [0, 1)"),
    (lambda: Criterion(label_smoothing=-0.1), "label_smoothing=-0.1 is outside [0, 1)"),
    (lambda: Criterion(label_smoothing=float("nan")), "label_smoothing=nan is outside"),
    (lambda: Criterion(smoothing="hf"), "smoothing='hf' is unknown"),
    (lambda: Criterion(per="batch"), "per='batch'"),
    (lambda: Criterion(R3F(), R3F()), "two parts of the loss are called 'r3f'"),
    (lambda: Criterion(R3F(name="base")), "called 'base'"),
    (lambda: build_term("r3g"), "unknown term 'r3g'; did you mean 'r3f'?"),
    (lambda: build_term("R3F"), "unknown term 'R3F'"),
    (lambda: build_term("json.decoder"), "defines 0 terms"),
    (lambda: build_term("json.JSONDecoder"), "is not a Term"),
    (lambda: build_term("no_such_package.term"), "cannot be imported"),
    (lambda: build_criterion({"label_smoting": 0.1}), "did you mean 'label_smoothing'?"),
    (lambda: build_criterion({"terms": ["r3f"]}), "expected a mapping"),
    (lambda: build_criterion({"terms": {"r3f": {"weight": {"schedule": "warm"}}}}), "did you mean 'warmup'?"),
    (lambda: build_criterion({"terms": {"r3f": {"weight": {"schedule": "every", "n": 2}}}}), "unknown setting 'n'"),
    (lambda: build_criterion({"terms": {"r3f": {"weight": {"schedule": "every", "k": 0}}}}), "k=0"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_answered_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_real_reason_of_a_failed_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_term.py").write_text("import no_such_dependency\n")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("")
    (tmp_path / "broken_package" / "term.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("broken_term.Term", "broken_package.term"):
        with pytest.raises(BadInput, match="No module named 'no_such_dependency'"):
            build_term(name)


def test_the_key_names_the_part_where_the_class_is_given() -> None:
    assert build_term("outside_term", {"term": "tests.helpers.outside_term"}).name == "outside_term"


def test_dicts_and_python_build_the_same() -> None:
    config = {
        "label_smoothing": 0.1,
        "smoothing": "fairseq",
        "terms": {
            "r3f": {"weight": {"schedule": "every", "k": 4, "weight": 0.5}, "noise": "uniform"},
            "far": {"term": "r3f", "preset": "fairseq", "scale": 0.1},
        },
    }
    expected = Criterion(
        R3F(weight=Every(0.5, k=4), noise="uniform"),
        R3F(name="far", preset="fairseq", scale=0.1),
        label_smoothing=0.1,
        smoothing="fairseq",
    )
    assert repr(build_criterion(config)) == repr(expected)
    assert build_criterion(config).terms == expected.terms
