"""From a recipe, a recipe of terms and the command line, laid on top of each other, to the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import cards, lookup, methods, overlay
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.methods import BASELINE, Part
from seqreg.workbench.config.schema import checked, texts
from seqreg.workbench.config.settings import Config
from seqreg.workbench.text.atomic_files import REMOVED, write_text

TEXTS = texts(Config)
_SECTIONS = ("model", "loss", "terms", "optimisation")
"""What a method may have settings of its own in; data and scores are the same for all."""


@dataclass(frozen=True)
class Run:
    """A configuration with the card of its task.

    Args:
        trust: whether the person who started it trusts code that comes with a model; in no file, and never saved
        note: what its size says about its scores
    """

    config: Config
    card: Card
    origins: overlay.Layers
    trust: bool = False
    note: str = ""

    def save(self, folder: Path) -> None:
        """Write config.yaml, which is a recipe again, and the card beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config.model_dump(mode="json"), "task": "task.yaml"}
        write_text(folder / "config.yaml", overlay.dump(config))
        card = self.card.model_dump(mode="json", exclude_defaults=True)
        write_text(folder / "task.yaml", overlay.dump(card))


def resolve(
    recipe: str,
    *,
    terms: Sequence[str] = (),
    variants: Sequence[str] = (),
    overrides: Sequence[str] = (),
    forget: Sequence[str] = (),
    trust: bool = False,
    build_terms: bool = True,
    foreign: bool = False,
    paths: Sequence[str] = (),
) -> Run:
    """Lay a recipe, its variants, recipes of terms and `key=value` on top of each other, and check the result.

    Args:
        forget: dotted keys of the recipe that do not count, as if they were not there
        build_terms: check the terms too, which imports the modules of those that are not seqreg's own
        foreign: the recipe may be somebody else's: modules that it names are imported only with `trust`
        paths: of these settings, refuse files and folders that are not there, before anything slow is imported
    """
    path = lookup.find("recipes", recipe)
    stack, values = overlay.Layers(), overlay.read(path)
    for key in forget:
        overlay.remove(values, key)
    choices = _mapping(values.pop("variants", None), f"{path}: variants")
    for variant, block in choices.items():
        choices[variant] = _mapping(block, f"{path}: variants.{variant}")
    stack.add(values, str(path))
    pretrained, note = _named(overrides, "model.name"), ""
    for variant in variants:
        if variant not in choices:
            hint = nearest(variant, choices) if choices else "it has none"
            raise BadInput(f"{path}: unknown variant {variant!r}; {hint}")
        block = dict(choices[variant])
        if "size" in block:
            note = _add_size(stack, block.pop("size"), pretrained)
        stack.add(block, f"{path} ({variant})")
    own_task = stack.values.get("task")
    if pretrained:
        _replace_model(stack, ("architecture", "vocab_size", "settings", "tokenizer"))
    elif _named(overrides, "model.architecture"):
        _replace_model(stack, ("name", "settings", "tokenizer"))
    chosen = [methods.parse(one) for one in terms]
    parts = [part for method in chosen for part in method.parts]
    files = [lookup.find("recipes/terms", part.recipe) for part in parts if part.recipe != BASELINE]
    blocks = [(found, overlay.read(found)) for found in files]
    regression = [(f, _mapping(block.pop("regression", None), f"{f}: regression")) for f, block in blocks]
    for found, block in blocks:
        _only(block, ("terms", "model", "optimisation"), str(found))
        if isinstance(block.get("optimisation"), dict):
            _only(block["optimisation"], ("update",), f"{found}: optimisation")
        stack.add(block, str(found))
    own = _own_settings(parts, [block for _, block in blocks])
    for assignment in overrides:
        _has_term(stack, assignment)
        stack.set(assignment, texts=TEXTS)
    card, card_path = _card(stack, path)
    extra = regression if card.kind == "regression" else []
    stack = _with_card(stack, card, card_path, [(str(found), block) for found, block in extra if block])
    for assignment in overrides:
        stack.set(assignment, texts=TEXTS)
    for under, assignment, where in own:  # meant for this method alone, so above what is meant for all
        stack.set(assignment, where, under=under)
    _drop_terms(stack)
    _refuse_trust(stack)
    task = stack.values["task"]
    other = [] if task == own_task or stack.origin("task") != "command line" else [_short(task)]
    name = "-".join([path.stem if path.stem != "config" else path.parent.name, *other, *variants])
    stack.values.setdefault("output", f"runs/{name}/{_folder(chosen)}")
    config = checked(Config, stack.values, stack.origin)
    _check_paths(config, paths)
    if foreign and build_terms and not trust:
        _refuse_modules(config, stack)
    if build_terms:
        _check_terms(config, stack)
    if card.kind == "generation" and config.evaluation.resamples < 1:
        where = stack.origin("evaluation.resamples")
        raise BadInput(f"{where}: evaluation.resamples=0: ROUGE has intervals: expected at least 1; 1000 is usual")
    return Run(config, card, stack, trust, note)


