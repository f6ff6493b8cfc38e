"""The value of JacHess in the first optimizer step, by how the step is cut into micro-batches.

    python -m tests.cut_steps MODEL SST-2/train.tsv

The same rows are cut into micro-batches of 32, 8, 4 and 1. The value of a step is the sum over its micro-batches, and
should be 1 in the first. Every draw has another order of rows, other dropout masks and other random directions.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from seqreg import Criterion
from seqreg.integrations.hf import context, count
from seqreg.terms.jachess import JacHess

ROWS, SIZES = 32, (32, 8, 4, 1)


def examples(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def first_value(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    """The value of the first optimizer step."""
    criterion, total = Criterion(JacHess()), count(model, batches)
    with torch.no_grad():
        reports = [criterion(context(model, batch, step=0, count=total)) for batch in batches]
    return sum(float(report.values["jachess"]) for report in reports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a classifier or encoder that save_pretrained wrote")
    parser.add_argument("data", type=Path, help="train.tsv of SST-2")
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, dtype=torch.float32, ignore_mismatched_sizes=True
    ).train()
    rows = examples(args.data)[:ROWS]
    warnings.simplefilter("ignore")  # of terms and base loss
    print("| micro-batches of | mean | range |\n|---|---|---|")
    for size in SIZES:
        values = []
        for draw in range(args.draws):
            torch.manual_seed(draw)
            order = torch.randperm(len(rows)).tolist()
            cut = [[rows[index] for index in order[first : first + size]] for first in range(0, len(rows), size)]
            batches = [
                {
                    **tokenizer([row["sentence"] for row in part], padding=True, return_tensors="pt"),
                    "labels": torch.tensor([int(row["label"]) for row in part]),
                }
                for part in cut
            ]
            values.append(first_value(model, batches))
        print(f"| {size} | {sum(values) / len(values):.2f} | {min(values):.2f} to {max(values):.2f} |", flush=True)


if __name__ == "__main__":
    main()
