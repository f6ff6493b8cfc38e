"""The files of studies, research/studies/*.yaml: a question, the commands that answer it, what is fixed in advance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import overlay
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.methods import parse as parse_method
from seqreg.workbench.config.schema import Count, Natural, NotNegative, Section, checked

STUDIES = Path(__file__).parent / "studies"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
KINDS = ("train", "compare", "chain", "probe", "shift", "calibrate", "robustness")
_OF = ("of", "settings", "options", "measures", "judged")
_KEYS = {
    "train": ("recipe", "variants", "settings", "methods"),
    "compare": ("recipe", "variants", "settings", "methods", "methods_of", "baseline", "primary", "arms", "search",
                "grid", "keep_models", "options", "agreement", "measures", "judged"),
    "chain": ("chain", "settings", "methods", "methods_of", "primary", "cycles", "options", "measures", "judged"),
    "probe": (*_OF, "tasks"),
    "shift": (*_OF, "to", "shares"),
    "calibrate": _OF,
    "robustness": _OF,
}  # fmt: skip
"""The keys that a step may have, by its command; beside name, title, command and sizes."""


class StepSize(Section):
    """What a step has of its own in one size; the rest is the size's.

    Args:
        seeds: how many, or which
        variants, settings, options: after those of the step
        minutes: of one run on one core, mean over the methods: for `--plan`; measured, and the header says how
        leave_out: why this step is not run in this size
    """

    seeds: Count | list[Natural] | None = None
    variants: list[str] = []
    settings: list[str] = []
    options: list[str] = []
    minutes: NotNegative | None = None
    leave_out: str | None = None


class StudySize(Section):
    """A model, and how much is run with it.

    Args:
        note: the model, the examples and the steps, in words
        seeds: how many, or which; the same for all methods
        variants, settings: for all steps, after those of the step
        minutes: as in a step
    """

    note: str
    seeds: Count | list[Natural]
    variants: list[str] = []
    settings: list[str] = []
    minutes: NotNegative | None = None


class ChainPart(Section):
    """One run of a chain, as in the plans of `seqreg chain`."""

    recipe: str
    name: str | None = None
    variants: list[str] = []
    settings: list[str] = []


class PreparedFile(Section):
    """A file made of lines of other files, before the first step.

    Args:
        to: its name, below {output}/data
        source: the file or files; their lines follow each other
        lines: the first, and the one after the last, of every source
        header: put the first line of the first source before all
        replace: a regular expression, and the text that takes the place of its first match in every line
    """

    to: str
    source: str | list[str]
    lines: Annotated[list[Natural], Field(min_length=2, max_length=2)] | None = None
    header: bool = False
    replace: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _has_lines(self) -> PreparedFile:
        try:
            re.compile(self.replace[0] if self.replace else "")
        except re.error as error:
            raise ValueError(f"replace: {self.replace}: no regular expression ({error})") from None
        if self.lines is not None and self.lines[0] >= self.lines[1]:
            raise ValueError(f"lines={self.lines}: expected the first, and a later one after the last")
        return self

    @property
    def sources(self) -> list[str]:
        return [self.source] if isinstance(self.source, str) else self.source


class Relation(Section):
    """Two numbers of every run, whose rank correlation is asked for.

    Args:
        x, y: dotted keys of metrics.json, * for any one key; or what a later step measured of these runs; of several,
            that which a step has
        of: the steps whose runs count
        title: what is asked
        drawn: in the figure too
    """

    title: str
    x: str
    y: str | list[str]
    of: list[str] = Field(min_length=1)
    drawn: bool = False

    @property
    def alternatives(self) -> list[str]:
        return [self.y] if isinstance(self.y, str) else self.y


class Curve(Section):
    """What methods gain over the baseline in several comparisons, over a number of the baseline.

    Args:
        x: a dotted key of metrics.json, mean over the baseline's seeds
        of: the steps, and the label of their points
    """

    title: str
    x: str
    of: dict[str, str] = Field(min_length=1)


class StudyStep(Section):
    """One command of a study; which keys it may have depends on the command.

    Args:
        name: of its folder, and of its section on the page
        command: of seqreg
        recipe, variants, settings: as on the command line
        methods: as for `--terms`, the baseline left out; `methods_of`: those of another step
        baseline, arms, search, grid, keep_models: the options of `seqreg compare`
        primary: the methods whose difference is tested; by default those of the study that the step has
        agreement: pairs of methods; the share of equal predictions with equal seeds is shown
        chain, cycles: the runs of a chain, and how often
        of: the comparison whose models are examined, all methods and seeds
        tasks: that are probed, as in the file of `seqreg probe --tasks`
        to, shares: of `seqreg shift`
        options: further words for the command
        measures: the numbers to show, by name, * for anything; those of a comparison are dotted keys of metrics.json
        judged: those of them that are tested for the primary methods; the rest is described
        sizes: what differs in one size
    """

    name: str
    title: str = ""
    command: Literal["train", "compare", "chain", "probe", "shift", "calibrate", "robustness"]
    recipe: str | None = None
    variants: list[str] = []
    settings: list[str] = []
    methods: list[str] = []
    methods_of: str | None = None
    baseline: str = BASELINE
    primary: list[str] | None = None
    arms: list[str] = []
    search: Natural = 0
    grid: list[str] = []
    keep_models: Literal["best", "all", "none"] = "none"
    agreement: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    chain: list[ChainPart] = []
    cycles: Count = 1
    of: str | None = None
    tasks: list[dict[str, Any]] = []
    to: str | None = None
    shares: list[float] = [0.0, 0.1]
    options: list[str] = []
    measures: list[str] = []
    judged: list[str] = []
    sizes: dict[str, StepSize] = {}

    @model_validator(mode="after")
    def _fits_its_command(self) -> StudyStep:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r}: expected small letters, digits and _")
        allowed = {"name", "title", "command", "sizes", *_KEYS[self.command]}
        for key in self.model_fields_set - allowed:
            raise ValueError(f"{key}: `{self.command}` has no such key; {nearest(key, allowed)}")
        needed = {"train": "recipe", "compare": "recipe", "chain": "chain", "shift": "to"}.get(self.command, "of")
        for key in {needed, "of"} & allowed:
            if not getattr(self, key):
                raise ValueError(f"{key}: `{self.command}` needs it")
        return self

    @property
    def heading(self) -> str:
        return self.title or self.name


class Study(Section):
    """A study.

    Args:
        title, question: in words
        mirrors, differs: the table or figure that is repeated, and what is different here
        primary: the methods whose difference to the baseline is tested, in every step that has them
        sizes: "paper" is the model of the paper, "small" one that fits a laptop
        files: made before the first step
        steps: in their order
        relations: rank correlations over the runs of several steps
        curves: drawn first in the figure
        not_shown: what this study cannot show, for its page
        notes: free text for its page, written when the results are known
    """

    title: str
    question: str
    mirrors: str
    differs: str = ""
    primary: list[str] = []
    sizes: dict[str, StudySize] = Field(min_length=1)
    files: list[PreparedFile] = []
    steps: list[StudyStep] = Field(min_length=1)
    relations: list[Relation] = []
    curves: list[Curve] = []
    not_shown: list[str] = []
    notes: str = ""

    @model_validator(mode="after")
    def _steps_know_each_other(self) -> Study:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError(f"steps are called {', '.join(names)}: give each a name of its own")
        for place, step in enumerate(self.steps):
            before = {other.name: other for other in self.steps[:place]}
            for key in ("of", "methods_of"):
                name = getattr(step, key)
                if name is not None and (name not in before or before[name].command not in ("compare", "chain")):
                    known = [other.name for other in before.values() if other.command == "compare"]
                    raise ValueError(
                        f"steps: {step.name}: {key}={name!r}: no comparison before it; {nearest(name, known)}"
                    )
            for size in step.sizes:
                if size not in self.sizes:
                    raise ValueError(f"steps: {step.name}: sizes: {size!r}: {nearest(size, self.sizes)}")
            methods = [parse_method(word).name for word in self.methods(step)]
            for name in (*(step.primary or ()), *(name for both in step.agreement for name in both)):
                if name not in (*methods, parse_method(step.baseline).name):
                    raise ValueError(f"steps: {step.name}: no method {name!r}; {nearest(name, methods)}")
        for name in self.primary:
            everything = {parse_method(word).name for step in self.steps for word in self.methods(step)}
            everything |= {arm for step in self.steps for arm in step.arms}
            if name not in everything:
                raise ValueError(f"primary: {name!r} is no method of any step; {nearest(name, everything)}")
        for name in (name for curve in self.curves for name in curve.of):
            if name not in names:
                raise ValueError(f"curves: no step {name!r}; {nearest(name, names)}")
        return self

    def step(self, name: str) -> StudyStep:
        return next(step for step in self.steps if step.name == name)

    def methods(self, step: StudyStep) -> list[str]:
        """The methods of a step beside the baseline, as given on the command line."""
        if step.of is not None:
            return self.methods(self.step(step.of))
        others = self.methods(self.step(step.methods_of)) if step.methods_of is not None else []
        return [*others, *step.methods]

    def primary_of(self, step: StudyStep) -> list[str]:
        """The methods of a step whose difference is tested."""
        if step.primary is not None:
            return step.primary
        if step.of is not None:
            return self.primary_of(self.step(step.of))
        names = [parse_method(word).name for word in self.methods(step)] + step.arms
        return [name for name in self.primary if name in names]

    def seeds(self, step: StudyStep, size: str) -> list[int]:
        """The seeds of a step in a size."""
        seeds = step.sizes[size].seeds if size in step.sizes else None
        if seeds is None and step.of is not None:
            return self.seeds(self.step(step.of), size)
        seeds = self.sizes[size].seeds if seeds is None else seeds
        return list(range(1, seeds + 1)) if isinstance(seeds, int) else seeds

    def left_out(self, step: StudyStep, size: str) -> str | None:
        """Why a step is not run in a size; None if it is."""
        own = step.sizes[size].leave_out if size in step.sizes else None
        return own or (self.left_out(self.step(step.of), size) if step.of is not None else None)


def names() -> list[str]:
    """The names of all studies of this repository."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def path_of(name: str) -> Path:
    """The file of a study, by its name, or by the path of a YAML file of your own."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in names():
        raise BadInput(f"unknown study {name!r}; {nearest(name, names())} (or the path of a .yaml file)")
    return STUDIES / f"{name}.yaml"


def read(name: str) -> Study:
    """The study of a name, or of the path of a YAML file of your own."""
    path = path_of(name)
    return parse(overlay.read(path), str(path))


def parse(values: Any, where: str) -> Study:
    """A study from plain values."""
    return checked(Study, values, lambda key: where)


def filled(text: str, places: dict[str, Path | None]) -> str:
    """A text with its placeholders filled in: {models}, {data} and {output}."""
    for name, path in places.items():
        if f"{{{name}}}" in text:
            if path is None:
                raise BadInput(f"{text}: say where that is: --{name} FOLDER")
            text = text.replace(f"{{{name}}}", str(path))
    if unknown := re.search(r"\{(\w+)\}", text):
        raise BadInput(f"{text}: {unknown.group()}: unknown placeholder; {nearest(unknown.group(1), places)}")
    return text


def size_of(study: Study, name: str, size: str | None) -> str:
    """The size to run: what was asked for, else "small", else the only one; refuses one that there is not."""
    if size is None:
        size = "small" if "small" in study.sizes else next(iter(study.sizes))
    if size not in study.sizes:
        others = "; ".join(f"{other}: {described.note}" for other, described in study.sizes.items())
        raise BadInput(f"{name} has no size {size!r}: {others}")
    return size


def method_names(study: Study, step: StudyStep) -> list[str]:
    """The names of all methods of a step, the baseline first."""
    base = step if step.of is None else study.step(step.of)
    return [parse_method(word).name for word in (base.baseline, *study.methods(step))]


def check_words(words: Sequence[str]) -> None:
    """Refuse settings that are not `key=value`."""
    for word in words:
        if "=" not in word:
            raise BadInput(f"{word!r}: expected key=value, such as optimisation.max_steps=100")
