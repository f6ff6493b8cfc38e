"""Whole trainings of tiny models: what they write, and that what they write is true."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from seqreg import build
from seqreg.cli.check import check, relative_cost
from seqreg.cli.predict import predict
from seqreg.errors import Advice, BadInput
from seqreg.workbench.config import cards, overlay, run_config
from seqreg.workbench.data import loading
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.run import train
from seqreg.workbench.run.tensorboard import CHANGE, RESULTS, hyperparameters
from seqreg.workbench.scores.evaluate import tidy
from seqreg.workbench.scores.results import score_table
from tests.helpers import sample_files, tiny_tasks

GLUE = ["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]


def run_of(
    recipe: str, tmp_path: Path, *further: str, variants: list[str], terms: list[str] | None = None
) -> run_config.Run:
    plain = run_config.resolve(recipe, variants=variants)
    folder = sample_files.folder(tmp_path / "data", plain.card, train=16, held=6)
    architecture = "bart" if plain.card.kind == "generation" else "roberta"
    settings = [*sample_files.tiny(architecture, folder), f"output={tmp_path / 'run'}", *further]
    return run_config.resolve(recipe, variants=variants, terms=terms or [], overrides=settings)


@pytest.mark.parametrize("task", GLUE)
def test_every_glue_card_trains(task: str, tmp_path: Path) -> None:
    run = run_of(
        "glue", tmp_path, "optimisation.max_steps=3", "logging.tensorboard=false", variants=[task], terms=["r3f"]
    )
    metrics = train.train(run)
    expected = {
        "cola": ["matthews"],
        "mrpc": ["accuracy", "f1"],
        "qqp": ["accuracy", "f1"],
        "stsb": ["pearson", "spearman"],
    }
    sets = ["validation", "test", "mismatched"] if task == "mnli" else ["validation", "test"]
    assert list(metrics["scores"]) == sets
    for name in sets:
        assert list(metrics["scores"][name]["intervals"]) == expected.get(task, ["accuracy"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    if task != "stsb":
        right = sum(row["correct"] for row in rows) / 6
        assert metrics["scores"]["test"].get("accuracy", 100 * right) == pytest.approx(100 * right)
        assert all(abs(sum(row["probabilities"].values()) - 1) < 1e-4 for row in rows)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert list(model.config.id2label.values()) == (run.card.labels or ["score"])


@pytest.mark.parametrize("architecture", ["bart", "t5"])
def test_a_classifier_with_a_decoder(architecture: str, tmp_path: Path) -> None:
    """Its labels are classes, although the model is an encoder-decoder."""
    t5 = "model.settings={d_model: 16, num_layers: 1, num_heads: 2, d_ff: 16, d_kv: 8}"
    size = f"model.settings={sample_files.TINY_BART}" if architecture == "bart" else t5
    plain = run_config.resolve("glue", variants=["sst2"])
    folder = sample_files.folder(tmp_path / "data", plain.card, train=16, held=6)
    settings = [*sample_files.tiny("bart", folder), f"model.architecture={architecture}", "model.settings=null", size]
    run = run_config.resolve(
        "glue", variants=["sst2"], terms=["r3f"], overrides=[*settings, f"output={tmp_path / 'run'}"]
    )
    before = train.train(run)["scores"]["validation"]
    assert train.evaluate_run(tmp_path / "run")["scores"]["validation"]["accuracy"] == before["accuracy"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [set(row["probabilities"]) for row in rows] == [{"negative", "positive"}] * 6


def test_xnli_is_averaged_over_languages(tmp_path: Path) -> None:
    run = run_of("xnli", tmp_path, "logging.tensorboard=false", variants=[])
    scores = train.train(run)["scores"]
    languages = [scores[name]["accuracy"] for name in run.card.splits if name.startswith("test")]
    assert len(languages) == 15
    assert scores["average"]["accuracy"] == pytest.approx(sum(languages) / 15, abs=1e-4)


def test_an_r4f_head_is_exported_folded(tmp_path: Path) -> None:
    run = run_of("glue", tmp_path, "logging.tensorboard=false", variants=["rte"], terms=["r4f"])
    before = train.train(run)["scores"]["validation"]
    kept = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    after = train.evaluate_run(tmp_path / "run")["scores"]["validation"]
    again = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert before["accuracy"] == after["accuracy"]
    for first, second in zip(kept, again, strict=True):
        assert first["probabilities"] == pytest.approx(second["probabilities"], abs=1e-5)


@pytest.fixture(scope="module")
def summarizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny model after six steps with two evaluations, and everything it wrote."""
    tmp_path = tmp_path_factory.mktemp("summarizer")
    run = run_of(
        "gigaword", tmp_path, "optimisation.max_steps=6", "evaluation.eval_steps=3", "checkpoints.save_steps=3",
        "evaluation.load_best_model_at_end=true", "evaluation.eval_before_training=true",
        "logging.diagnostics_steps=3", "optimisation.learning_rate=1e-2",
        variants=[], terms=["r3f"],
    )  # fmt: skip
    return tmp_path / "run", train.train(run)


