"""Cards of datasets that come as local files, on a few examples of their form; and files of other forms."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from seqreg.cli import new_task
from seqreg.errors import BadInput
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example, example
from tests.helpers import sample_files
from tests.helpers.tiny_tasks import seqreg

MAIL = {"document": "an email", "summary": "its subject", "references": ["its subject", "another one"]}
PAIR = {"sentence1": "a man runs", "sentence2": "he moves"}
GOLD = {**PAIR, "gold_label": "entailment"}
REVIEW = {"Text": "a fine film", "Sentiment": "Positive"}
QUESTION = {"question": "who?", "sentence": "me", "label": 1}
FILES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "aeslc": ({"train.jsonl": MAIL, "validation.jsonl": MAIL, "test.jsonl": MAIL}, {"test": 2}),
    "dialogsum": ({"validation.jsonl": MAIL, "test.jsonl": MAIL}, {"test": 2}),
    "scitldr": ({"train.jsonl": MAIL, "dev.jsonl": {**MAIL, "title": "t"}}, {"validation": 2}),
    "multi30k": ({"train.jsonl": {"en": "a", "de": "ä"}, "test.jsonl": {"en": "a", "de": "ä", "fr": "à"}}, {"test": 2}),
    "anli": ({f"r{n}_dev.jsonl": {**PAIR, "label": "n"} for n in (1, 2, 3)}, {"r1": 2, "r2": 2, "r3": 2}),
    "breaking_nli": ({"test.jsonl": {**GOLD, "category": "colors"}}, {"test": 2}),
    "counterfactual_nli": (
        {f"cad_nli_{name}.jsonl": GOLD for name in ("orig_train", "orig_test", "revised_test")},
        {"test": 2, "revised": 2},
    ),
    "counterfactual_imdb": (
        {f"cad_imdb_{name}.jsonl": REVIEW for name in ("train", "test", "revised_test")},
        {"test": 2, "revised": 2},
    ),
    "twitter_hate": ({"train.csv": "id,label,tweet\n1,0,a\n2,1,b\n3,0,c\n4,0,d\n"}, {"validation": 1}),
    "uci/amazon": ({"amazon_cells_labelled.txt": "a.\t0\nb!  \t1\nc\t1\nd\t0\n", "x.txt": "x"}, {"test": 1}),
    "uci/imdb": ({"imdb_labelled.txt": "a.\t0\nb!  \t1\nc\t1\n"}, {"test": 1}),
    "uci/yelp": ({"yelp_labelled.txt": "a.\t0\nb!  \t1\nc\t1\n"}, {"test": 1}),
    "advglue/sst2": ({"sst2.jsonl": {"idx": 0, "sentence": "a", "label": 1}}, {"sst2": 2}),
    "advglue/qqp": ({"qqp.jsonl": {"question1": "a", "question2": "b", "label": 1}}, {"qqp": 2}),
    "advglue/qnli": ({"qnli.jsonl": QUESTION}, {"qnli": 2}),
    "advglue/rte": ({"rte.jsonl": {**PAIR, "label": 0}}, {"rte": 2}),
    "advglue/mnli": (
        {f"{name}.jsonl": {"premise": "a", "hypothesis": "b", "label": 2} for name in ("mnli", "mnli-mm")},
        {"mnli": 2, "mnli-mm": 2},
    ),
    "g2p": ({"gb_gold.json": '{"a": "b", "c": {"NOUN": null}, "d": "e", "f": "g"}'}, {"test": 1}),
}  # fmt: skip


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Texts as they are; of an example two lines of JSON."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else f"{json.dumps(content)}\n" * 2
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_cards_read_their_files(name: str, tmp_path: Path) -> None:
    (files, sizes), (card, _) = FILES[name], cards.load(name)
    path = write(tmp_path / "data", files)
    path = path / "gb_gold.json" if name == "g2p" else path
    splits = loading.load(card, Data(path=str(path)), needs_train=False)
    judged = splits.evaluations(card)
    assert {split: len(splits.sets[split]) for split in judged} == sizes
    first = splits.sets[judged[0]][0]
    if card.kind == "generation":
        assert first.target
        assert first.accepted == (tuple(MAIL["references"]) if card.columns.references else (first.target,))
    else:
        assert first.label in range(len(card.labels or ()))


def test_all_sets_of_another_task_are_scored(tmp_path: Path) -> None:
    write(tmp_path / "mnli", {f"{name}.jsonl": {**PAIR, "label": "neutral"} for name in ("train", "dev_matched")})
    anli = write(tmp_path / "anli", FILES["anli"][0])
    gold = write(tmp_path / "gold", FILES["breaking_nli"][0])
    also = {"anli": str(anli), "breaking_nli": str(gold)}
    splits = loading.load(cards.load("glue/mnli")[0], Data(path=str(tmp_path / "mnli"), also=also), needs_train=False)
    assert splits.also == ["anli-r1", "anli-r2", "anli-r3", "breaking_nli"]
    assert [splits.sets[name][0].label for name in splits.also] == [1, 1, 1, 0]


def resolved(*settings: str) -> run_config.Run:
    return run_config.resolve("quickstart", overrides=["task=text_pairs", *settings])


def test_another_file_of_the_same_task_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name, word in (("gb", "tomato"), ("us", "lift")):
        (tmp_path / f"{name}.json").write_text(json.dumps({f"{word}{number}": "x" for number in range(20)}))
    data = Data(path=str(tmp_path / "gb.json"), also={"g2p": str(tmp_path / "us.json")})
    splits = loading.load(cards.load("g2p")[0], data, needs_train=False)
    assert splits.also == ["g2p-us"]
    assert splits.sets["g2p-us"][0].source.startswith("lift")


def test_columns_delimiter_and_encoding_of_a_file(tmp_path: Path) -> None:
    lines = ["body;subject;note", *(f'"caf\xe9; {n}";sujet {n};x' for n in range(4))]
    (tmp_path / "mails.csv").write_bytes("\n".join(lines).encode("latin-1"))
    where = ["data.columns.source=body", "data.columns.target=[title, subject]", f"data.path={tmp_path / 'mails.csv'}"]
    run = resolved(*where, "data.delimiter=;", "data.encoding=latin-1")
    splits = loading.load(run.card, run.config.data)
    assert {example.source for split in splits.sets.values() for example in split} == {
        f"caf\xe9; {n}" for n in range(4)
    }
    run.save(tmp_path / "run")
    assert run_config.load(tmp_path / "run").card == run.card  # the card that is written has the columns
    with pytest.raises(BadInput, match=r"mails\.csv:2: not UTF-8 \(byte 5 of the line\): .* Give data\.encoding"):
        loading.load(run.card, Data(path=str(tmp_path / "mails.csv"), delimiter=";"))
    (tmp_path / "mails.tsv").write_text("a\tb\n")
    with pytest.raises(BadInput, match=r"data\.delimiter=';': only CSV files have one to choose"):
        loading.load(run.card, Data(path=str(tmp_path / "mails.tsv"), delimiter=";"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.columns.sorce=body", "data.columns: sorce='body': unknown key; did you mean 'source'"),
        ("data.columns.label=y", "data.columns.label: pairs of texts has none: leave it out"),
        ("data.delimiter=ab", "data.delimiter='ab': expected one character"),
        ("data.encoding=utf-32", "data.encoding='utf-32': expected utf-8, latin-1, cp1252"),
        ("data.subset=de", "data.subset=de: the data of this run are not from the hub: leave it out"),
        ("data.encoding=latin-1", "data.encoding=latin-1: for local files, and data.path names none: leave it out"),
    ],
)  # fmt: skip
def test_settings_of_data_that_do_nothing_are_refused(setting: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        load(resolved, setting)


def load(resolve: Callable[..., run_config.Run], *settings: str) -> loading.Splits:
    run = resolve(*settings)
    return loading.load(run.card, run.config.data)


def test_a_card_is_made_for_a_file(tmp_path: Path) -> None:
    rows = [{"id": str(n), "article": f"word {n} " * 20, "headline": f"a headline {n}"} for n in range(8)]
    (tmp_path / "news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = seqreg("new-task", "news.jsonl", cwd=tmp_path).stdout.splitlines()
    assert said[:4] == [
        "news.jsonl: a task of generation, 8 examples; encoding utf-8",
        "  source: article",
        "  target: headline",
        "  not used: id",
    ]
    assert said[-4:] == [
        f"  source: {('word 2 ' * 20)[:67]}...",
        "  target: a headline 2",
        "news.yaml is written. Train with it:",
        "seqreg train summarize task=news.yaml data.path=news.jsonl",
    ]
    card, _ = cards.load(str(tmp_path / "news.yaml"))
    assert (card.kind, card.columns.source, card.columns.target) == ("generation", "article", "headline")
    assert (card.lengths.source, card.lengths.target, card.generation.max_length) == (64, 16, 16)
    assert len(loading.load(card, Data(path=str(tmp_path / "news.jsonl"))).sets["train"]) == 6
    assert "it is there already" in seqreg("new-task", "news.jsonl", cwd=tmp_path, code=2).stderr
    (tmp_path / "tweets.csv").write_text("id|label|tweet\n1|0|so it goes\n2|1|no way\n")
    seqreg("new-task", "tweets.csv", "--delimiter", "|", cwd=tmp_path)
    card, path = cards.load(str(tmp_path / "tweets.yaml"))
    assert (card.kind, card.columns.source, card.labels) == ("classification", "tweet", ["class_0", "class_1"])
    assert card.files.delimiter == "|"
    assert "data.path=tweets.csv\n" in path.read_text()
    assert "from 2 examples. Lengths" in path.read_text()
    (tmp_path / "my tabs.csv").write_text("id\tlabel\ttweet\n1\t0\tso it goes\n2\t1\tno way\n3\t0\tah\n")
    said = seqreg("new-task", "my tabs.csv", "--delimiter", r"\t", "--output", "tabs.yaml", cwd=tmp_path).stdout
    assert shlex.split(said.splitlines()[-1])[3:] == ["task=tabs.yaml", "data.path=my tabs.csv"]
    run = resolved(f"task={tmp_path / 'tabs.yaml'}", f"data.path={tmp_path / 'my tabs.csv'}")
    assert (run.card.files.delimiter, run.config.data.delimiter) == ("\t", None)
    assert loading.load(run.card, run.config.data).sets["train"][0].source in ("so it goes", "no way", "ah")


def test_a_card_carries_the_form_of_its_files(tmp_path: Path) -> None:
    rows = [f"{n}|a caf\xe9, number {n}|caf\xe9 {n}|number {n}" for n in range(5)]
    (tmp_path / "train.csv").write_bytes("\n".join(["id|text|summary1|summary2", *rows]).encode("latin-1"))
    said = seqreg("new-task", "train.csv", "--delimiter", "|", "--encoding", "latin-1", cwd=tmp_path).stdout
    assert "  references: summary1, summary2\n" in said
    assert said.splitlines()[-1] == "seqreg train summarize task=train.yaml data.path=train.csv"
    card, _ = cards.load(str(tmp_path / "train.yaml"))
    assert (card.files.delimiter, card.files.encoding) == ("|", "latin-1")
    sample_files.write(tmp_path / "validation.jsonl", [{"text": "caf\xe9", "summary1": "x"}])
    splits = loading.load(card, Data(path=str(tmp_path)))
    assert splits.sets["train"][2].source == "a caf\xe9, number 2"
    assert splits.sets["train"][2].references == ("caf\xe9 2", "number 2")
    assert splits.sets["validation"][0].source == "caf\xe9"
    (tmp_path / "train.csv").write_bytes((tmp_path / "train.csv").read_bytes().replace(b"|", b";"))
    again = loading.read_file(card, tmp_path / "train.csv", Data(delimiter=";"))  # the command line wins
    assert again == splits.sets["train"]
    for key, value in (("delimiter", "||"), ("encoding", "utf-32")):
        with pytest.raises(BadInput, match=rf"files\.{key}.*expected") as caught:
            cards.parse({**card.model_dump(), "files": {key: value}}, "x.yaml")
        assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--delimiter", "¦¦"], "--delimiter '¦¦': expected one character, such as ; or \\t"),
        (["--delimiter", ""], "--delimiter '': expected one character"),
        (["--encoding", "latin1x"], "--encoding 'latin1x': expected utf-8, latin-1, cp1252 or the like"),
        (["--encoding", "utf-8"], "x.csv:2: not UTF-8 (byte 3 of the line): is there another encoding? "
                                  "Give --encoding"),
        (["--delimiter", ","], "x.csv:2: 2 cells, but the first line names 1 columns: is there another delimiter? "
                               "Give --delimiter"),
        (["--encoding", "latin-1", "--delimiter", "|"], "x.csv: one column, 'label;text': is there another delimiter? "
                                                        "Give --delimiter"),
    ],
)  # fmt: skip
def test_options_of_a_file_that_cannot_be_right(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("label;text\n0;é, so\n1;no\n".encode("latin-1"))
    said = seqreg("new-task", "x.csv", *options, cwd=tmp_path, code=2).stderr
    assert (message in said, len(said.splitlines())) == (True, 1), said
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_a_file_in_utf_16_is_read_as_excel_writes_it(tmp_path: Path) -> None:
    rows = [f"text {number} é is here,title {number}" for number in range(20)]
    (tmp_path / "x.csv").write_text("\n".join(["source,target", *rows]) + "\n", encoding="utf-16")
    run = resolved(f"data.path={tmp_path / 'x.csv'}")
    assert loading.read_file(run.card, tmp_path / "x.csv")[3].source == "text 3 é is here"
    (tmp_path / "x.csv").write_bytes((tmp_path / "x.csv").read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"x\.csv:21: not UTF-16"):
        loading.read_file(run.card, tmp_path / "x.csv")


def test_another_delimiter_is_named_before_missing_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("source;target\none two;one\n")
    run = resolved(f"data.path={tmp_path / 'x.csv'}")
    with pytest.raises(BadInput, match=r"x\.csv:1: one column, 'source;target': .* Give data\.delimiter"):
        loading.load(run.card, run.config.data)


def test_a_pipe_is_called_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    run = resolved(f"data.path={tmp_path / 'x.jsonl'}")
    with pytest.raises(BadInput, match=r"x\.jsonl: a pipe, a socket or a device"):
        loading.load(run.card, run.config.data)


def test_of_two_files_for_a_split_the_one_that_is_read_is_named(tmp_path: Path) -> None:
    rows = [{"source": f"text {number} is here", "target": f"title {number}"} for number in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.csv").write_text("source,target\nother text,other\n")
    run = resolved(f"data.path={tmp_path}")
    splits = loading.load(run.card, run.config.data)
    assert "train.jsonl is read, and not train.csv: data.path=FILE names one alone" in splits.notes
    assert all("is here" in example.source for example in splits.sets["train"])


def test_quotes_before_another_delimiter_are_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('text\n"a b";0\n')
    message = "x.csv:2: not CSV: ',' expected after '\"': is there another delimiter? Give --delimiter"
    assert message in seqreg("new-task", "x.csv", "--delimiter", ",", cwd=tmp_path, code=2).stderr


OFFICE = [["Nr", "Nachricht", "Betreff", "Betreff2"]] + [
    [str(n), f"Guten Tag, Herr “Müller”;\nes geht um {n} Äpfel für 5 €\nGrüße", f"Äpfel {n}", f"{n} Äpfel" * (n % 2)]
    for n in range(30)
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "latin-1"])
@pytest.mark.parametrize("delimiter", [";", ",", "\t", "|"])
def test_a_file_of_an_office_needs_no_options(encoding: str, delimiter: str, tmp_path: Path) -> None:
    rows = [[cell.translate({0x20AC: "$", 0x201C: "'", 0x201D: "'", 0xC4: "\x81Ä"}) for cell in row] for row in OFFICE]
    rows = rows if encoding == "latin-1" else OFFICE  # with a byte that cp1252 does not have
    with (tmp_path / "mails.csv").open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    said = seqreg("new-task", "mails.csv", cwd=tmp_path).stdout
    assert (
        "  source: Nachricht\n  target: Betreff\n  references: Betreff, Betreff2\n  not used: Nr\nexample 1\n" in said
    )
    card, _ = cards.load(str(tmp_path / "mails.yaml"))
    assert card.files.encoding == {"utf-8": None, "utf-8-sig": None}.get(encoding, encoding)
    assert card.files.delimiter == (None if delimiter == "," else delimiter)
    read = loading.read_file(card, tmp_path / "mails.csv")
    assert [(made.source, made.target) for made in read] == [(row[1], row[2]) for row in rows[1:]]
    assert read[1].references == (rows[2][2], rows[2][3])
    run = run_config.resolve(
        "summarize", overrides=[f"data.path={tmp_path / 'mails.csv'}"]
    )  # without a card of its own
    assert (run.card.columns, run.card.files) == (card.columns, card.files)


def test_a_table_without_a_header_is_read_from_its_first_line(tmp_path: Path) -> None:
    lines = [f"{n};a text about {('sport', 'trade')[n % 2]} {n};{('good', 'bad')[n % 2]}" for n in range(20)]
    (tmp_path / "posts.csv").write_text("\n".join(lines))
    said = seqreg("new-task", "posts.csv", cwd=tmp_path).stdout
    assert said.startswith(
        "posts.csv: a task of classification, 20 examples; encoding utf-8, delimiter ';', without a header"
    )
    assert "seqreg train classify task=posts.yaml data.path=posts.csv" in said
    card, _ = cards.load(str(tmp_path / "posts.yaml"))
    assert (card.columns.source, card.columns.label, card.labels) == ("B", "C", ["bad", "good"])
    assert len(loading.read_file(card, tmp_path / "posts.csv")) == 20


def test_new_task_asks_at_a_terminal_what_a_file_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_files.write(tmp_path / "x.jsonl", [{name: f"{name} {n}" for name in ("en", "de", "fr")} for n in range(60)])
    answers = iter(["nl", "de", "fr"])
    monkeypatch.setattr(new_task, "at_a_terminal", lambda: True)
    monkeypatch.setattr(typer, "prompt", lambda *_, **__: next(answers))
    assert "  source: fr\n  target: de\n  not used: en\n" in seqreg("new-task", "x.jsonl", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "what is to be predicted? Give --target or --label, one of en, de, fr"),
        (["--target", "es"], "--target es: x.jsonl has no such column"),
        (["--target", "de"], "which column is read? Give --source, one of en, fr"),
        (["--label", "de", "--source", "en"], "the column 'de' has 60 different values in 60 records"),
        (["--label", "de", "--target", "en"], "--target and --label: a task generates a text or predicts a class"),
        (["--label", "de", "--output", "no/x.yaml"], "--output no/x.yaml: there is no folder no"),
        (["--label", "de", "--references", "en"], "--references en: only a text that is generated has references"),
    ],
)
def test_files_that_say_too_little_for_a_card(options: list[str], message: str, tmp_path: Path) -> None:
    rows = [{"en": f"a{n}", "de": f"b{n}", "fr": f"c{n}"} for n in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert message in seqreg("new-task", "x.jsonl", *options, cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "x.yaml").exists()


def made_of(path: Path, text: str, **options: Any) -> dict[str, Any]:
    """The card of a file with this text."""
    path.write_text(text)
    output = path.with_suffix(".yaml")
    output.unlink(missing_ok=True)
    words = [word for key, names in options.items() for name in names for word in (f"--{key}", name)]
    said = json.loads(seqreg("new-task", path, *words, "--output", output, "--json", cwd=path.parent).stdout)
    return {key: value for key, value in said.items() if key not in ("card", "command")}


def test_new_task_takes_no_reference_for_the_source(tmp_path: Path) -> None:
    text = "id,mail,subject1,subject2\n1,how are you,a greeting,some question\n2,so long then,a farewell,the end\n"
    columns = made_of(tmp_path / "a.csv", text)["columns"]
    assert columns == {"source": "mail", "target": "subject1", "references": ["subject1", "subject2"]}


def test_new_task_sees_both_texts_of_a_pair_and_numbers(tmp_path: Path) -> None:
    questions = made_of(tmp_path / "a.csv", "question,sentence,label\nwho is it,it is me,0\nwhat now,go on then,1\n")
    assert questions["columns"] == {"source": "question", "second": "sentence", "label": "label"}
    pairs = made_of(tmp_path / "b.csv", "question1,question2,label\nwho is it,it is me,0\nwhat now,go on then,1\n")
    assert pairs["columns"] == {"source": "question1", "second": "question2", "label": "label"}
    scores = made_of(tmp_path / "c.csv", "sentence1,sentence2,score\na b,c d,0.5\ne f,g h,3\n")
    assert (scores["kind"], scores["metric"]) == ("regression", ["pearson", "spearman"])


def test_several_references_are_in_columns_of_a_table_with_another_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "talks.csv"
    text = 'dialogue|summary|summary2\nhello there|a greeting|they greet\n"a|b c"|letters|\n'
    values = made_of(path, text)
    assert values["columns"] == {"source": "dialogue", "target": "summary", "references": ["summary", "summary2"]}
    card, _ = cards.load(str(tmp_path / "talks.yaml"))
    read = loading.read_file(card, path, Data(delimiter="|"))
    assert [example.accepted for example in read] == [("a greeting", "they greet"), ("letters",)]
    assert [example.target for example in read] == ["a greeting", "letters"]
    path.write_text('dialogue|summary|summary2\na b|[News] c d|[1]\ne f|g h| \ni j|k l|"[""m"", ""n""]"\n')
    read = loading.read_file(card, path, Data(delimiter="|"))
    assert [example.accepted for example in read] == [("[News] c d", "[1]"), ("g h",), ("k l", "m", "n")]
    values = card.model_dump(exclude_defaults=True)
    missing = cards.parse({**values, "columns": {**values["columns"], "references": ["summary", "sumary2"]}}, "x.yaml")
    splits = loading.load(missing, Data(path=str(path), delimiter="|"))
    assert "talks.csv: no example has the column 'sumary2' of columns.references" in splits.notes
    said = seqreg("new-task", path, "--references", "summary2", "--output", "y.yaml", cwd=tmp_path, code=2).stderr
    assert "--references summary2: " in said
    assert said.endswith("such as --references summary --references summary2")


def test_the_delimiter_is_that_of_held_out_text_too(tmp_path: Path) -> None:
    pairs, path = tmp_path / "pairs.csv", tmp_path / "held_out.csv"
    pairs.write_text("source;target\n" + "".join(f"a, {n};b\n" for n in range(3)))
    path.write_text("text;id\na b, c;1\n")
    data = Data(path=str(pairs), corpora={"held": str(path)}, delimiter=";")
    splits = loading.load(cards.load("text_pairs")[0], data)
    assert [example.source for example in splits.corpora["held"]] == ["a b, c"]


def test_a_label_or_target_that_is_empty_is_none_where_none_is_needed() -> None:
    (pairs, _), (rte, _) = cards.load("text_pairs"), cards.load("glue/rte")
    for empty in (None, ""):
        assert example(pairs, {"source": "a", "target": empty}, "x:1", labelled=False) == Example("a")
        record = {"sentence1": "a", "sentence2": "b", "label": empty}
        assert example(rte, record, "x:1", labelled=False) == Example("a", "b")
    with pytest.raises(BadInput, match=r"x:1: the column 'target' is empty \(null\)"):
        example(pairs, {"source": "a", "target": None}, "x:1")


def test_a_reference_that_the_first_record_lacks_is_seen(tmp_path: Path) -> None:
    lines = '{"body": "a b", "title": "c d"}\n{"body": "e f", "title": "g h", "title2": "i j"}\n'
    assert made_of(tmp_path / "a.jsonl", lines)["columns"]["references"] == ["title", "title2"]


def test_a_cell_of_a_table_may_hold_a_list_of_references(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    values = made_of(path, 'text,summary,references\na b,c,"[""c"", ""d e""]"\n')
    read = loading.read_file(cards.parse(values, "a.yaml"), path)
    assert read[0].accepted == ("c", "d e")
    named = made_of(path, 'text,summary,all\na b,c,"[""c"", ""d e""]"\n', references=["all"])
    assert named["columns"]["references"] == "all"
    apart = made_of(path, "text,summary,references\na b,c,d e\n")
    assert apart["columns"]["references"] == ["summary", "references"]
    path.write_text("text,summary,references\na b,c,\n")
    assert loading.read_file(cards.parse(values, "a.yaml"), path)[0].accepted == ("c",)
    path.write_text("text,summary,references\na b,c,d e\n")
    with pytest.raises(BadInput, match=r"'references' is 'd e': expected a list of texts; or name several columns"):
        loading.read_file(cards.parse(values, "a.yaml"), path)
