"""TRL's SFTTrainer with LoRA: chats, loss on the assistant's turns alone, and JacHess. Needs trl and peft.

python examples/sft_lora.py Qwen/Qwen3-0.6B

Most causal LMs have no dropout, so that R-Drop does nothing and R3F next to nothing there: docs/which_term.md.
"""

import sys
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from seqreg import Criterion, attach
from seqreg.terms.jachess import JacHess

CHATS = [
    [{"role": "user", "content": "where was the cat"}, {"role": "assistant", "content": "on the mat"}],
    [{"role": "user", "content": "where was the dog"}, {"role": "assistant", "content": "over the hill"}],
]


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder, max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to="none", save_strategy="no",
                assistant_only_loss=True, gradient_checkpointing=False, bf16=False,
            ),
            train_dataset=Dataset.from_dict({"messages": CHATS}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        )  # fmt: skip
        attach(trainer, Criterion(JacHess(weight=0.01)))
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:2])
