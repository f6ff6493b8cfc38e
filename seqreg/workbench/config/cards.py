"""Task cards: all that is known about a dataset, in one YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from seqreg.errors import BadInput
from seqreg.metrics import tags, texts
from seqreg.metrics.tags import TagMetricName
from seqreg.metrics.texts import TextMetricName, Tokenize
from seqreg.workbench.config import lookup, overlay
from seqreg.workbench.config.schema import Count, Length, Natural, Section, checked, known_encoding, one_character

NewsKind = Literal["city", "people"]
CardKind = Literal["generation", "classification", "regression", "token_classification"]
Metric = Literal[TextMetricName, TagMetricName, "accuracy", "f1", "matthews", "pearson", "spearman"]
Names = str | list[str]
_BY_KIND = {"generation": texts.METRICS, "token_classification": tags.METRICS}
"""Metrics of the kinds whose examples have scores of their own; those of all other kinds are GLUE's."""


SOURCE = "{source}"
"""The place of the source text in a prompt."""


def _has_source(template: str) -> str:
    if template.count(SOURCE) != 1:
        raise ValueError(f"prompt={template!r}: expected {SOURCE} in it, once, where the text comes in")
    return template


Prompt = Annotated[str, AfterValidator(_has_source)]


GONE = ("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "penalty_alpha", "dola_layers")
"""Settings of groups of beams, constrained beams, contrastive search and DoLa: no longer a part of transformers."""


class Generation(Section):
    """How text is generated; the words are those of transformers.

    Args:
        max_length: tokens of the output, its special ones included
        min_length: the same at least
        max_words: words of the output, which are what is between spaces; null for no limit
        min_words: the same at least, if it fits into max_length
        num_beams: of beam search; 1 for greedy decoding
        length_penalty: exponent of the length that scores of beams are divided by
        no_repeat_ngram_size: no n-gram of this size comes twice; 0 for no such rule
        early_stopping: end when as many beams as `num_beams` are complete
        do_sample: draw tokens, from the seed of the run, instead of taking the most likely ones
        temperature, top_k, top_p: of `do_sample`: what logits are divided by; so many of the most likely tokens alone,
            0 for all; the fewest tokens whose probabilities add up to this
        suppress_tokens: ids of tokens that are never generated
    """

    max_length: int = Field(default=64, ge=2, le=32_768)
    min_length: Natural = 0
    max_words: Count | None = None
    min_words: Natural = 0
    num_beams: int = Field(default=4, ge=1, le=1000)
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    no_repeat_ngram_size: Natural = 0
    early_stopping: bool = True
    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0, le=100)
    top_k: Natural = 50
    top_p: float = Field(default=1.0, gt=0, le=1)
    suppress_tokens: list[Natural] = []

    @model_validator(mode="before")
    @classmethod
    def _still_there(cls, values: Any) -> Any:
        for key in GONE if isinstance(values, dict) else ():
            if key in values:
                raise ValueError(
                    f"generation.{key}: not in transformers 5, which runs code from the hub for it: leave it out"
                )
        return values

    @model_validator(mode="after")
    def _fits(self) -> Generation:
        for key, usual in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0)):
            if not self.do_sample and getattr(self, key) != usual:
                raise ValueError(f"{key}={getattr(self, key)} does nothing without do_sample=true")
        if self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} is larger than max_length={self.max_length}")
        if self.max_words is not None and self.min_words > self.max_words:
            raise ValueError(f"min_words={self.min_words} is larger than max_words={self.max_words}")
        return self


class Hub(Section):
    """Where a dataset is on the Hugging Face hub.

    Args:
        repo: its name
        config: its configuration
        files: for a repository that has only a loading script, the address of its Parquet copy; {config} and {split}
            are filled in
    """

    repo: str
    config: str | None = None
    files: str | None = None


class HubSplit(Section):
    """A split that is in another configuration of the hub's repository."""

    config: str | None = None
    split: str


class Generated(Section):
    """Synthetic news (`seqreg.workbench.data.synthetic_news`).

    Args:
        kind: of news
        rows: examples of every split
        seed: that decides all of them
    """

    kind: NewsKind = "city"
    rows: dict[str, Annotated[int, Field(ge=1, le=100_000)]]
    seed: Natural = 0

    @model_validator(mode="after")
    def _not_endless(self) -> Generated:
        if sum(self.rows.values()) > 300_000:
            raise ValueError(f"rows={self.rows}: {sum(self.rows.values()):,} examples in all: at most 300,000 are made")
        return self


