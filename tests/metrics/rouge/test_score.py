"""ROUGE is rouge-score's to the last bit, whatever the text."""

# ruff: noqa: RUF001 - texts in many scripts

from __future__ import annotations

import inspect
import itertools
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.stem.porter import PorterStemmer
from rouge_score import rouge_scorer, scoring

from seqreg.errors import BadInput
from seqreg.metrics import RougeReport, rouge
from seqreg.metrics.bootstrap import percentile_intervals, resampled_means
from seqreg.metrics.rouge import lcs, score, sentences
from seqreg.metrics.rouge.score import KINDS
from seqreg.metrics.rouge.tokens import stem_of, unicode_words

WORDS = """the The of to and a in is it running runs runner ran flies flying happily happiness organization organize
relational conditional valency digitizer operator feudalism hopefulness formality sensitivity adjustment probate rate
controlling roll sky dying lying news innings generously caresses ponies ties cats agreed plastered motoring hopping
1990s 2,000 U.S. e-mail can't O'Neil's x y z yyyyy sses ies ing eed I.B.M. C3PO 3.14""".split()
STRANGE = """café naïve İstanbul Kelvin ｆｕｌｌ２ ß Ωmega Привет мир 東京
日本語 مرحبا हिन्दी ไทย 🙂 ½ № ﬁne \u200b \ud800 e\u0301""".split()
ENDS = [" ", " ", " ", " ", "\n", "\n", "  ", "\t", "\r\n", ". ", "!\n", "\n\n", "\u2028", "\x0b", "_", "-"]


def one_text(source: random.Random, words: list[str], most: int) -> str:
    return "".join(source.choice(words) + source.choice(ENDS) for _ in range(source.randint(0, most)))


def many_pairs(size: int) -> Iterator[tuple[str, str]]:
    """Pairs of every sort, the same each time."""
    source = random.Random(7)
    fixed = ["", " ", "\n", "\n\n", "...", "!?\n--", "a", "A\na\nA", "the\n", "é", "東京", "\ufeff", "0"]
    yield from ((first, second) for first in fixed for second in fixed)
    long = [one_text(source, WORDS, 500) + "end" for _ in range(6)]
    yield from zip(long[:3], long[3:], strict=True)
    yield "word " * 300, "word word\n" * 90
    alphabets = [["a"], ["a", "b"], list("abc"), list("abcdefgh"), WORDS, WORDS, WORDS + STRANGE, STRANGE, ["--", "."]]
    for number in range(size - len(fixed) ** 2 - 4):
        words = alphabets[number % len(alphabets)]
        first = one_text(source, words, source.choice((3, 12, 40)))
        second = one_text(source, words, source.choice((3, 12, 40)))
        if number % 5 == 0:  # nearly the same, shuffled or cut
            tokens = first.split(" ")
            source.shuffle(tokens)
            second = " ".join(tokens[: source.randint(0, len(tokens))]).replace(" ", "\n", number % 3)
        yield first, second


PAIRS = list(many_pairs(3000))


def ours(predictions: list[str], references: list[str], **options: Any) -> RougeReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of other scripts
        return rouge(predictions, references, **{"resamples": 2, "split": "newline", **options})


def theirs(pairs: list[tuple[str, str]], stem: bool, **options: Any) -> dict[str, list[list[float]]]:
    scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=stem, **options)
    scored = [scorer.score(reference, prediction) for prediction, reference in pairs]
    return {kind: [list(map(float, one[kind])) for one in scored] for kind in KINDS}


def assert_equal(report: RougeReport, wanted: dict[str, list[list[float]]], pairs: list[tuple[str, str]]) -> None:
    for kind, rows in wanted.items():
        wrong = [place for place, row in enumerate(rows) if report.scores[kind][place].tolist() != row]
        assert not wrong, f"{kind}: {len(wrong)} differ, first {pairs[wrong[0]]!r}"


@pytest.mark.parametrize("stem", [True, False])
def test_equal_to_rouge_score_to_the_last_bit(stem: bool) -> None:
    assert len(PAIRS) == 3000
    report = ours([one for one, _ in PAIRS], [other for _, other in PAIRS], stem=stem)
    assert_equal(report, theirs(PAIRS, stem), PAIRS)
    assert all(report.scores[kind].shape == (3000, 3) for kind in KINDS)