def resolve_method(
    recipe: str, name: str, given: str, variants: Sequence[str], settings: Sequence[str], trust: bool = False
) -> Run:
    """The run of one method: of the settings of terms those that it has reach it, and the baseline has none."""
    common = [one for one in settings if methods.term_of(one) is None]
    run = resolve(recipe, terms=[given], variants=variants, overrides=common, trust=trust)
    if name == BASELINE and run.config.method != BASELINE:
        raise BadInput(
            f"{recipe}: the baseline would be trained as {run.config.method}: take that out of the recipe and the "
            f"settings, or call it something else: --baseline NAME={BASELINE}"
        )
    own = methods.reaching(settings, run.config.terms)
    if own == common:
        return run
    return resolve(recipe, terms=[given], variants=variants, overrides=own, trust=trust)


def _short(task: str) -> str:
    """A task in the name of a folder."""
    return Path(task).stem if task.endswith((".yaml", ".yml")) else task.replace("/", "-")


def _named(overrides: Sequence[str], key: str) -> bool:
    """Whether the command line gives a key a value that is not null."""
    given = [text.strip() for name, _, text in (one.partition("=") for one in overrides) if name.strip() == key]
    return bool(given) and given[-1] not in ("", "null", "~")


def _add_size(stack: overlay.Layers, name: Any, pretrained: bool) -> str:
    """Add what recipes of one size share; returns the line on what such a model is worth.

    Args:
        pretrained: the command line names a model, so that the block of this name counts too
    """
    path = lookup.find("recipes/sizes", name)
    block = overlay.read(path)
    further = block.pop("pretrained", {})
    notes = [part.pop("note", "") for part in (block, further)]
    stack.add(block, str(path))
    if pretrained:
        stack.add(further, str(path))
    return str(notes[pretrained])


def _replace_model(stack: overlay.Layers, keys: Sequence[str]) -> None:
    """A model that the command line names takes the place of the recipe's, if that is of the other kind."""
    model = stack.values.get("model")
    if isinstance(model, dict) and model.get(keys[0]) is not None:
        for key in keys:
            model.pop(key, None)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    """A part of a file that is laid on top of others; nothing for null."""
    if value is not None and not isinstance(value, dict):
        raise BadInput(f"{where}={value!r}: expected a mapping of keys to values, such as {{seed: 2}}")
    return value or {}


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


def _has_term(stack: overlay.Layers, assignment: str) -> None:
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


def _card(stack: overlay.Layers, recipe: Path) -> tuple[Card, Path]:
    """The card that the layers ask for; a path that a file names counts from there, and stays in its folder."""
    task = stack.values.get("task")
    if task is None:
        raise BadInput(f"{recipe}: task is missing; choose from {', '.join(lookup.names('tasks'))}")
    own = isinstance(task, str) and task.endswith((".yaml", ".yml"))
    try:
        if own and stack.origin("task") != "command line":
            task = str(lookup.inside(recipe.parent, task))
        card, path = cards.load(task)
    except BadInput as error:
        raise BadInput(f"{stack.origin('task')}: task={task!r}: {error}") from None
    stack.values["task"] = str(path.resolve()) if own else task
    return card, path


