"""Everything that the library can do, a recipe can say; and what a recipe of a term says is the library's default."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg import Ascent, Criterion, build_term, selective_update
from seqreg.build import UPDATES, build_update, term_names
from seqreg.errors import BadInput
from seqreg.integrations.hf import RegularizedTrainer, r4f
from seqreg.schedules import SCHEDULES
from seqreg.workbench.config import lookup, overlay, run_config
from seqreg.workbench.data import loading
from seqreg.workbench.run import train
from tests.helpers import sample_files
from tests.workbench.run.test_train import run_of

TRAINER = {
    "criterion": "terms",
    "diagnostics_steps": "logging.diagnostics_steps",
    "smoothness_steps": "logging.smoothness_steps",
    "unlabelled_dataset": "data.unlabelled",
    "unlabelled_ratio": "data.unlabelled_ratio",
    "replay_dataset": "data.replay",
    "replay_share": "data.replay",  # inside it
    "update": "optimisation.update",
}
"""What the trainers take beside transformers' own, and the keys that say it."""
OTHER: dict[Any, Any] = {"epoch": 7, "measure": "plain", "layers": "all", 1e-8: 1e-4}
"""Values of updates beside their defaults."""


def resolved(*overrides: str, terms: tuple[str, ...] = ()) -> run_config.Config:
    return run_config.resolve("quickstart", terms=terms, overrides=overrides).config


def options(function: Any) -> dict[str, Any]:
    """The named parameters that have a default."""
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not one.empty}


@pytest.mark.parametrize("name", term_names())
def test_every_setting_of_a_term_is_a_key(name: str) -> None:
    term = build_term(name)
    keys = [field.name for field in fields(term) if field.name != "attack"]
    keys += [f"attack.{field.name}" for field in fields(Ascent)] if hasattr(term, "attack") else []
    for key in keys:
        value = "other" if key == "name" else attrgetter(key)(term)
        found = resolved(f"terms.{name}.{key}={json.dumps(value)}", terms=(name,)).criterion().terms[0]
        assert attrgetter(key)(found) == value
    for preset in term.presets:
        words = f"terms.{name}.preset={preset}", "data.unlabelled=texts.jsonl"
        assert resolved(*words, terms=(name,)).criterion().terms[0].preset == preset


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_a_weight(name: str) -> None:
    for key, default in options(SCHEDULES[name]).items():
        value = 0.5 if key == "weight" else int(default) + 1
        weight = resolved(f"terms.r3f={{weight: {{schedule: {name}, {key}: {value}}}}}").criterion().terms[0].weight
        assert isinstance(weight, SCHEDULES[name])
        assert getattr(weight, key) == value


def test_every_option_of_the_criterion_is_a_key() -> None:
    changed = {"label_smoothing": 0.2, "smoothing": "fairseq", "per": "sequence", "fused": False}
    weighted = {"label_smoothing": 0.0, "loss": "dft"}  # which excludes smoothing
    assert options(Criterion.__init__).keys() == changed.keys() | weighted.keys()
    for given in (changed, weighted):
        criterion = resolved(*(f"loss.{key}={json.dumps(value)}" for key, value in given.items())).criterion()
        assert {key: getattr(criterion, key) for key in given} == given


def test_every_update_and_each_of_its_settings_is_a_key() -> None:
    kinds = {
        kind
        for kind in vars(selective_update).values()
        if inspect.isclass(kind) and issubclass(kind, selective_update.Update)
    }
    assert set(UPDATES.values()) == {kind for kind in kinds if not inspect.isabstract(kind)}
    for name, kind in UPDATES.items():
        assert type(resolved(f"optimisation.update.{name}=null").update()) is kind
        for key, default in options(kind).items():
            value = OTHER[default] if default in OTHER else default / 2 if isinstance(default, float) else default + 1
            assert getattr(resolved(f"optimisation.update.{name}.{key}={value}").update(), key) == value


def test_every_option_of_the_trainers_and_of_r4f_is_a_key() -> None:
    own = {
        one.name
        for one in inspect.signature(RegularizedTrainer.__init__).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    }
    assert own == {*TRAINER, "build_context", "strict"}  # code, and what --allow-change says of a run
    known = json.loads(json.dumps(resolved().model_dump()))
    for key in TRAINER.values():
        inside: Any = known
        for part in key.split("."):
            assert part in inside, key
            inside = inside[part]
    assert {f"head_{key}" for key in options(r4f)} <= known["model"].keys()


def test_uegr_has_both_stages_and_the_baseline_none() -> None:
    update = resolved(terms=("uegr",)).update()
    assert isinstance(update, selective_update.StochasticUpdate)
    assert resolved().update() is None
    assert resolved("optimisation.update=null", terms=("uegr",)).update() is None
    for setting in ("optimisation.update.selective.ratio=0.2", "optimisation.update={selective: {ratio: 0.2}}"):
        other = resolved(setting, terms=("uegr",)).update()  # another one takes its place
        assert isinstance(other, selective_update.SelectiveUpdate)
        assert other.ratio == 0.2
    mild = resolved("optimisation.update.stochastic.alpha=0.9", terms=("uegr",)).update()
    assert isinstance(mild, selective_update.StochasticUpdate)
    assert (mild.alpha, mild.beta) == (0.9, 1.0)
    roast = resolved(terms=("roast",))
    assert isinstance(roast.update(), selective_update.StochasticUpdate)
    assert roast.method == "roast"


