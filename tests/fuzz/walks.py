"""Strategies that walk over what there is: every setting, term, option and file of a run, with values out of place."""

from __future__ import annotations

import dataclasses
import json
import os
import string
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from hypothesis import strategies as st

from seqreg.build import term_class, term_names
from seqreg.workbench.config.schema import Section
from seqreg.workbench.config.settings import Config
from tests.bad_input.table import COMMAND
from tests.fuzz.inputs import WORDS, dumped, mutated, places, torn

HUGE = [2**31 - 1, 2**31, 10**9, 10**12, 2**62, 1e38, 1e300, 1e308]
TINY = [5e-324, 1e-300, 1e-40, -1e-9]
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    1000,
    100_000,
    0.5,
    0.999999,
    -0.0,
    1.5,
    *HUGE,
    *TINY,
    float("nan"),
    float("inf"),
    -(2**63),
]
OTHERS: list[Any] = [True, False, None, "", "x", "1", "0x10", "1e5", [], [1], {}, {"a": 1}, [[]], "1,5", "½", "-"]
LETTERS = string.ascii_lowercase + "_."


def leaves(section: type[Section], prefix: str = "") -> dict[str, Any]:
    """Every setting below a section: dotted key -> annotation."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = inner
    return found


SETTINGS = leaves(Config)
LONGER = ("steps", "epochs", "accumulation", "patience")
"""Settings that may make a run long, and are right all the same."""


def out_of_place(hint: Any) -> Any:
    """Values that a setting of this type may not be ready for."""
    options = [one for part in get_args(hint) for one in (get_args(part) if get_origin(part) is Literal else [part])]
    choices = [
        one for one in [*options, *(get_args(hint) if get_origin(hint) is Literal else ())] if isinstance(one, str)
    ]
    if choices:
        near = st.sampled_from(choices).flatmap(misspelt)
        return st.one_of(near, near, st.sampled_from(OTHERS), st.sampled_from(NUMBERS))
    if hint in (int, float) or int in options or float in options:
        return st.one_of(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.sampled_from(OTHERS))
    odd = [word for word in WORDS if "\0" not in word and "\ud800" not in word]
    return st.one_of(st.sampled_from(odd), st.sampled_from(OTHERS), st.sampled_from(NUMBERS))


@st.composite
def misspelt(draw: Any, word: str) -> str:
    """The same word, one or two edits away."""
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(word)))
        way, letter = draw(st.sampled_from(["put", "drop", "swap", "change", "case"])), draw(st.sampled_from(LETTERS))
        rest = word[place + 1 :]
        word = word[:place] + {
            "put": letter + word[place:], "drop": rest, "change": letter + rest, "case": word[place:].title(),
            "swap": word[place : place + 2][::-1] + word[place + 2 :],
        }[way]  # fmt: skip
    return word


def assigned(key: str, value: Any) -> str:
    """`key=value` in YAML's spelling of numbers."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={text}".replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")


@st.composite
def typed_settings(draw: Any) -> tuple[str, Any]:
    key = draw(st.sampled_from(sorted(SETTINGS)))
    return key, draw(out_of_place(SETTINGS[key]))


@st.composite
def misspelt_keys(draw: Any) -> str:
    parts = draw(st.sampled_from(sorted(SETTINGS))).split(".")
    place = draw(st.integers(0, len(parts) - 1))
    parts[place] = draw(misspelt(parts[place]))
    return ".".join(parts)


@st.composite
def term_settings(draw: Any) -> tuple[str, str, Any]:
    name = draw(st.sampled_from(term_names()))
    hints = typing.get_type_hints(term_class(name))
    field = draw(st.sampled_from([one.name for one in dataclasses.fields(term_class(name))]))
    schedules = st.builds(
        lambda kind, key, value: {"schedule": kind, key: value},
        st.sampled_from(["warmup", "every", "start_at", "evry"]), st.sampled_from(["steps", "k", "start", "weight",
        "x"]),
        st.sampled_from([*NUMBERS, *OTHERS]),
    )  # fmt: skip
    if field == "weight" and draw(st.booleans()):
        return name, field, draw(schedules)
    return name, field, draw(out_of_place(float if field == "weight" else hints[field]))


BODIES = [
    "cost = Cost(forwards=0, backwards=0)", "cost = None", "@property\n    def cost(self): raise OSError('x')", "",
    "def loss(self, ctx, passes): return ctx.clean.logits.sum()", "def loss(self, ctx, passes): return None",
    "def loss(self, ctx, passes): return 'x'", "def loss(self, ctx, passes): raise KeyError(3)",
    "def loss(self): return 0",
    "def loss(self, ctx, passes): return ctx.clean.logits", "def loss(self, ctx, passes): return float('nan')",
    "def diagnostics(self, ctx): return 1 / 0", "def declare(self, ctx): return 3",
    "counts_on = 3",
    "def __post_init__(self): raise MemoryError", "more: float", "more: int = 'x'", "weight: str = 'a'",
    "name: int = 3",
    "def __init__(self, a, b): pass", "def declare(self, ctx): raise ValueError",
    "def settings(self): return 3",
]  # fmt: skip
HEADS = ["import os", "1 / 0", "raise SystemExit(3)", "import not_there", "def", "x = [",
         "raise RecursionError", "import sys; sys.path = None", "del Term"]  # fmt: skip


