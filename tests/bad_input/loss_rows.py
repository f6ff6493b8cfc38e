"""Batches, losses and terms that cannot be right, or that released code gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from seqreg import Criterion, spectral_norm
from seqreg.divergences import symmetric_kl
from seqreg.errors import BadInput
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer, context, count, r4f
from seqreg.losses import label_smoothed_nll
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from seqreg.terms.uegr import UEGR
from seqreg.workbench.config import run_config
from seqreg.workbench.run import train
from tests.bad_input.table import elsewhere, refused, row, run, tiny, warned
from tests.helpers import tiny_models


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value[n] for key, value in batch.items()} for n in range(len(batch["labels"]))]


def trainer(tmp: Path, rows: list[dict[str, Any]], **settings: Any) -> RegularizedSeq2SeqTrainer:
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp), per_device_train_batch_size=1, learning_rate=0.1, weight_decay=0.1, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", **settings,
    )  # fmt: skip
    return RegularizedSeq2SeqTrainer(tiny_models.make("bart"), arguments, train_dataset=rows, criterion=Criterion())


class Steps(transformers.TrainerCallback):
    """Keeps a copy of a weight after every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(model.model.encoder.layers[0].fc1.weight.detach().clone())


@row(1, "no label in a whole batch", "H", "handled", "the loss is 0 and the optimizer does not move; a warning")
def _(tmp: Path) -> None:
    batch = tiny_models.batch("bart")
    batch["labels"][:] = -100
    report = Criterion(R3F(scale=0.1), label_smoothing=0.1)(context(tiny_models.make("bart"), batch, step=0))
    assert float(report.total.detach()) == 0
    rows = rows_of(tiny_models.batch("bart", rows=6))
    for one in rows[:3]:
        one["labels"] = torch.full_like(one["labels"], -100)
    found, steps = trainer(tmp, rows, num_train_epochs=1), Steps()
    found.add_callback(steps)
    with warned(r"step \d: no example has a label, so it is skipped"):
        found.train()
    moved = [not torch.equal(one, other) for one, other in zip(steps.seen, steps.seen[1:], strict=False)]
    assert len(steps.seen) == 6
    assert 2 <= sum(moved) <= 3  # three steps have labels; the first of all may be one of them


@row(2, "no label in the whole dataset", "E", "refused")
def _(tmp: Path) -> None:
    rows = [{**one, "labels": torch.full((6,), -100)} for one in rows_of(tiny_models.batch("bart"))]
    with pytest.raises(BadInput, match="all labels of all 3 training examples are -100: there is nothing to learn"):
        trainer(tmp, rows, max_steps=2).train()


@row(5, "a label that the vocabulary does not have", "E", "refused")
def _(tmp: Path) -> None:
    batch = tiny_models.batch("bart")
    batch["labels"][2, 1] = tiny_models.VOCAB
    with pytest.raises(
        BadInput, match=r"labels\[2, 1\] is 48, but the head has classes 0..47: is the tokenizer larger"
    ):
        context(tiny_models.make("bart"), batch)


@row(6, "-1 for a label that is not there", "E", "refused")
def _(tmp: Path) -> None:
    batch = tiny_models.batch("bart")
    batch["labels"][0, 5] = -1
    with pytest.raises(BadInput, match=r"labels\[0, 5\] is -1, .*padding must be -100"):
        context(tiny_models.make("bart"), batch)


@row(9, "label smoothing without decoder_input_ids", "H", "handled", "made from the labels, as the model was trained")
def _(tmp: Path) -> None:
    model, batch = tiny_models.dropout_off(tiny_models.make("bart")), tiny_models.batch("bart")
    batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, 2), value=-100)  # as long as the source
    given = {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}
    one, other = (Criterion(label_smoothing=0.1)(context(model, found)).total for found in (batch, given))
    assert torch.equal(one, other)


@row(18, "float16 sums over 50,265 classes", "H", "handled", "sums are in float32")
def _(tmp: Path) -> None:
    logits, labels = torch.randn(4, 50265, dtype=torch.float16) * 3, torch.arange(4)
    exact = torch.nn.functional.cross_entropy(logits.double(), labels, label_smoothing=0.1, reduction="none")
    assert torch.allclose(label_smoothed_nll(logits, labels, 0.1)[0].double(), exact, rtol=1e-5)


@row(19, "a float16 divergence of distant outputs", "H", "handled", "log-softmax in float32")
def _(tmp: Path) -> None:
    p, q = torch.tensor([[60.0, 0.0]], dtype=torch.float16), torch.tensor([[0.0, 60.0]], dtype=torch.float16)
    assert float(symmetric_kl(p, q)) == pytest.approx(120.0, rel=1e-5)


@row(20, "a noise scale of 0", "H", "handled", "R3F is then R-Drop; with shared masks it is refused")
def _(tmp: Path) -> None:
    model, batch, found = tiny_models.make("bart"), tiny_models.batch("bart"), []
    for scale in (0.0, 1e-6):
        torch.manual_seed(3)
        found.append(float(Criterion(R3F(scale=scale))(context(model, batch, step=0)).values["r3f"]))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert found[0] > 0
    with pytest.raises(BadInput, match=r"r3f: scale=0.0: without noise .* the term is 0: leave it out"):
        R3F(scale=0.0, dropout="shared")


