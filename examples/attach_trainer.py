"""A Trainer that is already there, and one more line.

python examples/attach_trainer.py FacebookAI/roberta-base
"""

import sys
import tempfile

from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from seqreg import Criterion, attach
from seqreg.terms.smart import SMART

TEXTS = ["the cat sat on the mat", "the dog ran over the hill", "the bird sang", "it was not a dog"]
CLASSES = [0, 1, 0, 1]


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(name, num_labels=2),
        AutoTokenizer.from_pretrained(name),
    )
    rows = [{**tokenizer(text), "labels": label} for text, label in zip(TEXTS, CLASSES, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)

        attach(trainer, Criterion(SMART(weight=1.0)))  # the line

        trainer.train()  # every log has part/base, part/smart, value/smart, weight/smart
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:2])
