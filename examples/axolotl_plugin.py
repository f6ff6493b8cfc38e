"""A plug-in of axolotl: terms as YAML in its configuration.

    plugins:
      - axolotl_plugin.Plugin    # in the folder of this file, or with the folder on PYTHONPATH
    seqreg:
      terms:
        jachess: {weight: 0.01}

Written against the interface that axolotl documents for its plug-ins (`axolotl.integrations.base.BasePlugin`), and
tested against a stand-in of it, not with axolotl itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from seqreg.build import build_criterion
from seqreg.criterion import Criterion
from seqreg.errors import BadInput
from seqreg.integrations.hf.attach import attach
from seqreg.term import check_packed, packed_fix

OPTIONS = ("diagnostics_steps", "smoothness_steps")
"""Keys beside those of `build_criterion`."""


class AxolotlSettings(BaseModel):
    """What the plug-in adds to axolotl's configuration; checked with it, before anything is loaded."""

    seqreg: dict[str, Any] | None = None

    @field_validator("seqreg")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _criterion(value)
        return value


class Plugin(BasePlugin):
    """Attaches the criterion of the key `seqreg` to the trainer that axolotl has made."""

    def get_input_args(self) -> str:
        return f"{AxolotlSettings.__module__}.{AxolotlSettings.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        settings = cfg.get("seqreg")
        if not settings:
            raise BadInput("seqreg: the plug-in is on, but there is no key 'seqreg' with terms: add one")
        criterion, options = _criterion(settings)
        if cfg.get("sample_packing"):
            if criterion.per == "sequence":
                raise BadInput(f"seqreg: per='sequence': {packed_fix('per')}")
            for term in criterion.terms:
                check_packed(term)
        attach(trainer, criterion, own_loss="call", **options)


def _criterion(settings: Any) -> tuple[Criterion, dict[str, Any]]:
    settings = _plain(settings)
    if not isinstance(settings, dict):
        raise BadInput(f"seqreg={settings!r}: expected a mapping, such as {{terms: {{r3f: {{weight: 0.1}}}}}}")
    options = {key: settings.pop(key) for key in OPTIONS if key in settings}
    try:
        return build_criterion(settings), options
    except BadInput as error:
        raise BadInput(f"seqreg: {error}") from None


def _plain(value: Any) -> Any:
    """Plain dicts, where axolotl's answer None for a key that is not there."""
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