@st.composite
def own_terms(draw: Any) -> tuple[str, str]:
    """The dotted name of a term, and the text of its module."""
    base = draw(st.sampled_from(["Term", "Term", "Term", "object", "R3F", "Exception"]))
    body = "\n    ".join(draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=4))) or "pass"
    head = draw(st.sampled_from([*HEADS, *[""] * 20]))
    decorated = draw(st.sampled_from(["@dataclass(frozen=True, kw_only=True)", "@dataclass", ""]))
    name = draw(
        st.sampled_from(["own.Mine", "own.Mine", "own.Mine", "own", "own.mine", "own.Mine.x", "own..Mine", "own."])
    )
    text = (
        f"from dataclasses import dataclass\nfrom seqreg import Cost, Term\nfrom seqreg.terms.r3f import R3F\n{head}\n"
    )
    return name, f"{text}{decorated}\nclass Mine({base}):\n    {body}\n    pass\n"


PLAN = {
    "settings": ["model.name=x"], "seeds": [1, 2], "output": "out",
    "steps": [
        {"recipe": "glue", "variants": ["rte"], "settings": ["data.path=rte"]},
        {"recipe": "glue", "variants": ["sst2"], "settings": ["data.path=rte"], "name": "other"},
    ],
}  # fmt: skip
PROBES = {
    "tasks": [{"task": "glue/rte", "data": {"path": "rte", "limit": {"train": 3}}, "name": "a"}, {"task": "x.yaml"}]
}


@st.composite
def plans(draw: Any) -> tuple[str, bytes]:
    command = draw(st.sampled_from(["chain", "probe"]))
    content = dumped(mutated(draw, PLAN if command == "chain" else PROBES))
    return command, draw(torn(st.just(content))) if draw(st.integers(0, 3)) == 0 else content


FILES = [
    "config.yaml", "task.yaml", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors", "metrics.json", "predictions.jsonl",
]  # fmt: skip
SHARES = [0.0, 0.2, 0.5, 0.9, 0.999, 1.0]


@st.composite
def damage(draw: Any, names: Any = tuple(FILES)) -> tuple[str, str, Any]:
    """A file, a way to spoil it, and what is needed for it; see `spoil`."""
    name = draw(st.sampled_from(names))
    ways = ["cut", "bytes", "gone", "folder", "empty", "pipe", "zero", "loop"]
    if name.endswith((".json", ".yaml", "safetensors")):
        ways += ["value"] * 12
    way = draw(st.sampled_from(ways))
    if way == "value":
        value = draw(st.one_of(st.sampled_from([*NUMBERS, *OTHERS]), st.sampled_from(WORDS)))
        return (
            name,
            way,
            (draw(st.integers(0, 10**6)), draw(st.sampled_from(["set", "set", "delete", "rename"])), value),
        )
    if way == "bytes":
        return name, way, (draw(st.sampled_from(SHARES)), draw(st.binary(min_size=1, max_size=9)))
    return name, way, draw(st.sampled_from(SHARES))


ENDLESS = ("serve", "launch")
"""Commands that end when someone ends them, or that start others."""


def options(*, endless: bool = False) -> list[tuple[str, Any]]:
    """Every command with every option and argument that it has: those of ENDLESS, or all others."""
    commands = [pair for pair in sorted(COMMAND.commands.items()) if (pair[0] in ENDLESS) == endless]  # type: ignore[attr-defined]
    return [(name, one) for name, command in commands for one in command.params if one.name != "help"]


PATHS = ["pipe", "/dev/zero", "/dev/full", "/dev/null", "/dev/stdin", "loop", "gone", "loop/a", "gone/a", "x" * 300,
         ".", "/",
         "a/" * 2000, "", " ", "-", "~", "*", "bom.txt", "bits.bin", "secret.txt", "../..", "/proc/self/mem",
         "/etc/shadow/x",
         "run/config.yaml", "run/model.safetensors", "good.jsonl/x", "\x1b[31m", "ü", "-x", "a=b"]  # fmt: skip
ODD = [
    "",
    "-1",
    "0",
    "1e9",
    "1000000000",
    "nan",
    "inf",
    "-inf",
    "x",
    "1,2",
    ",",
    "1,,2",
    "0.5",
    "½",
    "true",
    "None",
    "99" * 30,
]


ADDRESSES = ["0.0.0.0", "::", "::1", "localhost", "256.1.1.1", "a b", "http://x", "x:y", "node0:29500", "node0:", ":1",
             "node0:99999", "[::1]:1", "a:b:c", "node0"]  # fmt: skip


