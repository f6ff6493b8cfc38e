"""One loss on two short rows before anything is written: terms that cannot work with a model say so here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from seqreg.errors import Advice, BadInput
from seqreg.integrations.hf import context
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data.encoding import Encoded
from seqreg.workbench.data.examples import Example
from seqreg.workbench.run.nonfinite import not_finite

TOKENS = 32
"""Of a text: enough to see that it works."""


def trial(config: Config, model: Any, tokenizer: Any, examples: Sequence[Example]) -> None:
    """Compute the loss once; generators, weights and the mode of the model are as before."""
    short = config.data.updated(
        max_source_length=min(TOKENS, config.data.max_source_length),
        max_target_length=min(TOKENS, config.data.max_target_length),
    )
    rows = Encoded(examples[:2], tokenizer, config.updated(data=short))
    collate = DataCollatorWithPadding if examples[0].target is None else DataCollatorForSeq2Seq
    training, bf16 = model.training, config.optimisation.precision == "bf16"
    try:
        batch = collate(tokenizer)([rows[index] for index in range(len(rows))])
        ctx = context(model.train(), {**batch}, step=0)
        with (
            warnings.catch_warnings(),
            ctx.forward.observed(),
            torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16),
        ):
            warnings.simplefilter("ignore", Advice)  # said at the first step, on whole rows
            bad = not_finite(config.criterion()(ctx))
        if bad:
            raise BadInput(
                f"the loss of the first {len(rows)} training examples is not finite ({', '.join(bad)}): look at "
                "model.settings, and at the settings of the terms"
            )
    except BadInput:
        raise
    except Exception as error:  # of whatever the settings broke inside the model
        shown = f"model.settings={config.model.settings}: " if config.model.settings else ""
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BadInput(f"{shown}{type(model).__name__} cannot compute a loss: {what[:200]}") from error
    finally:
        model.train(training)
