"""The plan of a comparison: a recipe, methods and seeds. It is written once, and never silently changed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqreg.errors import BadInput, nearest
from seqreg.studies.common.seeds import read_seeds, write_seeds
from seqreg.workbench.config import methods, run_config
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.other_names import current_settings
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import with_defaults
from seqreg.workbench.text.atomic_files import write_text

if TYPE_CHECKING:
    from seqreg.workbench.run.run_directory import RunRecord

PLAN = "comparison.json"


@dataclass(frozen=True)
class Job:
    """One run of a comparison; its log and exit code are beside its folder."""

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
class ComparisonPlan:
    """What is compared, and how.

    Args:
        recipe, variants: as for `seqreg train`
        settings: the same; those of a term are for the methods that have it
        methods: the baseline first; "r3f+rdrop" is both terms together
        seeds: the same for all methods
        alpha: the family-wise error rate over all differences
        resolved: all settings of every method, so that a recipe that was edited is noticed
        extended: what the plan was before seeds or methods were added
        given: methods as the command line gave them, where that is not their name
        terms: the names of the terms of every method
        keep_models: the models to keep of every method: "best" by validation score, "all" or "none"
        primary: the methods whose difference is tested, all if empty; the others are described
        primary_late: whether they were named after the comparison was begun
    """

    recipe: str
    methods: list[str]
    seeds: list[int]
    variants: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    alpha: float = 0.05
    resolved: dict[str, dict[str, Any]] = field(default_factory=dict)
    extended: list[dict[str, Any]] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    terms: dict[str, list[str]] = field(default_factory=dict)
    keep_models: str = "all"
    primary: list[str] = field(default_factory=list)
    primary_late: bool = False

    @property
    def baseline(self) -> str:
        return self.methods[0]

    @property
    def tested(self) -> list[str]:
        """The methods whose difference to the baseline is tested: the family of Holm's correction."""
        return self.primary or self.methods[1:]

    def jobs(self, folder: Path) -> list[Job]:
        """All runs, seed by seed, so that a comparison that is stopped early is balanced."""
        return [Job(method, seed, folder / method / f"seed-{seed}") for seed in self.seeds for method in self.methods]

    def words(self, job: Job) -> list[str]:
        """The arguments of `seqreg` for one run."""
        chosen = methods.parse(self.given.get(job.method, job.method)).parts
        terms = [word for part in chosen for word in ("--terms", str(part)) if part != methods.MethodPart(BASELINE)]
        variants = [word for name in self.variants for word in ("--variant", name)]
        settings = methods.reaching(self.settings, self.terms.get(job.method, []))
        return ["train", self.recipe, *terms, *variants, *settings, f"seed={job.seed}", assigned("output", job.folder)]

    def command(self, folder: Path) -> str:
        """What repeats the comparison."""
        given = [self.given.get(name, name) for name in self.methods]
        terms = [word for method in given[1:] for word in ("-t", method)]
        first = ["--baseline", given[0]] if self.baseline != BASELINE else []
        variants = [word for name in self.variants for word in ("-v", name)]
        words = ["seqreg", "compare", self.recipe, *terms, *first, *variants, *self.settings]
        words += ["--seeds", write_seeds(self.seeds)]
        level = [] if self.alpha == 0.05 else ["--alpha", f"{self.alpha:g}"]
        keep = [] if self.keep_models == "best" else ["--keep-models", self.keep_models]
        keep += ["--primary", ",".join(self.primary)] if self.primary else []
        return shlex.join([*words, *level, *keep, "--output", str(folder)])

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, json.dumps(asdict(self), indent=1) + "\n")