@st.composite
def command_lines(draw: Any, *, endless: bool = False) -> tuple[str, str, str]:
    """A command, one of its options or arguments, and a value for it."""
    command, one = draw(st.sampled_from(options(endless=endless)))
    values = ["", "=x", "=1"] if getattr(one, "is_flag", False) else [*PATHS, *ODD, *ADDRESSES * endless]
    return command, one.opts[0], draw(st.sampled_from(values))


ARGUMENTS = {
    "run": "run", "runs": "run", "names": "run", "folder": "run", "crash": "run", "recipe": "quickstart",
    "plan": "plan.yaml", "source": "in.txt", "predictions": "in.txt", "references": "in.txt", "what": "terms",
    "words": "train",
}  # fmt: skip
FURTHER = {
    "train": ["output=out"], "compare": ["-t", "r3f", "--seeds", "1"], "robustness": ["--limit", "4", "--draws", "1"],
    "calibrate": ["--limit", "4"], "shift": ["run", "--to", "synthetic_news"],
    "quickstart": ["nope"],
}  # fmt: skip


def words(command: str, name: str, value: str, quick: list[str]) -> list[str]:
    """What comes after the command: everything that it needs, with a value for one option or argument."""
    params = [one for known, one in options(endless=command in ENDLESS) if known == command]
    arguments = [one.opts[0] for one in params if one.param_type_name == "argument"]
    found = [value if one == name else ARGUMENTS.get(one, "") for one in arguments]
    found = [one for one, key in zip(found, arguments, strict=True) if one or key == name]
    found += [*(quick if "recipe" in arguments else []), *FURTHER.get(command, [])]
    if name in arguments:
        return found
    flag = any(one.is_flag for one in params if one.opts[0] == name)
    given = [name + value] if flag else [name, value]
    return [*given, *found] if command == "launch" else [*found, *given]  # whose options come first


VARIABLES = {
    "WORLD_SIZE": ["abc", "", "-1", "0", "1.5", "99999999999"], "RANK": ["abc", "", "-1", "7"], "LOCAL_RANK": ["abc",
    "", "9"],
    "COLUMNS": ["abc", "-1", "0", "999999999999"], "LINES": ["x"], "TERM": ["", "nonsense", "dumb"], "NO_COLOR": ["x"],
    "HF_HUB_OFFLINE": ["abc", "2", ""], "HF_HOME": ["/dev/null", "x" * 300, ""], "TMPDIR": ["/nowhere", "/dev/null"],
    "HOME": ["", "/nowhere", "/dev/null"], "LANG": ["xx_YY.zzz"], "LC_ALL": ["nonsense"], "TZ": ["x" * 300],
    "MASTER_PORT": ["abc", "-1", "99999999"], "MASTER_ADDR": ["", "nowhere"], "FORCE_COLOR": ["x"],
    "PAGER": ["/nowhere"],
    "CUDA_VISIBLE_DEVICES": ["abc", "-1", "9"], "ACCELERATE_MIXED_PRECISION": ["abc", "fp16", ""],
    "PYTHONHASHSEED": ["abc"],
    "ACCELERATE_USE_CPU": ["abc", ""], "ACCELERATE_USE_DEEPSPEED": ["true", "abc"],
    "ACCELERATE_USE_FSDP": ["true", "abc", ""],
    "TOKENIZERS_PARALLELISM": ["abc"], "TRANSFORMERS_VERBOSITY": ["abc"], "LOCAL_WORLD_SIZE": ["abc"],
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ["abc", "7"], "ACCELERATE_DYNAMO_BACKEND": ["abc"],
    "DATASETS_VERBOSITY": ["x"],
}  # fmt: skip


@st.composite
def environments(draw: Any) -> dict[str, str]:
    chosen = draw(st.lists(st.sampled_from(sorted(VARIABLES)), min_size=1, max_size=2, unique=True))
    return {name: draw(st.sampled_from(VARIABLES[name])) for name in chosen}


def spoil(path: Path, way: str, how: Any) -> None:
    """Do a damage of `damage` to a file."""
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if way == "cut":
        path.write_bytes(content[: int(how * len(content))])
    elif way == "bytes":
        place = int(how[0] * len(content))
        path.write_bytes(content[:place] + how[1] + content[place + len(how[1]) :])
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way in ("zero", "loop"):
        path.symlink_to("/dev/zero" if way == "zero" else path.name)
    elif way == "value":
        path.write_bytes(_changed(path.suffix, content, *how))


def _changed(ending: str, content: bytes, place: int, action: str, value: Any) -> bytes:
    """A document with one value changed; of safetensors its header."""
    size = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + size] if ending == ".safetensors" else content
    document = yaml.safe_load(text) if ending == ".yaml" else json.loads(text)
    path = [one for one in places(document) if one][place % (len(places(document)) - 1)]
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    if action == "set":
        owner[path[-1]] = value
    elif action == "delete" or isinstance(owner, list):
        del owner[path[-1]]
    else:
        owner[str(value)] = owner.pop(path[-1])
    found = dumped(document) if ending == ".yaml" else json.dumps(document).encode()
    return len(found).to_bytes(8, "little") + found + content[8 + size :] if ending == ".safetensors" else found
