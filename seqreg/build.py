"""From names and plain dicts to terms and criteria."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any, cast

from seqreg import terms
from seqreg.criterion import Criterion
from seqreg.errors import BadInput, check_keys, nearest
from seqreg.schedules import SCHEDULES, Weight
from seqreg.selective_update import ChildTuningD, ChildTuningF, SelectiveUpdate, StochasticUpdate, Update
from seqreg.term import Cost, Term


def term_names() -> list[str]:
    """The terms that come with seqreg: the files of `seqreg/terms/`."""
    return sorted(module.name for module in pkgutil.iter_modules(terms.__path__))


def term_class(name: str) -> type[Term]:
    """The class behind a file name ("r3f") or a dotted name of your own ("my_package.my_term", or "....MyTerm")."""
    if not isinstance(name, str):
        raise BadInput(f"term {name!r}: expected a name")
    if "." not in name:
        if name == "r4f":
            raise BadInput(
                "R4F is a property of the model: call seqreg.integrations.hf.r4f(model), and use the term r3f"
            )
        if name not in term_names():
            raise BadInput(f"unknown term {name!r}; {nearest(name, term_names())}, or give a dotted name of your own")
        return _only_term(importlib.import_module(f"{terms.__name__}.{name}"))
    parent, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"term {name!r}: expected a dotted name, such as my_package.MyTerm")
    try:
        if _is_module(name):
            return _only_term(importlib.import_module(name))
        cls = getattr(importlib.import_module(parent), attribute)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # a module of the user's, which may do anything when it is imported
        raise BadInput(f"term {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(cls) and issubclass(cls, Term)):
        raise BadInput(f"{name!r} is not a Term")
    return cls


def _is_module(name: str) -> bool:
    """Whether a dotted name is a module. A package on the way to it that fails to import is an error, not a no."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return False  # its parent is a module or a class, or does not exist
        raise


def _only_term(module: ModuleType) -> type[Term]:
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Term) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise BadInput(f"{module.__name__} defines {len(classes)} terms: name one as {module.__name__}.CLASS")
    return classes[0]


def build_weight(value: Any) -> Weight:
    """A number, or {"schedule": NAME, **its settings}, whose own `weight` may be a schedule again."""
    if not isinstance(value, Mapping):
        return cast("Weight", value)  # the term checks it
    settings = dict(value)
    name = settings.pop("schedule", None)
    if name is None:
        raise BadInput(
            f"weight={dict(value)}: a schedule is written {{'schedule': 'warmup', 'weight': 0.1, 'steps': 9}}"
        )
    if not isinstance(name, str) or name not in SCHEDULES:
        raise BadInput(f"unknown schedule {name!r}; {nearest(str(name), SCHEDULES)}")
    schedule = SCHEDULES[name]
    check_keys(f"schedule {name}", settings, (f.name for f in fields(schedule)))
    return schedule(**{**settings, "weight": build_weight(settings.get("weight", 1.0))})


def build_term(name: str, settings: Mapping[str, Any] | None = None) -> Term:
    """One term from its name and a plain dict of its settings; the key "term" gives the class if the name does not."""
    if settings is not None and not isinstance(settings, Mapping):
        raise BadInput(f"{name}: expected a mapping of settings, such as {{'weight': 0.1}}, not {settings!r}")
    settings = dict(settings or {})
    if "term" in settings:
        settings.setdefault("name", name)
    cls = term_class(settings.pop("term", name))
    if "weight" in settings:
        try:
            settings["weight"] = build_weight(settings["weight"])
        except BadInput as error:
            raise BadInput(str(error), key="weight", value=settings["weight"]) from None
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise BadInput(f"term {name!r}: {cls.__name__} is abstract: it lacks {', '.join(missing)}")
    try:
        made = cls(**settings)
        cost: Any = made.cost
    except BadInput:
        raise
    except Exception as error:  # a class of the user's may have any constructor
        raise BadInput(f"term {name!r}: {cls.__name__} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(cost, Cost):
        raise BadInput(f"term {name!r}: {cls.__name__}.cost is {cost!r}: expected a seqreg.Cost")
    return made


UPDATES: dict[str, type[Update]] = {
    "stochastic": StochasticUpdate, "selective": SelectiveUpdate,
    "child_tuning_f": ChildTuningF, "child_tuning_d": ChildTuningD,
}  # fmt: skip


def build_update(config: Mapping[str, Any]) -> Update:
    """A change of the optimizer's step from its name and its settings.

    >>> build_update({"selective": {"ratio": 0.2}}).ratio
    0.2
    """
    if len(config) != 1:
        raise BadInput(f"update={dict(config)}: expected one of {', '.join(UPDATES)} with its settings")
    ((name, settings),) = config.items()
    if name not in UPDATES:
        raise BadInput(f"update: unknown {name!r}; {nearest(str(name), UPDATES)}")
    if not isinstance(settings, Mapping):
        raise BadInput(f"update: {name}={settings!r}: expected a mapping of settings, such as {{}}")
    check_keys(f"update {name}", settings, inspect.signature(UPDATES[name]).parameters)
    return UPDATES[name](**settings)


def build_criterion(config: Mapping[str, Any]) -> Criterion:
    """A criterion from a plain dict.

    >>> build_criterion({"label_smoothing": 0.1, "terms": {"r3f": {"weight": 0.1}}}).terms[0].weight
    0.1
    """
    if not isinstance(config, Mapping):
        raise BadInput(f"criterion: expected a mapping, such as {{'terms': {{'r3f': {{}}}}}}, not {config!r}")
    check_keys("criterion", config, ("label_smoothing", "smoothing", "per", "loss", "fused", "terms"))
    settings = dict(config)
    chosen = settings.pop("terms", {})
    if not isinstance(chosen, Mapping):
        raise BadInput(f"criterion: terms={chosen!r}: expected a mapping from names to settings")
    return Criterion(*(build_term(name, keys) for name, keys in chosen.items()), **settings)
