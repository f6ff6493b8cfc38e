"""Strategies: documents that are nearly right, and bytes that are not."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from hypothesis import strategies as st

from seqreg.build import term_names
from seqreg.workbench.config import lookup, run_config

LIMITS = [0, 1, -1, 2, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**63), 10**400]
WORDS = [
    "", " ", "null", "no", "1e-5", "12:30", "../x", "/etc/passwd", "x.yaml", "../x.yaml", "gigaword", "glue/rte", "a.b",
    "os.path", ".", "..", "a..b", "\x1b[31m", "a\0b", "\u202e", "{", "[/red]", "<n>", "%s", "x" * 5000, "é", "東京",
    "🙂", "\ud800", "~", "*", "&a", "!!int", "(a+)+$", "\\9", "(", "*a", "trust_remote_code", "true", *term_names(),
]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(LIMITS), st.floats(), st.text(max_size=12),
    st.sampled_from(WORDS),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), inner, max_size=4),
    ),
    max_leaves=8,
)

RECIPE: dict[str, Any] = {
    **run_config.resolve("quickstart").config.model_dump(mode="json", exclude_defaults=True), "task": "synthetic_news",
    "terms": {"r3f": {"weight": 0.1}, "far": {"term": "smart", "weight": {"schedule": "warmup", "steps": 9}}},
    "variants": {"small": {"seed": 2}, "none": None},
}  # fmt: skip
CARD: dict[str, Any] = {
    "title": "x", "kind": "generation", "hub": {"repo": "a/b", "config": "c", "files": "x"},
    "generated": {"rows": {"train": 4, "validation": 2}, "seed": 1}, "columns": {"source": ["a", "b"], "target": "t"},
    "clean": [{"column": "target", "pattern": "<n>", "by": "\n"}], "lengths": {"source": 9, "target": 9}, "drop": ["-"],
    "splits": {"train": "train", "test": {"config": "c", "split": "s"}}, "rule": "x", "metric": ["rouge"],
    "sentences": "newline", "generation": {"num_beams": 2, "max_length": 9},
}  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a document."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def mutated(draw: Any, document: Any) -> Any:
    """The document with a few values, keys or whole parts changed."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(document)))
        value = draw(scalars if draw(st.booleans()) else values)
        if not path:
            document = value if draw(st.integers(0, 9)) == 0 else document
            continue
        owner = document
        for key in path[:-1]:
            owner = owner[key]
        action = draw(st.sampled_from(["set", "delete", "rename", "add"]))
        if action == "set":
            owner[path[-1]] = value
        elif action == "delete":
            del owner[path[-1]]
        elif isinstance(owner, dict):
            new = draw(st.one_of(st.text(max_size=6), st.sampled_from(WORDS), st.sampled_from(sorted(RECIPE))))
            owner[new] = owner.pop(path[-1]) if action == "rename" else value
        else:
            owner.append(value)
    return document


def dumped(document: Any) -> bytes:
    """YAML as PyYAML writes it: long numbers, aliases and escapes included."""
    try:
        text = yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    except UnicodeEncodeError:  # half a character
        text = yaml.dump(document, Dumper=yaml.SafeDumper, sort_keys=False)
    return str(text).encode("utf-8", "surrogatepass")


@st.composite
def torn(draw: Any, contents: Any) -> bytes:
    """Content with bytes cut out, put in or repeated."""
    content: bytes = draw(contents)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 20)))
        nasty = [
            b"\0",
            b"\xff",
            b"\n",
            b"\r",
            b'"',
            b"{",
            b"[" * 300,
            b": ",
            b"&a ",
            b"*a",
            b"- ",
            b"\t",
            b"'",
            b"\xef\xbb\xbf",
        ]
        new = draw(st.one_of(st.binary(max_size=8), st.sampled_from(nasty), st.just(content[start:end] * 2)))
        content = content[:start] + new + content[end:]
    return content


@st.composite
def recipes(draw: Any) -> Any:
    return dumped(mutated(draw, RECIPE)), draw(st.lists(_assignment(), max_size=2))


@st.composite
def _recipe_bytes(draw: Any) -> bytes:
    name = draw(st.sampled_from(lookup.names("recipes")))
    return lookup.find("recipes", name).read_bytes()


@st.composite
def card_files(draw: Any) -> bytes:
    content = dumped(mutated(draw, CARD))
    return draw(torn(st.just(content))) if draw(st.booleans()) else content


KEYS = [".".join(map(str, path)) for path in places(RECIPE) if path and all(isinstance(key, str) for key in path)]


@st.composite
def _assignment(draw: Any) -> str:
    key = draw(st.sampled_from(KEYS) if draw(st.integers(0, 7)) else st.text(max_size=9))
    value = draw(st.one_of(values.map(lambda found: json.dumps(found)), st.text(max_size=12), st.sampled_from(WORDS)))
    return f"{key}{draw(st.sampled_from(['', '=='])) if draw(st.integers(0, 15)) == 0 else '='}{value}".replace(
        "\0", ""
    )  # no shell can pass a NUL


