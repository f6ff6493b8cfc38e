"""Every recipe with every term: it resolves, and a model of its architecture takes a step and generates."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from seqreg.build import term_names
from seqreg.errors import BadInput
from seqreg.workbench.config import cards, lookup, overlay, run_config
from seqreg.workbench.run import train
from seqreg.workbench.scores.evaluate import evaluate
from tests.helpers import sample_files

RECIPES = lookup.names("recipes")
TERMS = lookup.names("recipes/terms")
ARCHITECTURES = {
    "facebook/bart-large": "bart",
    "google/pegasus-large": "pegasus",
    "FacebookAI/roberta-large": "roberta",
    "microsoft/deberta-v3-base": "deberta-v2",
    "FacebookAI/xlm-roberta-large": "xlm-roberta",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
}
OWN_TEXT = ["classify", "pairs", "summarize", "tag", "translate"]
"""The recipes whose card is made of a file: tests/cli/test_own_text.py trains them."""
RECIPES = [name for name in RECIPES if name not in OWN_TEXT]


def variants(recipe: str) -> list[list[str]]:
    """The recipe as it is, and each of its variants."""
    return [[], *([name] for name in overlay.read(lookup.find("recipes", recipe)).get("variants", {}))]


COMBINATIONS = [(recipe, chosen) for recipe in RECIPES for chosen in variants(recipe)]
STEPS = [(recipe, chosen) for recipe, chosen in COMBINATIONS if chosen in ([], ["pegasus"], ["stsb"], ["mnli"])]


def test_what_there_is() -> None:
    assert sorted([*RECIPES, *OWN_TEXT]) == lookup.names("recipes")
    assert {"cnn_dailymail", "gigaword", "reddit_tifu", "glue", "ner", "xnli", "xsum", "quickstart", "sft"} == set(
        RECIPES
    )
    assert sorted([*term_names(), "asft", "r4f", "roast"]) == TERMS
    assert len(COMBINATIONS) * (len(TERMS) + 1) == 41 * 16


def allowed(recipe: str, chosen: list[str], term: str | None) -> bool:
    """Whether a model has what a term needs: UEGR distributions, R4F a classification head, RoAST a LayerNorm."""
    if term == "roast" and (chosen == ["pegasus"] or recipe == "sft"):
        return False
    if term == "uegr" and chosen == ["stsb"]:
        return False
    return term != "r4f" or recipe in ("glue", "xnli")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_resolves_with_every_term(recipe: str) -> None:
    warnings.simplefilter("error")  # and no recipe uses a retired name
    for chosen in variants(recipe):
        for term in [None, *TERMS]:
            run = run_config.resolve(recipe, terms=[term] if term else [], variants=chosen)
            assert len(run.config.terms) == (term is not None)
            assert run.config.criterion().label_smoothing == run.config.loss.label_smoothing


@pytest.mark.parametrize("path", [lookup.find("recipes", name) for name in RECIPES], ids=lambda path: path.stem)
def test_header_says_what_is_needed(path: Path) -> None:
    text = lookup.header(path)
    assert f"seqreg train {path.stem}" in text
    assert all(word in text for word in ("Hardware:", "Aims at", "Values:", f"bash recipes/{path.stem}.sh"))
    assert (path.parent / f"{path.stem}.sh").exists()


@pytest.mark.parametrize("name", [name for name in lookup.names("recipes/sizes") if name.startswith("tiny")])
def test_header_of_sizes(name: str) -> None:
    path = lookup.find("recipes/sizes", name)
    assert all(word in lookup.header(path) for word in ("--variant tiny", "model.name=FOLDER", "Values:"))
    block = overlay.read(path)
    assert block["note"] != block["pretrained"]["note"]  # what such a model is worth


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "quickstart"])
def test_tiny_variants_are_small(recipe: str) -> None:
    run = run_config.resolve(recipe, variants=["tiny"])
    assert run.config.model.name is None
    assert (run.config.data.max_source_length, run.config.optimisation.max_steps) <= (256, 1000)
    named = run_config.resolve(recipe, variants=["tiny"], overrides=["model.name=folder"])
    assert (named.config.optimisation.max_steps or 0) * named.config.optimisation.per_device_train_batch_size <= 3200
    assert named.config.model.new_head == (run.card.kind != "generation")


@pytest.mark.parametrize("name", TERMS)
def test_header_of_terms(name: str) -> None:
    text = lookup.header(lookup.find("recipes/terms", name))
    assert all(word in text for word in ("seqreg train", "--terms " + name, "Hardware:", "Aims at"))


@pytest.mark.parametrize("term", [None, *TERMS], ids=str)
@pytest.mark.parametrize(("recipe", "chosen"), STEPS, ids=str)
def test_one_step_and_one_generation(recipe: str, chosen: list[str], term: str | None, tmp_path: Path) -> None:
    plain = run_config.resolve(recipe, variants=chosen)
    architecture = (
        ARCHITECTURES[plain.config.model.name] if plain.config.model.name else plain.config.model.architecture
    )
    data = sample_files.folder(tmp_path / "data", plain.card, train=2, held=2)
    settings = sample_files.tiny(str(architecture), data)
    run = run_config.resolve(recipe, terms=[term] if term else [], variants=chosen, overrides=settings)
    if not allowed(recipe, chosen, term):
        with pytest.raises(BadInput, match=r"regression head|classification head|no LayerNorm on its embed"):
            train.make_trainer(train.prepare(run), tmp_path / "run").train()
        return
    shop = train.prepare(run)
    trainer = train.make_trainer(shop, tmp_path / "run")
    result = trainer.train()
    assert result.global_step == 1
    assert result.training_loss > 0
    name = shop.splits.evaluations(run.card)[0]
    scored = evaluate(trainer, run, shop.tokenizer, shop.splits.sets[name], name)
    assert len(scored.predictions) == 2
    assert 0 <= abs(scored.metrics["score"]) <= 100


@pytest.mark.parametrize("recipe", OWN_TEXT)
def test_every_term_resolves_with_a_file_of_ones_own(recipe: str, tmp_path: Path) -> None:
    data = [f"data.path={sample_files.own_text(tmp_path)}"]
    for term in [None, *TERMS]:
        run = run_config.resolve(recipe, terms=[term] if term else [], overrides=data)
    assert run.config.output == f"runs/{recipe}-mine/{TERMS[-1]}"


def test_cards_name_what_they_need() -> None:
    for name in lookup.names("tasks"):
        card, path = cards.load(name)
        local = card.hub is None and card.generated is None
        assert not local or "data.path=" in lookup.header(path) or "data.also=" in lookup.header(path)
        assert lookup.header(path).count("seqreg train") >= 1
