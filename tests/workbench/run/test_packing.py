"""Bins of training examples: what is in them, that they change no gradient, and what is refused with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seqreg.workbench.config import run_config
from seqreg.workbench.data.batches import best_fit_decreasing
from seqreg.workbench.data.encoding import INDEX, CompletionCollator
from seqreg.workbench.run import train
from tests.helpers import tiny_models, tiny_tokenizer
from tests.helpers.tiny_tasks import seqreg

TEXTS = tiny_tokenizer.texts(60)
SETTINGS = [
    "optimisation.max_steps=3", "optimisation.warmup_steps=0", "optimisation.per_device_train_batch_size=2",
    "optimisation.gradient_accumulation_steps=2", "data.dataloader_num_workers=0", "data.max_source_length=32",
    "data.max_target_length=12", "generation.max_length=6", "evaluation.resamples=10", "checkpoints.save_steps=0",
    "logging.tensorboard=false", "logging.logging_steps=1", "data.path=data.jsonl", "model.lora=null",
]  # fmt: skip
PACKED = ["data.packing=true", "data.max_length=64"]
MODELS = ("llama", "gpt2")


def made(kind: str, folder: Path) -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"max_position_embeddings" if kind != "gpt2" else "n_positions": 128}
    model = tiny_models.make(kind, vocab_size=len(tokenizer), **sizes)
    tiny_models.dropout_off(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models without dropout, one that cannot keep examples apart, and prompts of unlike lengths."""
    folder = tmp_path_factory.mktemp("packing")
    for kind in MODELS:
        made(kind, folder / kind)
    tokenizer = tiny_tokenizer.tokenizer()
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 2}
    transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(
        folder / "bloom"
    )
    tokenizer.save_pretrained(folder / "bloom")
    words = [text.split() for text in TEXTS]
    rows = [
        {"prompt": " ".join(words[n][: 1 + n % 7]), "completion": " " + " ".join(words[-n][: 1 + n % 3])}
        for n in range(60)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trainer_of(home: Path, *overrides: str, model: str = "llama", terms: tuple[str, ...] = ()) -> Any:
    words = [*SETTINGS, f"data.path={home}/data.jsonl", f"model.name={home}/{model}", *overrides]
    run = run_config.resolve("sft", terms=list(terms), overrides=words)
    return train.make_trainer(train.prepare(run), home / "none")


@pytest.mark.parametrize("seed", range(5))
def test_bins_are_those_of_trl(seed: int) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl compares with its pack_dataset")
    import datasets

    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (200,), generator=drawn).tolist()
    bins = best_fit_decreasing(lengths, 64)
    assert sorted(index for each in bins for index in each) == list(range(200))
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    theirs = trl.pack_dataset(rows, 64, "bfd")["seq_lengths"]
    assert sorted(tuple(lengths[index] for index in each) for each in bins) == sorted(map(tuple, theirs))


def test_no_bin_is_longer_than_it_may_be_and_every_example_is_in_one(home: Path) -> None:
    bins = trainer_of(home, *PACKED).train_dataset
    lengths = [[len(example["input_ids"]) for example in bins[place]] for place in range(len(bins))]
    assert max(map(sum, lengths)) <= 64
    numbers = [example[INDEX] for place in range(len(bins)) for example in bins[place]]
    assert sorted(numbers) == list(range(len(bins.dataset)))
    assert len(bins) < len(numbers) / 2


def gradient_of_step(trainer: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """Of one optimizer step of micro-batches, as the trainer itself counts and computes it."""
    samples, count = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
    trainer.model.train().zero_grad()
    for batch in samples:
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=count).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.filterwarnings("ignore::seqreg.errors.Advice")
@pytest.mark.parametrize("term", [None, "r3f", "smart", "anchor", "rdrop"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_bins_has_the_gradient_of_its_examples_in_rows_of_their_own(
    model: str, term: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("seqreg.terms.r3f", "seqreg.ascent"):  # noise that depends on the embedding alone
        monkeypatch.setattr(f"{place}.sample", lambda noise, like, scale, mask: scale * torch.sin(1000 * like.detach()))
    trainer = trainer_of(home, *PACKED, model=model, terms=() if term is None else (term,))
    loader = iter(trainer.get_train_dataloader())
    packed = [next(loader), next(loader)]
    rows = [trainer.train_dataset.dataset[index] for batch in packed for index in batch[INDEX].tolist()]
    assert len(rows) > 8  # in four bins
    cut = [rows[:3], rows[3:]]
    apart = [dict(CompletionCollator(trainer.processing_class)(part)) for part in cut]
    gradient_of_step(trainer, packed)  # where an anchor remembers the start
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    first, second = (gradient_of_step(trainer, batches) for batches in (packed, apart))
    assert (first - second).norm() <= 1e-4 * first.norm()


def test_a_run_counts_bins_and_tokens(home: Path) -> None:
    epochs = ["optimisation.max_steps=null", "optimisation.num_train_epochs=2"]
    trainer = trainer_of(home, *PACKED, *epochs)
    bins, lengths = trainer.train_dataset, trainer.train_dataset.dataset.lengths()
    trainer.train()
    assert trainer.state.max_steps == 2 * -(-len(bins) // 4)
    tokens = sum(tokens for tokens, _ in lengths)
    assert trainer.state.num_input_tokens_seen == 2 * tokens  # with those whose id is that of padding
    checked = seqreg("check", "sft", *SETTINGS, *PACKED, *epochs, "model.name=llama", cwd=home).stdout
    assert f"{trainer.state.max_steps} steps of 4 of {len(bins)} bins per device" in " ".join(checked.split())


def test_a_run_from_the_command_line(home: Path) -> None:
    words = (*SETTINGS, *PACKED, "model.name=llama", "output=run")
    said = seqreg("train", "sft", "--terms", "r3f", "--terms", "anchor", *words, cwd=home).stdout
    assert "perplexity" in said
    assert run_config.load(home / "run").config.data.packing


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data.max_length=64"], "data.max_length=64: the length of bins, which data.packing=true makes"),
        (["data.packing=true", "data.group_by_length=true"], "data.packing and data.group_by_length"),
        (
            ["data.packing=true", "data.max_length=5"],
            "tokens with its prompt: raise it, or lower data.max",
        ),
        ([*PACKED, "model.name=bloom"], "BloomForCausalLM does not keep them apart: leave it out"),
        (["data.padding_free=true", "model.name=bloom"], "BloomForCausalLM does not keep them apart: leave it out"),
        ([*PACKED, "loss.per=sequence"], "the criterion: per='sequence': rows are packed"),
        ([*PACKED, "--terms", "vat"], "vat: attack.over='sentence': rows are packed"),
        (["data.padding_free=true", "--terms", "freelb"], "freelb: attack.over='sentence': rows are packed"),
        (["data.sample_packing=true"], "data.packing"),
    ],
)
def test_what_is_refused_in_one_line(words: list[str], line: str, home: Path) -> None:
    refused = seqreg("train", "sft", *SETTINGS, "model.name=llama", *words, "output=no", cwd=home, code=2).stderr
    assert line in refused
    assert len(refused.strip().splitlines()) == 1
    assert not (home / "no").exists()


def test_an_encoder_decoder_is_refused(home: Path) -> None:
    refused = seqreg("train", "quickstart", "data.packing=true", "output=no", cwd=home, code=2).stderr
    assert "data.packing is for causal language models" in refused
