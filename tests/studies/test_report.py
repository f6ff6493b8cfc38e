"""`seqreg report`: one page, safe, whole, and readable where people read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.studies.common.figures import figure
from seqreg.studies.common.findings import FOLDER, Finding, Table
from seqreg.studies.compare.export import latex
from seqreg.studies.compare.report import marked, report
from tests.helpers import fake_comparison
from tests.helpers.browser import Browser, find

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
    assert report(folder, None) == folder / "report.html"
    return folder


def test_the_page_is_whole_and_safe(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "r3f is significantly better than baseline" in page
    assert "<script>document" not in page
    assert page.count("<script>") == 1
    assert fake_comparison.NASTY.split("&")[0].replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in page
    outside = re.findall(r"(?:src|href)=\"(?!data:image/(?:svg\+xml|png);base64,|#)[^\"]*", page)
    assert outside == []
    for said in ("Probes fall by 3 points.", "Probes &lt;b&gt;", "ECE is 0.02.", "(r3f, seed 1)", "exit code 3"):
        assert said in page
    assert "seqreg train quickstart --terms smart seed=3" in page
    assert page.count('alt="Collapse"') == 1
    assert "data:image/png" not in page  # the same figure is there as SVG
    for name in ("scores", "differences", "cost", "validation", "parts", "diagnostics"):
        assert f'id="figure-{name}"' in page
        assert (folder / FOLDER / f"{name}.png").stat().st_size > 5000
        assert (folder / FOLDER / f"{name}.svg").exists()


def test_the_same_files_give_the_same_page(folder: Path, tmp_path: Path) -> None:
    assert report(folder, tmp_path / "again.html").read_text() == (folder / "report.html").read_text()


@needs_chromium
def test_the_page_in_a_browser(folder: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    shown = (
        "[...document.querySelectorAll('dd[data-seed]')].filter(one => one.offsetParent).map(one => one.dataset.seed)"
    )
    with Browser() as browser:
        browser.open(folder / "report.html")
        assert browser.run("document.title").startswith("seqreg: quickstart")  # and not what a model wrote
        assert browser.run("[...document.images].every(one => one.complete && one.naturalWidth > 100)")
        light = browser.run(back)
        browser.click("#theme")
        assert browser.run(back) != light
        browser.click("#theme")
        assert browser.run(back) == light
        assert set(browser.run(shown)) == {"1"}
        browser.run(
            "const one = document.querySelector('#seed'); one.value = '3'; one.dispatchEvent(new Event('change'))"
        )
        assert set(browser.run(shown)) == {"3"}
        browser.click("#marks")
        assert (
            browser.run("getComputedStyle(document.querySelector('#texts dd mark')).backgroundColor")
            == "rgba(0, 0, 0, 0)"
        )
        firsts = (
            "[...document.querySelectorAll('#scores table')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
        )
        assert browser.run(firsts) == ["baseline", "r3f", "smart"]
        browser.click("#scores table th:nth-child(4)")
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
@pytest.mark.parametrize("width", [360, 400, 800])
def test_nothing_is_wider_than_a_phone(folder: Path, width: int) -> None:
    with Browser() as browser:
        browser.open(folder / "report.html", width=width, height=800)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("document.querySelector('#scores .wide').scrollWidth") > 0


@needs_chromium
def test_b11_all_columns_are_on_paper(folder: Path) -> None:
    with Browser() as browser:
        browser.open(folder / "report.html", width=1030, height=700)  # A4 across, without its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        wide = "[...document.querySelectorAll('table')].map(one => one.scrollWidth)"
        assert max(browser.run(wide)) <= 1030
        assert browser.run("getComputedStyle(document.querySelector('#scores .wide')).overflowX") == "visible"
        said = browser.run("document.querySelector('.about').textContent")
        assert all(one in said for one in ("bart from scratch", "60 examples (test)", "trained"))


def test_markdown_and_latex(folder: Path, tmp_path: Path) -> None:
    text = report(folder, tmp_path / "r.md", markdown=True).read_text()
    assert "| r3f | 5 | 0 |" in text
    assert "<script>" not in text
    assert "seqreg compare quickstart -t r3f -t smart --seeds 5" in text
    tables = report(folder, tmp_path / "r.tex", latex=True).read_text()
    assert tables.count(r"\begin{table}") == tables.count(r"\end{table}") == 5
    assert r"95\% interval" in tables
    assert latex(r"a_b & \x") == r"a\_b \& \textbackslash{}x"
    with pytest.raises(BadInput, match="choose one"):
        report(folder, None, markdown=True, latex=True)
    with pytest.raises(BadInput, match="is a folder: name a file"):
        report(folder, tmp_path)


def test_a_comparison_without_curves_or_texts_has_a_page(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="2")
    page = report(tmp_path, None).read_text()
    assert "The runs wrote no curves." in page
    assert 'id="texts"' not in page


def test_figures_of_findings_stay_in_their_folder(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="2")
    (tmp_path / "secret.svg").write_text("<svg/>")
    Finding("probe", "Collapse", "x", [], [], ["../secret.svg"]).write(tmp_path / FOLDER)
    with pytest.raises(BadInput, match="leads out of"):
        report(tmp_path, None)


def test_words_that_differ_are_marked() -> None:
    assert marked("the big cat sat", "the cat sat down") == [("the ", False), ("big ", True), ("cat sat", False)]
    assert marked("", "the cat") == []
    assert "".join(text for text, _ in marked("A  cat\nsat.", "a cat")) == "A  cat\nsat."


def test_what_intervals_count_is_said(folder: Path, tmp_path: Path) -> None:
    assert "both kinds of chance" in (folder / "report.html").read_text()
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, kind="classes", seeds="5")
    page = report(tmp_path, None).read_text()
    assert "both kinds of chance" not in page
    assert "the test set is taken for fixed" in page


def test_a_comparison_of_which_only_the_baseline_is_there_has_a_page(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 5.0}, seeds="2", failed=(("r3f", 1), ("r3f", 2)), curves=False)
    page = report(tmp_path, None).read_text()
    assert "2 of 2 runs of r3f failed" in page
    assert "all failed" in page
    assert 'id="figure-differences"' not in page
    assert r"all failed \\" in report(tmp_path, None, latex=True).read_text()


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
