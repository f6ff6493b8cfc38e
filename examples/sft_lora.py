"""TRL's SFTTrainer with LoRA, anchor and R3F: chats, loss on the assistant's turns alone. Needs trl and peft.

python examples/sft_lora.py Qwen/Qwen3-0.6B

`Anchor` holds the output near that of the model with its adapters switched off, and needs no copy of the weights. Most
causal LMs have no dropout: R3F needs noise that counts beside the embeddings there, a tenth of their RMS.
"""

import sys
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from seqreg import Criterion, attach
from seqreg.terms.anchor import Anchor
from seqreg.terms.r3f import R3F

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
        attach(trainer, Criterion(Anchor(weight=0.1), R3F(weight=0.1, scale=0.1, relative=True)))
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:2])
