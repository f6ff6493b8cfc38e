"""From a recipe, a recipe of terms and the command line, laid on top of each other, to the configuration of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.workbench import cards, catalogue, layers, methods
from seqreg.workbench.cards import Card
from seqreg.workbench.files import write_text
from seqreg.workbench.methods import BASELINE, Part
from seqreg.workbench.sections import checked
from seqreg.workbench.settings import Config

_SECTIONS = ("model", "loss", "terms", "optimisation")
"""What a method may have settings of its own in; data and scores are the same for all."""


@dataclass(frozen=True)
class Run:
    """A configuration with the card of its task.

    Args:
        trust: whether the person who started it trusts code that comes with a model; in no file, and never saved
    """

    config: Config
    card: Card
    origins: layers.Layers
    trust: bool = False

    def save(self, folder: Path) -> None:
        """Write config.yaml, which is a recipe again, and the card beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config.model_dump(mode="json"), "task": "task.yaml"}
        write_text(folder / "config.yaml", layers.dump(config))
        card = self.card.model_dump(mode="json", exclude_defaults=True)
        write_text(folder / "task.yaml", layers.dump(card))


def resolve(
    recipe: str,
    *,
    terms: Sequence[str] = (),
    variants: Sequence[str] = (),
    overrides: Sequence[str] = (),
    forget: Sequence[str] = (),
    trust: bool = False,
) -> Run:
    """Lay a recipe, its variants, recipes of terms and `key=value` on top of each other, and check the result.

    Args:
        forget: dotted keys of the recipe that do not count, as if they were not there
    """
    path = catalogue.find("recipes", recipe)
    stack, values = layers.Layers(), layers.read(path)
    for key in forget:
        layers.remove(values, key)
    choices = values.pop("variants", {})
    stack.add(values, str(path))
    for variant in variants:
        if not isinstance(choices, dict) or variant not in choices:
            hint = nearest(variant, choices) if choices else "it has none"
            raise BadInput(f"{path}: unknown variant {variant!r}; {hint}")
        stack.add(choices[variant] or {}, f"{path} ({variant})")
    chosen = [methods.parse(one) for one in terms]
    parts = [part for method in chosen for part in method.parts]
    files = [catalogue.find("recipes/terms", part.recipe) for part in parts if part.recipe != BASELINE]
    blocks = [(found, layers.read(found)) for found in files]
    regression = [(found, block.pop("regression", None)) for found, block in blocks]
    for found, block in blocks:
        _only(block, ("terms", "model"), str(found))
        stack.add(block, str(found))
    own = _own_settings(parts, [block for _, block in blocks])
    for assignment in overrides:
        _has_term(stack, assignment)
        stack.set(assignment)
    card, card_path = _card(stack, path)
    extra = regression if card.kind == "regression" else []
    stack = _with_card(stack, card, card_path, [(str(found), block) for found, block in extra if block])
    for assignment in overrides:
        stack.set(assignment)
    for under, assignment, where in own:  # meant for this method alone, so above what is meant for all
        stack.set(assignment, where, under)
    _drop_terms(stack)
    _refuse_trust(stack)
    name = "-".join([path.stem if path.stem != "config" else path.parent.name, *variants])
    stack.values.setdefault("output", f"runs/{name}/{_folder(chosen)}")
    config = checked(Config, stack.values, stack.origin)
    _check_terms(config, stack)
    if card.kind == "generation" and config.evaluation.resamples < 1:
        where = stack.origin("evaluation.resamples")
        raise BadInput(f"{where}: evaluation.resamples=0: ROUGE has intervals: expected at least 1; 1000 is usual")
    return Run(config, card, stack, trust)


def _folder(chosen: Sequence[methods.Method]) -> str:
    return "-".join(one.name for one in chosen if one.name != BASELINE) or BASELINE


def _own_settings(parts: Sequence[Part], blocks: Sequence[dict[str, Any]]) -> list[tuple[list[str], str, str]]:
    """Settings that a method has of its own: below which keys, `key=value`, and where they were given.

    A key of a section, such as optimisation.learning_rate, is taken as it is; any other is one of the method's term.
    """
    found: list[tuple[list[str], str, str]] = []
    recipes = iter(blocks)
    for part in parts:
        block = {} if part.recipe == BASELINE else next(recipes)
        there, where = block.get("terms"), f"--terms {part}"
        terms = list(there) if isinstance(there, dict) else []
        for setting in part.settings:
            key = setting.partition("=")[0].strip()
            first, _, rest = key.partition(".")
            if first in _SECTIONS and rest and (first != "terms" or rest.partition(".")[0] in terms):
                found.append(([], setting, where))
            elif len(terms) == 1 and key not in terms:
                found.append((["terms", terms[0]], setting, where))
            elif rest and first in terms:
                found.append((["terms", first], setting.strip().partition(".")[2], where))
            else:
                has = (
                    f"has the terms {', '.join(terms)}: say of which, as in {terms[0]}.{key}"
                    if terms
                    else "has no term"
                )
                raise BadInput(f"{where}: {key}: {part.recipe} {has}")
    return found