@pytest.mark.parametrize("name", UPDATES)
def test_a_run_applies_its_update(name: str, tmp_path: Path) -> None:
    """Weights that the update keeps still are still after a step."""
    further = [f"optimisation.update={{{name}: {{}}}}", "optimisation.max_steps=2", "optimisation.weight_decay=0"]
    shop = train.prepare(run_of("glue", tmp_path, *further, variants=["sst2"]))
    before = torch.cat([p.detach().clone().flatten() for p in shop.model.parameters()])
    trainer = train.make_trainer(shop, tmp_path / "run")
    assert isinstance(trainer.update, UPDATES[name])
    trainer.train()
    moved = (torch.cat([p.detach().flatten() for p in shop.model.parameters()]) != before).float().mean()
    if name == "stochastic":
        inside = trainer.update.places
        assert 0 < len(inside) < len(list(shop.model.parameters()))
        assert trainer.update.factors.keys() == inside
        share = torch.cat([factor.flatten() for factor in trainer.update.factors.values()]).bool().float().mean()
        assert abs(share - 0.45) < 0.02  # the mean of sigmoid(2 (r - 0.6))
        return
    assert 0 < moved < (0.6 if name == "child_tuning_f" else 0.45)
    if name == "child_tuning_d":
        assert sum(int(mask.sum()) for mask in trainer.update.masks.values()) == round(0.3 * len(before))
        draws = torch.get_rng_state()
        trainer.measure(selective_update.ChildTuningD())
        assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize(("recipe", "variant"), [("glue", "sst2"), ("gigaword", "tiny")])
def test_terms_train_on_texts_without_labels_and_old_examples(recipe: str, variant: str, tmp_path: Path) -> None:
    card = run_config.resolve(recipe, variants=[variant]).card
    rows = [{key: row[key] for key in list(row)[:1]} for row in sample_files.rows(card, 5, seed=9)]
    path = sample_files.write(tmp_path / "texts.jsonl", rows)
    old = sample_files.write(tmp_path / "old.jsonl", sample_files.rows(card, 6, seed=8))
    further = [
        "terms.jachess.mode=alternate", f"data.unlabelled={path}", "optimisation.max_steps=2",
        f"data.cache_dir={tmp_path / 'cache'}", f"data.replay={{path: '{old}', share: 0.5}}",
    ]  # fmt: skip
    run = run_of(recipe, tmp_path, *further, variants=[variant], terms=["jachess"])
    shop = train.prepare(run)
    assert len(shop.splits.sets[loading.UNLABELLED]) == 5
    trainer = train.make_trainer(shop, tmp_path / "run")
    trainer.train()
    logged = [one for one in trainer.state.log_history if "loss" in one]
    assert all(one["value/jachess.unlabelled"] > 0 and one["value/nll.replay"] > 0 for one in logged)


def test_impossible_settings_are_refused_in_one_line() -> None:
    for words, message in {
        ("terms.jachess.mode=alternate",): r"terms.jachess.mode=alternate: counts on texts without lab",
        ("optimisation.update={selectve: {}}",): r"command line: optimisation.update: unknown 'selectve'; did you mean",
        ("optimisation.update={selective: {rato: 1}}",): r"update selective: unknown setting 'rato'; did you mean",
        (
            "optimisation.update.selective.ratio=2",
        ): r"^command line: optimisation.update.selective.ratio=2: expected a number in \(0, 1\]",
        ("optimisation.update.child_tuning_f.seed=x",): r"seed='x': expected a whole number >= 0",
        ("optimisation.update={selective: {}, child_tuning_f: {}}",): r"expected one of stochastic, selective, child_t",
        ("optimisation.update.stochastic.refresh=0",): (
            r"^command line: optimisation.update.stochastic.refresh=0: expected a whole number >= 1, or 'epoch'"
        ),
        ("optimisation.update.stochastic.scope=head",): r"scope='head': expected 'layers' or 'all'",
        ("optimisation.update.stochastic.alpha=.nan",): r"alpha=nan: expected a number from 0 to 1",
        ("optimisation.update.stochastic={bta: 1}",): r"update stochastic: unknown setting 'bta'; did you mean 'beta'",
        ("optimisation.update=selective",): r"optimisation.update='selective'",
    }.items():
        with pytest.raises(BadInput, match=message) as caught:
            resolved(*words, terms=("jachess",))
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(BadInput, match="expected a mapping"):
        build_update({"selective": 3})
    run = run_config.resolve("quickstart", overrides=["data.unlabelled=nowhere.jsonl"])
    with pytest.raises(BadInput, match=r"data.unlabelled=nowhere.jsonl: no such file"):
        loading.load(run.card, run.config.data)


@pytest.mark.parametrize("name", lookup.names("recipes/terms"))
def test_a_recipe_of_a_term_says_what_the_library_says(name: str) -> None:
    """A key that it sets has the value of the library's default, or of a preset that it names."""
    block = overlay.read(lookup.find("recipes/terms", name))
    for term, settings in block["terms"].items():
        of_paper = build_term(term, {key: value for key, value in settings.items() if key == "preset"})
        defaults = {field.name: getattr(of_paper, field.name) for field in fields(of_paper)}
        assert {**defaults, **settings} == defaults
    for update, settings in block.get("optimisation", {}).get("update", {}).items():
        defaults = options(UPDATES[update])
        assert {**defaults, **settings} == defaults