def test_what_a_run_leaves_behind(summarizer: tuple[Path, dict[str, Any]]) -> None:
    folder, metrics = summarizer
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml", "task.yaml", "metrics.json", "predictions.jsonl", "generated_predictions.txt", "README.md",
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tensorboard",
    } <= names  # fmt: skip
    assert "training_args.bin" not in names
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert list(metrics["scores"]) == ["before", "validation", "test"]
    assert metrics["scores"]["test"]["signature"].startswith("rouge|v=")
    assert metrics["train"]["steps"] == 6
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert 100 * sum(row["rouge1"] for row in rows) / len(rows) == pytest.approx(
        metrics["scores"]["test"]["rouge1"], abs=1e-3
    )
    plain = (folder / "generated_predictions.txt").read_text().splitlines()
    assert [line.replace("<n>", "\n") for line in plain] == [row["prediction"] for row in rows]
    card = (folder / "README.md").read_text()
    header = overlay.parse(card.split("---")[1], "card")
    assert header["tags"] == ["seqreg", "r3f"]
    assert "Criterion(R3F(" in card
    assert "rougeLsum" in card


def test_evaluate_and_predict_say_the_same_as_the_training(
    summarizer: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, metrics = summarizer
    again = train.evaluate_run(folder, output=tmp_path)
    for name in ("validation", "test"):
        for key in ("rouge1", "rougeLsum", "loss", "gen_len"):
            assert again["scores"][name][key] == pytest.approx(metrics["scores"][name][key], abs=1e-4)
    source = folder.parent / "data" / "test.jsonl"
    assert predict(folder, str(source), str(tmp_path / "out.jsonl")) == 6
    found = [json.loads(line)["prediction"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert found == [row["prediction"] for row in rows]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffa first text\na second<n>text\n"))
    assert predict(folder, "-", str(tmp_path / "out.txt"), as_json=True) == 2
    sources = [json.loads(line)["source"] for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert sources == ["a first text", "a second\ntext"]  # without the byte-order mark
    other = train.evaluate_run(folder, file=source, output=tmp_path / "other", overrides=("generation.num_beams=1",))
    assert list(other["scores"]) == ["test"]


def test_plain_transformers_loads_and_generates_the_same(summarizer: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = summarizer
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    card, _ = cards.load("gigaword")
    examples = loading.read_file(card, folder.parent / "data" / "test.jsonl")
    batch = tokenizer(
        [one.source for one in examples], return_tensors="pt", padding=True, truncation=True, max_length=24
    )
    texts = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    assert [tidy(text, card) for text in texts] == [row["prediction"] for row in rows]


def test_tensorboard_tells_the_story(summarizer: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = summarizer
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {
        "train/loss", "train/part/base", "train/part/r3f", "train/weight/r3f", "train/value/nll", "train/grad_norm",
        "train/learning_rate", "train/tokens_per_second", "train_diagnostics/r3f/noise_over_value", "eval/rougeL",
        "validation_intervals/rougeL_low", "validation_intervals/rougeL_high", "eval/loss", "eval/score",
        "validation_outputs/gen_len", "validation_outputs/empty", "trained/test/rouge1",
    } <= scalars  # fmt: skip
    assert [event.step for event in events.Scalars("eval/rougeL")] == [3, 6]
    parts = [events.Scalars(f"train/part/{name}") for name in ("base", "r3f")]
    for total, base, term in zip(events.Scalars("train/loss"), *parts, strict=True):
        assert total.value == pytest.approx(base.value + term.value, abs=1e-4)
    texts = set(events.Tags()["tensors"])
    assert {"samples/text_summary", "settings/text_summary", "custom_scalars__config__"} <= texts
    shown = [name.removesuffix("/text_summary") for name in sorted(texts) if name.endswith("text_summary")]
    assert shown == ["result", "samples", "scores_by_epoch", "settings"]  # the order in which TensorBoard has them
    (final,) = events.Tensors("result/text_summary")
    text = final.tensor_proto.string_val[0].decode()
    assert all(said in text for said in ("r3f**, from scratch, 6 steps", "| test | rougeL |", "| drift | "))
    (stored,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(stored.tensor_proto.string_val[0])  # as TensorBoard reads it
    titles = [category.title for category in layout.category]
    assert titles == sorted(titles)  # the order of the story
    assert "Scores" in titles[0]
    assert "drift and retention" in titles[1]
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    matched = {title for title, tags in charts.items() if any(re.match(tag, name) for tag in tags for name in scalars)}
    assert {"loss and its parts", "KL to the start, in both directions", "CKA to the start", "gradient norm"} <= matched
    experiment = HParamsPluginData.FromString(events.SummaryMetadata(EXPERIMENT_TAG).plugin_data.content).experiment
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == list(RESULTS)
    assert set(metrics) - scalars == {CHANGE}  # there is no other task
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(scalars)))
    assert groups[:2] == ["eval", "train"]  # those that TensorBoard opens with
    assert [tag for tag in sorted(scalars) if tag.startswith("eval/")] == [
        "eval/loss", "eval/rouge1", "eval/rouge2", "eval/rougeL", "eval/rougeLsum", "eval/score",
    ]  # fmt: skip
    assert len([tag for tag in scalars if tag.startswith("train/")]) <= 12  # the cards of a page
    assert not any("time" in tag for tag in scalars)
    size = sum(path.stat().st_size for path in (folder / "tensorboard").iterdir())
    assert size < 60_000


def test_hparams_have_the_same_keys_in_every_run() -> None:
    runs = [("gigaword", ["tiny"], ["r3f"]), ("glue", ["rte"], ["smart", "bregman"]), ("quickstart", [], [])]
    keys = [hyperparameters(run_config.resolve(name, variants=v, terms=t)) for name, v, t in runs]
    assert keys[0].keys() == keys[1].keys() == keys[2].keys()
    assert (keys[0]["weight.r3f"], keys[1]["weight.r3f"], keys[1]["weight.smart"]) == (0.1, 0.0, 0.1)
    assert all(isinstance(value, (bool, int, float, str)) for value in keys[0].values())
    opened = ["1 method", "2 weights of terms", "3 learning rate", "4 steps", "5 seed"]
    assert sorted(keys[0])[:5] == opened  # the columns that TensorBoard opens with
    assert (keys[0]["2 weights of terms"], keys[2]["2 weights of terms"]) == ("r3f 0.1", "none")


def test_two_runs_are_not_mixed(summarizer: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = summarizer
    run = run_config.load(folder)
    with pytest.raises(BadInput, match="started with other settings"):
        train.train(run_config.Run(run.config.model_copy(update={"seed": 7}), run.card, run.origins))
    (tmp_path / "x").write_text("mine")
    other = run_config.Run(run.config.model_copy(update={"output": str(tmp_path)}), run.card, run.origins)
    with pytest.raises(BadInput, match="not a run of seqreg"):
        train.train(other, overwrite=True)
    assert (tmp_path / "x").read_text() == "mine"
    with pytest.raises(BadInput, match="nothing to resume"):
        train.train(
            run_config.Run(run.config.model_copy(update={"output": str(tmp_path / "y")}), run.card, run.origins),
            resume=True,
        )


def test_nothing_is_written_before_everything_is_checked(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, f"data.path={tmp_path / 'nothing'}", variants=[])
    with pytest.raises(BadInput, match="no such file"):
        train.train(run)
    assert not (tmp_path / "run").exists()


def test_a_resumed_training_ends_where_it_would_have(tmp_path: Path) -> None:
    settings = ["checkpoints.save_steps=2", "logging.tensorboard=false", "optimisation.lr_scheduler_type=constant"]
    run = run_of("gigaword", tmp_path, *settings, "optimisation.max_steps=4", variants=[], terms=["r3f"])
    train.train(run)
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").state_dict()
    half = run_config.Run(run.config.model_copy(update={"output": str(tmp_path / "half")}), run.card, run.origins)
    short = half.config.updated(optimisation=half.config.optimisation.updated(max_steps=2))
    train.train(run_config.Run(short, run.card, run.origins))
    train.train(half, resume=True, allow_change=["optimisation.max_steps"])
    resumed = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half").state_dict()
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())


def tokens_of(folder: Path) -> list[str]:
    """The keys of the record of a run that are about token ids on disk."""
    inputs = json.loads((folder / "run.json").read_text())["inputs"]
    return sorted(key for key in inputs if key.startswith("data.rows.tokens."))


def test_data_on_disk_train_the_same_model_and_resume_a_run_that_held_them_in_memory(tmp_path: Path) -> None:
    settings = ["checkpoints.save_steps=2", "logging.tensorboard=false", "optimisation.lr_scheduler_type=constant"]
    settings += ["data.group_by_length=true", f"data.cache_dir={tmp_path / 'cache'}", "optimisation.max_steps=4"]
    run = run_of("gigaword", tmp_path, *settings, variants=[], terms=["r3f"])
    train.train(run)
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").state_dict()
    assert not tokens_of(tmp_path / "run")
    half, short = f"output={tmp_path / 'half'}", "optimisation.max_steps=2"
    train.train(run_of("gigaword", tmp_path, *settings, half, short, variants=[], terms=["r3f"]))
    stored = run_of("gigaword", tmp_path, *settings, half, "data.keep_in_memory=false", variants=[], terms=["r3f"])
    train.train(stored, resume=True, allow_change=["optimisation.max_steps"])
    resumed = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half").state_dict()
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    assert tokens_of(tmp_path / "half") == ["data.rows.tokens.train", "data.rows.tokens.validation"]
    record = json.loads((tmp_path / "half/run.json").read_text())
    record["inputs"]["data.rows.tokens.train"], record["finished"] = "of another tokenizer", False
    (tmp_path / "half/run.json").write_text(json.dumps(record))
    with pytest.raises(BadInput, match=r'data\.rows\.tokens\.train: "of another tokenizer" there, ') as caught:
        train.train(stored, resume=True)
    assert "--allow-change data.rows.tokens.train" in str(caught.value)


@pytest.mark.parametrize(("recipe", "chosen"), [("gigaword", []), ("glue", ["rte"])])
def test_rows_of_like_length_share_batches(recipe: str, chosen: list[str], tmp_path: Path) -> None:
    settings = ["data.group_by_length=true", "data.max_source_length=400", "optimisation.per_device_train_batch_size=4"]
    run = run_of(recipe, tmp_path, *settings, variants=chosen)
    sample_files.folder(tmp_path / "data", run.card, train=160)
    trainer = train.make_trainer(train.prepare(run), tmp_path / "run")
    widths = [batch["attention_mask"].sum(1) for batch in trainer.get_train_dataloader()]
    spread = sum(float(width.max() - width.min()) for width in widths)
    trainer.options = dataclasses.replace(trainer.options, sampler=None)
    plain = [batch["attention_mask"].sum(1) for batch in trainer.get_train_dataloader()]
    assert spread < sum(float(width.max() - width.min()) for width in plain)
    assert sorted(torch.cat(widths).tolist()) == sorted(torch.cat(plain).tolist())


def test_check_counts_what_is_cut(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[], terms=["r3f", "smart"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(check(run))
    text = console.export_text()
    assert "100.0%" in text  # no story has 24 tokens or fewer
    assert "2.00x" in text
    assert "BartForConditionalGeneration" in text
    assert not (tmp_path / "run").exists()
    assert relative_cost(run.config.criterion().terms[0].cost) == 2.0


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, "model.settings.max_position_embeddings=16", variants=[])
    with pytest.raises(BadInput, match=r"data.max_source_length=24: the model has only 16 positions"):
        train.prepare(run)
    for setting, message in (
        ("model.architecture=bert2", r"model.architecture='bert2': unknown; did you mean 'bert"),
        ("model.settings={d_modle: 3}", r"model.settings.d_modle: bart has no such setting; did you mean 'd_model'"),
    ):
        with pytest.raises(BadInput, match=message):
            train.prepare(run_of("gigaword", tmp_path, setting, variants=[]))
    hub = run_config.resolve("gigaword", overrides=[f"data.path={tmp_path / 'data'}"])
    with pytest.raises(BadInput, match=r"bart-large is not on this machine .*hf download facebook/bart-large.*FOLDER"):
        train.prepare(hub)


def test_a_trained_tokenizer_knows_its_text() -> None:
    tokenizer = train_tokenizer(["Ada Berg opens library in Oslo"] * 3, 300)
    ids = tokenizer("Ada Berg", "Oslo")["input_ids"]
    assert tokenizer.decode(ids) == "<s> Ada Berg</s></s> Oslo</s>"
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [1, 0, 2]


@pytest.mark.parametrize("architecture", ["bart", "pegasus", "t5"])
def test_a_model_from_scratch_writes_text_and_not_special_tokens(architecture: str, tmp_path: Path) -> None:
    """Also when it prefers them: a model that has hardly learnt anything repeats the first token that it has seen."""
    t5 = "{d_model: 16, num_layers: 1, num_heads: 2, d_ff: 16, d_kv: 8}"
    size = f"model.settings={t5 if architecture == 't5' else sample_files.TINY_BART}"
    settings = [f"model.architecture={architecture}", "model.settings=null", size, "generation.min_length=3"]
    shop = train.prepare(run_of("gigaword", tmp_path, *settings, "generation.num_beams=2", variants=[]))
    model, tokenizer = shop.model.eval(), shop.tokenizer
    with torch.no_grad():
        model.get_output_embeddings().weight[[0, 1, 3, 4]] = 10 * model.get_output_embeddings().weight[:4].abs()
    batch = tokenizer(["a story", "another one"], return_tensors="pt", padding=True)
    ids = model.generate(**batch)
    assert (ids[:, 1] == tokenizer.bos_token_id).all()  # as in every target
    found = set(ids[:, 2:].flatten().tolist()) - {tokenizer.eos_token_id}
    assert not found & {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    assert all(tokenizer.batch_decode(ids, skip_special_tokens=True))


def test_runs_side_by_side() -> None:
    one = {"scores": {"test": {"rouge1": 50.0, "intervals": {"rouge1": [40, 60]}}}, "train": {"seconds": 2.0}}
    two = {"scores": {"test": {"rouge1": 60.0, "intervals": {"rouge1": [50, 70]}}}, "train": {"seconds": 3.0}}
    table = score_table({"a": one, "b": two})
    assert [list(column.cells) for column in table.columns][2:] == [
        ["50.00", "2.0", "1.00x"],
        ["60.00", "3.0", "1.50x"],
    ]


def test_parts_are_shown_also_when_a_run_is_shorter_than_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all their digits; what R-Drop adds to the task loss is called that."""
    further = [
        "optimisation.max_steps=3",
        "logging.logging_steps=50",
        "terms.smart={attack: {radius: 1e-3, step_size: 1e-3}, weight: 1e-3}",
    ]
    run = run_of("glue", tmp_path, *further, variants=["sst2"], terms=["rdrop"])
    printed = io.StringIO()
    monkeypatch.setattr("seqreg.workbench.text.progress.console", Console(file=printed, width=200))
    trainer = train.make_trainer(train.prepare(run), tmp_path / "run")
    trainer.train()
    number = r"[\d.]+(e-\d+)?"
    rdrop = rf"rdrop {number} \({number} of it a second task loss\)"
    assert re.search(
        rf"step 3 of 3 \(100%\)  loss {number} = base {number} \+ {rdrop} \+ smart {number}", printed.getvalue()
    )
    assert not re.search(r"smart 0\.0+\b", printed.getvalue())
    assert {"task/rdrop", "part/rdrop"} <= trainer.state.log_history[0].keys()


def test_a_run_says_once_that_a_term_does_nothing(tmp_path: Path) -> None:
    size = sample_files.TINY_BERT.replace("}", ", hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}")
    further = ["optimisation.max_steps=3", f"model.settings={size}", "logging.diagnostics_steps=2"]
    run = run_of("glue", tmp_path, *further, variants=["sst2"], terms=["r3f"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train.make_trainer(train.prepare(run), tmp_path / "run").train()
    said = [str(one.message) for one in caught if issubclass(one.category, Advice)]
    assert len(said) == 1
    remedy = "raise scale, such as scale=0.1 with relative=True, or give adapters lora_dropout=0.1"
    assert said[0].endswith(f"does nothing on this model and batch: {remedy}")


def test_the_criterion_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    real = build.build_criterion
    monkeypatch.setattr(build, "build_criterion", lambda settings: built.append(settings) or real(settings))
    train.train(run_of("gigaword", tmp_path, variants=[], terms=["r3f"]))
    assert len(built) == 1


def test_trainers_are_assembled_by_their_constructor() -> None:
    for path in sorted(Path(train.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {ast.unparse(inner) for target in targets for inner in ast.walk(target)}
            outside = {name for name in names if re.fullmatch(r"trainer\.\w+", name)}
            assert outside <= {"trainer._evaluation_due", "trainer.state"}, f"{path}: {outside}"


def test_an_anchor_to_the_output_of_a_random_head_is_told(tmp_path: Path) -> None:
    card, bert = tiny_tasks.task(tmp_path, "colour"), tiny_tasks.bert(tmp_path / "bert")

    def said(*settings: str) -> list[str]:
        where = [f"task={card}", f"data.path={tmp_path / 'colour'}", *tiny_tasks.SHORT, f"output={tmp_path / 'run'}"]
        run = run_config.resolve("glue", terms=["anchor"], overrides=[*where, *settings])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Advice)
            made = train.prepare(run)
            made.model.save_pretrained(tmp_path / "trained")
            made.tokenizer.save_pretrained(tmp_path / "trained")
        return [str(one.message) for one in caught if one.category is Advice]

    new_head, knows_the_task = f"model.name={bert}", f"model.name={tmp_path / 'trained'}"
    (line,) = said(new_head)
    assert line.startswith("anchor: the head of this model is new, so that the output which divergence=kl stays near")
    assert "terms.anchor.divergence=l2" in line
    assert not said(new_head, "terms.anchor.divergence=l2")
    assert not said(new_head, "terms.anchor.reference=average")  # it follows the head
    assert not said(knows_the_task)
    assert said(knows_the_task, "model.new_head=true") == [line]
    scratch = [key for key in sample_files.tiny("roberta", tmp_path / "colour") if key.startswith("model.")]
    assert "trained from scratch" in said(*scratch)[0]
