"""Runs on instructions in TRL's formats: chats, prompts and completions, with and without padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seqreg import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.data import loading, sample_batch
from seqreg.workbench.run import train
from tests.helpers import tiny_models, tiny_tokenizer
from tests.helpers.tiny_tasks import seqreg

TEXTS = tiny_tokenizer.texts(24)
SHORT = [
    "model.name=base", "model.lora={r: 2, target_modules: [q_proj]}", "optimisation.max_steps=2",
    "optimisation.warmup_steps=0", "optimisation.per_device_train_batch_size=3",
    "optimisation.gradient_accumulation_steps=1", "data.dataloader_num_workers=0", "data.max_source_length=32",
    "data.max_target_length=12", "generation.max_length=6", "evaluation.resamples=10", "checkpoints.save_steps=0",
    "logging.tensorboard=false", "logging.logging_steps=1",
]  # fmt: skip


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMATS: dict[str, Any] = {
    "messages": lambda text, answer: {"messages": asked(text) + answered(answer)},
    "conversational": lambda text, answer: {"prompt": asked(text), "completion": answered(answer)},
    "texts": lambda text, answer: {"prompt": text, "completion": f" {answer}"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose tokenizer has a chat template, and a file of every format."""
    folder, tokenizer = tmp_path_factory.mktemp("chat"), tiny_tokenizer.tokenizer()
    tiny_models.make("llama", vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    for name, row in FORMATS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(*pair)) + "\n" for pair in pairs))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_of_every_format(name: str, home: Path) -> None:
    words = (f"data.path={name}.jsonl", *SHORT, f"output={name}")
    said = seqreg("train", "sft", "--terms", "anchor", "--terms", "r3f", *words, cwd=home)
    assert "perplexity" in said.stdout
    assert run_config.load(home / name).config.terms["r3f"] == {"scale": 0.1, "relative": True}
    predicted = rows(home / name)
    assert len(predicted) == 2
    assert all(row["reference"] in TEXTS for row in predicted)
    seqreg("predict", name, f"{name}.jsonl", "-o", f"{name}-predicted.jsonl", cwd=home)
    assert len((home / f"{name}-predicted.jsonl").read_text().splitlines()) == len(TEXTS)
    noise = ("robustness", name, "--noise", "words", "--limit", "2", "--draws", "1", "--output", f"{name}-noise")
    if name == "texts":
        seqreg(*noise, cwd=home)
    else:
        assert "its examples are chats" in seqreg(*noise, cwd=home, code=2).stderr


def test_both_formats_of_a_chat_are_one_and_padding_changes_nothing(home: Path) -> None:
    losses = {}
    for name in ("messages", "conversational"):
        for free in ("false", "true"):
            words = [*SHORT, f"data.path={home}/{name}.jsonl", f"model.name={home}/base", f"data.padding_free={free}"]
            run = run_config.resolve("sft", overrides=[*words, "model.settings={attention_dropout: 0.0}"])
            trainer = train.make_trainer(train.prepare(run), home / "none")
            trainer.train()
            losses[name, free] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    first, *others = losses.values()
    assert len(first) == 2
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


def test_the_loss_is_that_of_trl_on_completions(home: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl compares with its SFTTrainer")
    import datasets

    overrides = [f"data.path={home}/conversational.jsonl", *SHORT, f"model.name={home}/base", "model.lora=null"]
    overrides.append("evaluation.per_device_eval_batch_size=64")  # one batch, as means of batches are averaged
    run = run_config.resolve("sft", overrides=overrides)
    loaded = train.prepare(run)
    trainer = train.make_trainer(loaded, home / "none")
    examples = loading.load(run.card, run.config.data).sets["train"]
    chats = {
        "prompt": [asked(example.source) for example in examples],
        "completion": [answered(example.target or "") for example in examples],
    }
    settings = {"per_device_eval_batch_size": 64, "report_to": "none", "use_cpu": True, "bf16": False}
    theirs = trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(home / "base"),
        trl.SFTConfig(output_dir=str(home / "none"), completion_only_loss=True, **settings),
        train_dataset=datasets.Dataset.from_dict(chats), eval_dataset=datasets.Dataset.from_dict(chats),
        processing_class=transformers.AutoTokenizer.from_pretrained(home / "base"),
    )  # fmt: skip
    ours = trainer.predict(trainer.train_dataset.dataset).metrics["test_loss"]
    assert ours == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


