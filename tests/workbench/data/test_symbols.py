"""A tokenizer for sources and another for targets, and those of single symbols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from seqreg.cli.predict import predict
from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.config.settings import Model
from seqreg.workbench.data import models
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.symbols import symbol_tokenizers
from seqreg.workbench.run import train

GRAPHEMES, PHONEMES = "____abcdefgh", "____ABCD"
SIDES = ["model.tokenizer=vocabulary:grapheme_chars", "model.target_tokenizer=vocabulary:phoneme_chars"]


def config(**further: Any) -> transformers.BartConfig:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lists = {"grapheme_chars": GRAPHEMES, "phoneme_chars": PHONEMES} | further
    return transformers.BartConfig(vocab_size=14, forced_eos_token_id=2, **sizes, **heads, **special, **lists)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    transformers.set_seed(0)
    transformers.BartForConditionalGeneration(config()).save_pretrained(tmp_path / "g2p")
    return tmp_path / "g2p"


def chosen(source: str = "grapheme_chars", target: str = "phoneme_chars") -> Model:
    return Model(name="g2p", tokenizer=f"vocabulary:{source}", target_tokenizer=f"vocabulary:{target}")


def test_ids_are_places_in_the_vocabulary() -> None:
    both = symbol_tokenizers(chosen(), config(), [Example("a", target="AB")])
    assert both("bad")["input_ids"] == [1, 5, 4, 7, 2]
    assert both("b?")["input_ids"] == [1, 5, 3, 2]  # 3: the place that no side needs
    assert both(text_target="BAD")["input_ids"] == [1, 5, 4, 7, 2]
    assert both.batch_decode([[1, 5, 4, 7, 2, 0]], skip_special_tokens=True) == ["BAD"]
    assert len(both) == 12


def test_symbols_that_targets_add_get_ids_that_nothing_uses(capsys: pytest.CaptureFixture[str]) -> None:
    both = symbol_tokenizers(chosen(), config(), [Example("a", target="AZ"), Example("b", target="Y")])
    assert both(text_target="AYZ")["input_ids"] == [1, 4, 12, 13, 2]
    assert both.batch_decode([[12, 13]]) == ["YZ"]
    assert "2 symbols of the training targets are not in it (Y Z): they get the ids 12 to 13" in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"3 symbols of the training targets are not in it \(X Y Z\), and the model"):
        symbol_tokenizers(chosen(), config(), [Example("a", target="XYZ")])


def test_symbols_of_several_characters_are_apart_by_spaces() -> None:
    settings = config(arpabet=["<pad>", "<s>", "</s>", "AH0", "B", "K"])
    both = symbol_tokenizers(chosen(target="arpabet"), settings, [Example("a", target="B AH0 K")])
    assert both(text_target="B AH0 K")["input_ids"] == [1, 4, 3, 5, 2]
    assert both.batch_decode([[1, 4, 3, 5, 2]], skip_special_tokens=True) == ["B AH0 K"]
    assert both(text_target="ZH")["input_ids"] == both("?")["input_ids"] == [1, 12, 2]  # the first id that is free
    with pytest.raises(BadInput, match="g2p: its vocabularies leave no id for symbols that are not in them"):
        symbol_tokenizers(chosen(target="arpabet"), config(arpabet=[f"P{n}" for n in range(14)]), [])


def test_a_vocabulary_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no text or list of symbols 'graphem_chars' .* did you mean 'grapheme_chars'"):
        symbol_tokenizers(chosen("graphem_chars"), config(), [])
    with pytest.raises(BadInput, match="20 symbols, and the model embeds 14"):
        symbol_tokenizers(chosen(), config(grapheme_chars="abcdefghijklmnopqrst"), [])


def test_a_trained_model_brings_both_sides_along(pretrained: Path, tmp_path: Path) -> None:
    words = {f"{a}{b}{c}": f"{a}{b}{c}".upper() for a in "abcd" for b in "abcd" for c in "ab"}
    (tmp_path / "words.json").write_text(json.dumps({**words, "read": {"DEFAULT": "A", "VERB": "B"}}))
    settings = [
        "task=g2p", f"data.path={tmp_path / 'words.json'}", f"model.name={pretrained}", *SIDES,
        "optimisation.max_steps=2", "evaluation.eval_steps=0", "evaluation.eval_before_training=false",
        "evaluation.resamples=10", "logging.tensorboard=false", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    run = run_config.resolve("quickstart", overrides=settings)
    loaded = train.prepare(run)
    assert loaded.splits.notes[0] == "words.json: 1 examples left out: a value that is no text"
    metrics = train.train(run)
    assert {"exact_match", "cer", "score"} <= metrics["scores"]["test"].keys()
    assert metrics["metric"] == "exact_match"
    again = models.load_tokenizer(train.trained(tmp_path / "run").config)
    for text in ("bad", "abc"):
        assert again(text)["input_ids"] == loaded.tokenizer(text)["input_ids"]
        assert again(text_target=text.upper())["input_ids"] == loaded.tokenizer(text_target=text.upper())["input_ids"]
    test = loaded.splits.sets["test"]
    (tmp_path / "in.txt").write_text("".join(f"{example.source}\n" for example in test))
    predict(tmp_path / "run", str(tmp_path / "in.txt"), str(tmp_path / "out.txt"))
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "run" / "generated_predictions.txt").read_text()
    scores = train.evaluate_run(tmp_path / "run", output=tmp_path / "again")["scores"]["test"]
    assert scores["cer"] == metrics["scores"]["test"]["cer"]


def test_characters_of_the_training_text_for_a_model_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text(json.dumps({f"a{n}": f"Ä{n}" for n in range(30)}))
    settings = ["task=g2p", f"data.path={tmp_path / 'words.json'}", "model.tokenizer=characters"]
    loaded = train.prepare(run_config.resolve("quickstart", overrides=settings))
    assert loaded.model.config.vocab_size == len(loaded.tokenizer) == 15
    ids = loaded.tokenizer(text_target="Ä12")["input_ids"]
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == "Ä12"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.tokenizer=vocabulary:a"], "vocabulary:KEY is for model.name, characters for model.architecture"),
        (["model.target_tokenizer=characters"], "set both model.tokenizer and model.target_tokenizer like this"),
        (["model.target_tokenizer=folder"], "for a model from scratch: characters"),
        (["model.name=x", "model.tokenizer=vocabulary:a", "model.target_tokenizer=y"], "set both model.tokenizer and"),
    ],
)
def test_sides_that_do_not_go_together_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run_config.resolve("quickstart", overrides=settings)


def test_stored_tokenizers_must_agree_on_special_tokens(tmp_path: Path) -> None:
    for name, offset in (("one", 0), ("other", 1)):
        lists = {"grapheme_chars": "_" * (4 + offset) + "abc", "phoneme_chars": "_" * (4 + offset) + "ABC"}
        settings = config(**lists)
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = offset, 1 + offset, 2 + offset
        symbol_tokenizers(chosen(), settings, []).source.save_pretrained(tmp_path / name)
    model = Model(name=str(tmp_path / "one"), target_tokenizer=str(tmp_path / "other"))
    run = run_config.resolve("quickstart", overrides=[f"model.name={tmp_path / 'one'}"])
    with pytest.raises(BadInput, match="its pad_token_id is 1, "):
        models.load_tokenizer(run.config.updated(model=model))
