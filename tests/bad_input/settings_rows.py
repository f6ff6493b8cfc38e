"""Settings that cannot be right: recipes, variants, terms, key=value."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqreg import Criterion
from seqreg.ascent import Ascent
from seqreg.errors import BadInput
from seqreg.terms.smart import SMART
from seqreg.workbench.config import overlay, run_config
from seqreg.workbench.data.tokenizers import train_tokenizer
from tests.bad_input.table import refused, row, run, tiny


@row(12, "min_length larger than max_length", "E", "refused")
def _(tmp: Path) -> None:
    refused(
        tmp,
        "min_length=9 is larger than max_length=8",
        *tiny(tmp, "generation.min_length=9", "generation.max_length=8"),
    )


@row(14, "max_length and max_new_tokens both", "E", "refused", "a recipe has no max_new_tokens")
def _(tmp: Path) -> None:
    refused(tmp, r"generation.max_new_tokens=5: unknown key; .*max_length", *tiny(tmp, "generation.max_new_tokens=5"))


@row(21, "a noise scale below 0, NaN or infinite", "E", "refused")
def _(tmp: Path) -> None:
    for value, words in (("-1", ">= 0"), (".nan", "finite number"), (".inf", "finite number")):
        message = rf"command line: terms.r3f.scale=\S+: expected a .*{words}"
        refused(tmp, message, *tiny(tmp, "--terms", "r3f", f"terms.r3f.scale={value}"))


@row(23, "a weight below 0", "E", "refused")
def _(tmp: Path) -> None:
    message = "command line: terms.r3f.weight=-1: expected"
    refused(tmp, message, *tiny(tmp, "--terms", "r3f", "terms.r3f.weight=-1"))


@row(25, "0 ascent steps", "E", "refused")
def _(tmp: Path) -> None:
    refused(tmp, r"terms.smart.attack.steps=0: expected", *tiny(tmp, "-t", "smart", "terms.smart.attack.steps=0"))


@row(26, "fewer than 0 ascent steps", "E", "refused")
def _(tmp: Path) -> None:
    refused(tmp, r"terms.smart.attack.steps=-3: expected", *tiny(tmp, "-t", "smart", "terms.smart.attack.steps=-3"))
    with pytest.raises(BadInput, match="steps=-3"):
        SMART(attack=Ascent(steps=-3))


@row(27, "label smoothing outside [0, 1)", "E", "refused")
def _(tmp: Path) -> None:
    for value in ("1.5", "-0.1", ".nan"):
        refused(tmp, r"command line: loss.label_smoothing=\S+: expected", *tiny(tmp, f"loss.label_smoothing={value}"))
        with pytest.raises(BadInput, match="label_smoothing"):
            Criterion(label_smoothing=float(value.removeprefix(".")))


@row(31, "an unknown term", "E", "refused")
def _(tmp: Path) -> None:
    refused(tmp, "unknown term 'smrt'; did you mean 'smart'", *tiny(tmp, "terms.smrt={}"))
    refused(tmp, "unknown term recipe 'smrt'; did you mean 'smart'", *tiny(tmp, "--terms", "smrt"))


@row(32, "an unknown key", "E", "refused")
def _(tmp: Path) -> None:
    refused(tmp, r"command line: sed=1: unknown key; did you mean 'seed'\?", *tiny(tmp, "sed=1"))
    message = r"terms.r3f.wieght=1: R3F: unknown setting 'wieght'; did you mean 'weight'\?"
    refused(tmp, message, *tiny(tmp, "-t", "r3f", "terms.r3f.wieght=1"))
    (tmp / "mine.yaml").write_text("task: gigaword\nmodel: {nme: x}\noptimisation: {steps: 3}\n")
    refused(tmp, r"mine.yaml: model.nme='x': unknown key; did you mean 'name'\?", "train", "mine.yaml")


@row(33, "a value of the wrong type", "E", "refused")
def _(tmp: Path) -> None:
    refused(tmp, "command line: seed='two': expected a valid integer", *tiny(tmp, "seed=two"))
    message = "command line: optimisation.learning_rate='abc': expected a valid number"
    refused(tmp, message, *tiny(tmp, "optimisation.learning_rate=abc"))


@row(34, "1e-5 in YAML", "H", "handled", "a number, as in YAML 1.2")
def _(tmp: Path) -> None:
    (tmp / "mine.yaml").write_text("task: gigaword\nmodel: {name: x}\noptimisation: {steps: 3, learning_rate: 1e-5}\n")
    assert run_config.resolve(str(tmp / "mine.yaml")).config.optimisation.learning_rate == 1e-5


@row(35, "a key that is there twice", "E", "refused")
def _(tmp: Path) -> None:
    (tmp / "mine.yaml").write_text("task: gigaword\nseed: 1\nseed: 2\n")
    refused(tmp, r"mine.yaml:3: the key 'seed' is twice", "train", "mine.yaml")


@row(36, "no, 010 and 12:30 in YAML", "E", "refused", "`no` and 12:30 are text, 010 is no whole number")
def _(tmp: Path) -> None:
    assert overlay.parse("[no, 12:30, off]", "here") == ["no", "12:30", "off"]
    for value in ("no", "010", "12:30"):
        refused(tmp, r"command line: seed=\S+: expected a valid integer", *tiny(tmp, f"seed={value}"))
    refused(
        tmp,
        "evaluation.eval_before_training='no': expected a valid boolean",
        *tiny(tmp, "evaluation.eval_before_training=no"),
    )


@row(37, "a Python tag, aliases, a bomb of them, thousands of brackets, a huge file", "E", "refused")
def _(tmp: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(20)
    )
    for text, message in (
        ("a: !!python/object/apply:os.system [touch pwned]", r"mine.yaml:1: the tag .*os.system' is not allowed"),
        (bomb, r"mine.yaml:2: aliases are not allowed"),
        ("a: &a [*a]", r"mine.yaml:1: aliases are not allowed"),
        ("a: " + "[" * 100_000, r"mine.yaml(:1)?: more than 20 levels deep"),
        ("#" * 1_000_001, r"mine.yaml: larger than 1000000 bytes"),
    ):
        (tmp / "mine.yaml").write_text(text)
        refused(tmp, message, "train", "mine.yaml")
    assert not (tmp / "pwned").exists()


@row(38, "batch size 0, accumulation 0, a NaN learning rate, epochs below 0", "E", "refused")
def _(tmp: Path) -> None:
    for setting in (
        "per_device_train_batch_size=0",
        "per_device_train_batch_size=-4",
        "gradient_accumulation_steps=0",
        "learning_rate=.nan",
        "num_train_epochs=-1",
    ):
        message = rf"command line: optimisation.{setting.partition('=')[0]}=\S+: expected"
        refused(tmp, message, *tiny(tmp, f"optimisation.{setting}"))
    refused(tmp, "seed=4294967296: expected less than", *tiny(tmp, "seed=4294967296"))


@row(72, "names that lead out of their folder", "E", "refused", "also by a link; paths that you type are yours")
def _(tmp: Path) -> None:
    outside, inside = tmp / "outside", tmp / "inside"
    outside.mkdir(), inside.mkdir()
    card = (
        "title: x\nkind: generation\ncolumns: {source: s, target: t}\nlengths: {source: 9}\nrule: x\nmetric: [rouge]\n"
    )
    (outside / "card.yaml").write_text(card)
    (inside / "link.yaml").symlink_to(outside / "card.yaml")
    for name in ("../../etc/passwd", "/etc/passwd", "../gigaword", "terms/../glue"):
        refused(tmp, "unknown recipe", "train", name)
        refused(tmp, "unknown task", *tiny(tmp, f"task={name}"))
    recipe = inside / "mine.yaml"
    for task in ("../outside/card.yaml", str(outside / "card.yaml"), "link.yaml"):
        recipe.write_text(f"task: {task}\nmodel: {{name: x}}\noptimisation: {{steps: 3}}\n")
        refused(tmp, rf"mine.yaml: task='{task}': .* leads out of", "train", recipe)
    (inside / "card.yaml").write_text(card)
    recipe.write_text("task: card.yaml\nmodel: {name: x}\noptimisation: {steps: 3}\n")
    assert run_config.resolve(str(recipe)).card.title == "x"
    assert run_config.resolve(str(recipe), overrides=[f"task={outside / 'card.yaml'}"]).card.title == "x"


@row(74, "a model with code of its own", "E", "refused", "runs only with --trust-remote-code, which no recipe can set")
def _(tmp: Path) -> None:
    model = tmp / "model"
    names = '{"AutoConfig": "conf.Conf", "AutoModelForSeq2SeqLM": "conf.Net"}'
    train_tokenizer(["words"], 300).save_pretrained(model)
    (model / "config.json").write_text(f'{{"model_type": "mine", "auto_map": {names}}}')
    (model / "conf.py").write_text(f"open({str(tmp / 'pwned')!r}, 'w')\n")
    chosen = [f"model.name={model}", "model.architecture=null"]
    refused(tmp, r"brings its own code.*--trust-remote-code", *tiny(tmp, *chosen))
    for setting in ("trust_remote_code=true", "model.trust_remote_code=true", "model.settings.trust_remote_code=true"):
        refused(tmp, r"not a setting: only a person can trust code, with --trust-remote-code", *tiny(tmp, setting))
    for setting in ("auto_map={AutoConfig: a.b}", "_attn_implementation=org/kernel", "attn_implementation=org/kernel"):
        refused(tmp, "a recipe cannot name code to run", *tiny(tmp, f"model.settings.{setting}"))
    (tmp / "mine.yaml").write_text("task: gigaword\ntrust_remote_code: true\n")
    refused(tmp, r"mine.yaml: trust_remote_code: not a setting", "train", "mine.yaml")
    assert not (tmp / "pwned").exists()
    assert run(tmp, *tiny(tmp, *chosen), "--trust-remote-code").code == 2  # the code runs now, and is not a model
    assert (tmp / "pwned").exists()
