"""The terms that --seqreg-terms asks for: a YAML file, or YAML itself in braces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path

from seqreg.build import build_term
from seqreg.errors import Advice, BadInput, nearest
from seqreg.integrations import strict_yaml
from seqreg.losses import LossName
from seqreg.term import Term

FLAG = "--seqreg-terms"


def read_terms(text: str, *, regression: bool = False) -> list[Term]:
    """The terms of a file such as recipes/terms/r3f.yaml; none for an empty text.

    Args:
        text: a path, or a mapping in braces: {terms: {r3f: {weight: 0.1}}}
        regression: also read the block `regression`, which changes terms for a regression head
    """
    if not text.strip():
        return []
    where, values = _read(text)
    terms = _terms(values, where)
    if regression and values.get("regression") is not None:
        for name, settings in _terms(values["regression"], f"{where}: regression").items():
            terms[name] = {**(terms.get(name) or {}), **(settings or {})}
    found = [_term(name, settings, where) for name, settings in terms.items()]
    names = [term.name for term in found]
    for name in names:
        if names.count(name) > 1 or name in ("base", "nll"):
            raise BadInput(f"{where}: terms: two parts of the loss are called {name!r}: give one of them another name")
    return found


def read_loss(text: str) -> LossName:
    """The base loss of the same file, `loss: {loss: dft}`; "nll" where it says nothing."""
    where, values = _read(text) if text.strip() else ("", {})
    block = values.get("loss") if isinstance(values, Mapping) else None
    if block is None:
        return "nll"
    if not isinstance(block, Mapping) or not block.keys() <= {"loss", "label_smoothing"}:
        raise BadInput(f"{where}: loss={block!r}: expected {{loss: dft}}")
    if smoothing := block.get("label_smoothing"):
        raise BadInput(f"{where}: loss.label_smoothing={smoothing!r}: fairseq has the flag --label-smoothing")
    loss = block.get("loss", "nll")
    if loss not in get_args(LossName):
        raise BadInput(f"{where}: loss.loss={loss!r}: {nearest(str(loss), get_args(LossName))}")
    return cast("LossName", loss)


def _read(text: str) -> tuple[str, Any]:
    """Where the settings are from, and what they say."""
    if text.lstrip().startswith("{"):
        return FLAG, strict_yaml.parse(text, FLAG)
    return str(_path(text)), strict_yaml.read(_path(text))


def _path(text: str) -> Path:
    """Hydra works in a folder of its own: a relative path counts from where the command was given."""
    path = Path(text).expanduser()
    return Path(to_absolute_path(str(path))) if HydraConfig.initialized() else path


def _terms(values: Any, where: str) -> dict[str, Any]:
    """The block `terms` of a file, a copy."""
    known = ("terms", "regression", "loss")
    if not isinstance(values, Mapping):
        raise BadInput(f"{where}: expected a mapping, such as {{terms: {{r3f: {{weight: 0.1}}}}}}, not {values!r}")
    for key in values:
        if key == "model":
            raise BadInput(f"{where}: model: in fairseq, R4F is an architecture: leave the key out, use --arch r4f_...")
        if key == "optimisation":  # UEGR's backward stage
            warnings.warn(
                f"{where}: optimisation: seqreg does not change the steps of fairseq's optimizer: the terms alone are "
                "trained",
                Advice,
                stacklevel=2,
            )
        elif key not in known and key not in ("search", "causal"):  # for `seqreg compare --search`, and other models
            raise BadInput(f"{where}: {key}={values[key]!r}: unknown key; {nearest(key, known)}")
    terms = values.get("terms")
    if not isinstance(terms, Mapping):
        raise BadInput(f"{where}: terms={terms!r}: expected a mapping, such as {{r3f: {{weight: 0.1}}}}")
    return dict(terms)


def _term(name: str, settings: Any, where: str) -> Term:
    """One term, or a line that names the file, the key and its value."""
    try:
        term = build_term(name, settings)
    except BadInput as error:
        path = f"terms.{name}"
        key, line = error.under(path, settings if isinstance(settings, Mapping) else {})
        raise BadInput(f"{where}: {f'{path}: ' if key == path else ''}{line}") from None
    if term.on != "labelled":
        raise BadInput(
            f"{where}: terms.{name}.on={term.on!r}: fairseq loads no texts without labels: use on='labelled'"
        )
    return term
