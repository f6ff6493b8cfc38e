"""What a comparison is made of: a recipe, methods and seeds. It is written down once, and never silently changed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench import config
from seqreg.workbench.config import Run
from seqreg.workbench.files import write_text
from seqreg.workbench.layers import assigned
from seqreg.workbench.sections import LARGEST

PLAN = "comparison.json"
BASELINE = "baseline"


@dataclass(frozen=True)
class Job:
    """One training of a comparison; its log and exit code are beside its folder."""

    method: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def code(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.code")


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Args:
        recipe, variants, settings: as for `seqreg train`
        methods: the baseline first; "r3f+rdrop" is both terms together
        seeds: the same for all methods
        alpha: the error that is allowed over all differences together
        resolved: all settings of every method, so that a recipe that was edited is noticed
        extended: what the plan was before seeds or methods were added
    """

    recipe: str
    methods: list[str]
    seeds: list[int]
    variants: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    alpha: float = 0.05
    resolved: dict[str, dict[str, Any]] = field(default_factory=dict)
    extended: list[dict[str, Any]] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        return self.methods[0]

    def jobs(self, folder: Path) -> list[Job]:
        """All trainings, seed by seed, so that a comparison that is stopped early is balanced."""
        return [Job(method, seed, folder / method / f"seed-{seed}") for seed in self.seeds for method in self.methods]

    def words(self, job: Job) -> list[str]:
        """The arguments of `seqreg` for one training."""
        terms = [word for term in parts(job.method) for word in ("--terms", term)]
        variants = [word for name in self.variants for word in ("--variant", name)]
        own = [f"seed={job.seed}", assigned("output", job.folder)]
        return ["train", self.recipe, *terms, *variants, *self.settings, *own]

    def command(self, folder: Path) -> str:
        """What makes the whole comparison, for people."""
        terms = [word for method in self.methods[1:] for word in ("-t", method)]
        first = ["--baseline", self.baseline] if self.baseline != BASELINE else []
        variants = [word for name in self.variants for word in ("-v", name)]
        words = ["seqreg", "compare", self.recipe, *terms, *first, *variants, *self.settings]
        words += ["--seeds", write_seeds(self.seeds)]
        level = [] if self.alpha == 0.05 else ["--alpha", f"{self.alpha:g}"]
        return shlex.join([*words, *level, "--output", str(folder)])

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, json.dumps(asdict(self), indent=1) + "\n")


def parts(method: str) -> list[str]:
    """The recipes of terms behind the name of a method."""
    return [] if method == BASELINE else method.split("+")


def make(
    recipe: str, methods: Sequence[str], seeds: str, *, variants: Sequence[str] = (), settings: Sequence[str] = (),
    alpha: float = 0.05, baseline: str = BASELINE,
) -> tuple[Plan, Run]:  # fmt: skip
    """A plan whose every method is known to resolve, and the run of the first of its trainings."""
    from seqreg.workbench.runs import settings_of

    for key in ("seed", "output"):
        if any(one.partition("=")[0].strip() == key for one in settings):
            raise BadInput(f"{key}=: a comparison sets it itself; --{'seeds' if key == 'seed' else key} says which")
    if not 0 < alpha < 1:
        raise BadInput(f"--alpha {alpha}: expected a number between 0 and 1, such as 0.05")
    names = list(dict.fromkeys([baseline, *methods]))
    if len(names) < 2:
        raise BadInput("nothing to compare with the baseline: name at least one recipe of terms, such as --terms r3f")
    for name in names:
        if Path(name).name != name or name.startswith("."):
            raise BadInput(f"--terms {name}: expected the names of term recipes, such as r3f or r3f+rdrop")
    plan = Plan(recipe, names, read_seeds(seeds), list(variants), list(settings), alpha)
    runs = {
        name: config.resolve(recipe, terms=parts(name), variants=variants, overrides=settings) for name in names
    }  # fmt: skip
    resolved = {name: {k: v for k, v in settings_of(run).items() if k != "seed"} for name, run in runs.items()}
    return replace(plan, resolved=resolved), runs[baseline]


def read_seeds(text: str) -> list[int]:
    """A number of seeds, which are 1, 2, 3 ..., or the seeds themselves with commas between."""
    try:
        found = [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        found = []
    if "," not in text and len(found) == 1:
        found = list(range(1, found[0] + 1)) if found[0] <= 1000 else []
    wrong = not found or len(found) > 1000 or min(found) < 0 or max(found) > LARGEST or len(set(found)) < len(found)
    if wrong:
        raise BadInput(f"--seeds {text}: expected how many, such as 5, or different ones with commas, such as 3,7,11")
    return found


def write_seeds(seeds: Sequence[int]) -> str:
    """What `read_seeds` reads as these.

    >>> write_seeds([1, 2, 3]), write_seeds([3, 7]), write_seeds([5])
    ('3', '3,7', '5,')
    """
    if list(seeds) == list(range(1, len(seeds) + 1)):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def read(folder: Path) -> Plan:
    """The plan of a comparison's folder."""
    path = folder / PLAN
    if not path.is_file():
        raise BadInput(f"{folder}: not a comparison of seqreg: it has no {PLAN}")
    try:
        return Plan(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None


def settle(folder: Path, plan: Plan, extend: bool) -> Plan:
    """The plan to work by: a new one, or the one that is there, which must be the same or be extended."""
    if not (folder / PLAN).exists():
        if folder.exists() and (not folder.is_dir() or any(one.name != ".lock" for one in folder.iterdir())):
            raise BadInput(f"--output {folder}: there is something else: choose another")
        return plan
    old = read(folder)
    grown = set(old.seeds) <= set(plan.seeds) and set(old.methods) <= set(plan.methods)
    larger = grown and plan.baseline == old.baseline
    others = differences(old, plan, skip=("seeds", "methods"))
    lines = others if extend and larger else differences(old, plan)
    if lines:
        hint = "" if others or not larger else ", or add seeds and methods with --extend"
        raise BadInput(
            f"--output {folder}: its comparison was begun with other settings:", *lines, f"choose another output{hint}"
        )
    if (old.seeds, old.methods) == (plan.seeds, plan.methods):
        return old
    before = [*old.extended, {"seeds": old.seeds, "methods": old.methods}]
    return replace(plan, extended=before)


def differences(old: Plan, new: Plan, skip: Sequence[str] = ()) -> list[str]:
    """One line for every setting that differs."""
    keys = [key for key in ("recipe", "variants", "settings", "methods", "seeds", "alpha") if key not in skip]
    pairs = [(key, getattr(old, key), getattr(new, key)) for key in keys]
    for name in [name for name in new.methods if name in old.resolved]:
        was, now = old.resolved[name], new.resolved[name]
        pairs += [(f"{name}: {key}", was.get(key), now.get(key)) for key in sorted({*was, *now})]
    return [f"  {key}: {json.dumps(was)} there, {json.dumps(now)} now" for key, was, now in pairs if was != now]
