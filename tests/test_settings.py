"""Settings that hold settings: merged with the defaults of their owner, and answered in one line."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from seqreg import Ascent, BadInput, Criterion, Passes, Term, build_term
from seqreg.ascent import RESCALED_ASCENT
from seqreg.term import check_packed
from seqreg.terms.freelb import FreeLB
from seqreg.terms.sift import SiFT
from seqreg.terms.smart import SMART
from seqreg.terms.vat import VAT
from tests.helpers.outside_term import ConfidencePenalty


@pytest.mark.parametrize("given", [Ascent(steps=2), {"steps": 2}])
def test_what_is_left_out_is_the_default_of_the_term(given: Any) -> None:
    attack = VAT(attack=given).attack
    assert (attack.steps, attack.rule, attack.norm, attack.radius) == (2, "power", "l2", 0.05)
    assert SiFT(attack=given).attack == replace(SiFT().attack, steps=2)


def test_what_is_left_out_is_that_of_the_preset() -> None:
    attack = SMART(preset="mtdnn", attack=Ascent(steps=2)).attack
    assert attack == Ascent(**{**RESCALED_ASCENT, "steps": 2, "padding": True})
    assert FreeLB(preset="freelb", attack={"inject": "scaled"}).attack.radius == 0.3


def test_a_term_that_is_copied_or_replaced_keeps_its_attack() -> None:
    term = SMART(preset="mtdnn", attack=Ascent(steps=2))
    for other in (replace(term, weight=0.5), copy.deepcopy(term), pickle.loads(pickle.dumps(term))):
        assert other.attack == term.attack
    assert build_term("smart", term.settings()) == term


def test_only_settings_that_differ_are_shown() -> None:
    assert SMART(attack=Ascent(steps=2, radius=0.1)).settings() == {"attack": {"steps": 2}}
    assert VAT(attack={"rule": "power"}).settings() == {}
    assert "attack={'steps': 2}" in repr(Criterion(SMART(attack=Ascent(steps=2))))


@pytest.mark.parametrize("name", ["smart", "sift", "vat", "alum", "freelb", "uegr"])
def test_an_old_flat_key_is_answered_with_its_place(name: str) -> None:
    with pytest.raises(BadInput, match=r"radius=0\.5: the setting is in attack: write attack\.radius=0\.5, in YAML"):
        build_term(name, {"radius": 0.5})


@pytest.mark.parametrize(
    ("attack", "key", "line"),
    [
        ({"steps": 0}, "attack.steps", "mine: attack.steps=0: expected a whole number >= 1, and at most 1000"),
        ({"radius": "x"}, "attack.radius", "mine: attack.radius='x': expected a finite number"),
        ({"stepz": 2}, "attack.stepz", "mine: attack: unknown setting 'stepz'; did you mean 'steps'?"),
        (3, "attack", "mine: attack=3: expected a mapping of settings, such as {where: input}"),
    ],
)
def test_a_bad_setting_is_named_with_its_place(attack: Any, key: str, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        SMART(name="mine", attack=attack)
    assert (str(caught.value), caught.value.key) == (line, key)


def test_packed_rows_are_refused_inside_an_attack() -> None:
    with pytest.raises(BadInput, match=r"^vat: attack\.over='sentence': rows are packed"):
        check_packed(VAT())


def test_padding_of_a_term_is_that_of_its_attack() -> None:
    assert SMART(padding=True).attack.padding
    assert not SMART().attack.padding


def test_batches_that_a_term_counts_on_are_known() -> None:
    class Misspelt(ConfidencePenalty):
        counts_on = "labeled"  # type: ignore[assignment]

    with pytest.raises(BadInput, match="counts_on='labeled': choose from labelled, unlabelled, both"):
        Criterion(Misspelt())


def test_the_public_members_of_a_term_are_few() -> None:
    members = {name for name in dir(Term) if not name.startswith("_")} | {field.name for field in fields(Term)}
    assert len(members) <= 14, members


def test_a_term_without_a_declaration_makes_its_own_passes() -> None:
    assert Passes(own="unknown").needs_clean_masks
    assert not Passes().needs_clean_masks
