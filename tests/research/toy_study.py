"""Studies in moments: files of the same schema as the real ones, tiny models, and commands that run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import random
import string
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from research import study as studies
from seqreg.cli import main as cli
from seqreg.errors import BadInput
from seqreg.studies.compare import jobs
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.config import cards
from seqreg.workbench.data.tokenizers import train_tokenizer
from tests.studies.conftest import BAD, GOOD, OTHER

SHORT = [
    "optimisation.max_steps=2", "optimisation.warmup_steps=0", "optimisation.per_device_train_batch_size=4",
    "data.limit={train: 40, validation: 8, test: 24}", "data.max_source_length=24", "data.max_target_length=8",
    "evaluation.per_device_eval_batch_size=24", "evaluation.resamples=20", "logging.tensorboard=false",
    "logging.diagnostics_steps=0",
]  # fmt: skip
"""Settings that make any run of a study a matter of moments."""
NAMES = ("entailment", "not_entailment")


def _sentences(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences and labels, half and half; a word in each tells its label."""
    rng = random.Random(seed)
    return [
        (" ".join([*rng.choices(OTHER, k=4), rng.choice((BAD, GOOD)[place % 2])]), place % 2) for place in range(count)
    ]


def _tsv(path: Path, header: str, line: Callable[[str, int], str], count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line(text, label) for text, label in _sentences(count, len(path.name))]
    path.write_text("\n".join([header, *lines] if header else lines) + "\n")


def _jsonl(path: Path, record: Callable[[str, int], dict[str, Any]], count: int) -> None:
    _tsv(path, "", lambda text, label: json.dumps(record(text, label)), count)


def data(folder: Path) -> Path:
    """The files that the studies name, with the columns of the real ones."""
    for name, count in (("train", 60), ("dev", 30)):
        many = 12_100 if name == "train" else count
        glue = folder / "glue"
        _tsv(glue / "SST-2" / f"{name}.tsv", "sentence\tlabel", lambda text, label: f"{text}\t{label}", many)
        _tsv(glue / "CoLA" / f"{name}.tsv", "", lambda text, label: f"o\t{label}\t\t{text}", count)
        header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        _tsv(glue / "MRPC" / f"{name}.tsv", header, lambda text, label: f"{label}\t1\t2\t{text}\tthe film", count)
        header = "index\tsentence1\tsentence2\tlabel"
        _tsv(glue / "RTE" / f"{name}.tsv", header, lambda text, label: f"1\t{text}\tthe film\t{NAMES[label]}", count)
        for task, labels, many in (
            ("qqp", ("yes", "no"), count), ("mnli", ("neutral", "entailment"), count), ("qnli", NAMES, 5463)
        ):  # fmt: skip
            _jsonl(
                folder / task / f"{name}.jsonl",
                lambda text, label, labels=labels: {"sentence1": text, "sentence2": "a plot", "label": labels[label]},
                many,
            )
    for site in ("amazon_cells", "imdb", "yelp"):
        _tsv(
            folder / "uci_sentences" / f"{site}_labelled.txt",
            "",
            lambda text, label, s=site: f"{s} {text}\t{label}",
            1000,
        )
    _tsv(folder / "twitter_hate" / "train.csv", "id,label,tweet", lambda text, label: f"1,{label},{text}", 300)
    _jsonl(folder / "advglue" / "sst2.jsonl", lambda text, label: {"idx": 0, "sentence": text, "label": label}, 24)
    _jsonl(
        folder / "advglue" / "mnli.jsonl", lambda text, label: {"premise": text, "hypothesis": "a", "label": label}, 24
    )
    for name in ("r1_dev", "r2_dev", "r3_dev"):
        _jsonl(
            folder / "anli" / f"{name}.jsonl",
            lambda text, label: {"sentence1": text, "sentence2": "a", "label": "en"[label]},
            24,
        )
    for path in ("breaking_nli/test.jsonl", "counterfactual/cad_nli_revised_test.jsonl"):
        _jsonl(
            folder / path,
            lambda text, label: {"sentence1": text, "sentence2": "a", "gold_label": ("neutral", "entailment")[label]},
            24,
        )
    _jsonl(
        folder / "counterfactual" / "cad_imdb_revised_test.jsonl",
        lambda text, label: {"Text": text, "Sentiment": ("Negative", "Positive")[label]},
        24,
    )
    for name in ("train", "validation", "test"):
        _jsonl(
            folder / "aeslc" / f"{name}.jsonl",
            lambda text, label: {"document": text, "summary": text[:20], "references": [text[:20], "a plot"]},
            60,
        )
    for name in ("gb", "us"):
        words = {
            f"{text.replace(' ', '')[:8]}{chr(97 + place % 26)}": name for place, (text, _) in enumerate(_sentences(90))
        }
        (folder / "g2p").mkdir(exist_ok=True)
        (folder / "g2p" / f"{name}_gold.json").write_text(json.dumps(words))
    for name in ("gigaword", "reddit_tifu"):
        _jsonl(folder / name / "train.jsonl", lambda text, label: {"document": text, "summary": text[:20]}, 120)
    return folder


def xnli(folder: Path) -> Path:
    """Pairs of sentences for every split and language of XNLI."""
    card, _ = cards.load("xnli")
    labels = card.labels or []
    for split in card.splits:
        _jsonl(
            folder / f"{split}.jsonl",
            lambda text, label: {"premise": text, "hypothesis": "the film", "label": labels[(label + len(text)) % 3]},
            24,
        )
    return folder


def models(folder: Path) -> Path:
    """A tiny BERT and a tiny T5 with tokenizers, and a BART of letters, under the names of the real ones."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([text for text, _ in _sentences(200)], 400)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    bert = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=80, bos_token_id=tokenizer.bos_token_id, **ids,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=tokenizer.pad_token_id, **ids,
    )  # fmt: skip
    for name, model in (
        ("bert-mini", transformers.BertModel(bert)), ("minilm-l6", transformers.BertModel(bert)),
        ("flan-t5-small", transformers.T5ForConditionalGeneration(t5))
    ):  # fmt: skip
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    letters = "____" + string.ascii_lowercase
    g2p = transformers.BartConfig(
        vocab_size=len(letters), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=80, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2, grapheme_chars=letters,
        phoneme_chars=letters,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(g2p).save_pretrained(folder / "g2p-bart-us")
    return folder


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let commands of studies and runs of comparisons be calls; returns the list of commands that studies make."""
    commands: list[list[str]] = []

    def call(words: Sequence[str]) -> int:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.app(list(words), standalone_mode=False)
        return 0

    def execute(words: Sequence[str]) -> int:
        commands.append(list(words))
        try:
            return call(words)
        except BadInput as error:
            raise AssertionError(f"{' '.join(words)}: {error}") from error

    def work(
        plan: ComparisonPlan, todo: Sequence[Job], most: int, before: int = 0, trust: bool = False
    ) -> Generator[Job, None, None]:
        for job in todo:
            call(jobs.words(plan, job, trust))
            yield job

    monkeypatch.setattr(studies, "execute", execute)
    monkeypatch.setattr(jobs, "work", work)
    return commands
