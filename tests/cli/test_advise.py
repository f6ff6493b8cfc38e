"""`seqreg advise`: what every term does on a model, and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg import Criterion, advise
from seqreg.build import build_term, term_names
from seqreg.integrations.hf import context
from seqreg.integrations.hf.term_advice import dropout_rates
from seqreg.terms.anchor import Anchor
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.workbench.config import run_config
from seqreg.workbench.config.settings import Lora
from seqreg.workbench.data.adapters import with_adapters
from seqreg.workbench.data.sample_batch import batch, kind_of
from tests.helpers import tiny_models, tiny_tokenizer
from tests.helpers.tiny_tasks import seqreg

CHOSEN = {"r3f": R3F(), "relative": R3F(scale=0.1, relative=True), "rdrop": RDrop(), "anchor": Anchor()}


def verdicts(model: Any, name: str, **options: Any) -> dict[str, str]:
    found = advise(model, tiny_models.batch(name), CHOSEN, repeats=1, **options)
    return {term.term: term.verdict for term in found.terms}


def test_terms_on_models_without_dropout_with_it_and_with_that_of_adapters() -> None:
    llama = tiny_models.dropout_off(tiny_models.make("llama"))
    plain = verdicts(llama, "llama")
    assert plain["r3f"] == plain["rdrop"] == "nothing"
    assert plain["relative"] in ("counts", "weak")  # its logits are those of random weights
    assert plain["anchor"] in ("counts", "begins at 0")
    assert verdicts(tiny_models.make("bart"), "bart")["rdrop"] != "nothing"
    adapters = Lora(r=4, lora_dropout=0.5, target_modules="all-linear")
    adapted = with_adapters(tiny_models.dropout_off(tiny_models.make("llama")), adapters, frozenset())
    assert verdicts(adapted, "llama")["rdrop"] != "nothing"
    assert dropout_rates(adapted)["lora_dropout"] == 0.5
    assert dropout_rates(llama) == {}


def test_looking_changes_nothing_and_values_are_those_of_the_criterion() -> None:
    model = tiny_models.dropout_off(tiny_models.make("llama")).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = advise(model, tiny_models.batch("llama"), CHOSEN, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    report = Criterion()(context(model.train(), tiny_models.batch("llama")))
    assert found.base_loss == pytest.approx(float(report.total.detach()), rel=0.01)  # after three small steps
    by_name = {term.term: term for term in found.terms}
    assert (by_name["relative"].forwards, by_name["relative"].backwards) == (1, 1)
    assert by_name["relative"].value == pytest.approx(by_name["relative"].part_over_base * found.base_loss / 0.1)
    assert all((term.seconds or 0) > 0 for term in found.terms)
    assert "scale=0.1 with relative=True" in by_name["r3f"].note


def test_a_list_of_terms_is_known_by_their_names() -> None:
    terms = [R3F(), R3F(name="again")]
    found = advise(tiny_models.make("roberta"), tiny_models.batch("roberta"), terms, repeats=1)
    assert [term.term for term in found.terms] == ["r3f", "again"]


def test_a_term_that_does_not_count_on_the_batch_is_refused() -> None:
    chosen = {"off": R3F(weight=0.0), "unlabelled": JacHess(mode="alternate")}
    found = advise(tiny_models.make("roberta"), tiny_models.batch("roberta"), chosen, repeats=1)
    assert [term.verdict for term in found.terms] == ["refused", "refused"]
    assert [term.note.partition(",")[0] for term in found.terms] == [
        "its weight is 0 at step 0", "jachess: on='unlabelled' counts on texts without labels",
    ]  # fmt: skip


def test_noise_and_dropout_are_told_apart(tmp_path: Path) -> None:
    chosen = {"tiny": R3F(scale=1e-6), "none": R3F(scale=0.0), "large": R3F(scale=1.0), "shared": R3F(dropout="shared")}
    found = advise(tiny_models.make("roberta"), tiny_models.batch("roberta"), chosen, repeats=1)
    by_name = {term.term: term for term in found.terms}
    both, masks, noise = by_name["tiny"].sources or (0.0, 0.0, 0.0)
    assert both == pytest.approx(masks, rel=1e-2)  # the same masks
    assert 0 <= noise < 1e-4 * masks
    both, masks, noise = by_name["none"].sources or (0.0, 1.0, 1.0)
    assert (both, noise) == (masks, 0.0)
    both, masks, noise = by_name["large"].sources or (0.0, 0.0, 0.0)
    assert noise > masks > 0
    assert by_name["shared"].sources is None
    assert not by_name["none"].note
    plain = advise(tiny_models.dropout_off(tiny_models.make("llama")), tiny_models.batch("llama"), chosen, repeats=1)
    assert all(term.sources is None for term in plain.terms)
    tiny_models.make("gpt2", vocab_size=len(tiny_tokenizer.tokenizer())).save_pretrained(tmp_path)
    tiny_tokenizer.tokenizer().save_pretrained(tmp_path)
    said = seqreg("advise", tmp_path, "-t", "r3f:scale=0", cwd=tmp_path).stdout
    assert "the noise alone gives 0: the noise adds next to nothing" in " ".join(said.split())


def test_a_refusal_is_a_line_of_the_table() -> None:
    found = advise(tiny_models.make("t5"), tiny_models.batch("t5"), {"sift": build_term("freelb", {"preset": "roast"})})
    assert found.terms[0].verdict == "refused"
    assert found.terms[0].note == (
        "freelb: attack.inject='layernorm': the encoder has no LayerNorm on its embeddings: use 'scaled' or 'word'"
    )


def test_recipes_of_terms_have_settings_for_causal_models() -> None:
    assert run_config.term_settings("r3f") == {"r3f": {}}
    assert run_config.term_settings("r3f", causal=True) == {"r3f": {"scale": 0.1, "relative": True}}
    recipe = run_config.resolve("gigaword", variants=["smollm2"], terms=["r3f"])
    assert recipe.config.terms == {"r3f": {"scale": 0.1, "relative": True}}
    changed = run_config.resolve("gigaword", variants=["smollm2"], terms=["r3f"], overrides=["terms.r3f.scale=0.2"])
    assert changed.config.terms == {"r3f": {"scale": 0.2, "relative": True}}
    own = run_config.resolve("gigaword", variants=["smollm2"], terms=["r3f:scale=0.3"])
    assert own.config.terms == {"r3f": {"scale": 0.3, "relative": True}}
    assert run_config.resolve("gigaword", terms=["r3f"]).config.terms == {"r3f": {}}
    for overrides, rate in (([], 0.1), (["model.lora.lora_dropout=0.3"], 0.3), (["model.lora=null"], None)):
        rdrop = run_config.resolve("gigaword", variants=["smollm2"], terms=["rdrop"], overrides=overrides)
        assert getattr(rdrop.config.model.lora, "lora_dropout", None) == rate
    assert run_config.resolve("sft", variants=["tiny"], terms=["rdrop"]).config.model.lora is None


def test_a_file_is_asked_by_the_prompt_of_its_card(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer.tokenizer(), tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "the cat", "completion": "a dog"}) + "\n")
    model = tiny_models.make("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    (ids,) = batch(model, tokenizer, "causal", 1, file, "sft")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat a dog"


@pytest.mark.parametrize(("name", "kind"), [("llama", "causal"), ("bart", "seq2seq"), ("roberta", "classifier")])
def test_the_command(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    model = tiny_models.make(name, vocab_size=len(tokenizer), max_position_embeddings=256)
    assert kind_of(model.config) == "classifier" or model.config.architectures is None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = seqreg("advise", "model", "--json", cwd=tmp_path)
    found = json.loads(said.stdout)
    names = {term["term"].partition(":")[0] for term in found["terms"]}
    assert names == set(term_names())
    assert ("r3f:scale=0.1,relative=true" in [term["term"] for term in found["terms"]]) == (kind == "causal")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"source": "the cat", "target": "a dog"}) + "\n")
    words = ["-t", "r3f", "-t", "r3f:scale=0.2,relative=true", "--batch-size", "2", "--lora-dropout", "0.5"]
    given = [] if kind == "classifier" else ["--data", "pairs.jsonl"]
    table = seqreg("advise", "model", *words, *given, cwd=tmp_path).stdout
    assert "lora_dropout 0.5" in table
    assert "r3f:scale=0.2" in table
    refused = seqreg("advise", "model", "-t", "r3f+rdrop", cwd=tmp_path, code=2)
    assert "one term at a time" in refused.stderr
    if kind == "classifier":
        refused = seqreg("advise", "model", "--data", "pairs.jsonl", cwd=tmp_path, code=2)
        assert "--task text_pairs" in refused.stderr


def test_another_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    for name, size in (("model", len(tokenizer)), ("small", 20)):
        tiny_models.make("bart", vocab_size=size, max_position_embeddings=256).save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "words")
    refused = seqreg("advise", "./model", cwd=tmp_path, code=2)
    assert "there is no tokenizer: its vocabulary is empty; set --tokenizer NAME" in " ".join(refused.stderr.split())
    refused = seqreg("advise", "./small", "--tokenizer", "./words", cwd=tmp_path, code=2)
    assert f"--tokenizer: it has {len(tokenizer)} tokens, more than ./small embeds" in refused.stderr
    refused = seqreg("advise", "./model", "--tokenizer", "vocabulary:letters", cwd=tmp_path, code=2)
    assert "has no text or list of symbols 'letters'" in " ".join(refused.stderr.split())
    said = seqreg("advise", "./model", "--tokenizer", "./words", "-t", "rdrop", "--json", cwd=tmp_path)
    assert [term["term"] for term in json.loads(said.stdout)["terms"]] == ["rdrop"]