@st.composite
def settings(draw: Any) -> list[str]:
    found = draw(st.lists(_assignment(), min_size=1, max_size=3))
    flags = [["--terms"], ["-t", "r3f"], ["-v", "tiny"], ["--variant", "x"], ["--terms", "../r3f"], ["--nope"], []]
    return [*found, *(draw(st.sampled_from(flags)) if draw(st.integers(0, 9)) == 0 else [])]


recipes, raw_recipes = recipes(), torn(st.one_of(_recipe_bytes(), st.binary(max_size=60)))  # type: ignore[assignment]
card_files, settings = card_files(), settings()  # type: ignore[assignment]

names = st.sampled_from(["source", "target", "label", "sentence1", "sentence2", "id", "", "x\n", "\x1b[2J"])
cells = st.one_of(st.text(max_size=9), st.text(max_size=9), values)


@st.composite
def data_files(draw: Any) -> tuple[str, str, bytes]:
    """The task, the name of a file, and its content."""
    task = draw(st.sampled_from(["text_pairs", "glue/rte", "glue/stsb"]))
    keys = ["source", "target"] if task == "text_pairs" else ["sentence1", "sentence2", "label"]
    rows: list[Any] = [{key: f"{key} {n}" if key != "label" else n % 2 for key in keys} for n in range(6)]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, 5))
        strange = st.dictionaries(st.one_of(names, st.sampled_from([*keys, "id"])), cells, max_size=2)
        rows[place] = {**rows[place], **draw(strange)} if draw(st.integers(0, 3)) else draw(strange)
    ending = draw(st.sampled_from(["jsonl", "json", "csv", "tsv", "parquet", "txt"]))
    content = _written(rows, ending)
    return task, f"x.{ending}", draw(torn(st.just(content))) if draw(st.booleans()) else content


def _written(rows: list[dict[str, Any]], ending: str) -> bytes:
    if ending in ("csv", "tsv"):
        lines = [list(rows[0]) if rows else [], *(list(row.values()) for row in rows)]
        mark = "," if ending == "csv" else "\t"
        return "\n".join(mark.join(map(_cell, line)) for line in lines).encode("utf-8", "surrogatepass")
    if ending == "parquet":
        try:
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, found := io.BytesIO())
            return found.getvalue()
        except (pyarrow.ArrowException, ValueError, OverflowError):
            return b"PAR1"
    if ending == "json":
        return json.dumps(rows).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _cell(value: Any) -> str:
    return f"{value:.5}" if isinstance(value, str) else json.dumps(value)[:20]


_metrics = {"scores": {"test": {"rouge1": 1.0, "intervals": {"rouge1": [0, 2]}, "signature": "x", "empty": 1}},
            "train": {"seconds": 2.0}, "method": "r3f"}  # fmt: skip


@st.composite
def _metrics_file(draw: Any) -> bytes:
    return json.dumps(mutated(draw, _metrics)).encode()


_lines = st.lists(st.text(max_size=20), max_size=4).map(lambda found: "\n".join(found).encode("utf-8", "surrogatepass"))
_predictions = st.lists(st.dictionaries(st.sampled_from(["reference", "x"]), cells, max_size=2), max_size=4).map(
    lambda found: _written(found, "jsonl")
)
texts = st.tuples(torn(_lines), torn(_predictions), torn(_metrics_file()))

_small = st.one_of(
    st.integers(-2, 40), st.floats(-1, 1), st.booleans(), st.sampled_from(["x", "", "relu", "no"]), st.none()
)
_model_keys = [
    "d_model", "encoder_layers", "encoder_attention_heads", "dropout", "activation_function", "pad_token_id",
    "max_position_embeddings", "vocab_size", "scale_embedding", "is_encoder_decoder", "num_labels", "eos_token_id",
    "decoder_start_token_id", "init_std", "tie_word_embeddings", "use_cache", "forced_eos_token_id", "nope",
]  # fmt: skip
_terms = [[], ["-t", "r3f"], ["-t", "smart", "-t", "rdrop"], ["-t", "jachess"], ["-t", "uegr"], ["model.head=r4f"]]
_others = [
    "optimisation.precision=bf16", "optimisation.gradient_checkpointing=true", "generation.num_beams=1",
    "data.source_prefix=x",
    "model.architecture=pegasus", "model.architecture=t5", "model.architecture=gpt2", "data.limit={train: 1}",
]  # fmt: skip
model_settings = st.builds(
    lambda found, terms, other: [*(f"model.settings.{k}={json.dumps(v)}" for k, v in found), *terms, *other],
    st.lists(st.tuples(st.sampled_from(_model_keys), _small), max_size=2), st.sampled_from(_terms),
    st.lists(st.sampled_from(_others), max_size=1),
)  # fmt: skip
data_files = data_files()  # type: ignore[assignment]
