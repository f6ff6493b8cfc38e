"""The configuration of a run: a recipe, recipes of terms and the command line, laid on top of each other."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import cards, lookup, methods, overlay
from seqreg.workbench.config.cards import Card, ColumnNames
from seqreg.workbench.config.methods import BASELINE, MethodPart
from seqreg.workbench.config.other_names import RETIRED_TASKS
from seqreg.workbench.config.overlay import Overlay
from seqreg.workbench.config.own_file import OwnFile, training_file
from seqreg.workbench.config.schema import checked, texts
from seqreg.workbench.config.settings import Config, Data
from seqreg.workbench.text.atomic_files import REMOVED, inside, refuse_links_out, writable, write_text

if TYPE_CHECKING:
    from seqreg.criterion import Criterion

TEXTS = texts(Config)
CAUSAL = "causal"
"""True in a recipe, a variant or a size of causal language models without dropout: recipes of terms are then laid on it
with their block of this name."""
WITHOUT_GPU = "without_gpu"
"""Settings of a recipe that count on a machine without a GPU."""
_SECTIONS = ("model", "loss", "terms", "optimisation")
"""What a method may have settings of its own in; data and scores are the same for all."""


@dataclass(frozen=True)
class Run:
    """A configuration with the card of its task.

    Args:
        trust: whether the person who started it trusts code that comes with a model; in no file, and never saved
        note: what its size says about its scores
        machine: what the recipe chose for this machine, and why
        search: the values that its recipes of terms declare for a search, by dotted key; without keys that were set by
            the command line
    """

    config: Config
    card: Card
    origins: Overlay
    trust: bool = False
    note: str = ""
    machine: str = ""
    search: dict[str, list[Any]] = field(default_factory=dict)

    @functools.cached_property
    def criterion(self) -> Criterion:
        """The loss, built once; it has a memory, so whoever evaluates it takes a deep copy."""
        return self.config.criterion()

    def save(self, folder: Path) -> None:
        """Write config.yaml, which is a recipe again, and the card beside it."""
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

    From the bottom: the task card, the recipe, its variants, the recipes of terms, `overrides`, and the settings that a
    method has of its own.

    Args:
        forget: dotted keys of the recipe that do not count, as if they were not there
        build_terms: check the terms too, which imports the modules of those that are not seqreg's own
        foreign: the recipe may be somebody else's: modules that it names are imported only with `trust`
        paths: of these settings, refuse files and folders that are not there, before anything slow is imported
    """
    path = lookup.find("recipes", recipe)
    stack, note = _recipe(path, variants, forget, _named(overrides, "model.name"))
    machine = _for_machine(stack)
    recipe_task = _current_task(stack.values.get("task"))
    if _named(overrides, "model.name"):
        _replace_model(stack, ("architecture", "vocab_size", "settings", "tokenizer", "target_tokenizer"))
    elif _named(overrides, "model.architecture"):
        _replace_model(stack, ("name", "settings", "tokenizer", "target_tokenizer"))
    causal = stack.values.pop(CAUSAL, False)
    if not isinstance(causal, bool):
        raise BadInput(f"{stack.origin(CAUSAL)}: {CAUSAL}={causal!r}: expected true or false")
    chosen = [methods.parse(text) for text in terms]
    parts = [_TermRecipe(part) for method in chosen for part in method.parts]
    for part in parts:
        stack.add(part.values, part.origin)
        stack.add(_for_causal(part, stack) if causal else {}, part.origin)
    for assignment in overrides:
        _has_term(stack, assignment)
        stack.set(assignment, texts=TEXTS)
    card, card_path = _card(stack, path)
    own_file = _own_file(stack) if card.from_file else None
    card = _with_columns(stack, card if own_file is None else _card_of_file(stack, card, own_file))
    stack = _above_card(stack, card, card_path)
    for part in parts if card.kind == "regression" else ():
        stack.add(part.regression, part.origin)
    for assignment in overrides:  # again, above what is meant for regression
        stack.set(assignment, texts=TEXTS)
    for part in parts:  # meant for this method alone, so above what is meant for all
        for under, assignment in part.settings():
            stack.set(assignment, f"--terms {part.part}", under=under)
    _drop_terms(stack)
    _refuse_trust(stack)
    task = stack.values["task"] = _current_task(stack.values["task"])
    other_task = [] if task == recipe_task or stack.origin("task") != "command line" else [_short(task)]
    other_task += [] if own_file is None else [own_file.stem]
    name = "-".join([path.stem if path.stem != "config" else path.parent.name, *other_task, *variants])
    method = "-".join(method.name for method in chosen if method.name != BASELINE) or BASELINE
    stack.values.setdefault("output", f"runs/{name}/{method}")
    config = checked(Config, stack.values, stack.origin)
    search = {key: values for part in parts for key, values in part.search().items() if not _is_given(stack, key)}
    run = Run(config, card, stack, trust, note, machine, search)
    _check_paths(config, paths)
    if build_terms:
        if foreign and not trust:
            _refuse_modules(config, stack)
        _check_terms(run)
        for part in parts:
            _check_search(run, part)
    if card.scores_examples and config.evaluation.resamples < 1:
        where, what = stack.origin("evaluation.resamples"), "texts" if card.kind == "generation" else "tags"
        raise BadInput(f"{where}: evaluation.resamples=0: {what} are scored with intervals: expected 1 or more")
    return run


