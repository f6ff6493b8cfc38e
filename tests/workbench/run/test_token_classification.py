"""Token classification from a file to scores: words, their tokens and tags, losses, terms, predictions, comparisons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax
from transformers import BertConfig, BertForTokenClassification

from seqreg import Criterion
from seqreg.build import build_criterion
from seqreg.cli import predict
from seqreg.errors import BadInput
from seqreg.integrations.hf import context
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.terms.rdrop import RDrop
from seqreg.workbench.config import cards, lookup, overlay, run_config
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.encoding import Encoded, collator, encode_words
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.run.train import evaluate_run, train
from seqreg.workbench.text import readers
from tests.helpers import sample_files
from tests.helpers.tiny_tasks import seqreg

CONLL = """-DOCSTART- -X- -X- O

# id 1 of a comment
Jane NNP B-NP B-PER
Doe NNP I-NP I-PER
left . O O

Rome NNP B-NP B-LOC
. . O O
"""
WORDS = ["Jane", "Doe's", "", "\n", "New York", "unbelievably", "2024", "."]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS), "a text of other words"], 300)


@pytest.fixture(scope="module")
def card() -> cards.Card:
    return cards.load("conll2003")[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt what is tagged: words with a capital, and numbers."""
    folder = tmp_path_factory.mktemp("tags")
    data = sample_files.folder(folder / "data", cards.load("conll2003")[0], train=200, held=20)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    settings = sample_files.tiny("bert", data)
    chosen = [
        "optimisation.max_steps=60",
        "optimisation.learning_rate=0.02",
        "optimisation.per_device_train_batch_size=16",
    ]
    output = folder / "run"
    resolved = run_config.resolve(
        "ner", terms=["r3f"], overrides=[*settings, *chosen, "data.max_source_length=64", f"output={output}"]
    )
    train(resolved)
    return output


def _metrics(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Files


def test_conll_files_are_lists_of_words_and_tags(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text(CONLL)
    records = [record for _, record in readers.read(path)]
    assert [record["tokens"] for record in records] == [["Jane", "Doe", "left"], ["Rome", "."]]
    assert [record["tags"] for record in records] == [["B-PER", "I-PER", "O"], ["B-LOC", "O"]]
    assert [where for where, _ in readers.read(path)] == [f"{path}:4", f"{path}:8"]


def test_txt_files_of_a_card_with_tags_are_conll(tmp_path: Path, card: cards.Card) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(CONLL)
    splits = loading.load(card, Data(path=str(tmp_path)))
    assert {name: len(some) for name, some in splits.sets.items()} == {"train": 2, "validation": 2, "test": 2}
    assert splits.sets["train"][0] == Example("Jane Doe left", tags=(1, 2, 0))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "'tags' has 1 tags: expected a list of 2"),
        ({"tokens": ["a"], "tags": ["B-CITY"]}, r"'tags\[0\]' is 'B-CITY': expected 0 to 8, or one of O, B-PER"),
        ({"tokens": [], "tags": []}, "expected a list of words, at least one"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "expected a list of words"),
        ({"tokens": ["a", "\0"], "tags": ["O", "O"]}, r"'tokens\[1\]' has a NUL"),
        ({"tokens": ["a"]}, "no column 'tags' or 'ner_tags'"),
    ],
)
def test_bad_tags_are_named_with_their_line(tmp_path: Path, card: cards.Card, record: Any, fault: str) -> None:
    path = sample_files.write(tmp_path / "a.jsonl", [record])
    with pytest.raises(BadInput, match=fault) as error:
        loading.read_file(card, path)
    assert f"{path}:1" in str(error.value)


def test_conll_files_of_unequal_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("Jane B-PER\nDoe\n")
    with pytest.raises(BadInput, match=r"a.conll:2: 1 columns: expected 2"):
        list(readers.read(path))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"labels": ["O", "PER"]}, "the label 'PER': expected O, or B, I, E, S with a type"),
        ({"labels": ["O", "B-A B"]}, "a tag has no spaces"),
        ({"metric": ["accuracy"]}, "entity_f1, token_f5, token_accuracy are for kind='token_classification'"),
        ({"columns": {"source": "tokens", "second": "more", "label": "tags"}}, "columns.second: not for"),
        ({"clean": [{"column": "source", "pattern": "a", "by": "b"}]}, "clean: not for"),
        ({"labels": None}, "labels: the names of the classes"),
    ],
)
def test_cards_with_tags_say_what_they_cannot_have(change: dict[str, Any], fault: str) -> None:
    values = overlay.read(lookup.find("tasks", "conll2003"))
    with pytest.raises(BadInput, match=fault):
        cards.parse({**values, **change}, "card.yaml")