def test_several_references_of_every_sort_are_score_multi_s() -> None:
    """Unicode, empty texts, lines of all lengths; more pairs than are compared at once."""
    predictions = [one for one, _ in PAIRS]
    references = [[PAIRS[(place + step) % 3000][1] for step in range(1 + place % 3)] for place in range(3000)]
    assert sum(map(len, references)) > score._PAIRS
    scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=True)
    scored = [scorer.score_multi(some, one) for some, one in zip(references, predictions, strict=True)]
    wanted = {kind: [list(map(float, one[kind])) for one in scored] for kind in KINDS}
    assert_equal(ours(predictions, references), wanted, PAIRS)


def test_batches_of_one_pair_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lcs, "_CELLS", 1)
    monkeypatch.setattr(score, "_PAIRS", 7)
    pairs = PAIRS[100:500]
    assert_equal(ours([one for one, _ in pairs], [other for _, other in pairs]), theirs(pairs, True), pairs)


def test_words_that_are_not_stemmed_are_their_own_stems() -> None:
    """Every end of three letters, and pieces of every suffix of nltk's rules."""
    porter = PorterStemmer()
    ends = ["".join(letters) for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3)]
    source = random.Random(5)
    rules = re.findall(r'"([a-z]+)"', inspect.getsource(PorterStemmer))
    starts = ["".join(source.choice("aeiouybcdlstz9") for _ in range(source.randint(1, 5))) for _ in range(20)]
    words = ["bat" + end for end in ends] + [start + end for start in starts for end in rules]
    wrong = [word for word in words if len(word) > 3 and stem_of(word) != porter.stem(word)]
    assert not wrong


TEXTS = st.text(alphabet="ab c\n.X1é", max_size=60)


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS)
def test_equal_on_texts_that_hypothesis_finds(prediction: str, reference: str) -> None:
    assert_equal(ours([prediction], [reference]), theirs([(prediction, reference)], True), [(prediction, reference)])


def test_any_order_of_n_and_of_kinds() -> None:
    pairs = PAIRS[200:400]
    kinds = ("rougeLsum", "rouge9", "rouge3", "rouge1")
    scorer = rouge_scorer.RougeScorer(list(kinds), use_stemmer=True)
    wanted = [scorer.score(reference, prediction) for prediction, reference in pairs]
    report = ours([one for one, _ in pairs], [other for _, other in pairs], kinds=kinds)
    assert tuple(report.scores) == tuple(report.means) == tuple(report.intervals) == kinds
    assert_equal(report, {kind: [list(map(float, one[kind])) for one in wanted] for kind in kinds}, pairs)


def test_ties_follow_rouge_score() -> None:
    """Two longest subsequences, and which one is taken changes rougeLsum."""
    scorer = rouge_scorer.RougeScorer(["rougeLsum"])
    source = random.Random(1)
    ties = ["\n".join("".join(source.choice("ab ") for _ in range(9)) for _ in range(3)) for _ in range(400)]
    ties = [" ".join(text.replace("\n", "|")).replace("|", "\n") for text in ties]
    pairs = list(zip(ties[::2], ties[1::2], strict=True))
    report = ours([one for one, _ in pairs], [other for _, other in pairs], kinds="rougeLsum", stem=False)
    wanted = [list(map(float, scorer.score(other, one)["rougeLsum"])) for one, other in pairs]
    assert report.scores["rougeLsum"].tolist() == wanted


def corpus(size: int) -> tuple[list[str], list[str]]:
    source = random.Random(3)
    texts = [one_text(source, WORDS, 30) for _ in range(2 * size)]
    return texts[:size], texts[size:]


def intervals(values: Any, confidence: float, resamples: int, seed: int) -> list[tuple[float, float]]:
    return percentile_intervals(resampled_means(values, resamples, np.random.default_rng(seed)), confidence)


def test_intervals_are_the_percentiles_of_resampled_means() -> None:
    values = np.random.default_rng(1).random((2, 37))
    generator = np.random.default_rng(9)
    draws = [generator.integers(0, 37, size=37, dtype=np.int32) for _ in range(80)]
    for row, found in zip(values, intervals(values, 0.9, 80, 9), strict=True):
        means = sorted(float(np.mean(row[draw])) for draw in draws)
        assert found == pytest.approx((np.percentile(means, 5), np.percentile(means, 95)), abs=1e-12)
    assert intervals(values, 0.9, 80, 9) == intervals(values, 0.9, 80, 9)
    assert intervals(values, 0.9, 80, 9) != intervals(values, 0.9, 80, 8)


