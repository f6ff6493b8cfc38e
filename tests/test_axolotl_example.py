"""The plug-in of axolotl, in a stand-in of the interface that axolotl documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from seqreg import BadInput
from tests.helpers import axolotl_stand_in, tiny_models
from tests.integrations.test_trainer import losses, rows

EXAMPLES = Path(__file__).parents[1] / "examples"

CONFIG = """
plugins:
  - axolotl_plugin.Plugin
seqreg:
  diagnostics_steps: 0
  terms:
    r3f: {weight: 0.5, scale: 0.1}
"""


@pytest.fixture(autouse=True)
def _axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    axolotl_stand_in.install(monkeypatch)


def made(out: Path, cls: Any = axolotl_stand_in.AxolotlTrainer) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=2, logging_steps=1, save_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True, per_device_train_batch_size=4,
    )  # fmt: skip
    return cls(tiny_models.make("llama"), arguments, train_dataset=rows("llama"))


def test_terms_from_its_yaml(tmp_path: Path) -> None:
    cfg, (plugin,) = axolotl_stand_in.configured(yaml.safe_load(CONFIG))
    trainer = made(tmp_path)
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    assert all(row["part/r3f"] > 0 for row in losses(trainer))
    assert trainer.diagnostics_steps == 0
    assert trainer.tokens > 0  # its own compute_loss is called, and calls the criterion
    assert isinstance(trainer, axolotl_stand_in.AxolotlTrainer)


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    settings = yaml.safe_load(CONFIG)
    with pytest.raises(ValueError, match="seqreg: unknown term 'r3'; did you mean 'r3f'"):
        axolotl_stand_in.configured({**settings, "seqreg": {"terms": {"r3": {}}}})
    cfg, (plugin,) = axolotl_stand_in.configured({"plugins": settings["plugins"]})
    with pytest.raises(BadInput, match="there is no key 'seqreg'"):
        plugin.post_trainer_create(cfg, made(tmp_path))
    packed = {**settings, "sample_packing": True, "seqreg": {"terms": {"smart": {"attack": {"over": "sentence"}}}}}
    cfg, (plugin,) = axolotl_stand_in.configured(packed)
    with pytest.raises(BadInput, match="rows are packed"):
        plugin.post_trainer_create(cfg, made(tmp_path))