class ColumnNames(Section):
    """Which columns hold what; of several names the first that is there counts.

    Args:
        source: the text, or the first of two; where words are tagged, a list of them or a text of them
        second: the second text of a pair
        target: what to generate
        references: a list of texts, all of which are right (JSON in a table); or of several names all, each with a text
            or nothing. Where an example has it, its text is scored against these instead of `target`
        messages: a chat, as TRL and chat templates have it: a list of messages with `role` and `content`, the last of
            which, the assistant's, is the target; for causal language models. Where a card names it, source and target
            may be such lists too: TRL's conversational prompt and completion
        label: the class, or the number; where words are tagged, a list of tags or a text of them, as many as words
    """

    source: Names | None = None
    second: Names | None = None
    target: Names | None = None
    references: Names | None = None
    messages: Names | None = None
    label: Names | None = None


class Columns(ColumnNames):
    """The same of a card, which has a source always."""

    source: Names


class Files(Section):
    """How the files of a dataset look as they are distributed, beside train.jsonl, dev.tsv and the like.

    Args:
        names: of files, with or without ending; {split} is the name of a split (also "dev" for "validation"), {config}
            its configuration on the hub. A .txt file is read as TSV
        header: names of the columns of a table that has none
        only: a column that holds the configuration, where one file has all of them
        labels: other names of classes
        mapping: for a JSON file that is one object, the names of two columns: of its keys, and of its values. What is
            not a text in the latter is left out
        delimiter, encoding: of CSV files, and of all text files, where they are not a comma and utf-8
    """

    names: list[str] = []
    header: list[str] = []
    only: str | None = None
    labels: dict[str, str] = {}
    mapping: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    delimiter: str | None = None
    encoding: str | None = None

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        return None if value is None else one_character(value)

    @field_validator("encoding")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        return None if value is None else known_encoding(value)

    @model_validator(mode="after")
    def _are_names(self) -> Files:
        for name in self.names:
            if "/" in name or re.search(r"[{}]", re.sub(r"\{(split|config)\}", "", name)):
                raise ValueError(f"names: {name!r}: expected the name of a file, with {{split}} and {{config}} in it")
        return self


