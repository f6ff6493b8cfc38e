"""Models whose folders hold something else than they say: refused before a number is computed from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from seqreg.cli.check import check
from seqreg.cli.predict import predict
from seqreg.errors import BadInput
from seqreg.studies.collapse.encoders import Encoder
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.config import run_config
from seqreg.workbench.data import models
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.run import checkpoints, train
from tests.helpers import sample_files
from tests.helpers.interrupted_runs import one_line, same
from tests.workbench.run.test_train import run_of

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 40,
}  # fmt: skip
T5 = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 16, "d_kv": 8}
SOURCES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SIZE, "BertForPreTraining": SIZE, "BertForSequenceClassification": SIZE, "BertModel": SIZE,
    "RobertaForMaskedLM": SIZE, "RobertaModel": SIZE, "ElectraForPreTraining": SIZE, "DebertaV2ForMaskedLM": SIZE,
    "BartForConditionalGeneration": BART, "BartModel": BART, "T5ForConditionalGeneration": T5,
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2}, "MBartForConditionalGeneration": BART,
}  # fmt: skip

Weights = dict[str, torch.Tensor]


def tokenizer() -> Any:
    return train_tokenizer(("the cat sat on the mat", "markets fell"), 300)


def stored(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder that `save_pretrained` wrote."""
    words = tokenizer()
    cls = getattr(transformers, kind)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    made = cls.config_class(vocab_size=len(words), **ids, **SOURCES[kind], **settings)
    cls(made).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def spoil(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    found = {key: value.clone() for key, value in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(change(found), path, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def renamed(found: Weights) -> Weights:
    return {f"foo.{key}": value for key, value in found.items()}


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda found: {key: value for key, value in found.items() if part not in key}


def in_eight_bits(found: Weights) -> Weights:
    return {key: value.char() if key.endswith("query.weight") else value for key, value in found.items()}


def run_with(folder: Path, tmp_path: Path, *further: str, seq2seq: bool = False) -> run_config.Run:
    settings = [f"model.name={folder}", "model.architecture=null", "model.settings=null", "model.settings={}"]
    settings += ["logging.tensorboard=false"]
    recipe, variants = ("gigaword", []) if seq2seq else ("glue", ["sst2"])
    return run_of(recipe, tmp_path, *settings, *further, variants=variants)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_pretrained_model_gets_a_new_head_and_nothing_else(kind: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", kind)
    run = run_with(folder, tmp_path)
    model = models.load_model(run.config, run.card, tokenizer())
    kept = safetensors.torch.load_file(folder / "model.safetensors")
    body = {key.removeprefix(f"{model.base_model_prefix}."): value for key, value in kept.items()}
    same = [key for key, value in model.base_model.state_dict().items() if key in body and body[key].equal(value)]
    assert len(same) >= len(model.base_model.state_dict()) - 4  # ties, and a pooler that is new
    Encoder.load(str(folder))


@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "BartModel", "T5ForConditionalGeneration"])
def test_a_generator_is_loaded_whole(kind: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", kind)
    run = run_with(folder, tmp_path, seq2seq=True)
    models.load_model(run.config, run.card, tokenizer(), trained=True)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "all renamed": (lambda path: spoil(path, renamed), r"\d\d missing \(.*\d\d unexpected \(foo\.\w"),
    "one layer is missing": (lambda path: spoil(path, without("layer.1.attention")), r"10 missing \(bert.encoder"),
    "more layers in the configuration": (lambda path: set_config(path, num_hidden_layers=3), "16 missing"),
    "fewer layers in the configuration": (lambda path: set_config(path, num_hidden_layers=1), "16 unexpected"),
    "a wider configuration": (lambda path: set_config(path, intermediate_size=32), r"6 of another shape \(bert.encod"),
    "a head in part": (lambda path: spoil(path, without("classifier.bias")), r"1 missing \(classifier.bias\)"),
    "a million layers": (
        lambda path: set_config(path, num_hidden_layers=1_000_000),
        r"config\.json: num_hidden_layers=1,000,000: expected at most 1,000",
    ),
    "weights in eight bits": (
        lambda path: spoil(path, in_eight_bits),
        r"query\.weight is stored as I8, and config\.json has no quantization_config: quantized weights are not",
    ),
    "not finite": (
        lambda path: spoil(path, lambda found: {**found, "classifier.bias": torch.full((2,), float("nan"))}),
        r"1 weights are not finite \(classifier.bias\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_weights_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    change, said = CHANGES[what]
    folder = stored(tmp_path / "model", "BertForSequenceClassification")
    change(folder)
    run = run_with(folder, tmp_path)
    for attempt in (lambda: train.train(run), lambda: check(run)):
        with pytest.raises(BadInput, match=said) as caught:
            attempt()
        assert len(caught.value.lines) == 1
        assert str(folder) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_generator_without_its_decoder_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "BartForConditionalGeneration")
    spoil(folder, without("model.decoder"))
    with pytest.raises(BadInput, match=r"missing \(model.decoder"):
        train.train(run_with(folder, tmp_path, seq2seq=True))
    with pytest.raises(BadInput, match=r"missing \(decoder"):
        Encoder.load(str(folder))


def test_another_number_of_classes_names_the_setting(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "BertForSequenceClassification", num_labels=5)
    with pytest.raises(BadInput, match=r"2 of another shape \(classifier.bias .*model.new_head=true") as caught:
        train.train(run_with(folder, tmp_path))
    assert "[5]" in str(caught.value)
    run = run_with(folder, tmp_path, "model.new_head=true")
    assert models.load_model(run.config, run.card, tokenizer()).num_labels == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("finished")
    train.train(run_of("glue", tmp_path, "logging.tensorboard=false", variants=["sst2"]))
    return tmp_path


@pytest.mark.parametrize("part", ["classifier", "encoder.layer.0.output"])
def test_a_trained_run_is_read_whole_by_every_command(part: str, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    spoil(folder, without(part))
    sample_files.accept_model(folder)
    set_config(folder, architectures=["RobertaForMaskedLM"])  # not even if it claims to be without a head
    before = (folder / "metrics.json").read_bytes()
    source = sample_files.write(tmp_path / "in.jsonl", [{"sentence": "good"}])
    for attempt in (
        lambda: train.evaluate_run(folder),
        lambda: predict(folder, str(source), str(tmp_path / "out.jsonl")),
        lambda: TrainedModel.load(folder).model,
    ):
        with pytest.raises(BadInput, match=r"missing \(.*" + part.partition(".")[0]):
            attempt()
    assert (folder / "metrics.json").read_bytes() == before
    assert not (tmp_path / "out.jsonl").exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "BartForConditionalGeneration")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(BadInput, match=r"there is no tokenizer: its vocabulary is empty; set model.tokenizer=NAME"):
        train.train(run_with(folder, tmp_path, seq2seq=True))


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_generation_settings_that_cannot_be_read_are_refused(text: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "BartForConditionalGeneration")
    (folder / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=r"generation_config.json can be loaded") as caught:
        train.train(run_with(folder, tmp_path, seq2seq=True))
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_an_attention_from_the_hub_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(tmp_path / "model", "BertForSequenceClassification")
    set_config(folder, **{key: "somebody/kernel"})

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the kernel loader was reached")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", never)
    for settings in ((), ("model.new_head=true",)):
        with pytest.raises(BadInput, match=r"config.json asks for \w+='somebody/kernel', which is code from the hub"):
            train.train(run_with(folder, tmp_path, *settings))
    with pytest.raises(BadInput, match="code from the hub"):
        Encoder.load(str(folder))


@pytest.mark.parametrize(("change", "said"), [(renamed, "missing"), (without("decoder.layers.0"), "missing")])
def test_a_checkpoint_whose_weights_do_not_fit_is_not_gone_on_with(
    change: Callable[[Weights], Weights], said: str, copy: Path
) -> None:
    folder = copy / "checkpoint-6"
    facts = {key: value for key, value in checkpoints.manifest(folder).items() if key != "files"}
    spoil(folder, change)
    checkpoints.seal(folder, facts)
    command = same(copy, "checkpoints.save_total_limit=9")
    assert command.wait() == 2, command.text()
    one_line(command, "checkpoint-6: its weights are of another model", said)