def _with_card(
    stack: overlay.Layers, card: Card, path: Path, extra: Sequence[tuple[str, dict[str, Any]]]
) -> overlay.Layers:
    """The same layers on top of what the card says about lengths and generation, with `extra` above both."""
    below = overlay.Layers()
    below.add(
        {
            "data": {"max_source_length": card.lengths.source, "max_target_length": card.lengths.target},
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


def _drop_terms(stack: overlay.Layers) -> None:
    """`terms.r3f=null` takes a term out again; a bare `r3f:` in a file is the term with its defaults."""
    terms = stack.values.get("terms")
    if terms is None:
        stack.values.pop("terms", None)
    elif isinstance(terms, dict):
        for name in [name for name, value in terms.items() if value is None]:
            if stack.origin(f"terms.{name}") == "command line":
                del terms[name]


def _refuse_trust(stack: overlay.Layers) -> None:
    for key, origin in stack.origins.items():
        if key.rpartition(".")[2] == "trust_remote_code":
            raise BadInput(f"{origin}: {key}: not a setting: only a person can trust code, with --trust-remote-code")


def _refuse_modules(config: Config, stack: overlay.Layers) -> None:
    """Terms of other packages: importing one runs its code."""
    for name, settings in config.terms.items():
        module = str((settings or {}).get("term", name))
        where = stack.origin(f"terms.{name}")
        if "." in module and where != "command line":
            raise BadInput(
                f"{where}: terms.{name}: the module {module} would be imported, and run with your rights: read it, and "
                "if you trust it give --trust-remote-code"
            )


def _check_terms(config: Config, stack: overlay.Layers) -> None:
    """Build the criterion once, so that a misspelt term or setting is found before anything else happens."""
    for name, settings in config.terms.items():
        from seqreg.build import build_term  # which imports torch

        try:
            term = build_term(name, settings)
        except BadInput as error:
            key, line = error.under(f"terms.{name}", settings or {})
            raise BadInput(f"{stack.origin(key)}: {line}") from None
        if term.needs_unlabelled and config.data.unlabelled is None:
            key = f"terms.{name}.mode"
            fix = "set data.unlabelled=FILE, texts without labels, or choose 'joint'"
            raise BadInput(f"{stack.origin(key)}: {key}='alternate': {fix}")
    try:
        if config.terms:
            config.criterion()
    except BadInput as error:
        raise BadInput(f"{stack.origin('terms')}: {error}") from None
    try:
        if config.optimisation.update:
            config.update()
    except BadInput as error:
        raise BadInput(f"{stack.origin('optimisation.update')}: optimisation.{error}") from None


PATHS = ("data.path", "model.name", "output")
"""Settings that name a file or a folder."""


def _check_paths(config: Config, keys: Sequence[str]) -> None:
    """Refuse what is missing or in the way; whoever reads it looks again."""
    data, model = config.data.path, config.model.name
    if "data.path" in keys and data is not None and not os.path.exists(data):
        raise BadInput(f"data.path={data}: no such file or folder")
    local = model is not None and model.startswith((".", "/", "~"))
    if "model.name" in keys and local and not os.path.isdir(model or ""):
        raise BadInput(f"model.name={model}: no such folder")
    for path in (config.output, *map(str, Path(config.output).parents)) if "output" in keys else ():
        if os.path.exists(path) and not os.path.isdir(path):
            raise BadInput(f"output={config.output}: {path} is a file and in the way: choose another")


def check_trained(folder: Path) -> None:
    """Refuse a folder without a trained model, before anything slow is imported."""
    if not os.path.isfile(folder / "config.yaml"):
        there = os.path.isdir(folder)
        raise BadInput(f"{folder}: {'not a run of seqreg: it has no config.yaml' if there else 'no such folder'}")
    if not os.path.isfile(folder / "config.json"):
        gone = os.path.isfile(folder / REMOVED)
        why = "its comparison has not kept it (--keep-models)" if gone else "has its training ended?"
        raise BadInput(f"{folder}: there is no trained model in it: {why}")


def check_studied(folders: Sequence[str | Path], settings: Sequence[str]) -> None:
    """The same for all folders, and then for the data of their runs: for commands that look into trained models."""
    for folder in folders:
        check_trained(Path(folder))
    for folder in folders:
        resolve(str(Path(folder) / "config.yaml"), overrides=settings, paths=["data.path"], build_terms=False)


def load(
    folder: Path, overrides: Sequence[str] = (), *, forget: Sequence[str] = (), trust: bool = False,
    build_terms: bool = True,
) -> Run:  # fmt: skip
    """The run that was saved in a folder. Whoever does not train with its terms leaves them alone: `build_terms`."""
    if not os.path.isfile(folder / "config.yaml"):
        there = os.path.isdir(folder)
        raise BadInput(f"{folder}: {'not a run of seqreg: it has no config.yaml' if there else 'no such folder'}")
    options: dict[str, Any] = {"trust": trust, "build_terms": build_terms, "foreign": True}
    return resolve(str(folder / "config.yaml"), overrides=overrides, forget=forget, **options)