def test_generation_ends_where_the_chat_template_ends_an_answer(home: Path, tmp_path: Path) -> None:
    """As with base models of Qwen, whose eos token is another one."""
    tokenizer = tiny_tokenizer.tokenizer([*tiny_tokenizer.WORDS, "<end>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<end>"]})
    tokenizer.chat_template = tiny_tokenizer.TEMPLATE.replace("</s>", "<end>")
    model = tiny_models.make("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    eos, end = tokenizer.convert_tokens_to_ids(["</s>", "<end>"])
    pairs = [json.dumps({"source": text, "target": text[:9]}) for text in TEXTS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    texts = [f"data.path={tmp_path}/pairs.jsonl", "task=text_pairs", 'data.prompt="{source} "']
    for words, ends in (
        ([f"data.path={home}/messages.jsonl"], {eos, end}),
        ([*texts, "data.chat_template=true"], {eos, end}),
        (texts, {eos}),
    ):
        run = run_config.resolve("sft", overrides=[*SHORT, *words, f"model.name={tmp_path}/base"])
        found = train.prepare(run).model.generation_config.eos_token_id
        assert set(found if isinstance(found, list) else [found]) == ends, words


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"messages": asked("a")},
            "has 1 messages, the last of 'user': expected at least two, the last of 'assistant'",
        ),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "user"}, *answered("a")]}, "expected {role: ..., content: ...} alone"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}, *answered("a")]}, "messages[0] is"),
        ({"messages": [{"role": "user", "content": 3}, *answered("a")]}, "messages[0].content' is 3: expected text"),
        ({"prompt": asked("a"), "completion": "a"}, "'completion' is 'a': expected a list of messages"),
        ({"prompt": asked("a"), "completion": asked("a")}, "expected one message of 'assistant'"),
        ({"answer": "a"}, "no column 'prompt'"),
        ({"messages": None}, "the column 'messages' is empty (null)"),
        ({"messages": None, "prompt": None, "completion": "a"}, "the column 'prompt' is empty (null)"),
    ],
)
def test_a_record_that_is_no_chat_is_refused(record: dict[str, Any], line: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    words = (f"data.path={tmp_path}/data.jsonl", *SHORT, "output=no")
    refused = seqreg("train", "sft", *words, cwd=home, code=2)
    assert line in refused.stderr
    assert "data.jsonl:1" in refused.stderr


def test_what_a_model_cannot_do_with_chats_is_refused(home: Path) -> None:
    torch.manual_seed(0)
    tiny = ("--variant", "tiny", "data.path=messages.jsonl", "optimisation.max_steps=1", "output=no")
    assert "has no chat template" in seqreg("train", "sft", *tiny, cwd=home, code=2).stderr
    bart = ("quickstart", "task=sft", "data.path=messages.jsonl", "output=no")
    assert "the examples are chats" in seqreg("train", *bart, cwd=home, code=2).stderr
    for key in ("chat_template", "padding_free"):
        refused = seqreg("train", "quickstart", f"data.{key}=true", "output=no", cwd=home, code=2)
        assert f"data.{key} is for causal language models" in refused.stderr
    prefix = ("data.path=messages.jsonl", *SHORT, "data.source_prefix=a", "output=no")
    assert "data.source_prefix='a': chats have none" in seqreg("train", "sft", *prefix, cwd=home, code=2).stderr
    assert not (home / "no").exists()


def test_check_and_advise_read_whole_chats(home: Path, tmp_path: Path) -> None:
    turns = [*asked("the cat sat"), *answered("a dog"), *asked("it ran"), *answered("a bird")]
    (tmp_path / "turns.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 10)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "base")
    prompt = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True, tokenize=False)
    length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    words = (*SHORT, f"data.path={tmp_path}/turns.jsonl", f"model.name={home}/base", "--json")
    sources = [entry for entry in json.loads(seqreg("check", "sft", *words, cwd=home).stdout)["data"]
               if entry["text"] == "source"]  # fmt: skip
    assert {entry["longest"] for entry in sources} == {length}
    batches = []
    for file in ("turns", "single"):
        kept = turns if file == "turns" else turns[2:]
        (tmp_path / f"{file}.jsonl").write_text((json.dumps({"messages": kept}) + "\n") * 4)
        model, tokens, kind = sample_batch.load(str(home / "base"))
        batches.append(sample_batch.batch(model, tokens, kind, 4, tmp_path / f"{file}.jsonl", "sft"))
    assert tokenizer.decode(batches[0]["input_ids"][0]).startswith(prompt.strip())
    assert batches[0]["input_ids"].shape[1] > batches[1]["input_ids"].shape[1]
    bart = tiny_models.make("bart", vocab_size=len(tokenizer))
    with pytest.raises(BadInput, match=r"^--data: the examples are chats"):
        sample_batch.batch(bart, tokenizer, "seq2seq", 4, tmp_path / "turns.jsonl", "sft")


def test_a_text_is_asked_by_the_chat_template(home: Path) -> None:
    words = (f"data.path={home}/texts.jsonl", "data.chat_template=true", 'data.prompt="the {source}"', "output=asked")
    seqreg("train", "sft", *SHORT, *words, cwd=home)
    run = run_config.load(home / "asked")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "asked")
    row = train.Encoded(loading.load(run.card, run.config.data).sets["test"], tokenizer, run.config, "the {source}")[0]
    text = tokenizer.decode(row["input_ids"])
    assert text.startswith("user : the ")
    assert " assistant : " in text
    assert text.endswith("</s>")
