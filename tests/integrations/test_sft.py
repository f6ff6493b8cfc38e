"""`attach` on TRL's SFTTrainer, in all its modes. Skipped where trl is not installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import Tensor

from seqreg import BadInput, Criterion, attach, regularized
from seqreg.errors import Advice
from seqreg.integrations.hf import context, count, private_names
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models, tiny_tokenizer

trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl runs the tests of SFTTrainer")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TEXTS = tiny_tokenizer.texts()
CHATS = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1][:9]}] for text in TEXTS]
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": TEXTS}, {}),
    "prompt-completion": ({"prompt": TEXTS, "completion": [f" {text}" for text in TEXTS[::-1]]}, {}),
    "chat": ({"messages": CHATS}, {}),
    "assistant-only": ({"messages": CHATS}, {"assistant_only_loss": True}),
    "packing": ({"text": TEXTS}, {"packing": True, "max_length": 12}),
    "padding-free": ({"text": TEXTS}, {"padding_free": True, "max_length": None}),
}
TERMS: dict[str, Any] = {
    "r3f": R3F(weight=0.5, scale=0.1, dropout="shared"),
    "smart": SMART(weight=0.5),
    "jachess": JacHess(weight=0.1),
    "anchor": Anchor(weight=1.0),
}


def sft(mode: str, out: Path, *, cls: Any = None, net: Any = None, model: str = "llama", **settings: Any) -> Any:
    data, own = MODES[mode]
    options = {key: settings.pop(key) for key in ("criterion", "peft_config") if key in settings}
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "bf16": False, "learning_rate": 1e-2,
        "gradient_checkpointing": False, "optim": "sgd", "lr_scheduler_type": "constant", **own, **settings,
    }  # fmt: skip
    rows = datasets.Dataset.from_dict(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL has to say of attention on CPUs
        return (cls or trl.SFTTrainer)(
            tiny_models.make(model) if net is None else net,
            trl.SFTConfig(output_dir=str(out), **settings),
            train_dataset=rows, eval_dataset=rows, processing_class=tiny_tokenizer.tokenizer(), **options,
        )  # fmt: skip


def history(trainer: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("mode", MODES)
def test_without_terms_the_loss_and_the_metrics_are_those_of_trl(mode: str, tmp_path: Path) -> None:
    plain = sft(mode, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    ours = attach(sft(mode, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2), Criterion())
    expected, found = history(plain), history(ours)
    assert len(expected) == len(found) == 2
    for theirs, row in zip(expected, found, strict=True):
        assert row["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert row["part/base"] == pytest.approx(row["loss"], rel=1e-6)
        for key in ("entropy", "mean_token_accuracy", "num_tokens"):
            assert row[key] == pytest.approx(theirs[key], rel=1e-5), key
    a, b = plain.evaluate(), ours.evaluate()
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert b[key] == pytest.approx(a[key], rel=1e-5), key


def test_the_load_balance_of_experts_is_weighed_by_its_coefficient(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip

    def made(coefficient: float) -> Any:
        torch.manual_seed(0)
        return sft("text", tmp_path, net=transformers.MixtralForCausalLM(config), router_aux_loss_coef=coefficient)

    for coefficient in (0.1, 0.0):
        expected, found = history(made(coefficient)), history(attach(made(coefficient), Criterion()))
        for theirs, row in zip(expected, found, strict=True):
            for key in ("loss", "grad_norm", *(["aux_loss"] if coefficient else [])):
                assert row[key] == pytest.approx(theirs[key], rel=1e-5), key
        assert ("part/aux_loss" in found[0]) == ("aux_loss" in expected[0]) == bool(coefficient)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("mode", MODES)
def test_terms_are_those_of_a_raw_loop(mode: str, term: str, tmp_path: Path) -> None:
    seen: list[tuple[Any, Tensor]] = []

    def recorded(model: Any, batch: Any, **options: Any) -> Any:
        if "step" in options:  # not a context to measure the start of JacHess
            seen.append((dict(batch), torch.get_rng_state()))
        return context(model, batch, **options)

    found = history(attach(sft(mode, tmp_path), Criterion(TERMS[term]), build_context=recorded))
    net, criterion = tiny_models.make("llama"), Criterion(TERMS[term])
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    assert len(found) == len(seen) == 2
    for step, (batch, state) in enumerate(seen):
        torch.set_rng_state(state)
        report = criterion(context(net, batch, step=step, count=count(net, [batch])))
        assert report.parts[term] > 1e-4
        assert found[step]["loss"] == pytest.approx(float(report.total.detach()), rel=1e-6)
        assert found[step][f"part/{term}"] == pytest.approx(float(report.parts[term]), rel=1e-6)
        report.total.backward()
        assert found[step]["grad_norm"] == pytest.approx(
            float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])), rel=1e-5
        )
        optimizer.step()
        optimizer.zero_grad()


def test_lora_and_what_terms_remember(tmp_path: Path) -> None:
    """A LoRA run that stops and resumes is the run that did not."""
    from peft import LoraConfig

    def made(out: str) -> Any:
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        trainer = sft(
            "chat", tmp_path / out, peft_config=adapter, max_steps=4, save_strategy="steps", save_steps=2,
            gradient_checkpointing=True,
            cls=regularized(trl.SFTTrainer), criterion=Criterion(Bregman(weight=1.0), R3F(scale=0.1)),
        )  # fmt: skip
        return trainer

    whole, again = made("whole"), made("again")
    assert type(whole).__name__ == "RegularizedSFTTrainer"
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert whole.state.log_history[-2]["part/bregman"] > 0


def test_what_becomes_of_its_loss_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.warns(Advice, match=r"^SFTTrainer: its loss \(loss_type='nll'.* is replaced by the criterion's.*kept$"):
        attach(sft("text", tmp_path), Criterion())
    trainer = sft("text", tmp_path, loss_type="dft")
    with pytest.raises(BadInput, match="loss_type='dft': the criterion would replace it"):
        attach(trainer, Criterion())
    assert type(trainer) is trl.SFTTrainer

    class Counting(trl.SFTTrainer):  # type: ignore[misc]
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().compute_loss(*args, **kwargs)

    ours = attach(sft("text", tmp_path, cls=Counting), Criterion(R3F(scale=0.1)), own_loss="call")
    assert all(row["part/r3f"] > 0 and row["entropy"] > 0 for row in history(ours))
    assert ours.calls == 2


def test_other_trainers_of_trl_are_refused_by_name() -> None:
    names = "CPO DPO Distillation GKD GOLD GRPO KTO ORPO OnlineDPO RLOO Reward SDFT SDPO TPO".split()
    for name in names:
        cls = getattr(trl, f"{name}Trainer", None)
        if cls is None:
            module = pytest.importorskip(f"trl.experimental.{ {'OnlineDPO': 'online_dpo'}.get(name, name.lower()) }")
            cls = getattr(module, f"{name}Trainer")
        with pytest.raises(BadInput, match=f"^{name}Trainer: its loss "):
            regularized(cls, own_loss="replace")


@pytest.mark.parametrize("name", private_names.SFT_ATTRIBUTES)
def test_a_private_name_is_there(name: str, tmp_path: Path) -> None:
    assert hasattr(sft("text", tmp_path), name)
