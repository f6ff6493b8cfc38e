"""`attach` on TRL's SFTTrainer, in all its modes. Skipped where trl is not installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion, attach, regularized
from seqreg.errors import Advice
from seqreg.integrations.hf import context, private_names
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
    "padding-free": ({"text": TEXTS}, {"padding_free": True}),
}
TERMS: dict[str, Any] = {
    "r3f": R3F(weight=0.5, scale=0.1, dropout="shared"),
    "smart": SMART(weight=0.5),
    "jachess": JacHess(weight=0.1),
}


def sft(mode: str, out: Path, *, cls: Any = None, net: Any = None, model: str = "llama", **settings: Any) -> Any:
    data, own = MODES[mode]
    options = {key: settings.pop(key) for key in ("criterion", "peft_config") if key in settings}
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "bf16": False, "learning_rate": 1e-2,
        "gradient_checkpointing": False, "optim": "sgd", **own, **settings,
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