def _recipe(path: Path, variants: Sequence[str], forget: Sequence[str], pretrained: bool) -> tuple[Overlay, str]:
    """A recipe with some of its variants, and what their size says about scores.

    A variant may name a `size`, a file that several recipes share, and one other `variant` that it is laid on top of.

    Args:
        pretrained: the command line names a model
    """
    stack, values, note = Overlay(), overlay.read(path), ""
    choices = _mapping(values.pop("variants", None), f"{path}: variants")
    choices = {name: _mapping(block, f"{path}: variants.{name}") for name, block in choices.items()}
    stack.add(values, str(path))
    for key in forget:
        stack.remove(key)
    bases = ((choices.get(variant, {}).get("variant"), variant) for variant in variants)
    for variant in (str(name) for pair in bases for name in pair if name is not None):
        if variant not in choices:
            hint = nearest(variant, choices) if choices else "it has none"
            raise BadInput(f"{path}: unknown variant {variant!r}; {hint}")
        block = choices[variant]
        if "size" in block:
            note = _add_size(stack, block["size"], pretrained)
        values = {key: value for key, value in block.items() if key not in ("size", "variant")}
        stack.add(values, f"{path} ({variant})")
    return stack, note


def _for_machine(stack: Overlay) -> str:
    """Lay the block of a recipe for machines without a GPU on top where there is none; returns what was chosen and why.

    The block says it in its `note`; what the command line gives counts in any case.
    """
    block = _mapping(stack.values.pop(WITHOUT_GPU, None), WITHOUT_GPU)
    if not block:
        return ""
    import torch

    if torch.accelerator.is_available():
        return (
            f"{torch.accelerator.current_accelerator()}: the recipe as it is; without a GPU it takes less of everything"
        )
    note = str(block.pop("note", ""))
    stack.add(block, WITHOUT_GPU)
    return note


class _TermRecipe:
    """The file behind one part of a method: `values` for every task, and more for regression and for causal models."""

    def __init__(self, part: MethodPart) -> None:
        self.part, self.origin = part, ""
        self.values: dict[str, Any] = {}
        self.regression: dict[str, Any] = {}
        self.causal: dict[str, Any] = {}
        self._search: dict[str, Any] = {}
        if part.recipe == BASELINE:
            return
        path = lookup.find("recipes/terms", part.recipe)
        self.origin, self.values = str(path), overlay.read(path)
        self.regression = _mapping(self.values.pop("regression", None), f"{path}: regression")
        self.causal = _mapping(self.values.pop(CAUSAL, None), f"{path}: {CAUSAL}")
        _only(self.causal, ("terms", "model"), f"{path}: {CAUSAL}")
        self._search = _mapping(self.values.pop("search", None), f"{path}: search")
        _only(self.values, ("terms", "model", "optimisation", "loss"), str(path))
        for section, keys in {"optimisation": ("update",), "loss": ("loss", "label_smoothing")}.items():
            if isinstance(self.values.get(section), dict):
                _only(self.values[section], keys, f"{path}: {section}")

    def settings(self) -> Iterator[tuple[list[str], str]]:
        """The settings that the method has of its own: below which keys, and `key=value`."""
        for setting in self.part.settings:
            key, equals, value = setting.partition("=")
            under, key = self._place(key.strip(), f"--terms {self.part}")
            yield under, f"{key}{equals}{value}"

    def search(self) -> dict[str, list[Any]]:
        """The values to try in a search, by dotted key."""
        space = {}
        for key, values in self._search.items():
            under, name = self._place(str(key), f"{self.origin}: search")
            if not isinstance(values, list) or not values or any(values.count(value) > 1 for value in values):
                raise BadInput(f"{self.origin}: search.{key}={values!r}: expected a list of different values to try")
            space[".".join([*under, name])] = values
        return space

    def _place(self, key: str, where: str) -> tuple[list[str], str]:
        """Below which keys a key of this recipe is, and what it is called there.

        A key of a section, such as optimisation.learning_rate, is taken as it is; any other is a key of the term.
        """
        terms = list(self.values["terms"]) if isinstance(self.values.get("terms"), dict) else []
        first, _, rest = key.partition(".")
        if first in _SECTIONS and rest and (first != "terms" or rest.partition(".")[0] in terms):
            return [], key
        if len(terms) == 1 and key not in terms:
            return ["terms", terms[0]], key
        if rest and first in terms:
            return ["terms", first], rest
        which = f"has the terms {', '.join(terms)}: say of which, as in {terms[0]}.{key}" if terms else "has no term"
        raise BadInput(f"{where}: {key}: {self.part.recipe} {which}")


