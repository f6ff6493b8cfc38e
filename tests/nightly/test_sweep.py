"""A part of `python -m tests.sweep`, and what it found."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pytest
import torch
import transformers

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import RegularizedTrainer, context, count
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from tests import sweep
from tests.helpers import tiny_configs, tiny_models

SOME = {
    "causal": "bart cpmant gpt2 jetmoe llama mamba mixtral qwen2_moe qwen3_next trocr whisper xlm xlnet",
    "seq2seq": "bart encoder-decoder fsmt m2m_100 nllb-moe pegasus qwen2_audio switch_transformers t5 t5gemma",
    "classification": "bart bert big_bird canine ibert jamba llama mixtral modernbert perceiver reformer t5 xlnet",
    "masked": "bert deberta-v2 ibert longformer modernbert roberta xlm",
    "tokens": "bert canine ibert qwen3_next roberta t5 umt5 xlnet",
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Tiny configurations have token ids that transformers finds strange."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize(
    ("kind", "model_type"), [(kind, model_type) for kind, names in SOME.items() for model_type in names.split()]
)
@pytest.mark.filterwarnings("ignore")  # models' own, about themselves
def test_loss_and_gradient_are_the_models_own(kind: str, model_type: str) -> None:
    (found,) = sweep.models([kind], [model_type])
    row = sweep.compare(*found)
    assert row.verdict == "equal", row


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_a_model_with_another_loss_is_refused_by_name(kind: str) -> None:
    (found,) = sweep.models([kind], ["prophetnet"])
    row = sweep.compare(*found)
    assert row.verdict == "refused"
    assert row.reason.startswith(f"{row.model} also learns to predict further tokens: set config.disable_ngram_loss")


def mixture(kind: str, model_type: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    (found,) = sweep.models([kind], [model_type])
    net = sweep.build(*found)
    for name, value in settings.items():
        setattr(net, name, value)
    return net, sweep.batch(kind, net)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("causal", "mixtral"), ("causal", "qwen2_moe"), ("seq2seq", "nllb-moe"), ("seq2seq", "switch_transformers")],
)
def test_the_balance_of_experts_is_a_part_of_the_loss(kind: str, model_type: str) -> None:
    """With a weight at which nobody can overlook it."""
    net, batch = mixture(kind, model_type, router_aux_loss_coef=0.7)
    tiny_models.dropout_off(net)
    sweep._seed()  # of the jitter in some routers
    theirs = net(**batch, output_router_logits=True).loss
    theirs.backward()
    wanted = sweep._gradient(net)
    batch["output_router_logits"] = True
    for criterion in (Criterion(), Criterion(fused=False), Criterion(R3F(weight=1e-9, scale=1e-2, relative=True))):
        sweep._seed()
        report = criterion(context(net, batch, step=0))
        report.total.backward()
        assert report.total.item() == pytest.approx(theirs.item(), rel=1e-5)
        assert (sweep._gradient(net) - wanted).norm() <= 1e-4 * wanted.norm()
        assert float(report.parts["aux_loss"]) > 0.1
        assert sum(map(float, report.parts.values())) == pytest.approx(report.total.item(), rel=1e-5)
        assert "aux_loss" in str(report)
    batch["output_router_logits"] = False
    assert "aux_loss" not in Criterion()(context(net, batch)).parts


@pytest.mark.filterwarnings("ignore")
def test_accumulation_weighs_the_balance_of_micro_batches_by_their_labels() -> None:
    net, batch = mixture("causal", "mixtral", router_aux_loss_coef=0.7)
    pieces = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    whole = count(net, pieces)
    parts = [Criterion()(context(net, piece, count=whole)).parts["aux_loss"].item() for piece in pieces]
    alone = [Criterion()(context(net, piece)).parts["aux_loss"].item() for piece in pieces]
    labels = [count(net, [piece]).labels for piece in pieces]
    assert parts == pytest.approx([one * n / sum(labels) for one, n in zip(alone, labels, strict=True)])


@pytest.mark.filterwarnings("ignore")
def test_other_additions_are_refused_by_name() -> None:
    net, batch = mixture("causal", "bamba")
    net.config.z_loss_coefficient = 0.1
    with pytest.raises(BadInput, match=r"^BambaForCausalLM adds a z-loss.*z_loss_coefficient=0"):
        context(net, batch)
    with pytest.raises(BadInput, match="two parts of the loss are called 'aux_loss'"):
        Criterion(R3F(name="aux_loss"))


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_logs_the_balance(tmp_path: Any) -> None:
    net, batch = mixture("causal", "mixtral", router_aux_loss_coef=0.7)
    rows = [{key: value[i] for key, value in batch.items()} for i in range(3)]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, per_device_train_batch_size=3, use_cpu=True, disable_tqdm=True
    )
    trainer = RegularizedTrainer(net, settings, train_dataset=rows, criterion=Criterion(), diagnostics_steps=0)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["part/aux_loss"] > 0.1
    assert log["part/base"] + log["part/aux_loss"] == pytest.approx(log["loss"], abs=2e-4)


def test_transformers_own_neftune_is_refused(tmp_path: Any) -> None:
    settings = transformers.TrainingArguments(str(tmp_path), neftune_noise_alpha=5.0, use_cpu=True)
    with pytest.raises(
        BadInput, match=r"^neftune_noise_alpha=5.0 would .*: set Criterion\(NEFTune\(alpha=5.0\)\) instead"
    ):
        RegularizedTrainer(tiny_models.make("llama"), settings, criterion=Criterion())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "model_type", "words"),
    [
        ("classification", "canine", "this model has no embeddings that seqreg can perturb"),
        ("tokens", "ibert", "cannot be perturbed: its QuantEmbedding gives a tuple, not embeddings"),
        ("tokens", "xlnet", "this model cannot be perturbed there"),
        ("causal", "cpmant", "this model cannot be perturbed there"),
    ],
)
def test_models_that_cannot_be_perturbed_say_so(kind: str, model_type: str, words: str) -> None:
    net, batch = mixture(kind, model_type)
    batch.pop("attention_mask")  # it would be told by its shape
    for term in (R3F(scale=1e-2, relative=True), R3F(scale=1e-2, dropout="shared"), NEFTune()):
        with pytest.raises(BadInput, match=words):
            Criterion(term)(context(net, batch, step=0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["t5", "mt5"])
def test_token_classifiers_of_t5_can_be_perturbed(model_type: str) -> None:
    net, batch = mixture("tokens", model_type)
    report = Criterion(R3F(scale=1e-2, relative=True, dropout="shared"))(context(net, batch, step=0))
    assert float(report.values["r3f"]) > 0


def test_a_crash_and_a_model_without_end_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "compare", lambda *_: os._exit(7))
    assert sweep.guarded("causal", "a", "B", 20).reason == "the process died with code 7"
    monkeypatch.setattr(sweep, "compare", lambda *_: time.sleep(60))
    assert sweep.guarded("causal", "a", "B", 0.5).reason == "no answer within 0.5 s"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", "sweep --kind causal --only gpt2 --only prophetnet --json".split())
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    assert stopped.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["totals"] == {"causal": {"equal": 1, "refused": 1, "not built": 0, "differs": 0}}
    assert [row["model"] for row in found["rows"]] == ["GPT2LMHeadModel", "ProphetNetForCausalLM"]
    wrong = sweep.Row("causal", "a", "B", "differs")
    monkeypatch.setattr(sweep, "sweep", lambda *_: [wrong])
    monkeypatch.setattr(sys, "argv", ["sweep"])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    assert stopped.value.code == 1
    assert "differs" in capsys.readouterr().out


def test_a_tiny_configuration_is_tiny() -> None:
    config = tiny_configs.tiny("llama", num_labels=7)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.num_labels) == (32, 2, 96, 7)
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in net.parameters()) < 100_000
