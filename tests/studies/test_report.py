"""`seqreg report`: one page, safe, whole, and readable where people read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.studies.common.figures import figure
from seqreg.studies.common.findings import FOLDER, Finding, Table
from seqreg.studies.compare import conclusions, reader, results
from seqreg.studies.compare.export import latex
from seqreg.studies.compare.report import report
from tests.helpers import fake_comparison
from tests.helpers.browser import Browser, find

PRETRAINED = ("model.name=a/b",)
needs_chromium = pytest.mark.skipif(find() is None, reason="Chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with a study of its own and one of a run, and its page."""
    folder = tmp_path_factory.mktemp("report") / "c"
    fake_comparison.comparison(folder, {"r3f": 4.0, "smart": 0.0}, failed=(("smart", 2),), seeds="5")
    place = folder / FOLDER
    with figure(place / "collapse.svg", place / "collapse.png") as drawn:
        drawn.add_subplot().plot([0, 1], [1, 0])
    table = Table("Probes <b>", ["task", "accuracy"], [["first", 0.5]])
    Finding(
        "probe", "Collapse", "seqreg probe x", ["Probes fall by 3 points."], [table], ["collapse.svg", "collapse.png"]
    ).write(place)
    of_run = folder / "r3f" / "seed-1" / FOLDER
    Finding("calibrate", "Calibration", "seqreg calibrate x", [f"ECE is 0.02. {fake_comparison.NASTY}"]).write(of_run)
    assert report([folder]) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests: it takes seconds to start."""
    with Browser() as browser:
        yield browser


def test_the_page_is_whole_and_safe(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "r3f is significantly better than baseline" in page
    assert "<script>document" not in page
    assert page.count("<script>") == 1
    assert fake_comparison.NASTY.split("&")[0].replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in page
    assert page.count("</script>") == page.count("<script") == 2  # the program, and outputs as JSON
    outside = re.findall(r"(?:src|href)=\"(?!data:image/(?:svg\+xml|png);base64,|#)[^\"]*", page)
    assert outside == []
    for said in ("Probes fall by 3 points.", "Probes &lt;b&gt;", "ECE is 0.02.", "(r3f, seed 1)", "exit code 3"):
        assert said in page
    assert "seqreg train quickstart --terms smart seed=3" in page
    assert page.count('alt="Collapse"') == 1
    assert "data:image/png" not in page  # the same figure is there as SVG
    for name in ("scores", "differences", "cost", "validation", "parts", "diagnostics"):
        assert (f'id="figure-{name}"' in page) is (name != "differences")  # the page draws these itself
        assert (folder / FOLDER / f"{name}.png").stat().st_size > 5000
        assert (folder / FOLDER / f"{name}.svg").exists()


def test_the_same_files_give_the_same_page(folder: Path, tmp_path: Path) -> None:
    assert report([folder], tmp_path / "again.html").read_text() == (folder / "report.html").read_text()


OUTPUTS = "[...document.querySelectorAll('.output')].map(one => one.innerText)"
SHOWN = "[...document.querySelectorAll('.example .source span')].map(one => one.textContent)"
COUNT = "document.querySelector('.count').textContent"


def choose(browser: Browser, name: str, value: str, event: str = "change") -> None:
    """Set a control of the reader as a person does it."""
    browser.run(
        f"(() => {{ const one = document.querySelector('[name={name}]'); one.value = {value!r}; "
        f"one.dispatchEvent(new Event('{event}')); }})()"
    )


@needs_chromium
def test_the_page_in_a_browser(folder: Path, browser: Browser) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    browser.open(folder / "report.html")
    assert browser.run("document.title").startswith("seqreg: quickstart")  # and not what a model wrote
    assert browser.run("[...document.images].every(one => one.complete && one.naturalWidth > 100)")
    light = browser.run(back)
    browser.click("#theme")
    assert browser.run(back) != light
    browser.click("#theme")
    assert browser.run(back) == light
    firsts = "[...document.querySelectorAll('#verdict table')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
    assert browser.run(firsts) == ["before training", "baseline", "r3f", "smart"]
    browser.click("#verdict table th:nth-child(4)")
    assert browser.run(firsts)[0] == "r3f"
    browser.click("#repeat details summary")
    assert browser.run("document.querySelector('#repeat details').open")
    for place in ("#cost", "#repeat"):
        browser.click(f"nav a[href='{place}']")
        assert browser.run("location.hash") == place
    assert browser.faults() == []
    browser.open(folder / "report.html", dark=True)
    assert browser.run(back) != light


@needs_chromium
def test_examples_are_read_filtered_and_searched(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html")
    assert browser.run(COUNT) == "10 of 60 examples"
    assert browser.run(SHOWN)[:2] == ["example 0", "example 1"]
    outputs = browser.run(OUTPUTS)
    assert outputs[1].startswith("baseline")
    assert "seed 1 won it 0" in outputs[1]
    assert any(fake_comparison.NASTY in text for text in outputs)  # as text, and none of it has run
    assert browser.run("document.title").startswith("seqreg: quickstart")
    choose(browser, "seed", "3")
    assert "seed 3 won it 0" in browser.run(OUTPUTS)[1]
    assert len(browser.run(OUTPUTS)) == 40
    choose(browser, "seed", "2")
    assert len(browser.run(OUTPUTS)) == 30  # that run of smart failed
    marks = "[...document.querySelectorAll('.example del')].filter(one => one.offsetParent).length"
    assert browser.run(marks) == 0
    choose(browser, "marks", "both")
    assert browser.run(marks) > 0
    choose(browser, "search", "IT 17", "input")
    assert browser.run(SHOWN) == ["example 17"]
    browser.click("[name=clear]")
    browser.click(".more")
    assert browser.run(COUNT) == "20 of 60 examples"
    choose(browser, "show", "worse 2")
    worse = int(browser.run(COUNT).split(" of ")[1].split()[0])
    counts = browser.run("[...document.querySelectorAll('.bin[data-method=smart]')].map(one => one.textContent)")
    assert 0 < worse == sum(int(count) for count in counts[:4]) < 60
    choose(browser, "show", "all")
    for place, count in enumerate(counts):
        if count != "0":
            browser.click(f".bin[data-method=smart][data-bin='{place}']")
            assert f" of {count} examples" in browser.run(COUNT)
    choose(browser, "order", "low")
    browser.click("[name=clear]")
    scores = [float(text.split("(")[1].split(")")[0]) for text in browser.run(OUTPUTS) if text.startswith("base")]
    assert scores == sorted(scores)
    assert browser.faults() == []


@needs_chromium
def test_numbers_stand_below_their_heads(folder: Path, browser: Browser) -> None:
    ends = (
        "[...document.querySelectorAll('table')].flatMap(table => [...table.tBodies[0].rows].flatMap(row => "
        "[...row.cells].map((cell, place) => [cell, table.tHead.rows[0].cells[place]])))"
        ".filter(([cell]) => cell.textContent.trim()).map(([cell, head]) => "
        "[getComputedStyle(cell).textAlign, getComputedStyle(head).textAlign])"
    )
    browser.open(folder / "report.html")
    pairs = browser.run(ends)
    assert len(pairs) > 50
    assert all(cell == head for cell, head in pairs)
    assert {cell for cell, _ in pairs} == {"left", "right"}


@needs_chromium
@pytest.mark.parametrize("width", [360, 390, 800])
def test_nothing_is_wider_than_a_phone(folder: Path, browser: Browser, width: int) -> None:
    browser.open(folder / "report.html", width=width, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelector('#scores .wide').scrollWidth") > 0


@needs_chromium
def test_all_columns_of_a_report_are_printed(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html", width=1030, height=700)  # A4 across, without its margins
    browser.call("Emulation.setEmulatedMedia", media="print")
    wide = "[...document.querySelectorAll('table')].map(one => one.scrollWidth)"
    assert max(browser.run(wide)) <= 1030
    assert browser.run("getComputedStyle(document.querySelector('#scores .wide')).overflowX") == "visible"
    said = browser.run("document.querySelector('.about').textContent")
    assert all(one in said for one in ("bart from scratch", "60 examples (test)", "trained"))


@needs_chromium
def test_the_verdict_is_printed_on_one_page(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html", width=1030, height=700)
    browser.call("Emulation.setEmulatedMedia", media="print")
    page = "document.querySelector('.top').offsetHeight + document.querySelector('.verdict').offsetHeight"
    assert browser.run(page) <= 700  # A4 across, without its margins
    shown = (
        "[...document.querySelector('.verdict').querySelectorAll('.headline, figure, table')].map(one => one.tagName)"
    )
    assert browser.run(shown) == ["P", "FIGURE", "TABLE"]
    assert browser.run("getComputedStyle(document.querySelector('.verdict')).breakAfter") == "page"


def test_markdown_and_latex(folder: Path, tmp_path: Path) -> None:
    text = report([folder], tmp_path / "r.md", markdown=True).read_text()
    assert "| r3f | 5 | 0 |" in text
    assert "<script>" not in text
    assert "seqreg compare quickstart -t r3f -t smart --seeds 5" in text
    tables = report([folder], tmp_path / "r.tex", latex=True).read_text()
    assert tables.count(r"\begin{table}") == tables.count(r"\end{table}") == 5
    assert r"95\% interval" in tables
    assert latex(r"a_b & \x") == r"a\_b \& \textbackslash{}x"
    with pytest.raises(BadInput, match="choose one"):
        report([folder], None, markdown=True, latex=True)
    with pytest.raises(BadInput, match="is a folder: name a file"):
        report([folder], tmp_path)


def test_a_comparison_without_curves_or_texts_has_a_page(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="2")
    page = report([tmp_path]).read_text()
    assert "The runs wrote no curves." in page
    assert 'id="texts"' not in page


def test_figures_of_findings_stay_in_their_folder(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="2")
    (tmp_path / "secret.svg").write_text("<svg/>")
    Finding("probe", "Collapse", "x", [], [], ["../secret.svg"]).write(tmp_path / FOLDER)
    with pytest.raises(BadInput, match="leads out of"):
        report([tmp_path])


def test_words_that_differ_are_marked() -> None:
    pieces = reader.differences("the big cat sat", ["the cat sat down"])
    assert pieces == ["=the ", "+big ", "=cat sat", "-down"]
    assert reader.differences("", ["the cat"]) == ["-the cat"]
    assert "".join(piece[1:] for piece in reader.differences(" A  cat\nsat.", ["a cat"]) if piece[0] != "-") == (
        " A  cat\nsat."
    )
    assert reader.differences("a dog", ["a cat", "a dog"]) == ["=a dog"]  # the nearest of several references


def test_examples_on_the_page_are_as_many_as_there_is_room_for(folder: Path) -> None:
    compared = results.load(folder)
    whole, few = reader.reader(compared), reader.reader(compared, budget=2000)
    assert whole is not None
    assert few is not None
    assert len(whole["examples"]) == whole["total"] == few["total"] == 60
    assert 1 < len(few["examples"]) < 20
    assert few["examples"][0]["index"] == 0
    assert few["bins"] == whole["bins"]  # of all examples
    assert all(sum(row["counts"]) == 60 for row in whole["bins"])


def test_several_comparisons_are_on_one_page(folder: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    fake_comparison.comparison(second, {"wise": 5.0}, kind="classes", seeds="2", arms=("wise",), settings=PRETRAINED)
    page = report([folder, second], tmp_path / "both.html").read_text()
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert all(name in names for name in re.findall(r'href="#([^"]+)"', page))
    assert page.count("r3f is significantly better than baseline") == 3  # overview, verdict, sentences
    assert page.count("Too few seeds for a verdict on wise.") == 2
    text = report([folder, second], tmp_path / "both.md", markdown=True).read_text()
    assert text.count("### To repeat it") == 2
    with pytest.raises(BadInput, match="2 comparisons: say where"):
        report([folder, second])
    with pytest.raises(BadInput, match="the same comparison twice"):
        report([folder, folder], tmp_path / "x.html")


def test_free_arms_are_marked_and_have_no_training_time(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0, "wise": 1.0}, arms=("wise",), settings=PRETRAINED)
    page = report([tmp_path]).read_text()
    assert 'wise <span class="tag">free</span>' in page
    assert 'r3f <span class="tag">' not in page
    assert "without training (made and scored in 30.0 s)" in page
    assert "free arms are not trained" in page


def test_no_p_is_shown_that_no_verdict_may_rest_on(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, seeds="2")
    table = conclusions.judge(tmp_path).tables[0]
    row = dict(zip(table.columns, table.rows[2], strict=True))
    assert row["p"] == row["p (Holm)"] == ""
    assert "more needed" in row["verdict"]


def test_what_intervals_count_is_said(folder: Path, tmp_path: Path) -> None:
    assert "both kinds of chance" in (folder / "report.html").read_text()
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="5")
    page = report([tmp_path]).read_text()
    assert "both kinds of chance" not in page
    assert "the test set is taken for fixed" in page


def test_a_comparison_of_which_only_the_baseline_is_there_has_a_page(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, seeds="2", failed=(("r3f", 1), ("r3f", 2)), curves=False)
    page = report([tmp_path]).read_text()
    assert "2 of 2 runs of r3f failed" in page
    assert "all failed" in page
    assert 'id="figure-differences"' not in page
    assert r"all failed \\" in report([tmp_path], None, latex=True).read_text()


def test_names_are_no_formulas_and_no_options(tmp_path: Path) -> None:
    with figure(tmp_path / "x.svg") as drawn:
        drawn.add_subplot().set_title(r"runs/$a_{$ and $\no$")  # which is no formula that could be drawn
    assert (tmp_path / "x.svg").stat().st_size > 1000
    assert latex("[1] * 2") == "{[}1] {*} 2"


@pytest.mark.parametrize(("values", "labels"), [([1e-4, 1, 100], {"1", "100"}), ([2.2, 6], {"3", "4"})])
def test_powers_of_ten_are_written_plainly(values: list[float], labels: set[str], tmp_path: Path) -> None:
    with figure(tmp_path / "x.png") as drawn:
        axes = drawn.add_subplot()
        axes.semilogy(values)
    shown = {label.get_text() for both in (False, True) for label in axes.get_yticklabels(minor=both)}
    assert labels <= shown
    assert not any("$" in text for text in shown)