def _for_causal(part: _TermRecipe, stack: Overlay) -> dict[str, Any]:
    """The block of a recipe of terms for causal models; settings of adapters only where the run has some."""
    given, model = stack.values.get("model"), part.causal.get("model") or {}
    if isinstance(given, dict) and isinstance(given.get("lora"), dict):
        return part.causal
    return {**part.causal, "model": {key: value for key, value in model.items() if key != "lora"}}


def term_settings(name: str, *, causal: bool = False) -> dict[str, dict[str, Any]]:
    """The terms of a recipe of terms with their settings; those of its block for causal models on top, if asked for."""
    recipe, stack = _TermRecipe(MethodPart(name)), Overlay()
    stack.add(recipe.values, recipe.origin)
    stack.add(recipe.causal if causal else {}, recipe.origin)
    return {term: dict(settings or {}) for term, settings in stack.values.get("terms", {}).items()}


def resolve_method(
    recipe: str, name: str, given: str, variants: Sequence[str], settings: Sequence[str], trust: bool = False
) -> Run:
    """The run of one method: of the settings of terms those that it has reach it, and the baseline has none."""
    common = [setting for setting in settings if methods.term_of(setting) is None]
    run = resolve(recipe, terms=[given], variants=variants, overrides=common, trust=trust)
    if name == BASELINE and run.config.method != BASELINE:
        raise BadInput(
            f"{recipe}: the baseline would be trained as {run.config.method}: take that out of the recipe and the "
            f"settings, or call it something else: --baseline NAME={BASELINE}"
        )
    reaching = methods.reaching(settings, run.config.terms)
    if reaching == common:
        return run
    return resolve(recipe, terms=[given], variants=variants, overrides=reaching, trust=trust)


def _short(task: str) -> str:
    """A task in the name of a folder."""
    return Path(task).stem if task.endswith((".yaml", ".yml")) else task.replace("/", "-")


def _named(overrides: Sequence[str], key: str) -> bool:
    """Whether the command line gives a key a value that is not null."""
    pairs = (override.partition("=") for override in overrides)
    values = [value.strip() for name, _, value in pairs if name.strip() == key]
    return bool(values) and values[-1] not in ("", "null", "~")


def _add_size(stack: Overlay, name: Any, pretrained: bool) -> str:
    """Add what recipes of one size share; returns the line on what such a model is worth.

    Args:
        pretrained: the command line names a model, so that the block of this name counts too
    """
    path = lookup.find("recipes/sizes", name)
    block = overlay.read(path)
    blocks = [block, block.pop("pretrained", {})][: 1 + pretrained]
    notes = [values.pop("note", "") for values in blocks]
    for values in blocks:
        stack.add(values, str(path))
    return str(notes[-1])


def _replace_model(stack: Overlay, keys: Sequence[str]) -> None:
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


