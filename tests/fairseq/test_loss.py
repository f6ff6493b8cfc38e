"""Losses and gradients beside those of fairseq's own criterions, on the same batch and seed."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq
import pytest
import torch
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
from fairseq.logging import metrics
from fairseq.trainer import Trainer

from seqreg import BadInput, noise
from seqreg.build import term_class, term_names
from tests.helpers import tiny_fairseq

SEQ2SEQ = {"transformer": tiny_fairseq.TRANSFORMER, "bart": tiny_fairseq.BART}
SEQREG = ["--criterion", "seqreg", "--label-smoothing", "0.1"]
CLASSES = ["--criterion", "seqreg_sentence_prediction"]
every_model = pytest.mark.parametrize("flags", SEQ2SEQ.values(), ids=SEQ2SEQ)
QUIET = "--dropout 0 --attention-dropout 0 --activation-dropout 0".split()


def seqreg(data: Path, flags: list[str], terms: str = "", *more: str) -> SimpleNamespace:
    return tiny_fairseq.build(data, *flags, *SEQREG, "--seqreg-terms", terms, *more)


def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is moved alike, so that noise does not depend on how a batch is cut."""
    monkeypatch.setattr(
        noise, "draw", lambda kind, shape, device="cpu": torch.linspace(-1, 1, shape[-1]).expand(shape).clone()
    )


@every_model
@pytest.mark.parametrize("averaged", [[], ["--sentence-avg"], ["--ignore-prefix-size", "1"]], ids=str)
def test_without_terms_it_is_label_smoothed_cross_entropy(pairs: Path, flags: list[str], averaged: list[str]) -> None:
    ours = seqreg(pairs, flags, "", *averaged)
    sample = tiny_fairseq.batch(ours, *range(8), pad=2)
    prefix = 1 if "--ignore-prefix-size" in averaged else 0
    plain = LabelSmoothedCrossEntropyCriterion(ours.task, "--sentence-avg" in averaged, 0.1, prefix)
    theirs = tiny_fairseq.loss_and_gradients(ours, sample, plain)
    found = tiny_fairseq.loss_and_gradients(ours, sample)
    torch.testing.assert_close(found[0], theirs[0], rtol=1e-6, atol=0)
    assert found[1] == theirs[1]
    for key, value in theirs[2].items():
        torch.testing.assert_close(torch.as_tensor(found[2][key]), torch.as_tensor(value), rtol=1e-6, atol=0)
    tiny_fairseq.assert_same_gradients(found[3], theirs[3], 1e-6)


def test_accuracy_is_reported(pairs: Path) -> None:
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, "", "--report-accuracy")
    plain = LabelSmoothedCrossEntropyCriterion(ours.task, False, 0.1, report_accuracy=True)
    sample = tiny_fairseq.batch(ours, *range(8))
    found, theirs = (tiny_fairseq.loss_and_gradients(ours, sample, one)[2] for one in (None, plain))
    assert (found["n_correct"], found["total"]) == (theirs["n_correct"], theirs["total"])


