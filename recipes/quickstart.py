"""Fine-tune a tiny BART on generated headlines, with and without R3F, and print what the loss is made of."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from typing import Any

import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainingArguments

from seqreg import Criterion
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer
from seqreg.terms.r3f import R3F

PAD, EOS = 1, 2
NAMES = "Ada Bruno Chidi Dora Emil Farah Goran Hana Ivo Jun Kira Luis Mina Noor Olga Pavel".split()
CITIES = "Oslo Lagos Lima Kyoto Porto Quito Riga Turin".split()
DEEDS = {"opened": "bakery library clinic theatre", "won": "race election prize chess-match"}
DAYS = "Monday Tuesday Wednesday Thursday Friday".split()


def story(dice: random.Random) -> tuple[str, str]:
    """A short article and its headline."""
    name, city, day = dice.choice(NAMES), dice.choice(CITIES), dice.choice(DAYS)
    deed = dice.choice(list(DEEDS))
    thing = dice.choice(DEEDS[deed].split())
    friend = dice.choice([other for other in NAMES if other != name])
    article = [
        f"on {day} the people of {city} met {name} and {friend}",
        f"{name} {deed} the {thing} in {city} after years of work",
        f"{friend} said that the {thing} made everyone in {city} proud",
    ]
    if dice.random() < 0.5:
        article[0], article[2] = article[2], article[0]
    return " . ".join(article), f"{name} {deed} {thing} in {city}"


def dataset(pairs: list[tuple[str, str]], vocabulary: dict[str, int]) -> list[dict[str, list[int]]]:
    def encode(text: str) -> list[int]:
        return [vocabulary[word] for word in text.split()] + [EOS]

    return [{"input_ids": encode(article), "labels": encode(headline)} for article, headline in pairs]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def pad(key: str, value: int) -> torch.Tensor:
        tensors = [torch.tensor(row[key]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": pad("labels", -100)}


class Progress(transformers.ProgressCallback):
    """The usual progress bar, with a line for the parts of the loss at every log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs and self.training_bar is not None:
            parts = " + ".join(f"{key[5:]} {value:.4f}" for key, value in logs.items() if key.startswith("part/"))
            line = f"  step {state.global_step:4d}  loss {logs['loss']:.4f} = {parts}   (nll {logs['value/nll']:.4f})"
            self.training_bar.write(line)


def train(name: str, criterion: Criterion, data: dict[str, Any], size: int, steps: int) -> dict[str, Any]:
    transformers.set_seed(7)
    config = BartConfig(
        vocab_size=size, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64,
        pad_token_id=PAD, bos_token_id=0, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=EOS,
    )  # fmt: skip
    arguments = Seq2SeqTrainingArguments(
        output_dir=f"runs/quickstart/{name}", max_steps=steps, per_device_train_batch_size=32, learning_rate=3e-3,
        per_device_eval_batch_size=64, logging_steps=steps // 6, save_strategy="no", use_cpu=True,
        report_to=["tensorboard"], lr_scheduler_type="linear", warmup_steps=20,
    )  # fmt: skip
    trainer = RegularizedSeq2SeqTrainer(
        BartForConditionalGeneration(config), arguments, data_collator=collate, criterion=criterion, **data
    )
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(Progress)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    final = trainer.evaluate()["eval_loss"]
    return {"eval": final, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of each run (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 6:
        parser.error(f"--steps {steps}: expected at least 6, one for every line of the log")
    dice = random.Random(0)
    pairs = [story(dice) for _ in range(2400)]
    words = sorted(set(itertools.chain.from_iterable(" ".join(pair).split() for pair in pairs)))
    vocabulary = {word: index for index, word in enumerate(words, start=4)}
    rows = dataset(pairs, vocabulary)
    data = {"train_dataset": rows[:2000], "eval_dataset": rows[2000:]}
    print(f"An article:  {pairs[0][0]}\nIts headline: {pairs[0][1]}\n")
    runs = {}
    for name, terms in {"baseline": (), "r3f": (R3F(weight=0.1),)}.items():
        criterion = Criterion(*terms, label_smoothing=0.1)
        print(f"{name}: {steps} steps of {criterion}")
        runs[name] = train(name, criterion, data, len(vocabulary) + 4, steps)
    plain, r3f = runs["baseline"], runs["r3f"]
    print(f"\nHeld-out label-smoothed loss: baseline {plain['eval']:.4f}, r3f {r3f['eval']:.4f}")
    print(f"Cost of R3F: {r3f['seconds'] / plain['seconds']:.2f}x the time of the baseline")
    print("Curves: tensorboard --logdir runs/quickstart")


if __name__ == "__main__":
    main()
