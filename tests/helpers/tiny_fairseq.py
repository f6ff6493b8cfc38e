"""Toy data in fairseq's format, and tiny fairseq tasks, models and criterions."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "seqreg" / "integrations" / "fairseq_plugin"
WORDS = [f"w{number}" for number in range(20)]

COMMON = "--cpu --optimizer adam --lr 3e-3 --num-workers 0 --required-batch-size-multiple 1 --no-progress-bar".split()
SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0.1"
).split()
PAIRS = [*COMMON, *SMALL, *"--task translation -s src -t tgt --share-all-embeddings --max-tokens 256".split()]
TRANSFORMER = [*PAIRS, "--arch", "transformer"]
BART = [*PAIRS, *"--arch bart_base --max-source-positions 64 --max-target-positions 64".split()]
HEADED = [
    *COMMON,
    *"--task sentence_prediction --num-classes 2 --init-token 0 --max-positions 64 --batch-size 8".split(),
    *"--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2".split(),
    *"--dropout 0.1 --attention-dropout 0.1".split(),
]
ROBERTA = [*HEADED, "--arch", "roberta_base"]


def write_pairs(folder: Path) -> None:
    """Sentences, and the same words backwards."""
    draw = random.Random(0)
    for split, rows in {"train": 160, "valid": 24, "test": 8}.items():
        texts = [[draw.choice(WORDS) for _ in range(draw.randint(2, 7))] for _ in range(rows)]
        (folder / f"{split}.src").write_text("".join(" ".join(text) + "\n" for text in texts))
        (folder / f"{split}.tgt").write_text("".join(" ".join(reversed(text)) + "\n" for text in texts))
        (folder / f"{split}.label").write_text("".join(f"{int('w1' in text)}\n" for text in texts))


def binarize(folder: Path) -> tuple[Path, Path]:
    """The pairs for translation, and the sources with a label for classification."""
    raw, pairs, classes = folder / "raw", folder / "pairs", folder / "classes"
    raw.mkdir()
    write_pairs(raw)
    files = [f"--{split}pref" for split in ("train", "valid", "test")]

    def run(*flags: str) -> None:
        preprocess.main(options.get_preprocessing_parser().parse_args(["--workers", "1", *flags]))

    splits = [
        part for flag, split in zip(files, ("train", "valid", "test"), strict=True) for part in (flag, f"{raw}/{split}")
    ]
    run(*"--source-lang src --target-lang tgt --joined-dictionary".split(), "--destdir", str(pairs), *splits)
    for kind, ending in (("input0", "src"), ("label", "label")):
        flags = [part if part.startswith("--") else f"{part}.{ending}" for part in splits]
        run("--only-source", "--destdir", str(classes / kind), *flags)
    return pairs, classes


def build(data: Path, *flags: str, seed: int = 0) -> SimpleNamespace:
    """A configuration, a task, a model and a criterion, in the way that fairseq-train makes them."""
    utils.import_user_module(Namespace(user_dir=str(PLUGIN)))
    args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *flags])
    cfg = convert_namespace_to_omegaconf(args)
    torch.manual_seed(seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    criterion = task.build_criterion(cfg.criterion)
    task.load_dataset("train")
    return SimpleNamespace(cfg=cfg, task=task, model=model.train(), criterion=criterion)


def batch(made: SimpleNamespace, *rows: int, pad: int = 0) -> dict[str, Any]:
    """Some rows of the training data, with more padding than they need."""
    data = made.task.dataset("train")
    items = [data[row] for row in rows]
    if not pad:
        return data.collater(items)
    width = {key: max(len(item[key]) for item in items) + pad for key in ("source", "target")}
    return data.collater(items, pad_to_length=width)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def loss_and_gradients(made: SimpleNamespace, sample: Any, criterion: Any = None, seed: int = 5) -> Any:
    """What a criterion gives for one batch: loss, sample size, log and gradients."""
    made.model.zero_grad()
    torch.manual_seed(seed)
    loss, size, log = (criterion or made.criterion)(made.model, sample)
    loss.backward()
    return loss.detach(), size, log, gradients(made.model)


def assert_same_gradients(found: Any, expected: Any, tolerance: float) -> None:
    """Every entry within `tolerance` of the largest."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * largest, name