def fairseq_r3f() -> Any:
    """fairseq's own criterion, which it ships as an example."""
    path = Path(fairseq.__file__).parent / "examples/rxf/rxf_src/label_smoothed_cross_entropy_r3f.py"
    spec = importlib.util.spec_from_file_location("fairseq_r3f", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LabelSmoothedCrossEntropyR3FCriterion


@pytest.fixture(scope="session")
def released() -> Any:
    return fairseq_r3f()


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("averaged", [False, True], ids=["tokens", "sentences"])
def test_the_preset_is_fairseqs_r3f(pairs: Path, released: Any, kind: str, averaged: bool) -> None:
    """With dropout, and padding in the batch: the same seed, the same loss and gradients.

    A fresh model gives all words the same; with larger weights the divergence is large beside its rounding errors.
    """
    terms = f"{{terms: {{r3f: {{preset: fairseq, weight: 0.7, scale: 0.1, noise: {kind}}}}}}}"
    ours = seqreg(pairs, tiny_fairseq.BART, terms, *(["--sentence-avg"] if averaged else []))
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    theirs = released(ours.task, averaged, 0.1, 0.1, 0.7, kind)
    sample = tiny_fairseq.batch(ours, *range(8), pad=1)
    expected, found = (
        tiny_fairseq.loss_and_gradients(ours, sample, theirs),
        tiny_fairseq.loss_and_gradients(ours, sample),
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert expected[2]["symm_kl"] > 0.005 * float(expected[0])
    torch.testing.assert_close(float(found[2]["value/r3f"]), expected[2]["symm_kl"], rtol=1e-5, atol=0)
    tiny_fairseq.assert_same_gradients(found[3], expected[3], 1e-6)


@pytest.mark.parametrize("quiet", [[], QUIET], ids=["dropout", "no dropout"])
def test_on_a_fresh_model_only_rounding_differs(
    pairs: Path, released: Any, quiet: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with fairseq's own casts to float32 taken away; its uniform noise would still be rounded to it."""
    plain = {
        "softmax": lambda x, dim, **_: torch.softmax(x, dim),
        "log_softmax": lambda x, dim, **_: torch.log_softmax(x, dim),
    }
    monkeypatch.setitem(released.forward.__globals__, "F", SimpleNamespace(kl_div=torch.nn.functional.kl_div, **plain))
    for name, function in plain.items():
        monkeypatch.setattr(utils, name, function)
    terms = "{terms: {r3f: {preset: fairseq, weight: 50.0, scale: 0.1, noise: normal}}}"
    ours = seqreg(pairs, tiny_fairseq.BART, terms, *quiet)
    ours.model.double()
    theirs = released(ours.task, False, 0.1, 0.1, 50.0, "normal")
    sample = tiny_fairseq.batch(ours, *range(8), pad=1)
    expected, found = (
        tiny_fairseq.loss_and_gradients(ours, sample, theirs),
        tiny_fairseq.loss_and_gradients(ours, sample),
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=0)
    torch.testing.assert_close(float(found[2]["value/r3f"]), expected[2]["symm_kl"], rtol=1e-8, atol=0)
    tiny_fairseq.assert_same_gradients(found[3], expected[3], 1e-11)


def test_fairseqs_r3f_fails_where_ours_works(pairs: Path, released: Any) -> None:
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, "{terms: {r3f: {preset: fairseq, scale: 1e-2}}}")
    sample = tiny_fairseq.batch(ours, *range(4))
    with pytest.raises(TypeError, match="token_embeddings"):
        released(ours.task, False, 0.1, 1e-2, 1.0, "normal")(ours.model, sample)
    assert tiny_fairseq.loss_and_gradients(ours, sample)[2]["value/r3f"] > 0


@torch.no_grad()
def move(model: torch.nn.Module) -> None:
    """What an optimizer would do."""
    for index, parameter in enumerate(model.parameters()):
        parameter.mul_(1.0 + 0.01 * (-1) ** index)


@pytest.mark.parametrize("name", term_names())
@every_model
def test_every_term_trains(pairs: Path, flags: list[str], name: str) -> None:
    ours = seqreg(pairs, flags, f"{{terms: {{{name}: {{}}}}}}")
    sample = tiny_fairseq.batch(ours, *range(6))
    plain = tiny_fairseq.loss_and_gradients(ours, sample, LabelSmoothedCrossEntropyCriterion(ours.task, False, 0.1))[3]
    for step in (0, 1):  # a term that remembers has something to compare with at the second
        ours.criterion.regularizer.step = step
        loss, size, log, found = tiny_fairseq.loss_and_gradients(ours, sample)
        move(ours.model)
    parts = sum(float(value) for key, value in log.items() if key.startswith("part/"))
    assert parts == pytest.approx(float(loss), rel=1e-5)
    assert f"part/{name}" in log
    assert size == sample["ntokens"]
    assert all(torch.isfinite(value).all() for value in found.values())
    assert any(not torch.equal(value, plain[key]) for key, value in found.items())


def quiet(name: str) -> str:
    """Settings with which a term depends neither on random numbers nor on how large the other rows are."""
    settings = {"attack: {relative: false}"} if hasattr(term_class(name), "attack") else set()
    further = {"uegr": {"low: 0.0", "high: 0.0"}, "neftune": {"max_ratio: null"}}
    return ", ".join(settings | further.get(name, set()))


agree = pytest.mark.filterwarnings("ignore::seqreg.errors.Advice")


@agree
@pytest.mark.parametrize("name", term_names())
def test_accumulation_does_not_change_the_gradient(pairs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows as one batch and as two of unequal size, through fairseq's trainer."""
    same_noise(monkeypatch)
    monkeypatch.setattr(Trainer, "clip_grad_norm", lambda *_: torch.ones(()))  # which cannot take float64
    found = []
    for cut in ([range(6)], [range(4), range(4, 6)]):
        ours = seqreg(
            pairs,
            tiny_fairseq.TRANSFORMER,
            f"{{terms: {{{name}: {{{quiet(name)}}}}}}}",
            *QUIET,
            "--update-freq",
            str(len(cut)),
        )
        ours.model.double()
        trainer = Trainer(ours.cfg, ours.task, ours.model, ours.criterion)
        samples = [tiny_fairseq.batch(ours, *rows) for rows in cut]
        if name == "jachess" and len(cut) > 1:  # see below
            with pytest.raises(SystemExit):
                trainer.train_step(samples)
            return
        trainer.train_step(samples)
        found.append(tiny_fairseq.gradients(ours.model))
    tiny_fairseq.assert_same_gradients(found[1], found[0], 1e-9)


def test_a_term_that_cannot_be_accumulated_says_so(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, "{terms: {jachess: {}}}", "--update-freq", "2")
    trainer = Trainer(ours.cfg, ours.task, ours.model, ours.criterion)
    with pytest.raises(SystemExit) as stopped:
        trainer.train_step([tiny_fairseq.batch(ours, 0, 1), tiny_fairseq.batch(ours, 2)])
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("seqreg: a term is averaged over sentences, and fairseq divides")
    assert "--sentence-avg" in line
    assert "\n" not in line
    sentences = seqreg(
        pairs, tiny_fairseq.TRANSFORMER, "{terms: {jachess: {}}}", "--update-freq", "2", "--sentence-avg"
    )
    Trainer(sentences.cfg, sentences.task, sentences.model, sentences.criterion).train_step(
        [tiny_fairseq.batch(sentences, 0, 1), tiny_fairseq.batch(sentences, 2)]
    )
    assert tiny_fairseq.gradients(sentences.model)


@agree
@pytest.mark.parametrize("name", term_names())
def test_padding_does_not_change_the_gradient(pairs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "softmax", lambda x, dim, **_: torch.softmax(x, dim))  # fairseq's is in float32
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, f"{{terms: {{{name}: {{{quiet(name)}}}}}}}", *QUIET)
    ours.model.double()
    ours.criterion.regularizer.step = 0
    rows = range(5)
    narrow, wide = (tiny_fairseq.loss_and_gradients(ours, tiny_fairseq.batch(ours, *rows, pad=pad)) for pad in (0, 3))
    torch.testing.assert_close(wide[0], narrow[0], rtol=1e-9, atol=0)
    tiny_fairseq.assert_same_gradients(wide[3], narrow[3], 1e-8)


def test_the_noise_reaches_roberta(classes: Path) -> None:
    """Without dropout the value is quadratic in the scale, over three decades."""
    values = []
    for scale in (1e-7, 1e-6, 1e-5, 1e-4):
        ours = tiny_fairseq.build(
            classes,
            *tiny_fairseq.ROBERTA,
            *CLASSES,
            *QUIET,
            "--seqreg-terms",
            f"{{terms: {{r3f: {{scale: {scale}}}}}}}",
        )
        ours.model.double()
        _, size, log, _ = tiny_fairseq.loss_and_gradients(ours, batch_of_classes(ours))
        values.append(float(log["value/r3f"]) / size)
    assert values[0] > 0
    for small, large in itertools.pairwise(values):
        assert large / small == pytest.approx(100, rel=0.01)


def batch_of_classes(ours: SimpleNamespace) -> Any:
    data = ours.task.dataset("train")
    return data.collater([data[row] for row in range(8)])


@pytest.mark.parametrize("arch", ["roberta_base", "bart_base", "r4f_roberta_base", "r4f_bart_base"])
def test_sentence_prediction(classes: Path, arch: str) -> None:
    """Without terms the loss and gradients of sentence_prediction; with one, its part besides."""
    more = ["--add-prev-output-tokens", *tiny_fairseq.SMALL] if "bart" in arch else []
    ours = tiny_fairseq.build(classes, *tiny_fairseq.HEADED, *more, "--arch", arch, *CLASSES)
    sample, plain = batch_of_classes(ours), SentencePredictionCriterion(ours.cfg.criterion, ours.task)
    if "r4f" in arch:  # one power iteration a pass: let it settle
        for _ in range(50):
            plain(ours.model, sample)
    theirs, found = tiny_fairseq.loss_and_gradients(ours, sample, plain), tiny_fairseq.loss_and_gradients(ours, sample)
    torch.testing.assert_close(found[0], theirs[0], rtol=1e-5 if "r4f" in arch else 1e-6, atol=0)
    assert found[1] == theirs[1] == 8
    assert found[2]["ncorrect"] == theirs[2]["ncorrect"]
    tiny_fairseq.assert_same_gradients(found[3], theirs[3], 1e-5 if "r4f" in arch else 1e-6)
    terms = tiny_fairseq.build(
        classes,
        *tiny_fairseq.HEADED,
        *more,
        "--arch",
        arch,
        *CLASSES,
        "--seqreg-terms",
        "{terms: {r3f: {}, smart: {}}}",
    )
    log = tiny_fairseq.loss_and_gradients(terms, sample)[2]
    assert {"part/base", "part/r3f", "part/smart", "value/r3f", "weight/smart"} <= log.keys()


def test_r4f_begins_from_a_plain_head(classes: Path) -> None:
    """The head of the checkpoint has spectral norm 1 from the first pass on, also where the vectors are not there."""
    plain = tiny_fairseq.build(classes, *tiny_fairseq.ROBERTA, *CLASSES, seed=1)
    state = {key: 3 * value for key, value in plain.model.state_dict().items()}
    for layers, count in (("all", 2), ("out_proj", 1)):
        flags = [*tiny_fairseq.HEADED, "--arch", "r4f_roberta_base", "--r4f-layers", layers, *CLASSES]
        ours = tiny_fairseq.build(classes, *flags, seed=2).model
        ours.load_state_dict(dict(state), strict=True)
        ours.eval()
        head = ours.classification_heads["sentence_classification_head"]
        for name in ("out_proj", "dense")[:count]:
            raw = state[f"classification_heads.sentence_classification_head.{name}.weight"]
            norm = torch.linalg.matrix_norm(raw, 2)
            torch.testing.assert_close(getattr(head, name).weight, raw / norm, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("name", term_names())
def test_every_term_trains_roberta(classes: Path, name: str) -> None:
    ours = tiny_fairseq.build(
        classes, *tiny_fairseq.ROBERTA, *CLASSES, "--seqreg-terms", f"{{terms: {{{name}: {{}}}}}}"
    )
    ours.criterion.regularizer.step = 0
    _, _, log, found = tiny_fairseq.loss_and_gradients(ours, batch_of_classes(ours))
    assert f"part/{name}" in log
    assert all(torch.isfinite(value).all() for value in found.values())


def test_the_log_adds_up_in_base_2(pairs: Path) -> None:
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, "{terms: {rdrop: {weight: 0.5}}}")
    logs = [
        tiny_fairseq.loss_and_gradients(ours, tiny_fairseq.batch(ours, *rows))[2] for rows in (range(4), range(4, 7))
    ]
    with metrics.aggregate(new_root=True) as found:
        type(ours.criterion).reduce_metrics(logs)
    values = {key: meter.avg for key, meter in found.items() if hasattr(meter, "avg")}
    tokens = sum(log["ntokens"] for log in logs)
    total = sum(float(log["loss"]) for log in logs)
    assert float(values["loss"]) == pytest.approx(total / tokens / 0.6931471805599453, rel=1e-6)
    assert float(values["part/base"] + values["part/rdrop"]) == pytest.approx(float(values["loss"]), rel=1e-5)
    assert float(values["part/rdrop"]) == pytest.approx(0.5 * float(values["value/rdrop"]), rel=1e-5)
    assert float(values["weight/rdrop"]) == pytest.approx(0.5)


def test_validation_has_no_terms(pairs: Path) -> None:
    ours = seqreg(pairs, tiny_fairseq.TRANSFORMER, "{terms: {r3f: {}, smart: {}}}")
    sample = tiny_fairseq.batch(ours, *range(6))
    _, _, found = ours.task.valid_step(sample, ours.model, ours.criterion)
    _, _, theirs = ours.task.valid_step(sample, ours.model, LabelSmoothedCrossEntropyCriterion(ours.task, False, 0.1))
    assert found == theirs


def test_what_cannot_work_is_refused(pairs: Path) -> None:
    checkpointed = seqreg(pairs, tiny_fairseq.TRANSFORMER, "{terms: {smart: {}}}", "--checkpoint-activations")
    with pytest.raises(BadInput, match=r"smart needs torch\.autograd\.grad, which --checkpoint-activations forbids"):
        checkpointed.criterion(checkpointed.model, tiny_fairseq.batch(checkpointed, 0, 1))
    other = tiny_fairseq.build(
        pairs, *tiny_fairseq.COMMON, *"--task translation -s src -t tgt --arch lstm --max-tokens 99".split(), *SEQREG
    )
    with pytest.raises(BadInput, match="LSTMModel has a LSTMEncoder: seqreg knows fairseq's transformer"):
        other.criterion(other.model, tiny_fairseq.batch(other, 0, 1))
    adaptive = seqreg(
        pairs,
        [flag for flag in tiny_fairseq.TRANSFORMER if flag != "--share-all-embeddings"],
        "",
        "--adaptive-softmax-cutoff",
        "5,10",
    )
    with pytest.raises(BadInput, match="adaptive softmax"):
        adaptive.criterion(adaptive.model, tiny_fairseq.batch(adaptive, 0, 1))
