"""Runs of causal language models and of LoRA adapters: trained, killed, resumed, scored again, read by others."""

from __future__ import annotations

import copy
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from seqreg.errors import BadInput
from seqreg.studies.compare import jobs
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.config import overlay
from seqreg.workbench.config.settings import Lora
from seqreg.workbench.data.adapters import merged_state, plain_parameters, with_adapters
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores import corpora
from tests.helpers import forked_process, tiny_models, tiny_tasks
from tests.helpers.interrupted_runs import log
from tests.helpers.tiny_tasks import seqreg

PROMPT = 'data.prompt="{source}\\nTL;DR: "'
SHORT = [word for word in forked_process.TINY if not word.startswith("model.")]
LLAMA = [
    "model.settings=null", "model.architecture=llama", "model.vocab_size=320",
    "model.settings={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}",
]  # fmt: skip
LORA = [
    "model.name=base", "model.lora={r: 4, lora_dropout: 0.2, target_modules: [q_proj, down_proj]}", PROMPT,
    "optimisation.max_steps=6", "checkpoints.save_steps=2", "checkpoints.save_total_limit=9",
    "optimisation.learning_rate=1e-2", "data.corpora={stories: stories.txt}",
]  # fmt: skip
TERMS = ("r3f", "anchor")
STORIES = (
    "the mayor opened a bridge .\nthe bridge is new .\n\n\nx\n\n" + "a fair was held in the old town . " * 30 + "\n"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama that has seen a little, without a padding token, and a run of adapters on it."""
    folder = tmp_path_factory.mktemp("causal")
    seqreg("train", "quickstart", *SHORT, *LLAMA, PROMPT, "optimisation.max_steps=3", "output=base", cwd=folder)
    settings = json.loads((folder / "base" / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "stories.txt").write_text(STORIES)
    run = forked_process.command(folder / "lora", "quickstart", *SHORT, *LORA, terms=TERMS, folder=str(folder))
    assert run.wait() == 0, log(folder / "lora")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_adapters_are_trained_and_plain_libraries_read_the_run(home: Path) -> None:
    run, base = home / "lora", transformers.AutoModelForCausalLM.from_pretrained(home / "base")
    merged = transformers.AutoModelForCausalLM.from_pretrained(run)
    changed = {
        name for name, value in merged.named_parameters() if not torch.equal(value, base.get_parameter(name))
    }  # fmt: skip
    assert changed == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"}
    loaded = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    ids = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, merged.eval()(ids).logits)
    adapted = loaded.merge_and_unload()
    for name, value in merged.named_parameters():
        torch.testing.assert_close(adapted.get_parameter(name), value)
    train = json.loads((run / "metrics.json").read_text())["train"]
    trained = safetensors.torch.load_file(run / "adapter" / "adapter_model.safetensors")
    assert train["trained_parameters"] == sum(value.numel() for value in trained.values())
    assert train["parameters"] == sum(value.numel() for value in base.parameters())
    assert transformers.AutoTokenizer.from_pretrained(run).pad_token == "</s>"  # which was none


def test_a_killed_run_ends_with_the_same_weights_and_scores(home: Path) -> None:
    words = ("quickstart", *SHORT, *LORA)
    killed = forked_process.command(home / "killed", *words, terms=TERMS, folder=str(home))
    assert killed.until((home / "killed" / "checkpoint-4").exists), log(home / "killed")
    killed.kill()
    assert not (home / "killed" / "checkpoint-4" / "model.safetensors").exists()  # adapters alone
    assert forked_process.command(home / "killed", *words, terms=TERMS, folder=str(home)).wait() == 0
    assert "resumes from" in log(home / "killed")
    assert forked_process.weights(home / "killed") == forked_process.weights(home / "lora")
    assert rows(home / "killed" / "predictions.jsonl") == rows(home / "lora" / "predictions.jsonl")


def test_scores_perplexity_and_predictions_are_the_same_again_and_for_any_batch_size(home: Path) -> None:
    run = home / "lora"
    before, predictions = json.loads((run / "metrics.json").read_text()), rows(run / "predictions.jsonl")
    words = ("evaluation.per_device_eval_batch_size=1", "--output", "again")
    seqreg("evaluate", "lora", *words, cwd=home)
    after = json.loads((home / "again" / "metrics.json").read_text())
    test = before["scores"]["test"]
    assert after["scores"]["test"]["perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert [row["prediction"] for row in rows(home / "again" / "predictions.jsonl")] == [
        row["prediction"] for row in predictions
    ]
    assert math.log(test["perplexity"]) == pytest.approx(sum(row["nll"] for row in predictions) / 4, rel=0.1)
    assert before["drift"]["kl_trained_start"] > 0
    seqreg("calibrate", "lora", "--limit", "4", "--output", "calibrated", cwd=home)
    refused = seqreg("robustness", "lora", "--limit", "4", cwd=home, code=2)
    assert "a causal model embeds its source and its own text alike" in refused.stderr
    seqreg("robustness", "lora", "--limit", "4", "--noise", "words", "--draws", "1", "--output", "rob", cwd=home)


def test_soups_and_probes_of_adapters(home: Path) -> None:
    other = [*SHORT, *LORA, "seed=2", "output=other"]
    seqreg("train", "quickstart", "--terms", "anchor", *other, cwd=home)
    seqreg("soup", "lora", "other", "-o", "soup", "--evaluate", cwd=home)
    states = [safetensors.torch.load_file(home / name / "model.safetensors") for name in ("lora", "other", "soup")]
    for key, value in states[2].items():
        torch.testing.assert_close(value, (states[0][key] + states[1][key]) / 2)
    assert json.loads((home / "soup" / "metrics.json").read_text())["retention"]["stories"]["perplexity"]["after"] > 1
    assert "it has no ema.safetensors" in seqreg("soup", "lora", "-o", "no", "--ema", cwd=home, code=2).stderr
    refused = seqreg("train", "quickstart", *SHORT, *LORA, "optimisation.ema_decay=0.9", "output=no", cwd=home, code=2)
    assert "adapters are not averaged" in refused.stderr
    assert "is not a classification" in seqreg("probe", "lora", cwd=home, code=2).stderr
    tiny_tasks.task(home, "colour")
    entry = {"task": "colour.yaml", "data": {"path": "colour", "max_source_length": 16}}
    (home / "tasks.yaml").write_text(overlay.dump({"tasks": [entry]}))
    probe = ("probe", "lora", "--tasks", "tasks.yaml", "--examples", "40", "--output", "probed")
    assert "colour" in seqreg(*probe, cwd=home).stdout
    assert "its first token sees no other" in seqreg(*probe, "--pooling", "first", cwd=home, code=2).stderr


def test_methods_are_compared_and_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(plan: ComparisonPlan, job: Job, trust: bool = False) -> subprocess.Popen[bytes]:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        seqreg(*jobs.words(plan, job, trust), cwd=home)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(jobs, "start", start)
    settings = [word for word in (*SHORT, *LORA) if not word.startswith("checkpoints.")]
    words = ("quickstart", "-t", "anchor", "--arm", "wise", "--seeds", "2", "--output", "compared", *settings)
    table = seqreg("compare", *words, cwd=home).stdout
    assert "anchor against baseline" in table
    seqreg("report", "compared", cwd=home)
    page = (home / "compared" / "report.html").read_text()
    assert "stories: perplexity change" in page
    assert "anchor" in page


def nll_of_texts(model: Any, tokenizer: Any, length: int) -> tuple[float, int]:
    """The mean NLL of the predicted tokens of the corpus, a window at a time by the model itself, and their number."""
    total, count = 0.0, 0
    for text in STORIES.split("\n\n"):
        ids = tokenizer(text.strip())["input_ids"]
        for window in torch.tensor(ids, dtype=torch.long).split(length):
            if len(window) > 1:
                row = window.unsqueeze(0)
                with torch.no_grad():
                    total += float(model(input_ids=row, labels=row).loss) * (len(window) - 1)
                count += len(window) - 1
    return total / count, count


def test_the_perplexity_of_plain_texts_is_kept_before_and_after(home: Path) -> None:
    run = home / "lora"
    data = overlay.read(run / "config.yaml")["data"]
    length = data["max_source_length"] + data["max_target_length"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(run)
    kept = json.loads((run / "metrics.json").read_text())["retention"]
    assert list(kept) == ["stories"]
    for when, folder in (("before", home / "base"), ("after", run)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        expected, count = nll_of_texts(model, tokenizer, length)
        assert count > length
        assert kept["stories"]["loss"][when] == pytest.approx(expected, rel=1e-5)
        assert kept["stories"]["perplexity"][when] == pytest.approx(math.exp(expected), rel=1e-5)
    assert kept["stories"]["loss"]["before"] != kept["stories"]["loss"]["after"]
    assert "perplexity, before and after" in (run / "README.md").read_text()
    (home / "texts.jsonl").write_text(json.dumps({"text": "a fair was held ."}) + "\n")
    again = ("data.corpora={stories: stories.txt, more: texts.jsonl}", "data.limit.stories=1", "--output", "corpora")
    seqreg("evaluate", "lora", *again, cwd=home)
    other = json.loads((home / "corpora" / "metrics.json").read_text())["retention"]
    assert list(other) == ["stories", "more"]
    assert other["stories"]["loss"]["after"] != pytest.approx(kept["stories"]["loss"]["after"], rel=1e-4)


def test_texts_of_one_token_have_no_perplexity() -> None:
    def by_word(text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    texts = [Example("one"), Example("two three four five six")]
    assert [row["labels"] for row in corpora.windows(texts, by_word, 2)] == [[3, 5], [4, 4]]
    with pytest.raises(BadInput, match=r"data\.corpora\.a: no text of two tokens or more"):
        corpora.check({"a": texts[:1]}, tiny_models.make("llama"), by_word)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data.corpora={a: nowhere.txt}", "model.name=base", PROMPT], "data.corpora.a=nowhere.txt: no such file"),
        (["data.corpora={a: empty.txt}", "model.name=base", PROMPT], "data.corpora.a=empty.txt: no text in it"),
        (["data.corpora={test: stories.txt}", "model.name=base", PROMPT], "data.corpora.test: there is a split"),
        (["data.corpora={a: a.jsonl}", "model.name=base", PROMPT], "a.jsonl:1: no column 'text'"),
        (["data.corpora={a: stories.txt}"], "data.corpora.a: perplexity is that of causal language models"),
        (["model.name=base"], "neither the recipe nor"),
        (["model.name=base", 'data.prompt="no place"'], "expected {source} in it"),
        (["model.name=base", PROMPT, "model.lora={target_modules: [nothing]}"], "has no module 'nothing'; choose from"),
        (["model.name=base", PROMPT, "model.lora={target_modules: [norm]}"], "cannot have these adapters"),
        (["model.name=base", PROMPT, "model.lora={modules_to_save: [nothing]}"], "has no module 'nothing'"),
        (["model.name=base", PROMPT, "model.lora={target_modules: [q_proj, k_prj]}"], "did you mean 'k_proj'?"),
        (["model.name=base", PROMPT, "model.lora={target_modules: q_proj}"], "write [q_proj]"),
        (["model.name=base", PROMPT, "data.max_source_length=500"], "more than the"),
        ([*LLAMA, PROMPT, "model.lora={}"], "adapters are for a pretrained model"),
        ([PROMPT], "data.prompt is for causal language models"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: list[str], line: str, home: Path) -> None:
    for name, text in {"empty.txt": "\n \n", "a.jsonl": '{"document": "a"}\n'}.items():
        (home / name).write_text(text)
    refused = seqreg("train", "quickstart", *SHORT, "optimisation.max_steps=3", *words, "output=no", cwd=home, code=2)
    assert line in refused.stderr
    assert not (home / "no").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    ("name", "lora", "refused"),
    [
        ("gpt2", {"target_modules": ["c_attn", "lm_head"]}, "lm_head has the weight of transformer.wte,"),
        ("gpt2", {"target_modules": ["wte"]}, "transformer.wte has the weight of lm_head,"),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}, ""),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}, ""),
        ("bart", {"target_modules": ["q_proj", "lm_head"]}, "lm_head has the weight of model.shared and "),
        ("bart", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head has the weight of "),
        ("bart", {"target_modules": ["q_proj"], "modules_to_save": ["shared"]}, "model.shared has the weight of "),
        ("llama", {"target_modules": ["embed_tokens", "lm_head"]}, ""),
    ],
)
def test_the_plain_model_is_the_one_that_was_trained_or_refused(
    name: str, lora: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    """PEFT takes the adapter of a tied head into the embeddings too, and a saved head of BART leaves them out."""
    model = tiny_models.make(name).eval()
    if refused:
        with pytest.raises(BadInput, match=rf"^model\.lora\.\w+: {refused}"):
            with_adapters(model, Lora(r=2, **lora), frozenset())
        return
    wrapped = with_adapters(model, Lora(r=2, **lora), frozenset()).eval()
    ids = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
        trained = wrapped(input_ids=ids).logits
        wrapped.merge_and_unload(safe_merge=True).save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(input_ids=ids).logits, trained)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "roberta"])
def test_merged_weights_are_those_of_peft(name: str) -> None:
    model = tiny_models.make(name)
    plain = {key: value.clone() for key, value in model.named_parameters()}
    head = frozenset(key for key in plain if key.startswith("classifier."))
    targets = {"gpt2": ["c_attn"], "roberta": ["query"]}.get(name, ["q_proj", "v_proj"])
    wrapped = with_adapters(model, Lora(r=2, target_modules=targets), head)
    trained = {key for key, value in wrapped.named_parameters() if value.requires_grad}
    assert all(".lora_" in key or ".modules_to_save." in key for key in trained)
    assert any("classifier" in key for key in trained) == bool(head)
    found = plain_parameters(wrapped)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[key], value) for key, value in plain.items())
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    merged, theirs = merged_state(wrapped), copy.deepcopy(wrapped).merge_and_unload()
    assert merged.keys() == plain.keys()
    for key, value in theirs.named_parameters():
        torch.testing.assert_close(merged[key], value)
