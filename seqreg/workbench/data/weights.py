"""Checks of the weights of a model: all of them are there, of the right shapes, and finite."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from seqreg.engines.shards import local
from seqreg.errors import BadInput

SHOWN = 3
"""Names of weights in a message."""
_BUFFER = re.compile(r"(^|\.)(position_ids|token_type_ids|version|_float_tensor|inv_freq|masked_bias)$")
"""What older checkpoints store although it is computed."""
_EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_POOLER = re.compile(r"(^|\.)pooler\.")
"""Below the head of some encoders, and inside their body by name."""


def check_loaded(model: Any, report: Mapping[str, Any], name: str, *, new_head: bool) -> set[str]:
    """Refuse weights that `from_pretrained` did not find, could not place, or found in another shape.

    Returns the names of those that were drawn anew: of a new head, and of the pooler below it.

    Args:
        report: transformers' own, from `output_loading_info=True`
        new_head: a head may be drawn anew, and the head of another task left out; never where the folder says that it
            holds this very class
    """
    new_head = new_head and type(model).__name__ not in (model.config.architectures or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {key: (list(old), list(new)) for key, old, new in report["mismatched_keys"]}
    missing = {key for key in report["missing_keys"] if key in parameters}
    unexpected = {key for key in report["unexpected_keys"] if not _BUFFER.search(key) and not _POOLER.search(key)}
    drawn = _drawn_anew(model, missing, parameters) if new_head else set()
    if new_head:
        missing -= drawn
        unexpected = {key for key in unexpected if in_body(model, key)}
    misshapen = [f"{key} {old} instead of {new}" for key, (old, new) in shapes.items()]
    if not (missing or unexpected or misshapen):
        return drawn
    faults = [_listed("missing", missing), _listed("unexpected", unexpected), _listed("of another shape", misshapen)]
    body_fits = not any(in_body(model, key) for key in {*missing, *unexpected, *shapes})
    hint = (
        "model.new_head=true draws a new head"
        if body_fits and shapes
        else "do config.json and model.settings belong to them?"
    )
    raise BadInput(f"{name}: its weights do not fit {type(model).__name__}: {', '.join(filter(None, faults))}; {hint}")


def whole_numbers(folder: str) -> str:
    """The first weight of a folder that is stored in integers or eight bits, and how; "" for none."""
    for path in sorted(Path(folder).glob("model*.safetensors")) if os.path.isdir(folder) else ():
        with contextlib.suppress(safetensors.SafetensorError), safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.endswith("weight") and (kind := file.get_slice(name).get_dtype()) in _EIGHT_BITS:
                    return f"{path.name}: {name} is stored as {kind}"
    return ""


def _drawn_anew(model: Any, missing: Collection[str], parameters: Iterable[str]) -> set[str]:
    """Those of the missing weights that make a whole head, of which nothing was stored, or the pooler below it."""
    above = {key: key.partition(".")[0] for key in parameters if not in_body(model, key)}
    stored = {part for key, part in above.items() if key not in missing}
    return {key for key in missing if _POOLER.search(key) or (key in above and above[key] not in stored)}


def in_body(model: Any, key: str) -> bool:
    """Whether a weight belongs to the body; checkpoints of bodies alone leave out its name."""
    inside = key.removeprefix(f"{model.base_model_prefix}.")
    return inside != key or key.partition(".")[0] in dict(model.base_model.named_children())


def misfit(model: Any, missing: Iterable[str], unexpected: Collection[str]) -> str:
    """What `load_state_dict` found no weight for, or no place, in a few words; tied weights are stored once."""
    tied = getattr(model, "all_tied_weights_keys", {})
    faults = (_listed("missing", [key for key in missing if key not in tied]), _listed("unexpected", unexpected))
    return ", ".join(filter(None, faults))


def not_finite(model: Any) -> str:
    """How many parameters hold a value that is infinite or not a number, and the first few; "" for none.

    Of a model in shards these are the parameters whose shard on this rank does.
    """
    bad = [name for name, value in model.named_parameters() if not bool(torch.isfinite(local(value)).all())]
    return _listed("weights are not finite", bad)


def _listed(what: str, names: Collection[str]) -> str:
    """How many, and the first few by name; "" for none."""
    shown = sorted(names)[:SHOWN]
    more = ", ..." if len(names) > SHOWN else ""
    return f"{len(names)} {what} ({', '.join(shown)}{more})" if names else ""
