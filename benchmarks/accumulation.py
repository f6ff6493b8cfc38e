"""Loss and gradient of one optimizer step, cut into micro-batches: the stock Trainer against `attach`.

    python -m benchmarks.accumulation                               # tiny random models of BART and T5
    python -m benchmarks.accumulation BART=FOLDER T5=FOLDER         # pretrained weights

The 16 examples, the weights and the optimizer are always the same. Labels have different lengths, dropout is off, and
the learning rate is 0. `loss` and `grad_norm` are what the trainer logs after the step. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, BartConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

from seqreg import Criterion, attach
from seqreg.losses import IGNORE

CUTS = ((16, 1), (8, 2), (4, 4))
"""Examples of a micro-batch, and micro-batches of a step."""
_SMALL = 64
TINY = {
    "BART": BartConfig(
        vocab_size=100, d_model=_SMALL, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
    ),
    "T5": T5Config(
        vocab_size=100, d_model=_SMALL, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
}  # fmt: skip


def tiny(name: str) -> Any:
    """A random model that is the same every time."""
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(TINY[name])


def examples(vocabulary: int, count: int = 16) -> list[dict[str, Any]]:
    """Random sources of 12 tokens, and targets of 2 to 17 tokens that are padded to one length."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for place in range(count):
        source, target = (torch.randint(4, vocabulary, (size,), generator=draw) for size in (12, count + 1))
        target[place + 2 :] = IGNORE
        rows.append({"input_ids": source, "attention_mask": torch.ones(12, dtype=torch.long), "labels": target})
    return rows


def step(model: Any, batch: int, cuts: int, criterion: Criterion | None) -> tuple[float, float]:
    """Loss and gradient norm of one step as the trainer logs them; the weights stay what they are."""
    for module in model.modules():
        for name in {"p", "dropout", "attention_dropout", "activation_dropout"} & vars(module).keys():
            setattr(module, name, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder, per_device_train_batch_size=batch, gradient_accumulation_steps=cuts, max_steps=1, logging_steps=1,
            learning_rate=0.0, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=examples(model.config.vocab_size))
        if criterion is not None:
            attach(trainer, criterion)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    first = trainer.state.log_history[0]
    return first["loss"], float(first["grad_norm"])


def measurements(models: dict[str, Any]) -> list[tuple[str, str, int, int, float, float]]:
    """Model, trainer, examples of a micro-batch, micro-batches, loss and gradient norm, for every combination."""
    trainers = {"Seq2SeqTrainer": None, "with `attach`": Criterion()}
    return [
        (name, trainer, batch, cuts, *step(model, batch, cuts, criterion))
        for name, model in models.items()
        for trainer, criterion in trainers.items()
        for batch, cuts in CUTS
    ]


def table(models: dict[str, Any]) -> str:
    """The measurements in Markdown: one row per model and trainer, one column per cut."""
    heads = [f"{batch} x {cuts}" for batch, cuts in CUTS]
    lines = ["| model | trainer | " + " | ".join(f"loss, gradient norm: {head}" for head in heads) + " |"]
    lines.append("|---|---|" + "--:|" * len(heads))
    rows: dict[tuple[str, str], list[str]] = {}
    for name, trainer, _, _, loss, norm in measurements(models):
        rows.setdefault((name, trainer), []).append(f"{loss:.3f}, {norm:.3f}")
    lines += [f"| {name} | {trainer} | " + " | ".join(cells) + " |" for (name, trainer), cells in rows.items()]
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Print the table; `NAME=FOLDER` names pretrained weights."""
    given = dict(word.partition("=")[::2] for word in words)
    for name, folder in given.items():
        if not Path(folder).is_dir():
            sys.exit(f"{name}={folder}: expected NAME=FOLDER, where FOLDER was written by save_pretrained")
    load = AutoModelForSeq2SeqLM.from_pretrained
    models = {name: load(folder, dtype=torch.float32) for name, folder in given.items()}
    print(f"transformers {transformers.__version__}, one step of 16 examples as micro-batch x accumulation steps\n")
    print(table(models or {name: tiny(name) for name in TINY}))


if __name__ == "__main__":
    main(sys.argv[1:])
