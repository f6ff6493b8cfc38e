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
from seqreg.studies.compare import arms as arm_names
from seqreg.studies.compare.search import ONLY_VALIDATION, Search, begun, best, further
from seqreg.workbench.config import methods, run_config
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.other_names import current_settings
from seqreg.workbench.config.overlay import assigned, parse
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import with_defaults
from seqreg.workbench.text.atomic_files import write_text

if TYPE_CHECKING:
    from seqreg.workbench.run.record import RunRecord

PLAN = "comparison.json"
SEARCH = "search"
"""The folder of the trials."""
DEFAULT_BUDGET = 12
"""Trials of a search that a message names."""
MADE_OF = "soup.runs"
"""The key of an arm's record that names the runs that it is made of."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison, a trial of its search or a free arm; its log and exit code are beside its folder.

    Args:
        seed: of a soup the first of its runs
        trial: the number of a trial, from 1; 0 for what is none
        settings: what a trial changes about its method
        sources: the runs that an arm is made of
    """

    method: str
    seed: int
    folder: Path
    trial: int = 0
    settings: tuple[str, ...] = ()
    sources: tuple[Job, ...] = ()

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def code(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.code")

    @property
    def title(self) -> str:
        """For messages."""
        if self.trial:
            return f"{self.method}, trial {self.trial}"
        return (
            f"{self.method} of {len(self.sources)} seeds"
            if len(self.sources) > 1
            else f"{self.method}, seed {self.seed}"
        )


@dataclass(frozen=True)
class ComparisonPlan:
    """What is compared, and how.

    Args:
        recipe, variants: as for `seqreg train`
        settings: the same; those of a term are for the methods that have it
        methods: the baseline first, free arms last; "r3f+rdrop" is both terms together
        seeds: the same for all methods
        alpha: the family-wise error rate over all differences
        resolved: all settings of every method, so that a recipe that was edited is noticed
        extended: what the plan was before seeds or methods were added
        given: methods as the command line gave them, where that is not their name
        terms: the names of the terms of every method
        keep_models: the models to keep of every method: "best" by validation score, "all" or "none"
        primary: the methods whose difference is tested, all if empty; the others are described
        primary_late: whether they were named after the comparison was begun
        arms: the free arms among the methods
        search: trials on the validation set that choose settings of the methods, and what they chose
        nproc: processes of every run and trial
        grid: values to search, as the command line gave them
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
    arms: list[str] = field(default_factory=list)
    search: Search = field(default_factory=Search)
    nproc: int = 1
    grid: list[str] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        return self.methods[0]

    @property
    def trained(self) -> list[str]:
        """The methods that are trained."""
        return [name for name in self.methods if name not in self.arms]

    @property
    def tested(self) -> list[str]:
        """The methods whose difference to the baseline is tested: the family of Holm's correction."""
        return [
            name for name in self.primary or self.methods[1:] if name not in arm_names.SOUPS or name not in self.arms
        ]

    def settings_of(self, method: str) -> dict[str, Any]:
        """All settings of the runs of a method, by dotted key; after a search those that it chose."""
        if method in self.arms:
            return {**self.settings_of(self.baseline), **arm_names.settings(method)}
        return self.search.resolved.get(method, self.resolved.get(method, {}))

    def jobs(self, folder: Path) -> list[Job]:
        """All runs, seed by seed, so that a comparison that is stopped early is balanced; then the free arms."""
        runs = [Job(method, seed, folder / method / f"seed-{seed}") for seed in self.seeds for method in self.trained]
        bases = [job for job in runs if job.method == self.baseline]
        for arm in self.arms:
            if arm in arm_names.SOUPS:
                runs.append(Job(arm, self.seeds[0], folder / arm / f"of-{len(bases)}-seeds", sources=tuple(bases)))
            else:
                runs += [Job(arm, job.seed, folder / arm / f"seed-{job.seed}", sources=(job,)) for job in bases]
        return runs

    def trials(self, folder: Path) -> list[Job]:
        """The trials of the search that are known so far, one of every method after the other."""
        tried = self.search.trials
        return [
            Job(name, tried[name][place].seed, folder / SEARCH / name / f"trial-{place + 1}", place + 1,
                tuple(tried[name][place].settings))
            for place in range(self.search.budget) for name in tried if place < len(tried[name])
        ]  # fmt: skip

    def words(self, job: Job) -> list[str]:
        """The arguments of `seqreg` for one run, trial or arm."""
        if job.sources:
            sources = [str(source.folder) for source in job.sources]
            return ["soup", *sources, *arm_names.ARMS[job.method], "--evaluate", "--output", str(job.folder)]
        own = [*job.settings, *ONLY_VALIDATION] if job.trial else self.search.settings(job.method)
        if job.method == self.baseline and not job.trial:
            own = [*own, *arm_names.baseline_settings(self.arms, self.settings)]
        chosen = methods.parse(self.given.get(job.method, job.method)).parts
        terms = [word for part in chosen for word in ("--terms", str(part)) if part != methods.MethodPart(BASELINE)]
        variants = [word for name in self.variants for word in ("--variant", name)]
        settings = methods.reaching(self.settings, self.terms.get(job.method, []))
        place = [f"seed={job.seed}", assigned("output", job.folder)]
        launch = ["launch", "--nproc", str(self.nproc)] if self.nproc > 1 else []
        return [*launch, "train", self.recipe, *terms, *variants, *settings, *own, *place]

    def command(self, folder: Path) -> str:
        """What repeats the comparison."""
        given = [self.given.get(name, name) for name in self.trained]
        terms = [word for method in given[1:] for word in ("-t", method)]
        first = ["--baseline", given[0]] if self.baseline != BASELINE else []
        variants = [word for name in self.variants for word in ("-v", name)]
        words = ["seqreg", "compare", self.recipe, *terms, *first, *variants, *self.settings]
        words += [word for arm in self.arms for word in ("--arm", arm)]
        words += ["--search", str(self.search.budget)] if self.search.budget else []
        words += [word for text in self.grid for word in ("--grid", text)]
        words += ["--seeds", write_seeds(self.seeds), *(["--nproc", str(self.nproc)] if self.nproc > 1 else [])]
        level = [] if self.alpha == 0.05 else ["--alpha", f"{self.alpha:g}"]
        keep = [] if self.keep_models == "best" else ["--keep-models", self.keep_models]
        keep += ["--primary", ",".join(self.primary)] if self.primary else []
        return shlex.join([*words, *level, *keep, "--output", str(folder)])

    def write(self, folder: Path) -> None:
        write_text(folder / PLAN, json.dumps(asdict(self), indent=1) + "\n")


def make(
    recipe: str, terms: Sequence[str], seeds: str, *, variants: Sequence[str] = (), settings: Sequence[str] = (),
    alpha: float = 0.05, baseline: str = BASELINE, arms: Sequence[str] = (), search: int = 0,
    grid: Sequence[str] = (), primary: Sequence[str] = (), nproc: int = 1,
) -> tuple[ComparisonPlan, Run]:  # fmt: skip
    """A plan whose every method is known to resolve, and the run of its baseline."""
    from seqreg.workbench.run.record import settings_of

    for key in ("seed", "output"):
        if any(setting.partition("=")[0].strip() == key for setting in settings):
            raise BadInput(f"{key}=: a comparison sets it itself; --{'seeds' if key == 'seed' else key} says which")
    if not 0 < alpha < 1:
        raise BadInput(f"--alpha {alpha}: expected a number between 0 and 1, such as 0.05")
    given = methods.several([baseline, *terms])
    if len(given) + len(arms) < 2:
        raise BadInput("nothing to compare with the baseline: name at least one recipe of terms, such as --terms r3f")
    for name in primary:
        if name not in (known := [*list(given)[1:], *(arm for arm in arms if arm not in arm_names.SOUPS)]):
            raise BadInput(f"--primary {name}: no method that is compared over seeds; {nearest(name, known)}")
    runs, first, chosen_seeds = {}, next(iter(given)), read_seeds(seeds)
    for name, text in given.items():
        extra = arm_names.baseline_settings(arms, settings) if name == first else []
        runs[name] = run_config.resolve_method(recipe, name, text, variants, [*settings, *extra])
    methods.check_reach(settings, {term for run in runs.values() for term in run.config.terms})
    arms = arm_names.check(arms, list(given), chosen_seeds, runs[first].config.model.name is not None)
    plan = ComparisonPlan(
        recipe, [*given, *arms], chosen_seeds, list(variants), list(settings), alpha,
        {name: without_seed(settings_of(run)) for name, run in runs.items()},
        given={name: text for name, text in given.items() if text != name},
        terms={name: list(run.config.terms) for name, run in runs.items()}, arms=arms,
        primary=list(dict.fromkeys(primary)), nproc=nproc, grid=list(grid),
    )  # fmt: skip
    if grid and not search:
        raise BadInput(f"--grid {grid[0]}: says what --search tries: add --search {DEFAULT_BUDGET}")
    if search:
        plan = replace(plan, search=begun(runs, search, grid, plan.seeds))
        for name, space in plan.search.spaces.items():
            for trial in [*plan.search.trials[name], *further(space, plan.search.trials[name][0], name, search)]:
                _resolved(plan, name, trial.settings)
    return plan, runs[first]


def without_seed(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seed"}


def _resolved(plan: ComparisonPlan, method: str, settings: Sequence[str]) -> Run:
    """A method of a comparison with some settings changed."""
    given = plan.given.get(method, method)
    return run_config.resolve_method(plan.recipe, method, given, plan.variants, [*plan.settings, *settings])


def with_rates(
    plan: ComparisonPlan, scores: dict[str, list[float | None]], *, greater_is_better: bool = True
) -> ComparisonPlan:
    """The plan after the learning rates: further trials of every method at its best one.

    Args:
        scores: of the trials of learning rates, of the methods that have no best one yet
    """
    old = plan.search
    rates = {name: best(name, some, greater_is_better=greater_is_better) for name, some in scores.items()}
    more = {
        name: [*old.trials[name], *further(old.spaces[name], old.trials[name][place], name, old.budget)]
        for name, place in rates.items()
    }
    return replace(plan, search=replace(old, trials={**old.trials, **more}, rates={**old.rates, **rates}))


def with_choices(
    plan: ComparisonPlan, scores: dict[str, list[float | None]], *, greater_is_better: bool = True
) -> ComparisonPlan:
    """The plan after its search: every method has the settings with the best validation score.

    Args:
        scores: of all trials of the methods that have not been chosen for yet
    """
    from seqreg.workbench.run.record import settings_of

    chosen = {name: best(name, some, greater_is_better=greater_is_better) for name, some in scores.items()}
    resolved = {}
    for name, place in chosen.items():
        extra = arm_names.baseline_settings(plan.arms, plan.settings) if name == plan.baseline else []
        run = _resolved(plan, name, [*plan.search.trials[name][place].settings, *extra])
        resolved[name] = without_seed(settings_of(run))
    old = plan.search
    return replace(plan, search=replace(
        old, scores={**old.scores, **scores}, chosen={**old.chosen, **chosen}, resolved={**old.resolved, **resolved}
    ))  # fmt: skip


def check_record(plan: ComparisonPlan, job: Job, record: RunRecord) -> None:
    """Refuse a finished run that was not trained with the method and the seed of its folder."""
    from seqreg.workbench.run.record import ROWS, WORLD

    was, wanted = record.settings, {**plan.settings_of(job.method), "seed": job.seed}
    if job.trial:
        given = [assignment.partition("=") for assignment in (*job.settings, ONLY_VALIDATION[0])]
        wanted = {**{key: parse(value, key) for key, _, value in given}, "seed": job.seed}
    own = ("terms", "soup.")
    keys = [key for key in wanted if key in was or key.startswith(own)]
    keys += [key for key in was if key.startswith(own) and key not in wanted and key != MADE_OF and not job.trial]
    for key in [key for key in keys if key not in (ROWS, WORLD)]:
        if was.get(key) != wanted.get(key) or (job.method == BASELINE and key.startswith("terms.")):
            raise BadInput(
                f"{job.folder}: was trained with {key}={json.dumps(was.get(key))}, and is filed under {job.method} and "
                f"seed {job.seed} ({json.dumps(wanted.get(key))}): move it away, and run the comparison again"
            )
    check_sources(job, record)


def check_sources(job: Job, record: RunRecord) -> None:
    """Refuse an arm whose runs were trained again since it was made of them."""
    from seqreg.workbench.run.record import RunRecord

    now = [None if (source := RunRecord.read(run.folder)) is None else source.run for run in job.sources]
    if job.sources and record.settings.get(MADE_OF, now) != now:
        raise BadInput(
            f"{job.folder}: was made of other runs than those that are in {job.sources[0].folder.parent} now: move it "
            "away, and run the comparison again"
        )


def read(folder: Path) -> ComparisonPlan:
    """The plan of a comparison's folder."""
    path = folder / PLAN
    if not path.is_file():
        raise BadInput(f"{folder}: not a comparison of seqreg: it has no {PLAN}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        plan = ComparisonPlan(**{**stored, "search": Search.of(stored.get("search", {}))})
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
    new, kept = plan.search, old.search  # what was tried and chosen stays
    search = replace(kept, spaces={**new.spaces, **kept.spaces}, trials={**new.trials, **kept.trials})
    return replace(plan, extended=before, search=search, primary_late=late or old.primary_late)


def differences(old: ComparisonPlan, new: ComparisonPlan, skip: Sequence[str] = ()) -> list[str]:
    """One line for every setting that differs."""
    keys = [
        key
        for key in ("recipe", "variants", "settings", "methods", "seeds", "alpha", "primary", "nproc")
        if key not in skip
    ]
    pairs = [(key, getattr(old, key), getattr(new, key)) for key in keys]
    pairs.append(("search", old.search.budget, new.search.budget))
    same = new.search.spaces if old.search.budget == new.search.budget else {}
    pairs += [(f"{name}: grid", old.search.spaces[name], same[name]) for name in same if name in old.search.spaces]
    for name in [name for name in new.trained if name in old.resolved]:
        before, after = with_defaults(old.resolved[name]), new.resolved[name]
        pairs += [(f"{name}: {key}", before.get(key), after.get(key)) for key in sorted({*before, *after})]
    return [f"  {key}: {json.dumps(was)} there, {json.dumps(now)} now" for key, was, now in pairs if was != now]