def test_intervals_in_steps_are_those_of_one_step() -> None:
    """More indices than one step holds: 1500 x 3000."""
    values = np.random.default_rng(1).random((1, 3000))
    means = values[0][np.random.default_rng(4).integers(0, 3000, size=(1500, 3000), dtype=np.int32)].mean(1)
    (found,) = intervals(values, 0.5, 1500, 4)
    assert found == pytest.approx(np.quantile(means, [0.25, 0.75]), abs=1e-12)


def test_intervals_agree_with_rouge_score_s_bootstrap() -> None:
    predictions, references = corpus(300)
    report = rouge(predictions, references, kinds=("rouge1",), resamples=2000)
    aggregator = scoring.BootstrapAggregator(n_samples=1000)
    for row in report.scores["rouge1"].tolist():
        aggregator.add_scores({"rouge1": scoring.Score(*row)})
    np.random.seed(0)
    theirs = aggregator.aggregate()["rouge1"]
    low, high = report.intervals["rouge1"]
    assert low < report.means["rouge1"] < high
    assert (low, high) == pytest.approx((theirs.low.fmeasure, theirs.high.fmeasure), abs=0.15 * (high - low))
    wider = rouge(predictions, references, kinds=("rouge1",), confidence=0.99).intervals["rouge1"]
    assert wider[0] < low < high < wider[1]


def test_report() -> None:
    report = rouge(["a b a b a b", "", "c d e"], ["a b", "x", "c d"], sources=["a b q", "y", "d e"], split="newline")
    # trigrams aba bab aba bab: two of four are repeated; bigrams ab ba ab ba ab: two of five are new; cd de: one of two
    assert report.counts == {"gen_len": 3.0, "repetition": 0.5 / 3, "empty": 1.0, "novelty": (2 / 5 + 1 / 2) / 2}
    assert report.signature == "rouge|v=0.1.2|stem=yes|split=newline|tokenizer=rouge"
    assert report.means["rouge1"] == report.scores["rouge1"][:, 2].mean()
    assert str(report).splitlines()[0].startswith("rouge1     43.33  [")
    assert "novelty" not in rouge(["a"], ["a"]).counts
    assert rouge(["a"], ["a"], sources=["b"]).counts["novelty"] == 0.0
    assert rouge(["a b"], ["a"], sources=[""]).counts["novelty"] == 1.0


def test_signature_says_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def signature(text: str, **options: Any) -> str:
        return rouge([text], ["A b. C d."], **options).signature.partition("v=0.1.2|")[2]

    monkeypatch.setattr(sentences, "has_punkt", lambda: False)
    assert signature("A b. C d.") == "stem=yes|split=rules|tokenizer=rouge"
    assert signature("A b.\nC d.") == "stem=yes|split=newline|tokenizer=rouge"
    assert signature("A b. C d.\n") == "stem=yes|split=rules|tokenizer=rouge"  # one line
    assert signature("A b.", stem=False, tokenizer="unicode") == "stem=no|split=rules|tokenizer=unicode"
    assert signature("A b.", kinds=["rouge1", "rougeL"]) == "stem=yes|split=none|tokenizer=rouge"
    with pytest.raises(BadInput, match=r"split='punkt' needs nltk's punkt_tab data.*split='rules'"):
        signature("A b.", split="punkt")
    monkeypatch.setattr(sentences, "has_punkt", lambda: True)
    monkeypatch.setattr(sentences, "_punkt", lambda: str.split)
    assert signature("A b. C d.") == "stem=yes|split=punkt|tokenizer=rouge"


def test_sentences_matter_for_lsum_alone() -> None:
    one, other = "The dog ran. The cat sat.", "The cat sat. The dog ran."
    report = rouge([one], [other], split="rules")
    assert report.means["rougeLsum"] == 1.0
    assert report.means["rougeL"] == 0.5
    assert rouge([one], [other], split="newline").means["rougeLsum"] == 0.5


