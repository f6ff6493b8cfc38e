"""terms.yaml: what is wrong with it is one line that names the file, the key, the value and the nearest right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqreg import BadInput
from seqreg.build import term_names
from seqreg.errors import Advice
from seqreg.integrations.fairseq_plugin.settings import read_loss, read_terms
from tests.helpers import tiny_fairseq


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("terms: {r3ff: {}}", r"terms.r3ff: unknown term 'r3ff'; did you mean 'r3f'\?"),
        (
            "terms: {r3f: {wieght: 0.1}}",
            r"terms.r3f.wieght=0.1: R3F: unknown setting 'wieght'; did you mean 'weight'\?",
        ),
        ("terms: {r3f: {noise: unifrom}}", r"terms.r3f.noise='unifrom': did you mean 'uniform'\?"),
        ("terms: {r3f: {scale: -1}}", r"terms.r3f.scale=-1: expected a number >= 0"),
        ("terms: {r3f: {weight: -1}}", r"terms.r3f.*weight.*-1"),
        ("terms: {r3f: {preset: fairsec}}", r"terms.r3f.preset='fairsec': .*did you mean 'fairseq'\?"),
        ("terms: {r3f: 3}", r"terms.r3f: r3f: expected a mapping of settings"),
        ("terms: {jachess: {mode: alternate}}", r"terms.jachess.on='unlabelled': fairseq loads no texts"),
        ("terms: [r3f]", r"terms=\['r3f'\]: expected a mapping"),
        ("term: {r3f: {}}", r"term=\{'r3f': \{\}\}: unknown key; did you mean 'terms'\?"),
        ("model: {head: r4f}", r"model: in fairseq, R4F is an architecture"),
        ("terms: {r3f: {}, other: {term: r3f, name: r3f}}", r"two parts of the loss are called 'r3f'"),
        ("- r3f", r"expected a mapping"),
        ("terms: {r3f: {}\n", r":\d: "),
        ("terms:\n  r3f: {}\n  r3f: {}\n", r":3: the key 'r3f' is twice"),
    ],
)
def test_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "terms.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        read_terms(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{terms: {}, loss: {loss: dtf}}", r"^--seqreg-terms: loss\.loss='dtf': did you mean 'dft'\?$"),
        ("{terms: {}, loss: dft}", r"^--seqreg-terms: loss='dft': expected {loss: dft}$"),
        (
            "{loss: {loss: dft, label_smoothing: 0.1}}",
            r"loss\.label_smoothing=0\.1: fairseq has the flag --label-smoothing$",
        ),
    ],
)
def test_one_line_about_a_loss(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_loss(text)


def test_the_loss_of_a_file() -> None:
    assert read_loss("") == read_loss("{terms: {r3f: {}}}") == "nll"
    assert read_loss(str(tiny_fairseq.ROOT / "recipes" / "terms" / "asft.yaml")) == "dft"
    assert [term.name for term in read_terms(str(tiny_fairseq.ROOT / "recipes" / "terms" / "asft.yaml"))] == ["anchor"]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"terms.yaml: cannot be read: No such file"):
        read_terms(str(tmp_path / "terms.yaml"))


def test_braces_are_yaml() -> None:
    (term,) = read_terms("{terms: {r3f: {weight: 0.5, scale: 1e-3}}}")
    assert (term.weight, term.settings()["scale"]) == (0.5, 1e-3)
    with pytest.raises(BadInput, match=r"^--seqreg-terms: terms.r3f.wieght=1: "):
        read_terms("{terms: {r3f: {wieght: 1}}}")
    assert read_terms("") == []


@pytest.mark.parametrize("name", term_names())
@pytest.mark.parametrize("regression", [False, True])
def test_the_recipes_of_terms_can_be_read(name: str, regression: bool) -> None:
    (term,) = read_terms(str(tiny_fairseq.ROOT / "recipes" / "terms" / f"{name}.yaml"), regression=regression)
    assert term.name == name
    if name == "r3f":
        assert term.settings().get("divergence", "symmetric_kl") == ("mse" if regression else "symmetric_kl")


def test_a_backward_stage_is_left_out_and_that_is_said() -> None:
    with pytest.warns(Advice, match=r"uegr.yaml: optimisation: .*the terms alone are trained"):
        read_terms(str(tiny_fairseq.ROOT / "recipes" / "terms" / "uegr.yaml"))


def test_fairseq_ends_with_that_line(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tiny_fairseq.build(
            pairs, *tiny_fairseq.TRANSFORMER, "--criterion", "seqreg", "--seqreg-terms", "{terms: {rdorp: {}}}"
        )
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error == (
        "seqreg: --seqreg-terms: terms.rdorp: unknown term 'rdorp'; did you mean 'rdrop'?, or give a dotted name of "
        "your own\n"
    )
