"""Scores of texts that a card chooses: which decides, which way is better, and what is written of every example."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from seqreg.errors import BadInput
from seqreg.metrics.rouge.score import rouge
from seqreg.metrics.texts import score
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.config.cards import Generation
from seqreg.workbench.data import models
from seqreg.workbench.data.examples import Example, example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.data.word_limits import WordLimits
from seqreg.workbench.run import train
from seqreg.workbench.run.record import _bytes, fingerprint
from seqreg.workbench.scores.evaluate import score_texts, with_average
from tests.helpers import sample_files

PAIRS = {"title": "pairs", "kind": "generation", "rule": "", "columns": {"source": "source", "target": "target"},
         "lengths": {"source": 8}}  # fmt: skip
TEXTS = ["a cat sat", "the dog ran far", "", "a mat"]
SAMPLING = ["generation.do_sample=true", "generation.top_k=0", "generation.temperature=2.0"]
TARGETS = ["the cat sat", "the dog ran", "nothing", "a mat"]


def card(*metrics: str, **further: Any) -> cards.Card:
    return cards.parse({**PAIRS, "metric": list(metrics), **further}, "card")


def test_rouge_is_what_it_was() -> None:
    examples = [Example(f"a source {n}", None, target) for n, target in enumerate(TARGETS)]
    scored = score_texts(TEXTS, examples, card("rouge"))
    report = rouge(TEXTS, TARGETS, sources=[row.source for row in examples], split="newline")
    assert scored.metrics["score"] == scored.metrics["rougeL"] == 100 * report.means["rougeL"]
    assert {key: scored.metrics[key] for key in report.counts} == report.counts
    assert scored.intervals["rouge2"] == tuple(100 * end for end in report.intervals["rouge2"])
    assert scored.signature == report.signature
    keys = ["index", "source", "prediction", "reference", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert list(scored.predictions[0]) == keys
    assert scored.predictions[1]["rougeL"] == round(float(report.scores["rougeL"][1, 2]), 6)


def test_the_first_metric_decides_and_knows_its_direction() -> None:
    both = card("cer", "exact_match")
    assert (both.score, both.greater_is_better, both.scores) == ("cer", False, ["cer", "exact_match"])
    assert card("exact_match", "cer").greater_is_better
    examples = [Example("x", None, target) for target in TARGETS]
    scored = score_texts(TEXTS, examples, both)
    rate = 100 * score("cer", TEXTS, [[target] for target in TARGETS]).means["cer"]
    assert scored.metrics["score"] == scored.metrics["cer"] == rate
    assert scored.signature == "cer|nrefs=1; exact_match|nrefs=1"
    assert scored.predictions[0].keys() >= {"cer", "cer_edits", "cer_length", "cer_pseudovalue", "exact_match"}
    two = card("cer", splits={"test": "t", "more": "m"}, average=True)
    assert with_average({"test": scored, "more": scored}, two)["average"].metrics == {"score": rate, "cer": rate}


def test_several_references_are_scored_and_one_is_trained_on() -> None:
    several = card("rouge", columns={"source": "source", "target": "target", "references": "references"})
    record = {"source": "s", "target": " a mat ", "references": ["a mat", "the cat sat "]}
    row = example(several, record, "file:1")
    assert row == Example("s", None, "a mat", references=("a mat", "the cat sat"))
    assert row is not None
    scored = score_texts(["the cat sat"], [row], several, resamples=1)
    assert scored.metrics["rougeL"] == 100
    assert scored.predictions[0]["references"] == ["a mat", "the cat sat"]
    assert example(several, {"source": "s", "target": "t"}, "file:2") == Example("s", None, "t")
    with pytest.raises(BadInput, match="file:3: the column 'references' is 'a': expected a list of texts"):
        example(several, {**record, "references": "a"}, "file:3")
    with pytest.raises(BadInput, match=r"the column 'references\[1\]' is 5: expected text"):
        example(several, {**record, "references": ["a", 5]}, "file:4")


def test_references_are_in_the_fingerprint_and_change_none_without() -> None:
    plain = Example("s", "t", "u", 1)
    assert _bytes(plain) == json.dumps(["s", "t", "u", 1]).encode()  # as ever: runs of before can be resumed
    one, other = (fingerprint(Splits({"test": [Example("s", None, "a", references=("a", text))]})) for text in "bc")
    assert one != other


@pytest.mark.parametrize(
    ("metrics", "further", "message"),
    [
        (["accuracy"], {}, "metric=.*: rouge, bleu, chrf, exact_match, cer, wer are for kind='generation'"),
        (["cer", "cer"], {}, "the same score twice"),
        (["per"], {}, r"metric\.0='per': expected 'rouge', .*'entity_f1', .* or 'spearman'$"),
        (["rouge"], {"columns": {"source": "a", "target": "b", "references": ["b", "b"]}}, "the same column twice"),
        (["bleu"], {"tokenize": "13b"}, "tokenize='13b': expected '13a'"),
        (["rouge"], {"kind": "classification", "labels": ["a", "b"],
                     "columns": {"source": "s", "label": "l", "references": "r"}}, "are for kind='generation'"),
    ],
)  # fmt: skip
def test_cards_with_scores_that_do_not_fit(metrics: list[str], further: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        card(*metrics, **further)


def tiny_run(tmp_path: Path, metrics: str, *further: str) -> run_config.Run:
    """A few steps on pairs of texts that are scored by some metrics."""
    path = tmp_path / "pairs.yaml"
    path.write_text(json.dumps({**PAIRS, "metric": metrics.split(), "generation": {"num_beams": 1}}))
    known, _ = cards.load(str(path))
    sample_files.folder(tmp_path / "data", known, train=12, held=6)
    settings = [f"task={path}", *sample_files.tiny("bart", tmp_path / "data"), "evaluation.eval_before_training=false"]
    return run_config.resolve("quickstart", overrides=[*settings, f"output={tmp_path / 'run'}", *further])


def test_the_best_checkpoint_has_the_lowest_error_rate(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, "cer bleu", "optimisation.max_steps=4", "optimisation.learning_rate=0.05", "evaluation.eval_steps=1",
        "checkpoints.save_steps=1", "evaluation.load_best_model_at_end=true", "checkpoints.save_total_limit=9",
        "generation.max_length=24", *SAMPLING,
    )  # fmt: skip
    metrics = train.train(run)
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    scores = [line["eval_score"] for line in state["log_history"] if "eval_score" in line]
    assert len(set(scores)) > 1
    assert state["best_metric"] == min(scores)
    assert metrics["scores"]["validation"]["cer"] == pytest.approx(min(scores), abs=1e-6)
    assert metrics["scores"]["validation"]["signature"].startswith("cer|nrefs=1; bleu|nrefs:1|case:mixed")
    page = (tmp_path / "run" / "README.md").read_text()
    assert "| validation | cer |" in page
    assert "| validation | bleu |" in page


def test_sampled_texts_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    train.train(tiny_run(tmp_path, "chrf", "logging.tensorboard=false", *SAMPLING))
    written = (tmp_path / "run" / "generated_predictions.txt").read_text()
    assert len(set(written.splitlines())) > 1  # an untrained model that is not sampled says one thing

    def again(*settings: str) -> str:
        output = tmp_path / f"again-{len(settings)}"
        train.evaluate_run(tmp_path / "run", output=output, overrides=settings)
        return (output / "generated_predictions.txt").read_text()

    assert again() == written
    assert again("seed=2") != written
    stored = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert (stored["do_sample"], stored["temperature"]) == (True, 2.0)


def test_suppressed_tokens_are_not_generated(tmp_path: Path) -> None:
    loaded = train.prepare(tiny_run(tmp_path, "chrf"))
    source = loaded.tokenizer("a story", return_tensors="pt")
    said = loaded.model.generate(**source)[0].tolist()
    token = next(token for token in said if token not in loaded.tokenizer.all_special_ids)
    quiet = train.prepare(tiny_run(tmp_path, "chrf", f"generation.suppress_tokens=[{token}]"))
    assert token not in quiet.model.generate(**source)[0].tolist()
    with pytest.raises(BadInput, match=r"generation\.suppress_tokens=\[100000\]: the model has tokens 0 to"):
        train.prepare(tiny_run(tmp_path, "chrf", "generation.suppress_tokens=[100000]"))
    with pytest.raises(BadInput, match=r"top_p=0\.5 does nothing without do_sample=true"):
        tiny_run(tmp_path, "chrf", "generation.top_p=0.5")


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_have_no_more_words_than_asked_for(tmp_path: Path, beams: int) -> None:
    limits = [
        "generation.max_words=5",
        "generation.max_length=60",
        *SAMPLING,  # an untrained model repeats one token otherwise
        f"generation.num_beams={beams}",
    ]
    train.train(tiny_run(tmp_path, "chrf", "logging.tensorboard=false", "evaluation.eval_steps=1", *limits))
    written = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    right = {1, 2, 3, 4, 5}  # fewer where an untrained model spells one word until max_length, or halves of characters
    assert written
    assert {len(line["prediction"].split()) for line in written} <= right
    model = TrainedModel.load(tmp_path / "run")
    batch = next(model.batches(model.splits.sets["validation"]))[1]
    assert {len(text.split()) for text in model.texts(model.generate(batch))} <= right


def test_limits_of_words_are_those_of_a_slow_count(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["one two three four, five. six"], 300)
    ids = torch.tensor([tokenizer("one two", add_special_tokens=False)["input_ids"]])
    started = WordLimits(tokenizer, 0, 3, [tokenizer.eos_token_id])
    scores = torch.zeros(1, len(tokenizer))
    assert torch.equal(started(ids, scores), scores)  # a prompt is not counted
    grown = torch.cat([ids, torch.tensor([tokenizer(" three four five", add_special_tokens=False)["input_ids"]])], -1)
    allowed = torch.isfinite(started(grown, scores))[0]
    for token in range(len(tokenizer)):
        more = tokenizer.decode([*grown[0, ids.shape[1] :].tolist(), token], skip_special_tokens=True)
        if allowed[token]:
            assert len(more.split()) == 3
    assert allowed[tokenizer.eos_token_id]
    fewest = WordLimits(tokenizer, 5, None, [tokenizer.eos_token_id])
    fewest(ids, scores)
    assert not torch.isfinite(fewest(grown, scores))[0, tokenizer.eos_token_id]
    only_end = torch.full_like(scores, -torch.inf)
    only_end[0, tokenizer.eos_token_id] = 0
    assert torch.equal(fewest(grown, only_end), only_end)  # at the last token there is nothing else


@pytest.mark.parametrize(
    "key", ["num_beam_groups", "diversity_penalty", "force_words_ids", "penalty_alpha", "dola_layers"]
)
def test_what_transformers_no_longer_has_is_refused_in_one_line(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadInput, match=rf"generation\.{key}: not in transformers 5"):
        tiny_run(tmp_path, "chrf", f"generation.{key}=2")
    with pytest.raises(BadInput, match="min_words=9 is larger than max_words=3"):
        tiny_run(tmp_path, "chrf", "generation.min_words=9", "generation.max_words=3")
    model = _sampler()
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        model.generate(torch.tensor([[0, 5, 2]]), num_beams=4, num_beam_groups=2, diversity_penalty=0.5)


def _sampler() -> Any:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=12, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def test_temperature_and_top_p_are_those_of_the_distribution() -> None:
    """The first token of many samples, against the softmax by hand."""
    model = _sampler()
    ids = torch.tensor([[0, 5, 2]]).expand(4000, -1)
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    logits = model(input_ids=ids[:1], decoder_input_ids=start).logits[0, -1] * 1.0
    shares = torch.softmax(logits / 0.5, -1)
    order = shares.argsort(descending=True)
    kept = order[: int((shares[order].cumsum(-1) < 0.6).sum()) + 1]
    torch.manual_seed(1)
    settings = Generation(do_sample=True, temperature=0.5, top_p=0.6, top_k=0, num_beams=1, max_length=2)
    models.set_generation(model, SimpleNamespace(generation=settings, model=SimpleNamespace(name=None)))
    drawn = model.generate(ids)[:, 1].bincount(minlength=12) / 4000
    expected = torch.zeros(12).scatter(0, kept, shares[kept] / shares[kept].sum())
    assert set(drawn.nonzero()[:, 0].tolist()) == set(kept.tolist())
    torch.testing.assert_close(drawn, expected, atol=0.04, rtol=0)  # five standard errors of a share