@pytest.mark.skipif(not sentences.has_punkt(), reason="nltk's punkt_tab data is not on this machine")
def test_punkt_equals_rouge_score_s_split_summaries() -> None:
    source = random.Random(2)
    texts = [
        " ".join(source.choice([*WORDS, "Mr.", "end.", "so?", '"Yes!"', "(no.)", "...", "U.S."]) for _ in range(25))
        for _ in range(200)
    ]
    pairs = list(zip(texts[:100], texts[100:], strict=True))
    report = rouge(texts[:100], texts[100:], split="punkt")
    assert_equal(report, theirs(pairs, True, split_summaries=True), pairs)


def test_other_scripts_are_warned_of_and_scored() -> None:
    predictions = ["Привет, мир", "東京は夜の七時", "plain text", "В 2020 году", "naïve café"]
    with pytest.warns(UserWarning, match=r"^3 of 5 examples are mostly in a script .*tokenizer='unicode'") as caught:
        report = rouge(predictions, predictions)
    assert caught[0].filename == __file__
    assert report.scores["rouge1"][:2, 2].tolist() == [0.0, 0.0]
    report = rouge(predictions, predictions, tokenizer="unicode")  # and no warning
    assert report.means["rouge1"] == report.means["rougeLsum"] == 1.0
    assert rouge(["東京の夜"], ["東京の朝"], tokenizer="unicode").means["rouge1"] == 0.75
    assert rouge(["STRASSE cafe\u0301 हिन्दी"], ["straße café हिन्द"], tokenizer="unicode").means["rouge1"] == 2 / 3
    assert rouge(["ℌＡ"], ["ha"], tokenizer="unicode").means["rouge1"] == 1.0  # a capital only once normalised
    assert unicode_words("ที่นี่ snake_case") == ["ที่", "นี่", "snake", "case"]
    assert rouge(["running cats"], ["run cat"], tokenizer="unicode").means["rouge2"] == 1.0


def test_progress_is_shown_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    rouge(["a"], ["a"])
    assert capsys.readouterr() == ("", "")
    rouge(["a"] * 300, ["a"] * 300, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "300/300" in err


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a"], ["a", "b"]), {}, "1 predictions but 2 references"),
        ((["a"], ["a"]), {"sources": []}, "sources is empty"),
        ((["a"], ["a"]), {"sources": ["a", "b"]}, "1 predictions but 2 sources"),
        (("a", ["a"]), {}, "predictions is str 'a': expected a list of strings"),
        ((["a"], b"a"), {}, "references is bytes"),
        ((5, ["a"]), {}, "predictions is int 5"),
        ((["a", None], ["a", "b"]), {}, r"predictions\[1\] is None: expected a string"),
        ((["a"], [[]]), {}, r"references\[0\] is an empty list"),
        ((["a"], [["a", None]]), {}, r"references\[1\] is None"),
        (([], []), {}, "predictions is empty"),
        ((["a"], ["a"]), {"kinds": ["rougel"]}, "kinds='rougel' is unknown: did you mean 'rougeL'"),
        ((["a"], ["a"]), {"kinds": ["rouge0"]}, "kinds='rouge0' is unknown"),
        ((["a"], ["a"]), {"kinds": []}, r"kinds=\(\): name each kind once"),
        ((["a"], ["a"]), {"kinds": ["rouge1", "rouge1"]}, "name each kind once"),
        ((["a"], ["a"]), {"split": "newlines"}, "split='newlines' is unknown: did you mean 'newline'"),
        ((["a"], ["a"]), {"tokenizer": "unicod"}, "tokenizer='unicod' is unknown: did you mean 'unicode'"),
        ((["a"], ["a"]), {"resamples": 0}, "resamples=0: expected a whole number from 1"),
        ((["a"], ["a"]), {"confidence": 1.0}, r"confidence=1.0 is outside \(0, 1\)"),
        ((["a"], ["a"]), {"confidence": 0}, "confidence=0 is outside"),
        ((["a"], ["a"]), {"confidence": float("nan")}, "confidence=nan is outside"),
        ((["a"], ["a"]), {"seed": -1}, "seed=-1: expected a whole number from 0"),
    ],
)
def test_bad_input(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        rouge(*arguments, **options)
    assert "\n" not in str(caught.value)