def make(
    recipe: str, terms: Sequence[str], seeds: str, *, variants: Sequence[str] = (), settings: Sequence[str] = (),
    alpha: float = 0.05, baseline: str = BASELINE, primary: Sequence[str] = (),
) -> tuple[ComparisonPlan, Run]:  # fmt: skip
    """A plan whose every method is known to resolve, and the run of its baseline."""
    from seqreg.workbench.run.run_directory import settings_of

    for key in ("seed", "output"):
        if any(setting.partition("=")[0].strip() == key for setting in settings):
            raise BadInput(f"{key}=: a comparison sets it itself; --{'seeds' if key == 'seed' else key} says which")
    if not 0 < alpha < 1:
        raise BadInput(f"--alpha {alpha}: expected a number between 0 and 1, such as 0.05")
    given = methods.several([baseline, *terms])
    if len(given) < 2:
        raise BadInput("nothing to compare with the baseline: name at least one recipe of terms, such as --terms r3f")
    for name in primary:
        if name not in list(given)[1:]:
            raise BadInput(f"--primary {name}: no method that is compared; {nearest(name, list(given)[1:])}")
    runs = {name: run_config.resolve_method(recipe, name, text, variants, settings) for name, text in given.items()}
    methods.check_reach(settings, {term for run in runs.values() for term in run.config.terms})
    plan = ComparisonPlan(
        recipe, list(given), read_seeds(seeds), list(variants), list(settings), alpha,
        {name: {k: v for k, v in settings_of(run).items() if k != "seed"} for name, run in runs.items()},
        given={name: text for name, text in given.items() if text != name},
        terms={name: list(run.config.terms) for name, run in runs.items()}, primary=list(dict.fromkeys(primary)),
    )  # fmt: skip
    return plan, runs[plan.baseline]


def check_record(plan: ComparisonPlan, job: Job, record: RunRecord) -> None:
    """Refuse a finished run that was not trained with the method and the seed of its folder."""
    from seqreg.workbench.run.run_directory import ROWS, WORLD

    was, wanted = record.settings, {**plan.resolved.get(job.method, {}), "seed": job.seed}
    keys = [key for key in wanted if key in was or key.startswith("terms")]
    keys += [key for key in was if key.startswith("terms") and key not in wanted]
    for key in [key for key in keys if key not in (ROWS, WORLD)]:
        if was.get(key) != wanted.get(key) or (job.method == BASELINE and key.startswith("terms.")):
            raise BadInput(
                f"{job.folder}: was trained with {key}={json.dumps(was.get(key))}, and is filed under {job.method} and "
                f"seed {job.seed} ({json.dumps(wanted.get(key))}): move it away, and run the comparison again"
            )


def read(folder: Path) -> ComparisonPlan:
    """The plan of a comparison's folder."""
    path = folder / PLAN
    if not path.is_file():
        raise BadInput(f"{folder}: not a comparison of seqreg: it has no {PLAN}")
    try:
        plan = ComparisonPlan(**json.loads(path.read_text(encoding="utf-8")))
        resolved = {name: current_settings(settings) for name, settings in plan.resolved.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None
    return replace(plan, resolved=resolved)


def settle(folder: Path, plan: ComparisonPlan, extend: bool) -> ComparisonPlan:
    """The plan to work by: a new one, or the one that is there, which must be the same or be extended."""
    if not (folder / PLAN).exists():
        if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
            raise BadInput(f"--output {folder}: there is something else: choose another")
        return plan
    old = read(folder)
    grown = set(old.seeds) <= set(plan.seeds) and set(old.methods) <= set(plan.methods)
    larger = grown and plan.baseline == old.baseline
    late = bool(plan.primary) and not old.primary
    others = differences(old, plan, skip=("seeds", "methods", *(["primary"] if late else [])))
    lines = others if extend and larger else differences(old, plan)
    if lines:
        hint = (
            ""
            if others or not larger
            else f", or add {'primary comparisons' if late else 'seeds and methods'} with --extend"
        )
        raise BadInput(
            f"--output {folder}: its comparison was begun with other settings:", *lines, f"choose another output{hint}"
        )
    if (old.seeds, old.methods) == (plan.seeds, plan.methods):
        return replace(old, primary=plan.primary, primary_late=True) if late else old
    before = [*old.extended, {"seeds": old.seeds, "methods": old.methods}]
    return replace(plan, extended=before, primary_late=late or old.primary_late)


def differences(old: ComparisonPlan, new: ComparisonPlan, skip: Sequence[str] = ()) -> list[str]:
    """One line for every setting that differs."""
    keys = [
        key for key in ("recipe", "variants", "settings", "methods", "seeds", "alpha", "primary") if key not in skip
    ]
    pairs = [(key, getattr(old, key), getattr(new, key)) for key in keys]
    for name in [name for name in new.methods if name in old.resolved]:
        was, now = with_defaults(old.resolved[name]), new.resolved[name]
        pairs += [(f"{name}: {key}", was.get(key), now.get(key)) for key in sorted({*was, *now})]
    return [f"  {key}: {json.dumps(was)} there, {json.dumps(now)} now" for key, was, now in pairs if was != now]