def test_new_task_makes_a_card_of_tags(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text(CONLL)
    values = json.loads(seqreg("new-task", path, "--json", cwd=tmp_path).stdout)
    assert cards.load(str(tmp_path / "train.yaml"))[0].kind == "token_classification"
    assert values["labels"] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    assert values["metric"] == ["entity_f1"]
    numbers = sample_files.write(tmp_path / "pos.jsonl", [{"words": ["a", "b"], "pos_tags": [0, 2]}])
    values = json.loads(seqreg("new-task", numbers, "--json", cwd=tmp_path).stdout)
    assert (values["labels"], values["metric"]) == (["tag_0", "tag_1", "tag_2"], ["token_accuracy"])
    assert values["columns"]["label"] == "pos_tags"


# Tokens


def _example(tags: tuple[int, ...] | None = None) -> Example:
    return Example(" ".join(word.replace(" ", "\u00a0") for word in WORDS), tags=tags)


@pytest.mark.parametrize("prefix", ["", "find names: "])
def test_the_first_token_of_a_word_is_where_its_characters_begin(tokenizer: Any, prefix: str) -> None:
    row, places = encode_words(tokenizer, _example(), prefix, None)
    assert row["input_ids"] == tokenizer(prefix + _example().source)["input_ids"]
    assert [place is None for place in places] == [word.strip() == "" for word in WORDS]
    for word, place, after in zip(WORDS, places, [*places[1:], None], strict=True):
        if place is not None and after is not None:
            text = tokenizer.decode(row["input_ids"][place:after]).replace("\u00a0", " ")
            assert text.strip() == word
    _, short = encode_words(tokenizer, _example(), prefix, places[4] + 2)  # one token of the word, and </s>
    assert short[:5] == places[:5]
    assert short[5:] == [None] * 3


def test_only_the_first_token_of_a_word_has_a_label(tokenizer: Any) -> None:
    tags = (1, 2, 3, 4, 5, 6, 7, 8)
    config = type("Settings", (), {"data": Data(max_source_length=64)})()
    rows = Encoded([_example(tags), Example("a text", tags=(1, 0))], tokenizer, config)
    _, places = encode_words(tokenizer, _example(), "", None)
    labels = rows[0]["labels"]
    assert {place: labels[place] for place in places if place is not None} == {
        place: tag for place, tag in zip(places, tags, strict=True) if place is not None
    }
    assert sum(label != -100 for label in labels) == 6
    batch = collator(tokenizer, "token_classification", None)([rows[0], rows[1]])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


# The loss, and terms


def _batch(masked: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 40, (3, 7))
    labels = torch.randint(0, 4, (3, 7))
    labels[:, masked:3] = -100
    mask = torch.ones_like(ids)
    labels[2, 5:], mask[2, 5:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _model(dropout: float = 0.0) -> BertForTokenClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForTokenClassification(config).train()


def test_the_loss_is_a_mean_over_words_and_the_models_own() -> None:
    model, batch = _model(), _batch()
    report = Criterion()(context(model, batch))
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen = batch["labels"] != -100
    torch.testing.assert_close(report.total, cross_entropy(logits[chosen], batch["labels"][chosen]))
    torch.testing.assert_close(report.total, model(**batch).loss)


def test_rdrop_is_the_divergence_of_labelled_positions_and_so_is_its_gradient() -> None:
    model, batch = _model(dropout=0.3), _batch()
    torch.manual_seed(5)
    report = Criterion(RDrop(alpha=0.7))(context(model, batch, step=0))
    report.total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    both = model(**{key: torch.cat([value, value]) for key, value in inputs.items()}).logits
    chosen = batch["labels"] != -100
    first, second = (log_softmax(half[chosen].float(), -1) for half in both.chunk(2))
    labels = batch["labels"][chosen]
    symmetric = ((first.exp() - second.exp()) * (first - second)).sum(-1).mean()
    expected = cross_entropy(first, labels) + cross_entropy(second, labels) + 0.7 * symmetric / 2
    expected.backward()
    torch.testing.assert_close(report.total, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("term", [name for name in lookup.names("recipes/terms") if name not in ("r4f", "lwf")])
def test_every_term_counts_labelled_positions_alone(term: str) -> None:
    settings = overlay.read(lookup.find("recipes/terms", term))
    criterion = build_criterion({**settings.get("loss", {}), "terms": settings["terms"]})
    model, batch = _model(dropout=0.1), _batch()
    torch.manual_seed(3)
    report = criterion(context(model, batch, step=0))
    report.total.backward()
    assert torch.isfinite(report.total)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    torch.manual_seed(3)
    other = build_criterion({**settings.get("loss", {}), "terms": settings["terms"]})
    fewer = other(context(_model(dropout=0.1), _batch(masked=2), step=0))
    assert float(fewer.total.detach()) != float(report.total.detach())


# Runs


def test_a_run_learns_tags_and_writes_its_scores(run: Path, card: cards.Card) -> None:
    scores = _metrics(run)["scores"]["test"]
    assert _metrics(run)["metric"] == "entity_f1"
    assert scores["entity_f1"] > 60
    assert scores["entity_f1"] == scores["score"]
    assert {"entity_f1", "entity_precision", "entity_recall"} == set(scores["intervals"])
    assert scores["entity_f1_PER"] > 60
    lines = _lines(run / "predictions.jsonl")
    metrics = pytest.importorskip("seqeval.metrics")
    truth, guess = ([line[key].split() for line in lines] for key in ("reference", "prediction"))
    assert scores["entity_f1"] == pytest.approx(100 * metrics.f1_score(truth, guess), abs=1e-4)
    assert "pipeline_tag: token-classification" in (run / "README.md").read_text()
    assert not (run / "generated_predictions.txt").exists()
    config = json.loads((run / "config.json").read_text())
    assert config["id2label"]["1"] == (card.labels or [])[1]


def test_a_trained_model_is_what_transformers_loads(run: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(run)
    tokenizer = AutoTokenizer.from_pretrained(run)
    line = _lines(run / "predictions.jsonl")[0]
    source = loading.read_file(cards.load("conll2003")[0], Path(_settings(run)["data"]["path"]) / "test.jsonl")[0]
    row, places = encode_words(tokenizer, source, "", 64)
    with torch.no_grad():
        chosen = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1)
    tags = ["O" if place is None else model.config.id2label[int(chosen[place])] for place in places]
    assert " ".join(tags) == line["prediction"]


def _settings(run: Path) -> dict[str, Any]:
    return overlay.read(run / "config.yaml")


def test_evaluate_on_a_file_has_the_same_scores(run: Path, tmp_path: Path) -> None:
    file = Path(_settings(run)["data"]["path"]) / "test.jsonl"
    metrics = evaluate_run(run, file=file, output=tmp_path / "again")
    for name in ("entity_f1", "entity_recall", "entity_f1_PER"):
        assert metrics["scores"]["test"][name] == pytest.approx(_metrics(run)["scores"]["test"][name], abs=1e-4)


def test_predict_writes_a_tag_per_word(run: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("Three  fires in Paris\t2024\n")
    assert predict.predict(run, str(source), str(target)) == 1
    assert len(target.read_text().split()) == 5
    file = Path(_settings(run)["data"]["path"]) / "test.jsonl"
    predict.predict(run, str(file), str(tmp_path / "out.jsonl"))
    predicted = [line["prediction"] for line in _lines(tmp_path / "out.jsonl")]
    assert predicted == [line["prediction"] for line in _lines(run / "predictions.jsonl")]
    unlabelled = sample_files.write(tmp_path / "in.jsonl", [{"tokens": ["Paris", "burns"]}])
    assert predict.predict(run, str(unlabelled), str(tmp_path / "more.jsonl")) == 1


def test_words_that_are_cut_off_count_as_not_found(run: Path, tmp_path: Path) -> None:
    file = Path(_settings(run)["data"]["path"]) / "test.jsonl"
    evaluate_run(run, file=file, output=tmp_path / "cut", overrides=("data.max_source_length=3",))
    for line in _lines(tmp_path / "cut" / "predictions.jsonl"):
        assert len(line["prediction"].split()) == len(line["reference"].split())
        assert set(line["prediction"].split()[1:]) == {"O"}


def test_studies_use_it_or_refuse_in_one_line(run: Path, tmp_path: Path) -> None:
    from seqreg.studies.calibrate.study import calibrate
    from seqreg.studies.collapse.study_files import ProbeTask
    from seqreg.studies.robustness.study import robustness

    finding = calibrate(run, output=tmp_path / "calibrate")
    assert finding.values
    with pytest.raises(BadInput, match="parts its words from their tags"):
        robustness([run], output=tmp_path / "robustness")
    model = TrainedModel.load(run)
    with pytest.raises(BadInput, match="a linear probe is a classifier"):
        ProbeTask.load("tags", model.card, model.run.config.data, 10)
