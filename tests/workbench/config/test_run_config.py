"""Layers of a run: what wins, what is refused, and what is said about it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from seqreg.errors import Advice, BadInput
from seqreg.workbench.config import lookup, other_names, overlay, run_config
from seqreg.workbench.config.settings import Lora
from tests.helpers import sample_files


def test_the_order_of_layers() -> None:
    plain = run_config.resolve("cnn_dailymail").config
    assert plain.data.max_source_length == 1024  # the card
    assert plain.generation.length_penalty == 2.0  # the card
    assert plain.optimisation.max_steps == 20000  # the recipe
    tiny = run_config.resolve("cnn_dailymail", variants=["tiny"], terms=["r3f", "rdrop"]).config
    assert (tiny.data.max_source_length, tiny.model.architecture) == (256, "bart")
    assert list(tiny.terms) == ["r3f", "rdrop"]
    assert tiny.output == "runs/cnn_dailymail-tiny/r3f-rdrop"
    last = run_config.resolve(
        "cnn_dailymail",
        variants=["tiny"],
        terms=["r3f"],
        overrides=["terms.r3f.weight=1e-3", "data.max_source_length=9"],
    ).config
    assert last.terms["r3f"]["weight"] == 1e-3  # type: ignore[index]
    assert last.data.max_source_length == 9
    assert run_config.resolve("gigaword", terms=["none"]).config.terms == {}
    assert run_config.resolve("gigaword", terms=["r3f"], overrides=["terms.r3f=null"]).config.terms == {}


def test_the_task_decides_lengths_whoever_sets_it() -> None:
    run = run_config.resolve("cnn_dailymail", overrides=["task=gigaword"])
    assert (run.config.data.max_source_length, run.config.generation.max_length) == (128, 32)


def test_regression_gets_its_divergence_and_the_command_line_still_wins() -> None:
    terms = run_config.resolve("glue", variants=["stsb"], terms=["r3f"]).config.terms
    assert terms["r3f"]["divergence"] == "mse"  # type: ignore[index]
    assert "divergence" not in run_config.resolve("glue", variants=["rte"], terms=["r3f"]).config.terms["r3f"]  # type: ignore[operator]
    changed = run_config.resolve("glue", variants=["stsb"], terms=["r3f"], overrides=["terms.r3f.divergence=js"])
    assert changed.config.terms["r3f"]["divergence"] == "js"  # type: ignore[index]


FAULTS = {
    "optimisation.learning_rte=1": r"^command line: optimisation.learning_rte=1: unknown key; .*'learning_rate'\?$",
    "sed=1": r"^command line: sed=1: unknown key; did you mean 'seed'\?$",
    "seed=two": r"^command line: seed='two': expected a valid integer",
    "seed='1'": r"^command line: seed='1': expected a valid integer",
    "seed=true": r"^command line: seed=True: expected a valid integer",
    "optimisation.per_device_train_batch_size=0": r"^command line: optimisation.per_device_train_batch_size=0: "
    r"expected greater than or equal to 1$",
    "optimisation.learning_rate=.nan": r"^command line: optimisation.learning_rate=nan: expected",
    "model.lora.target_modules='((('": r"^command line: model\.lora\.target_modules='\(\(\(': a text is a regular "
    r"expression, and this is none \(missing \), .*: write names as a list, such as \[q_proj, v_proj\]$",
    "model.lora.alpha=32": r"model\.lora\.alpha=32: unknown key; did you mean 'model\.lora\.lora_alpha'\?$",
    "model.lora.rank=4": r"^command line: model\.lora\.rank=4: unknown key; did you mean 'model\.lora\.r'\?$",
    "optimisation.lr_scheduler_type=linaer": r"^command line: optimisation.lr_scheduler_type='linaer': expected",
    "optimisation.num_train_epochs=1": r"^recipes/sizes/tiny_summarizer.yaml and command line: set one of optimisation",
    "optimisation.warmup_steps=9999": r"\.warmup_steps=9999 leaves nothing of optimisation\.max_steps=\d+: set both$",
    "generation.min_length=99": r"min_length=99 is larger than max_length=24$",
    "evaluation.load_best_model_at_end=true": r"evaluation.load_best_model_at_end=true: set evaluation.eval_steps",
    "task=gigawrd": r"^command line: task='gigawrd': unknown task 'gigawrd'; did you mean 'gigaword'\?",
    "task=../../etc/passwd": r"unknown task '../../etc/passwd'",
    "task=/etc/passwd": r"unknown task",
    "terms.r3f.wieght=1": r"^command line: terms.r3f.wieght=1: R3F: unknown setting 'wieght'; did you mean 'weight'\?$",
    "terms.r3f.scale=-1": r"^command line: terms.r3f.scale=-1: expected a number >= 0",
    "terms.r3f.weight=-1": r"^command line: terms.r3f.weight=-1: expected",
    "terms.r3f.preset=fairsq": r"^command line: terms.r3f.preset='fairsq': R3F: unknown preset",
    "terms.smrt={}": r"^command line: unknown term 'smrt'; did you mean 'smart'\?",
    "terms.r3f=3": r"^command line: terms.r3f=3: expected a valid dictionary",
    "model.architecture=null": r"set one of model.name \(pretrained\) and model.architecture",
    "loss.label_smoothing=1.5": r"^command line: loss.label_smoothing=1.5: expected less than 1$",
    "a": r"expected key=value",
}


@pytest.mark.parametrize("setting", FAULTS)
def test_faults_are_one_line_that_names_place_key_and_value(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(BadInput, match=FAULTS[setting]) as caught:
        run_config.resolve("gigaword", terms=["r3f"], variants=["tiny"], overrides=[setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["output", "data.cache_dir"])
def test_a_home_that_the_shell_has_not_written_out_is_no_folder(key: str) -> None:
    """It writes ~ out at the beginning of a word alone, and a folder of that name is easily removed for the other."""
    with pytest.raises(BadInput, match=rf"^{key}=~/a: a folder called ~ would be made here: write {Path.home()}/a$"):
        run_config.resolve("gigaword", variants=["tiny"], overrides=[f"{key}=~/a"], paths=run_config.PATHS)


def test_a_misspelt_key_is_named_before_what_it_leads_to() -> None:
    with pytest.raises(BadInput, match=r"optimization.*unknown key; did you mean 'optimisation'"):
        run_config.resolve(
            "gigaword", variants=["tiny"], overrides=["optimisation.max_steps=2", "optimization.warmup=1"]
        )


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: gigaword\nmodel: {nme: x}\noptimisation: {steps: 3}\n")
    with pytest.raises(BadInput, match=rf"^{path}: model.nme='x': unknown key; did you mean 'name'\?"):
        run_config.resolve(str(path))
    (tmp_path / "term.yaml").write_text("optimisation: {steps: 3}\n")
    path.write_text("task: gigaword\nmodel: {name: x}\noptimisation: {steps: 3}\n")
    with pytest.raises(BadInput, match=r"term.yaml: optimisation: steps: unknown key"):
        run_config.resolve(str(path), terms=[str(tmp_path / "term.yaml")])
    with pytest.raises(BadInput, match="unknown variant 'tny'"):
        run_config.resolve("gigaword", variants=["tny"])


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "", "terms/r3f", "quickstrat"])
def test_names_stay_in_their_folder(name: str) -> None:
    for kind in ("recipes", "recipes/terms", "tasks"):
        with pytest.raises(BadInput):
            lookup.find(kind, name)  # type: ignore[arg-type]


def test_a_retired_task_is_read_with_a_notice() -> None:
    with pytest.warns(Advice, match="the task newsroom: now synthetic_news$"):
        assert lookup.find("tasks", "newsroom").name == "synthetic_news.yaml"


def test_a_variant_is_laid_on_another(tmp_path: Path) -> None:
    both = run_config.resolve("gigaword", variants=["tiny"], overrides=["model.architecture=pegasus"])
    run = run_config.resolve("gigaword", variants=["pegasus_tiny"], overrides=[f"output={both.config.output}"])
    assert run.config.updated(model=both.config.model) == both.config
    assert (run.config.model.architecture, run.note) == ("pegasus", both.note)
    path = tmp_path / "mine.yaml"
    path.write_text("task: gigaword\nvariants: {a: {variant: b}}\n")
    with pytest.raises(BadInput, match=r"mine.yaml: unknown variant 'b'"):
        run_config.resolve(str(path), variants=["a"])


def test_a_saved_run_is_a_recipe_again(tmp_path: Path) -> None:
    run = run_config.resolve("glue", variants=["mnli", "tiny"], terms=["r4f"], overrides=["seed=7"])
    run.save(tmp_path)
    again = run_config.load(tmp_path)
    assert again.card == run.card
    own = {**again.config.model_dump(), "task": run.config.task}
    assert own == run.config.model_dump()
    assert overlay.read(tmp_path / "config.yaml")["task"] == "task.yaml"
    with pytest.raises(BadInput, match="nothing: no such folder"):
        run_config.load(tmp_path / "nothing")


def test_a_term_that_needs_unlabelled_rows_is_refused_before_anything_is_written() -> None:
    with pytest.raises(BadInput, match=r"command line: terms.jachess.mode=alternate: counts on texts without lab"):
        run_config.resolve("quickstart", terms=["jachess"], overrides=["terms.jachess.mode=alternate"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.settings.decoder_layers=-1", "model.settings.decoder_layers=-1: expected a whole number from 0"),
        ("model.settings.num_attention_heads=-2", "num_attention_heads=-2: expected a whole number from 0"),
        (
            "optimisation.num_train_epochs=1e308",
            "optimisation.num_train_epochs=1e+308: expected less than or equal to 1000000",
        ),
        ("optimisation.learning_rate=1e38", "optimisation.learning_rate=1e+38: expected less than or equal to 100"),
        ("generation.num_beams=1000000000", "generation.num_beams=1000000000: expected less than or equal to 1000"),
    ],
)
def test_settings_that_cannot_train_are_refused_before_writing(setting: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        run_config.resolve("quickstart", overrides=[setting])
    assert str(caught.value).startswith("command line: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optimisation.lr=1", "optimisation.learning_rate"), ("model.path=x", "model.name"),
        ("per_device_train_batch_size=8", "optimisation.per_device_train_batch_size"), ("output_dir=x", "output"),
        ("optimisation.clip_norm=1", "optimisation.max_grad_norm"), ("optimisation.betas=1", "optimisation.adam_beta1"),
    ],
)  # fmt: skip
def test_a_key_that_is_called_so_elsewhere_names_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"unknown key; did you mean '{meant}'\\?$"):
        run_config.resolve("quickstart", overrides=[given])


SAMPLE_VALUES = {"lr_scheduler_type": "constant", "optim": "adafactor", "source_prefix": "x", "vocab_size": 400}
FLAGS = ("gradient_checkpointing", "group_by_length", "eval_before_training", "load_best_model_at_end")
NEEDED = {
    "num_train_epochs": ["optimisation.max_steps=null"],
    "max_steps": ["optimisation.warmup_steps=0"],
    "load_best_model_at_end": ["evaluation.eval_steps=3", "checkpoints.save_steps=3"],
}


RENAMED = [key for key in sorted(other_names.RETIRED) if not key.startswith(("terms.", "data.also."))]


@pytest.mark.parametrize("retired", RENAMED)
def test_a_retired_name_is_read_and_answered_with_the_new_one(retired: str) -> None:
    section, now = retired.partition(".")[0], other_names.RETIRED[retired]
    value: object = SAMPLE_VALUES.get(now, 0.5 if "fraction" in now else now in FLAGS or 7)
    with pytest.warns(Advice, match=rf"^command line: {re.escape(retired)}: now {now}$"):
        run = run_config.resolve("quickstart", overrides=[f"{retired}={json.dumps(value)}", *NEEDED.get(now, [])])
    assert getattr(getattr(run.config, section), now) == value


def test_retired_names_of_terms_tasks_and_pairs_are_read() -> None:
    with pytest.warns(Advice, match="^command line: optimisation.betas: now adam_beta1 and adam_beta2$"):
        run = run_config.resolve("quickstart", overrides=["optimisation.betas=[0.7, 0.8]"])
    assert (run.config.optimisation.adam_beta1, run.config.optimisation.adam_beta2) == (0.7, 0.8)
    with pytest.warns(Advice, match="^--terms r3f:rows=0.5: terms.r3f.rows: now example_fraction$"):
        run = run_config.resolve("quickstart", terms=["r3f:rows=0.5"])
    assert run.config.terms == {"r3f": {"example_fraction": 0.5}}
    with pytest.warns(Advice, match="^command line: data.also.newsroom: now synthetic_news$"):
        run = run_config.resolve("quickstart", overrides=["task=newsroom_people", "data.also={newsroom: null}"])
    assert run.config.data.also == {"synthetic_news": None}
    new = run_config.resolve("quickstart", overrides=["task=synthetic_news_people"])
    assert (run.config.task, run.config.output) == (new.config.task, new.config.output)


def test_a_text_under_its_retired_name_is_text() -> None:
    with pytest.warns(Advice):
        run = run_config.resolve("quickstart", overrides=["data.prefix=summarize: "])
    assert run.config.data.source_prefix == "summarize: "


@pytest.mark.parametrize("block", ["{steps: 50, max_steps: 100}", "{max_steps: 100, steps: 50}"])
def test_a_retired_name_beside_its_new_one_is_refused(block: str) -> None:
    with pytest.raises(BadInput, match=r"^command line: optimisation.steps: now max_steps, which is set too"):
        run_config.resolve("quickstart", overrides=[f"optimisation={block}"])


def test_what_is_forgotten_is_forgotten_under_its_retired_name_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: gigaword\nmodel: {name: x}\noptimisation: {steps: 3}\ndata: {share: 0.5, holdout: 3}\n")
    with pytest.warns(Advice):
        run = run_config.resolve(str(path), forget=["data.train_fraction"])
    assert (run.config.data.train_fraction, run.config.data.holdout) == (1.0, 3)
    assert run.origins.origin("data.train_fraction") == str(path)  # of its section


def test_aliases_lead_to_settings_and_are_none_themselves() -> None:
    known = run_config.resolve("quickstart", terms=["neftune"]).config.model_dump(mode="json")
    keys = {*known, *(f"{one}.{two}" for one, inner in known.items() if isinstance(inner, dict) for two in inner)}
    keys |= {f"model.lora.{name}" for name in Lora.model_fields}
    for key, words in other_names.ALIASES.items():
        assert key in keys or key == "terms.neftune.alpha", key
        assert not keys & set(words), key
    words = [word for one in other_names.ALIASES.values() for word in one]
    assert sorted({word for word in words if words.count(word) > 1}) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("data.source_prefix=summarize: ", "summarize: "), ("data.source_prefix=translate ", "translate "),
        ("data.source_prefix=[x] y", "[x] y"), ("data.source_prefix=a: b: c", "a: b: c"),
        ("data.source_prefix=# 1", "# 1"),
        ("data.source_prefix='null'", "null"), ('data.source_prefix="a\\tb"', "a\tb"), ("data.path={a}", "{a}"),
        ("output=runs/a #2", "runs/a #2"), ("data.path=null", None),
    ],
)  # fmt: skip
def test_a_setting_that_is_text_is_read_as_text(setting: str, value: str | None) -> None:
    found = run_config.resolve("quickstart", overrides=[setting]).config.model_dump()
    key = setting.partition("=")[0].split(".")
    assert (found[key[0]][key[1]] if key[1:] else found[key[0]]) == value


@pytest.mark.parametrize("recipe", lookup.names("recipes"))
def test_any_number_of_steps_fits_the_warmup_of_a_recipe(recipe: str, tmp_path: Path) -> None:
    data = [f"data.path={sample_files.own_text(tmp_path)}"]
    chosen = [[], *([name] for name in overlay.read(lookup.find("recipes", recipe)).get("variants", {}))]
    for variants in chosen:
        for steps in (1, 2, 20):
            run = run_config.resolve(recipe, variants=variants, overrides=[*data, f"optimisation.max_steps={steps}"])
            assert 0 <= run.config.optimisation.warmup < steps
    papers = {"cnn_dailymail": 500, "xsum": 500, "reddit_tifu": 5000}
    if recipe in papers:
        assert run_config.resolve(recipe).config.optimisation.warmup == papers[recipe]


def test_a_task_of_the_command_line_is_in_the_name_of_the_folder(tmp_path: Path) -> None:
    assert run_config.resolve("gigaword", overrides=["task=gigaword"]).config.output == "runs/gigaword/baseline"
    assert run_config.resolve("gigaword", overrides=["task=xsum"]).config.output == "runs/gigaword-xsum/baseline"
    named = run_config.resolve("glue", variants=["tiny"], terms=["r3f"], overrides=["task=glue/sst2"]).config.output
    assert named == "runs/glue-glue-sst2-tiny/r3f"
    card = tmp_path / "mine.yaml"
    card.write_text(lookup.find("tasks", "text_pairs").read_text())
    assert run_config.resolve("gigaword", overrides=[f"task={card}"]).config.output == "runs/gigaword-mine/baseline"
    run = run_config.resolve("gigaword", overrides=["task=xsum"])
    run.save(tmp_path / "saved")
    assert run_config.load(tmp_path / "saved").config.output == "runs/gigaword-xsum/baseline"


def test_a_model_of_the_command_line_takes_the_place_of_the_recipes() -> None:
    tiny = run_config.resolve("gigaword", variants=["tiny"])
    assert tiny.config.model.architecture == "bart"
    assert "from scratch" in tiny.note
    named = run_config.resolve("gigaword", variants=["tiny"], overrides=["model.name=folder"])
    assert (named.config.model.name, named.config.model.architecture, named.config.model.settings) == (
        "folder",
        None,
        {},
    )
    assert named.config.optimisation.learning_rate < tiny.config.optimisation.learning_rate  # its `pretrained` block
    assert named.config.data.max_source_length == tiny.config.data.max_source_length
    assert "from scratch" not in named.note
    scratch = run_config.resolve("gigaword", overrides=["model.architecture=bart"]).config.model
    assert (scratch.name, scratch.architecture) == (None, "bart")
    with pytest.raises(BadInput, match=r"set one of model\.name"):
        run_config.resolve("gigaword", overrides=["model.architecture=bart", "model.name=x"])