class Replace(Section):
    """A clean-up of a text: every match of the regular expression `pattern` becomes `by`."""

    column: Literal["source", "second", "target"]
    pattern: str
    by: str

    @model_validator(mode="after")
    def _compiles(self) -> Replace:
        try:
            re.sub(self.pattern, self.by, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={self.pattern!r}, by={self.by!r}: not a regular expression: {error}") from None
        return self


class TokenLimits(Section):
    """Tokens after which a text is cut."""

    source: Length
    target: Length = 64


class Card(Section):
    """A dataset.

    Args:
        title: for people
        kind: what is predicted: a text, a class, a number, or a tag for every word
        hub, generated: where the examples come from, if not from data.path
        files, columns: how they look
        labels: the names of the classes, or all tags
        clean: clean-ups of texts, in this order
        lengths: tokens after which a text is cut
        rule: how the splits came about, in words
        splits: name -> split on the hub. "train", "validation" and "test" have a role; all others are evaluated too
        drop: labels whose examples are left out
        sentences: how ROUGE-Lsum finds sentences
        words: how ROUGE finds words; "unicode" for text that is not in Latin letters
        tokenize: how BLEU finds words, in sacrebleu's names
        metric: the scores; of generated texts and tagged words the first decides between models
        holdout: training examples that become the validation set, the same ones always and stratified by label, so that
            the validation set that is distributed can be the test set; at most a tenth of them, 0 for none
        average: report the mean over the sets that a model is judged by in the end, as XNLI does; not over validation
        generation: how text is generated
        prompt: of causal language models, with {source} in the place of the text; see `data.prompt`
        from_file: find title, labels, lengths, the form of the file and which of the `columns` it has in the file of
            data.path (`own_file`)
    """

    title: str
    kind: CardKind
    hub: Hub | None = None
    generated: Generated | None = None
    files: Files = Files()
    columns: Columns
    labels: list[str] | None = None
    drop: list[str] = []
    clean: list[Replace] = []
    lengths: TokenLimits
    splits: dict[str, str | HubSplit] = Field(default_factory=dict)
    rule: str
    metric: list[Metric] = Field(min_length=1)
    sentences: Literal["newline", "punkt", "rules", "auto"] = "newline"
    words: Literal["rouge", "unicode"] = "rouge"
    tokenize: Tokenize = "13a"
    holdout: Natural = 0
    average: bool = False
    generation: Generation = Generation()
    prompt: Prompt | None = None
    from_file: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> Card:
        needed = "target" if self.kind == "generation" else "label"
        if getattr(self.columns, needed) is None:
            raise ValueError(f"kind={self.kind!r} needs columns.{needed}")
        has_classes = self.kind in ("classification", "token_classification")
        if has_classes != (self.labels is not None) and not self.from_file:
            raise ValueError("labels: the names of the classes, for kind='classification' and 'token_classification'")
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) < len(self.labels)):
            raise ValueError(f"labels={self.labels}: expected at least two, all different")
        if unknown := [name for name in self.files.labels.values() if name not in (self.labels or [])]:
            raise ValueError(f"files.labels: {unknown[0]!r} is none of labels={self.labels}")
        for metric in self.metric:
            if any((metric in known) != (kind == self.kind) for kind, known in _BY_KIND.items()):
                right = ", ".join(f"{', '.join(names)} are for kind={kind!r}" for kind, names in _BY_KIND.items())
                raise ValueError(f"metric={self.metric}: {right}, the others for labels of whole texts")
        if len(set(self.metric)) < len(self.metric):
            raise ValueError(f"metric={self.metric}: the same score twice")
        if self.prompt is not None and self.kind != "generation":
            raise ValueError("prompt: only for kind='generation'")
        references = self.columns.references
        if isinstance(references, list) and len(set(references)) < len(references):
            raise ValueError(f"columns.references={references}: the same column twice")
        for key in ("references", "messages"):
            if getattr(self.columns, key) is not None and self.kind != "generation":
                raise ValueError(f"columns.{key}: only for kind='generation'")
        if self.kind == "token_classification" and not self.from_file:
            self._tags_words()
        return self

    def _tags_words(self) -> None:
        """Refuse what words with tags cannot have."""
        labels = self.labels or []
        if self.columns.second is not None or self.clean or self.drop:
            name = "columns.second" if self.columns.second is not None else "clean" if self.clean else "drop"
            raise ValueError(f"{name}: not for kind='token_classification', where every word has its tag")
        if spaced := [label for label in labels if label.split() != [label]]:
            raise ValueError(f"labels: {spaced[0]!r}: a tag has no spaces")
        if "entity_f1" in self.metric and (fault := tags.check_labels(labels)):
            raise ValueError(f"metric=entity_f1: {fault}; token_accuracy is for tags of another kind")
        if "token_f5" in self.metric and tags.OUTSIDE not in labels:
            raise ValueError(
                f"metric=token_f5: no {tags.OUTSIDE!r} among labels={labels}, for words that are left alone"
            )

    @property
    def score(self) -> str:
        """What the score that decides is called."""
        if self.scores_examples:
            return _BY_KIND[self.kind][self.metric[0]].score
        return self.metric[0] if len(self.metric) == 1 else f"mean of {' and '.join(self.metric)}"

    @property
    def score_title(self) -> str:
        """The same, as people write it."""
        return _BY_KIND[self.kind][self.metric[0]].title if self.scores_examples else " and ".join(self.metric)

    @property
    def scores(self) -> list[str]:
        """The names of all scores."""
        if not self.scores_examples:
            return list(self.metric)
        return [name for metric in self.metric for name in _BY_KIND[self.kind][metric].names]

    @property
    def scores_examples(self) -> bool:
        """Whether every example has numbers of its own, whose mean is the score; the first metric decides then."""
        return self.kind in _BY_KIND

    @property
    def greater_is_better(self) -> bool:
        """Whether a larger score is a better one."""
        return texts.greater_is_better(self.score)

    @property
    def evaluations(self) -> list[str]:
        """Names of the splits that a model is judged by in the end, if they are there."""
        main = "test" if "test" in self.splits or self.hub is None else "validation"
        return [main, *(name for name in self.splits if name not in ("train", "validation", "test"))]


def load(name: str) -> tuple[Card, Path]:
    """The card of a task: by name, or by the path of a file of your own."""
    path = lookup.find("tasks", name)
    return parse(overlay.read(path), str(path)), path


def parse(values: dict[str, Any], where: str) -> Card:
    """A card from plain values."""
    if not values:
        raise BadInput(f"{where}: an empty card; see docs/recipes.md")
    return checked(Card, values, lambda key: where)