@row(22, "noise that bfloat16 cannot see", "W", "refused", "or a warning with unresolved='warn'")
def _(tmp: Path) -> None:
    model, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    words = r"r3f: a perturbation of 1e-05 is below what bfloat16 resolves at an embedding RMS of \S+ \(\S+\)"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadInput, match=words):
        Criterion(R3F(scale=1e-5))(context(model, batch, step=0))
    with torch.autocast("cpu", dtype=torch.bfloat16), warned(words):
        Criterion(R3F(scale=1e-5, unresolved="warn"))(context(model, batch, step=0))
    refused(tmp, words, *tiny(tmp, "--terms", "r3f", "optimisation.precision=bf16"))


@row(24, "a weight of 0", "H", "handled", "the term costs nothing")
def _(tmp: Path) -> None:
    model = tiny_models.make("bart")
    with mock.patch.object(model, "forward", wraps=model.forward) as forward:
        Criterion(R3F(weight=0.0))(context(model, tiny_models.batch("bart"), step=0))
    assert forward.call_count == 1


@row(28, "a divergence of distributions on a regression head", "E", "refused", "divergence: mse compares numbers")
def _(tmp: Path) -> None:
    words = tiny(tmp, "--terms", "r3f", recipe="glue", variant="stsb")
    refused(
        tmp,
        r"divergence='symmetric_kl' is 0 on a regression head: use divergence='mse'",
        *words,
        "terms.r3f.divergence=symmetric_kl",
    )
    assert run(tmp, *words).code == 0


@row(30, "R4F on a language-model head", "E", "refused")
def _(tmp: Path) -> None:
    message = "R4F normalises a classification head, and BartForConditionalGeneration has a language-model head"
    refused(tmp, message, *tiny(tmp, "model.head=r4f"))


@row(56, "frozen embeddings", "H", "handled", "perturbed from outside the graph, as with PEFT")
def _(tmp: Path) -> None:
    model = tiny_models.make("bart")
    model.get_input_embeddings().weight.requires_grad_(False)
    report = Criterion(R3F(scale=0.1), SMART())(context(model, tiny_models.batch("bart"), step=0))
    report.total.backward()
    assert torch.isfinite(report.total)
    assert float(model.model.encoder.layers[0].fc1.weight.grad.norm()) > 0


@row(57, "a quantised model", "E", "cannot occur", "no quantiser is installed here; the answer is tested with a mark")
def _(tmp: Path) -> None:
    model, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    model.is_quantized = True
    with pytest.raises(
        BadInput, match="a quantised model has no second derivatives: use estimator='finite_difference'"
    ):
        Criterion(JacHess(estimator="reverse"))(context(model, batch, step=0))
    Criterion(JacHess(), R3F(scale=0.1))(context(model, batch, step=0)).total.backward()


@row(58, "JacHess over fused attention", "H", "handled", "its own passes take the attention that has derivatives")
def _(tmp: Path) -> None:
    model = tiny_models.make("bart", attn_implementation="sdpa")
    report = Criterion(JacHess(estimator="reverse"))(context(model, tiny_models.batch("bart"), step=0))
    report.total.backward()
    assert torch.isfinite(model.get_input_embeddings().weight.grad).all()


@row(
    59, "reentrant gradient checkpointing", "H", "handled", "the command never uses it; in a loop of your own: one line"
)
def _(tmp: Path) -> None:
    settings = run_config.resolve("gigaword", overrides=["optimisation.gradient_checkpointing=true"]).config
    arguments = train.arguments(settings, tmp, True)
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": False}
    model = tiny_models.make("bart")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(BadInput, match=r"smart needs torch.autograd.grad, which reentrant gradient checkpointing"):
        Criterion(SMART())(context(model, tiny_models.batch("bart"), step=0))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    Criterion(SMART())(context(model, tiny_models.batch("bart"), step=0)).total.backward()
    with pytest.raises(BadInput, match="uegr: gradient checkpointing forgets its dropout rates"):
        Criterion(UEGR())(context(model, tiny_models.batch("bart"), step=0))


@row(60, "an R4F head, saved and loaded", "H", "handled", "the normalisation is folded in")
def _(tmp: Path) -> None:
    model, batch = r4f(tiny_models.make("roberta")), tiny_models.batch("roberta")
    model.save_pretrained(tmp, state_dict=spectral_norm.folded_state(model))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp)
    with torch.no_grad():
        assert torch.allclose(again.eval()(**batch).logits, model.eval()(**batch).logits, atol=1e-6)


@row(61, "a model without dropout under R-Drop", "W", "warned", "UEGR sets dropout rates of its own")
def _(tmp: Path) -> None:
    model = tiny_models.dropout_off(tiny_models.make("bart"))
    with warned("rdrop: it is 0.* does nothing on this model and batch: give the model dropout"):
        assert (
            float(Criterion(RDrop(task="none"))(context(model, tiny_models.batch("bart"), step=0)).values["rdrop"]) == 0
        )


elsewhere(
    62, "parameters without a gradient across ranks", "H", "handled",
    "tests/integrations/test_distributed.py::test_gradient", "two ranks, gloo, no flag needed",
)  # fmt: skip


@row(63, "micro-batches and ranks with other numbers of labels", "H", "handled", "averaged over all labels of a step")
def _(tmp: Path) -> None:
    model, batch = tiny_models.dropout_off(tiny_models.make("bart")), tiny_models.batch("bart")
    Criterion(label_smoothing=0.1)(context(model, batch)).total.backward()
    whole = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    cuts = [{k: v[:1] for k, v in batch.items()}, {k: v[1:] for k, v in batch.items()}]
    for cut in cuts:
        Criterion(label_smoothing=0.1)(context(model, cut, count=count(model, cuts))).total.backward()
    assert all(torch.allclose(one.grad, whole[name], atol=1e-6) for name, one in model.named_parameters())