def _has_term(stack: layers.Layers, assignment: str) -> None:
    """Refuse a setting of a term that the run does not have: it would bring the term in. `terms.r3f={}` does that."""
    key, _, _ = assignment.partition("=")
    parts = key.strip().split(".")
    there = stack.values.get("terms")
    if parts[0] == "terms" and len(parts) > 2 and parts[1] not in (there if isinstance(there, dict) else {}):
        has = f"has {', '.join(there)}" if isinstance(there, dict) and there else "has none"
        raise BadInput(
            f"command line: {assignment}: there is no term {parts[1]!r} (the run {has}): add --terms {parts[1]}"
        )


def _only(block: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in block:
        if key not in known:
            raise BadInput(f"{where}: {key}: unknown key; {nearest(key, known)}")


def _card(stack: layers.Layers, recipe: Path) -> tuple[Card, Path]:
    """The card that the layers ask for; a path that a file names counts from there, and stays in its folder."""
    task = stack.values.get("task")
    if task is None:
        raise BadInput(f"{recipe}: task is missing; choose from {', '.join(catalogue.names('tasks'))}")
    own = isinstance(task, str) and task.endswith((".yaml", ".yml"))
    try:
        if own and stack.origin("task") != "command line":
            task = str(catalogue.inside(recipe.parent, task))
        card, path = cards.load(task)
    except BadInput as error:
        raise BadInput(f"{stack.origin('task')}: task={task!r}: {error}") from None
    stack.values["task"] = str(path.resolve()) if own else task
    return card, path


def _with_card(
    stack: layers.Layers, card: Card, path: Path, extra: Sequence[tuple[str, dict[str, Any]]]
) -> layers.Layers:
    """The same layers on top of what the card says about lengths and generation, with `extra` above both."""
    below = layers.Layers()
    below.add(
        {
            "data": {"max_source": card.lengths.source, "max_target": card.lengths.target},
            "generation": card.generation.model_dump(),
        },
        str(path),
    )
    origins = dict(below.origins)
    below.add(stack.values, "")
    below.origins = {**origins, **stack.origins}
    for where, block in extra:
        below.add(block, where)
    return below


def _drop_terms(stack: layers.Layers) -> None:
    """`terms.r3f=null` takes a term out again; a bare `r3f:` in a file is the term with its defaults."""
    terms = stack.values.get("terms")
    if terms is None:
        stack.values.pop("terms", None)
    elif isinstance(terms, dict):
        for name in [name for name, value in terms.items() if value is None]:
            if stack.origin(f"terms.{name}") == "command line":
                del terms[name]


def _refuse_trust(stack: layers.Layers) -> None:
    for key, origin in stack.origins.items():
        if key.rpartition(".")[2] == "trust_remote_code":
            raise BadInput(f"{origin}: {key}: not a setting: only a person can trust code, with --trust-remote-code")


def _check_terms(config: Config, stack: layers.Layers) -> None:
    """Build the criterion once, so that a misspelt term or setting is found before anything else happens."""
    try:
        terms = config.criterion().terms
    except BadInput as error:
        message = str(error)
        found = re.search(r"unknown (?:setting|preset|schedule) '([^']+)'|\b(\w+)=", message)
        word = next(filter(None, found.groups()), "") if found else ""
        for name, settings in config.terms.items():
            for key, value in (settings or {}).items():
                if word in (key, value):
                    where, what = stack.origin(f"terms.{name}.{key}"), f"terms.{name}.{key}={value!r}"
                    raise BadInput(f"{where}: {what}: {message.removeprefix(f'{name}: {key}={value!r}: ')}") from None
        named = [f"terms.{name}" for name in config.terms if f"{name!r}" in message or name == word]
        raise BadInput(f"{stack.origin(named[0] if named else 'terms')}: {message}") from None
    for name, term in zip(config.terms, terms, strict=True):
        if term.takes_unlabelled and getattr(term, "mode", "") == "alternate":
            key = f"terms.{name}.mode"
            raise BadInput(f"{stack.origin(key)}: {key}='alternate': a run has no unlabelled rows; choose 'joint'")


def load(folder: Path, overrides: Sequence[str] = (), *, forget: Sequence[str] = (), trust: bool = False) -> Run:
    """The run that was saved in a folder."""
    if not os.path.isfile(folder / "config.yaml"):
        there = os.path.isdir(folder)
        raise BadInput(f"{folder}: {'not a run of seqreg: it has no config.yaml' if there else 'no such folder'}")
    return resolve(str(folder / "config.yaml"), overrides=overrides, forget=forget, trust=trust)