def _has_term(stack: Overlay, assignment: str) -> None:
    """Refuse a setting of a term that the run does not have: it would bring the term in. `terms.r3f={}` does that."""
    key, _, _ = assignment.partition("=")
    parts = key.strip().split(".")
    terms = stack.values.get("terms")
    terms = terms if isinstance(terms, dict) else {}
    if parts[0] == "terms" and len(parts) > 2 and parts[1] not in terms:
        has = f"has {', '.join(terms)}" if terms else "has none"
        known = parts[1] in lookup.names("recipes/terms")
        fix = f"add --terms {parts[1]}" if known else "a term of your own is named in a file: --terms FILE.yaml"
        raise BadInput(f"command line: {assignment}: there is no term {parts[1]!r} (the run {has}): {fix}")


def _only(block: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in block:
        if key not in known:
            raise BadInput(f"{where}: {key}: unknown key; {nearest(key, known)}")


def _card(stack: Overlay, recipe: Path) -> tuple[Card, Path]:
    """The card that the layers ask for; a path that a file names counts from there, and stays in its folder."""
    task = stack.values.get("task")
    if task is None:
        raise BadInput(f"{recipe}: task is missing; choose from {', '.join(lookup.names('tasks'))}")
    is_file = isinstance(task, str) and task.endswith((".yaml", ".yml"))
    try:
        if is_file and stack.origin("task") != "command line":
            task = str(inside(recipe.parent, task))
        card, path = cards.load(task)
    except BadInput as error:
        raise BadInput(f"{stack.origin('task')}: task={task!r}: {error}") from None
    stack.values["task"] = str(path.resolve()) if is_file else task
    return card, path


def _with_columns(stack: Overlay, card: Card) -> Card:
    """The card, with other columns where data.columns names some."""
    data = stack.values.get("data")
    names = data.get("columns") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not any(names.values()):
        return card
    chosen = checked(ColumnNames, names, lambda key: f"{stack.origin('data.columns')}: data.columns")
    for key in ("label",) if card.kind == "generation" else ("target", "references", "messages"):
        if getattr(chosen, key):
            raise BadInput(f"{stack.origin('data.columns')}: data.columns.{key}: {card.title} has none: leave it out")
    columns = {**card.columns.model_dump(), **{key: value for key, value in chosen.model_dump().items() if value}}
    values = {**card.model_dump(exclude_defaults=True), "columns": columns}
    return checked(Card, values, lambda key: f"{stack.origin('data.columns')}: data.columns")


def _own_file(stack: Overlay) -> Path:
    """The file whose card is made of it, for a recipe for people's own text."""
    data = stack.values.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if not isinstance(path, str):
        raise BadInput(f"{stack.origin('task')}: which file has your text? Give data.path=FILE")
    return Path(path)


def _card_of_file(stack: Overlay, card: Card, path: Path) -> Card:
    """A card of `from_file` with what it leaves open."""
    data = checked(Data, stack.values["data"], stack.origin)
    given = {key: names for key, names in data.columns.model_dump().items() if names}
    file = OwnFile.read(training_file(path), data.delimiter, data.encoding, "data.")

    def ask(part: str, question: str, columns: Sequence[str]) -> str:
        raise BadInput(f"{path}: {question} Give data.columns.{part}=NAME, one of {', '.join(columns)}")

    template = card.model_dump(exclude_defaults=True)
    return cards.parse(file.card(template, given, ask), str(path))


def _current_task(task: Any) -> Any:
    """What a task card is called now."""
    return RETIRED_TASKS.get(task, task) if isinstance(task, str) else task


def _above_card(stack: Overlay, card: Card, path: Path) -> Overlay:
    """The same settings on top of what the card says about lengths and generation."""
    below = Overlay()
    lengths = {"max_source_length": card.lengths.source, "max_target_length": card.lengths.target}
    below.add({"data": lengths, "generation": card.generation.model_dump()}, str(path))
    origins = dict(below.origins)
    below.add(stack.values, "")
    below.origins = {**origins, **stack.origins}
    return below


def _drop_terms(stack: Overlay) -> None:
    """`terms.r3f=null` takes a term out again; a bare `r3f:` in a file is the term with its defaults."""
    terms = stack.values.get("terms")
    if terms is None:
        stack.values.pop("terms", None)
    elif isinstance(terms, dict):
        for name in [name for name, value in terms.items() if value is None]:
            if stack.origin(f"terms.{name}") == "command line":
                del terms[name]


def _refuse_trust(stack: Overlay) -> None:
    for key, origin in stack.origins.items():
        if key.rpartition(".")[2] == "trust_remote_code":
            raise BadInput(f"{origin}: {key}: not a setting: only a person can trust code, with --trust-remote-code")


def _refuse_modules(config: Config, stack: Overlay) -> None:
    """Terms of other packages: importing one runs its code."""
    for name, settings in config.terms.items():
        module = str((settings or {}).get("term", name))
        where = stack.origin(f"terms.{name}")
        if "." in module and where != "command line":
            raise BadInput(
                f"{where}: terms.{name}: the module {module} would be imported, and run with your rights: read it, and "
                "if you trust it give --trust-remote-code"
            )


def _check_terms(run: Run) -> None:
    """Build the criterion, so that a misspelt term or setting is found before anything else happens."""
    config, stack = run.config, run.origins
    _check_each_term(config, stack)
    try:
        if config.terms:
            _ = run.criterion
    except BadInput as error:
        raise BadInput(f"{stack.origin('terms')}: {error}") from None
    _check_update(config, stack)


def _check_each_term(config: Config, stack: Overlay) -> None:
    """Build every term by itself."""
    for name, settings in config.terms.items():
        from seqreg.build import build_term  # which imports torch

        try:
            term = build_term(name, settings)
        except BadInput as error:
            key, line = error.under(f"terms.{name}", settings or {})
            raise BadInput(f"{stack.origin(key)}: {line}") from None
        if term.on != "labelled" and config.data.unlabelled is None:
            key = "mode" if "mode" in (settings or {}) else "on"
            raise BadInput(
                f"{stack.origin(f'terms.{name}.{key}')}: terms.{name}.{key}={getattr(term, key)}: counts on texts "
                "without labels: set data.unlabelled=FILE"
            )


def _check_update(config: Config, stack: Overlay) -> None:
    """Build the change of the optimizer's step, if there is one: this imports torch."""
    if not config.optimisation.update:
        return
    try:
        config.update()
    except BadInput as error:
        ((name, settings), *_) = (config.optimisation.update or {}).items()
        path = f"optimisation.update.{name}"
        key, line = error.under(path, settings or {})
        line = f"optimisation.{error}" if key == path else line
        raise BadInput(f"{stack.origin(key)}: {line}") from None


def _is_given(stack: Overlay, key: str) -> bool:
    """Whether a key was set by a person, for all methods or for this one: a search leaves it as it is."""
    return stack.origin(key).startswith(("command line", "--terms "))


def _check_search(run: Run, part: _TermRecipe) -> None:
    """Refuse values for a search that a run could not have."""
    for key, values in part.search().items():
        for value in values:
            tried = Overlay()
            tried.values, tried.origins = copy.deepcopy(run.origins.values), dict(run.origins.origins)
            for name in reversed(key.split(".")):
                value = {name: value}
            tried.add(value, f"{part.origin}: search")
            config = checked(Config, tried.values, tried.origin)
            _check_each_term(config, tried)
            _check_update(config, tried)


PATHS = ("data.path", "data.cache_dir", "model.name", "output")
"""Settings that name a file or a folder."""


def _check_paths(config: Config, keys: Sequence[str]) -> None:
    """Refuse what is missing or in the way; whoever reads it looks again."""
    data, model = config.data.path, config.model.name
    if "data.path" in keys and data is not None and not os.path.exists(data):
        raise BadInput(f"data.path={data}: no such file or folder")
    local = model is not None and model.startswith((".", "/", "~"))
    if "model.name" in keys and local and not os.path.isdir(model or ""):
        raise BadInput(f"model.name={model}: no such folder")
    for key, written in (("output", config.output), ("data.cache_dir", config.data.cache_dir)):
        if key in keys and written is not None:
            writable(written, f"{key}=")
    for path in (config.output, *map(str, Path(config.output).parents)) if "output" in keys else ():
        if os.path.exists(path) and not os.path.isdir(path):
            raise BadInput(f"output={config.output}: {path} is a file and in the way: choose another")


def _check_run(folder: Path) -> None:
    if not os.path.isfile(folder / "config.yaml"):
        reason = "not a run of seqreg: it has no config.yaml" if os.path.isdir(folder) else "no such folder"
        raise BadInput(f"{folder}: {reason}")
    refuse_links_out(folder)


def check_trained(folder: Path) -> None:
    """Refuse a folder without a trained model, before anything slow is imported."""
    _check_run(folder)
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
    _check_run(folder)
    return resolve(
        str(folder / "config.yaml"),
        overrides=overrides,
        forget=forget,
        trust=trust,
        build_terms=build_terms,
        foreign=True,
    )
