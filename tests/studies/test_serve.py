"""`seqreg serve`: outputs and probabilities over HTTP, who may ask, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqreg.cli.answers import answer
from seqreg.cli.options import check_address
from seqreg.cli.serve import LONGEST, PageServer, _examples
from seqreg.errors import BadInput
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.data.examples import Example
from tests.helpers.browser import Browser, find
from tests.helpers.tiny_tasks import seqreg

SOURCE = "the film was good and lovely"
NASTY = "<img src=x onerror=\"document.title='owned'\"> good fine"


@pytest.fixture(scope="module")
def models(writer: Path, classifier: Path) -> dict[str, TrainedModel]:
    return {"writer": TrainedModel.load(writer), "classifier <b>": TrainedModel.load(classifier)}


@pytest.fixture(scope="module")
def server(models: dict[str, TrainedModel]) -> Iterator[PageServer]:
    server = PageServer(models, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
    thread.join()


def ask(server: PageServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, document and headers of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    kind = {"Content-Type": "application/json"} if body is not None else {}
    text = body if isinstance(body, (bytes, str)) or body is None else json.dumps(body)
    connection.request(method, path, text, {**kind, **{key.replace("_", "-"): value for key, value in headers.items()}})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(content) if is_json else content.decode(), response.headers


def test_probabilities_are_the_model_s_own(models: dict[str, TrainedModel]) -> None:
    model = models["writer"]
    said = answer(model, Example(SOURCE), 0.0, 0)
    assert said["kind"] == "text"
    assert "noisy" not in said
    tokens = said["clean"]["tokens"]
    assert tokens[-1]["end"]
    assert "".join(token["text"] for token in tokens).strip() == said["clean"]["text"]
    source = model.tokenizer(SOURCE, return_tensors="pt")
    ids = model.model.generate(**source)
    with torch.no_grad():
        logits = model.model(**source, decoder_input_ids=ids[:, :-1]).logits[0]
    shares = logits.double().softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    special = set(model.tokenizer.all_special_ids) - {model.end}
    kept = [
        100 * float(share) for share, token in zip(shares, ids[0, 1:].tolist(), strict=True) if token not in special
    ]
    assert [token["percent"] for token in tokens] == pytest.approx(kept, abs=0.06)


def test_noise_changes_outputs_and_its_tokens_are_marked(models: dict[str, TrainedModel]) -> None:
    model = models["writer"]
    quiet = answer(model, Example(SOURCE), 1e-9, 0)
    assert quiet["noisy"]["text"] == quiet["clean"]["text"]
    assert not any(token["changed"] for token in quiet["noisy"]["tokens"])
    loud = [answer(model, Example(SOURCE), 5.0, seed) for seed in range(8)]
    assert [one["noisy"] for one in loud] == [answer(model, Example(SOURCE), 5.0, seed)["noisy"] for seed in range(8)]
    changed = [one for one in loud if one["noisy"]["text"] != one["clean"]["text"]]
    assert changed
    for one in changed:
        lost, new = one["clean"]["tokens"], one["noisy"]["tokens"]
        assert any(token["lost"] for token in lost) or any(token["changed"] for token in new)
        assert [t["text"] for t in lost if not t["lost"]] == [t["text"] for t in new if not t["changed"]]
    several = [answer(models["classifier <b>"], Example(SOURCE), 10.0, seed) for seed in range(8)]
    said = several[0]
    assert said["kind"] == "classes"
    assert any(one["clean"]["percent"] != one["noisy"]["percent"] for one in several)
    assert sum(said["clean"]["percent"].values()) == pytest.approx(100, abs=0.2)
    assert said["clean"]["text"] == max(said["clean"]["percent"], key=said["clean"]["percent"].__getitem__)


def test_examples_have_all_their_references(tmp_path: Path) -> None:
    rows = [{"source": "a", "reference": "b", "references": ["b", "c"]}, {"source": "d", "reference": "e"}]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: Any = SimpleNamespace(folder=tmp_path, card=SimpleNamespace(columns=SimpleNamespace(second=None)))
    assert [example["reference"] for example in _examples(run)] == ["b | c", "e"]


def test_a_source_that_is_cut_is_told(models: dict[str, TrainedModel]) -> None:
    assert answer(models["writer"], Example(SOURCE), 0.0, 0)["notes"] == []
    (note,) = answer(models["writer"], Example("good " * 5000), 0.0, 0)["notes"]
    assert "what is beyond is cut" in note


def test_questions_over_http(server: PageServer) -> None:
    status, said, headers = ask(server, "POST", "/answers", {"source": SOURCE, "scale": 0.5, "seed": 3})
    assert status == 200
    assert [run["name"] for run in said["runs"]] == ["writer", "classifier <b>"]
    assert {"clean", "noisy"} <= said["runs"][0].keys()
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, said, _ = ask(server, "GET", "/about")
    assert [run["pair"] for run in said["runs"]] == [False, False]
    assert said["examples"][0].keys() == {"source", "second", "reference"}
    status, page, headers = ask(server, "GET", "/")
    assert (status, page.count("NONCE")) == (200, 0)
    nonce = headers["Content-Security-Policy"].split("'nonce-")[1].split("'")[0]
    assert page.count(f'nonce="{nonce}"') == 2
    assert nonce not in ask(server, "GET", "/")[1]  # another for every page


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ({"source": "  "}, 400, "source: is empty"), ({"source": 1}, 400, "source: expected text"),
        ({"source": "a\0b"}, 400, "source: expected text"), ({"source": "\ud800"}, 400, "source: expected text"),
        ({"source": "a", "scale": -1}, 400, "scale=-1: expected a number from 0 to 10"),
        ({"source": "a", "scale": True}, 400, "scale=True: expected"), ({"source": "a", "seed": 1.5}, 400, "seed=1.5"),
        ({"source": "a", "sed": 1}, 400, "expected {"), ([], 400, "expected {"), ("{", 400, "expected JSON"),
        ("[" * 50_000, 400, "expected JSON"), ("NaN", 400, "expected {"), (b"\xff", 400, "expected JSON"),
        ({"source": "a" * LONGEST}, 413, "expected at most"),
    ],
)  # fmt: skip
def test_bad_questions_are_one_line(server: PageServer, body: Any, status: int, line: str) -> None:
    found, said, _ = ask(server, "POST", "/answers", body)
    assert found == status
    assert said["error"].startswith(line)


def test_only_this_page_may_ask(server: PageServer) -> None:
    port = server.server_address[1]
    question = {"source": SOURCE}
    for host in (
        f"evil.example:{port}",
        "127.0.0.1:1",
        f"127.0.0.1.evil.example:{port}",
        "",
        f"10.0.0.1:{port}",
        "[::1",
    ):
        status, said, _ = ask(server, "GET", "/about", Host=host)
        assert (status, said) == (403, {"error": "the Host header names another server"})
    assert ask(server, "GET", "/about", Host=f"localhost:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"http://evil.example:{port}"):
        assert ask(server, "POST", "/answers", question, Origin=origin)[0] == 403
    assert ask(server, "POST", "/answers", question, Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(server, "POST", "/answers", json.dumps(question), Content_Type="text/plain")[0] == 415
    assert ask(server, "GET", "/../../etc/passwd")[0] == 404
    assert ask(server, "POST", "/")[0] == 404
    assert ask(server, "PUT", "/answers", question)[0] == 501


def test_addresses_that_others_can_reach_are_refused(models: dict[str, TrainedModel]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(BadInput, match="if that is meant, --allow-remote"):
            check_address(host, False)
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_address(host, False)
    with PageServer(models, "0.0.0.0", 0, allow_remote=True) as server:
        port = server.server_address[1]
        assert server.knows(f"192.168.1.2:{port}")
        assert not server.knows(f"evil.example:{port}")
    tagger = SimpleNamespace(card=SimpleNamespace(kind="token_classification"), folder=Path("runs/tags"))
    with pytest.raises(BadInput, match="runs/tags: tags of words have no page yet: seqreg predict runs/tags FILE"):
        PageServer({"tags": tagger}, "127.0.0.1", 0)  # type: ignore[dict-item]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadInput, match="Address already in use: choose another with --port"):
            PageServer(models, "127.0.0.1", taken.getsockname()[1])


def test_the_command_refuses_in_one_line_and_ends_by_ctrl_c(writer: Path, tmp_path: Path) -> None:
    assert "no such folder" in seqreg("serve", tmp_path / "none", cwd=tmp_path, code=2).stderr
    refused = seqreg("serve", writer, "--host", "0.0.0.0", cwd=tmp_path, code=2).stderr
    assert refused.strip().splitlines()[-1].startswith("--host 0.0.0.0: other machines could reach")
    words = [sys.executable, "-m", "seqreg", "serve", str(writer), "--port", "0", "--json"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )  # fmt: skip
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.stderr
            text += line
        assert json.loads(text)["url"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # a server of a test that has failed
        process.wait()
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert errors.rstrip().endswith("Stopped.")


@pytest.mark.skipif(find() is None, reason="Chromium is not installed: apt-get install chromium")
def test_the_page_in_a_browser(server: PageServer) -> None:
    wait = (
        "new Promise(done => { const look = () => document.querySelectorAll('.run').length === 2 && "
        "!document.querySelector('#ask').disabled ? done(true) : setTimeout(look, 50); look(); })"
    )
    with Browser() as browser:
        browser.open(server.url)
        browser.run(f"document.querySelector('#source').value = {json.dumps(NASTY)}")
        browser.click("#ask")
        assert browser.run(wait)
        assert browser.run("document.title") == "seqreg serve"
        assert browser.run("document.images.length") == 0
        assert browser.run("document.querySelectorAll('.run')[1].querySelector('h2').textContent") == "classifier <b>"
        assert browser.run("document.querySelectorAll('.token').length") > 4
        assert "%" in browser.run("document.querySelector('.token').title")
        assert browser.run("[...document.querySelectorAll('.run h3')].length") == 4  # both, without and with noise
        assert browser.run("document.querySelectorAll('progress').length") == 4
        browser.click("#example")
        assert browser.run(wait)
        assert browser.run("document.querySelector('#reference').textContent").startswith("reference: this was a")
        browser.run("document.querySelector('#source').value = ' '")
        browser.click("#draw")
        said = "new Promise(done => setTimeout(() => done(document.querySelector('#error').textContent), 1500))"
        assert browser.run(said) == "source: is empty"
        (refused,) = browser.faults(own=server.url)  # that question, and nothing else
        assert "400 (Bad Request)" in refused
        browser.open(server.url, width=390, height=800)
        assert browser.run("document.documentElement.scrollWidth") <= 390
