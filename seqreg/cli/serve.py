"""`seqreg serve`: a local page to type a source into, with the outputs of trained models side by side."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seqreg.cli.answers import answer
from seqreg.cli.options import check_address
from seqreg.errors import BadInput
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.version import __version__
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores.evaluate import SOURCE
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import to_json
from seqreg.workbench.text.escape import plain

PAGE = Path(__file__).with_name("serve.html")
LONGEST = 100_000
"""Bytes of a question."""
EXAMPLES = 50
"""Examples of its test set that a run offers to try."""
SCALES = (0.0, 10.0)
_NAMES = ("localhost", "127.0.0.1", "::1")


class _RefusedError(Exception):
    """A request that is answered with a status and one line."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """The page of some models; every question is answered by one thread at a time.

    Args:
        models: by the name that is shown
        host, port: where it listens; port 0 is a free one
        allow_remote: requests may name any numeric address, not those of this machine alone
    """

    daemon_threads = True

    def __init__(self, models: Mapping[str, TrainedModel], host: str, port: int, *, allow_remote: bool = False) -> None:
        check_address(host, allow_remote)
        for model in models.values():
            if model.card.kind == "token_classification":
                raise BadInput(f"{model.folder}: tags of words have no page yet: seqreg predict {model.folder} FILE")
        self.models, self.host, self.allow_remote = models, host, allow_remote
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.lock = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            fix = (
                "choose another with --port, or 0 for a free one"
                if not isinstance(error, socket.gaierror)
                else "--host"
            )
            raise BadInput(f"--host {host} --port {port}: {error.strerror}: {fix}") from None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def knows(self, header: str) -> bool:
        """Whether a Host header names this server: a page of another site whose name points here is refused."""
        try:
            parts = urlsplit(f"//{header}")
            name, port = (parts.hostname or "").lower(), parts.port or 80
        except ValueError:
            return False
        if port != self.server_address[1]:
            return False
        if name in _NAMES or name == self.host.lower():
            return True
        try:
            return self.allow_remote and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def about(self) -> dict[str, Any]:
        """What the page has to know about the models."""
        runs = [
            {"name": name, "folder": str(model.folder), "task": model.card.title, "pair": _is_pair(model)}
            for name, model in self.models.items()
        ]
        return {"runs": runs, "examples": _examples(next(iter(self.models.values()))), "version": __version__}

    def answers(self, question: Any) -> dict[str, Any]:
        """The outputs of all models; what is wrong with the question for one of them is said beside its name."""
        source, second, scale, seed = _question(question)
        runs = []
        for name, model in self.models.items():
            with self.lock:
                try:
                    if _is_pair(model) and not second.strip():
                        raise BadInput("this task has two texts: give the second too")
                    said = answer(model, Example(source, second if _is_pair(model) else None), scale, seed)
                except BadInput as error:
                    said = {"error": " ".join(error.lines)}
            runs.append({"name": name, **said})
        return {"runs": runs}


def _is_pair(model: TrainedModel) -> bool:
    return model.card.columns.second is not None


def _examples(model: TrainedModel) -> list[dict[str, str]]:
    """Sources that the run was tested on, as far as it has written them whole."""
    path = model.folder / "predictions.jsonl"
    if not path.is_file():
        return []
    lines = [line for _, (_, line) in zip(range(4 * EXAMPLES), readers.read(path), strict=False)]
    whole = [line for line in lines if 0 < len(str(line.get("source", ""))) <= SOURCE][:EXAMPLES]
    examples = []
    for line in whole:
        source, _, second = str(line["source"]).partition("\t") if _is_pair(model) else (str(line["source"]), "", "")
        reference = " | ".join(line.get("references") or [str(line.get("reference", ""))])
        examples.append({"source": source, "second": second, "reference": reference})
    return examples


def _question(question: Any) -> tuple[str, str, float, int]:
    """Source, second text, scale of the noise and its seed; refuses everything else."""
    if not isinstance(question, dict) or not {"source"} <= question.keys() <= {"source", "second", "scale", "seed"}:
        raise BadInput('expected {"source": TEXT} with, if wanted, "second", "scale" and "seed"')
    source, second = question["source"], question.get("second", "")
    for name, text in (("source", source), ("second", second)):
        if not isinstance(text, str) or any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in text):
            raise BadInput(f"{name}: expected text")
    if not source.strip():
        raise BadInput("source: is empty")
    scale, seed = question.get("scale", 0.0), question.get("seed", 0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not SCALES[0] <= scale <= SCALES[1]:
        raise BadInput(f"scale={scale}: expected a number from {SCALES[0]:g} to {SCALES[1]:g}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise BadInput(f"seed={seed}: expected a whole number from 0 to {2**31 - 1}")
    return source, second, float(scale), seed


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "seqreg", ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        try:
            if not self.server.knows(self.headers.get("Host", "")):
                raise _RefusedError(HTTPStatus.FORBIDDEN, "the Host header names another server")
            method()
        except _RefusedError as error:
            self._json({"error": str(error)}, error.status)
        except BadInput as error:
            self._json({"error": " ".join(error.lines)}, HTTPStatus.BAD_REQUEST)
        except (BrokenPipeError, ConnectionResetError):  # the reader has left
            self.close_connection = True

    def _get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/about":
            self._json(self.server.about())
        elif path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
            self._send(page.encode(), "text/html; charset=utf-8", HTTPStatus.OK, nonce)
        else:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"{plain(path)[:200]}: no such page")

    def _post(self) -> None:
        if urlsplit(self.path).path != "/answers":
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such page")
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "the question comes from a page of another site")
        if self.headers.get_content_type() != "application/json":  # which no other site can send unasked
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LONGEST:
            self.close_connection = True
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {LONGEST:,} bytes")
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise BadInput("expected JSON") from None
        self._json(self.server.answers(question))

    def _json(self, document: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(to_json(document).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus, nonce: str = "") -> None:
        allowed = (
            f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
            if nonce
            else ""
        )
        policy = f"default-src 'none'; {allowed}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        self.send_response(status)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of every request: what is asked is nobody else's."""


def serve(server: PageServer, announce: Callable[[], None]) -> None:
    """Say where the page is, and answer until Ctrl-C."""
    try:
        announce()
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
