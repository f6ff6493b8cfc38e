"""The promises of docs/reliability.md on two ranks, under DDP and FSDP2, with torchrun's own restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.run
from transformers import AutoModelForSeq2SeqLM

from seqreg import BadInput
from seqreg.cli import main as cli
from seqreg.workbench.config import run_config
from seqreg.workbench.run import checkpoints, launch, replay
from seqreg.workbench.run import torchrun as launcher
from seqreg.workbench.run import train as training
from tests.faults import RANK_SETTINGS, RANK_TERMS
from tests.helpers import forked_process, torchrun
from tests.helpers.interrupted_runs import one_line

FSDP2 = "engine.name=fsdp2"
DRIFT = "evaluation.drift_examples=4"
FAULTY = "tests.helpers.nonfinite_term.Faulty"


def train(folder: Path, *words: str, **options: int) -> torchrun.Agent:
    return torchrun.train(folder, *RANK_SETTINGS, DRIFT, *words, terms=RANK_TERMS, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed runs under both engines."""
    folder = tmp_path_factory.mktemp("engines")
    for engine in ("ddp", "fsdp2"):
        command = train(folder / engine, f"engine.name={engine}")
        assert command.wait(300) == 0, command.text()
    return folder


def killed(folder: Path, engine: str, rank: int, **options: int) -> torchrun.Agent:
    """A run of which one rank was killed, by SIGKILL, as soon as there was a checkpoint."""
    command = train(folder, f"engine.name={engine}", **options)
    assert command.until((folder / "checkpoint-2").exists, 200), command.text()
    os.kill(command.ranks[rank], signal.SIGKILL)
    return command


@pytest.mark.slow
def test_fsdp2_trains_what_ddp_trains(runs: Path) -> None:
    """The final model is a plain folder with the weights of DDP, to rounding, and its scores and drift are the same."""
    plain, sharded = (safetensors.torch.load_file(runs / name / "model.safetensors") for name in ("ddp", "fsdp2"))
    assert plain.keys() == sharded.keys()
    start = AutoModelForSeq2SeqLM.from_pretrained(runs / "fsdp2").state_dict()
    for name, weight in plain.items():
        assert torch.allclose(weight, sharded[name], atol=1e-5), name
        assert torch.equal(start[name], sharded[name]), name
    found, expected = (json.loads((runs / name / "metrics.json").read_text()) for name in ("fsdp2", "ddp"))
    for key in ("kl_trained_start", "weight_distance", "cka"):
        assert found["drift"][key] == pytest.approx(expected["drift"][key], rel=1e-3), key
    assert found["scores"]["validation"]["loss"] == pytest.approx(expected["scores"]["validation"]["loss"], rel=1e-5)
    assert not (runs / "fsdp2" / "sharded").exists()


@pytest.mark.slow
def test_shards_are_sealed_by_the_manifest(runs: Path, tmp_path: Path) -> None:
    checkpoint = runs / "fsdp2" / "checkpoint-6"
    assert checkpoints.fault(checkpoint) is None
    assert not (checkpoint / "model.safetensors").exists()
    for part in ("model", "optimizer", "terms"):
        files = sorted(path.name for path in (checkpoint / "sharded" / part).iterdir())
        assert [name.partition("-model")[0] for name in files] == ["shard-00001", "shard-00002"]
    shutil.copytree(checkpoint, spoilt := tmp_path / "checkpoint-6")
    shard = next((spoilt / "sharded" / "terms").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"sharded/terms/{shard.name} has" in str(checkpoints.fault(spoilt))
    shard.unlink()
    assert checkpoints.fault(spoilt) == f"sharded/terms/{shard.name} is missing"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "rank"), [("fsdp2", 0), ("ddp", 1)])
def test_torchrun_restarts_a_run_whose_rank_was_killed(runs: Path, tmp_path: Path, engine: str, rank: int) -> None:
    command = killed(tmp_path / "run", engine, rank, restarts=2)
    assert command.wait(300) == 0, command.text()
    assert "resumes from" in command.text()
    assert forked_process.weights(tmp_path / "run") == forked_process.weights(runs / engine)


@pytest.mark.slow
def test_resuming_on_another_number_of_ranks_is_refused_unless_allowed(tmp_path: Path) -> None:
    """Refused, as the weights would not be the same to the bit; shards are cut anew where it is allowed."""
    folder = tmp_path / "run"
    assert killed(folder, "fsdp2", 1).wait(300) != 0
    refused = train(folder, FSDP2, ranks=3)
    assert refused.wait(300) == 2, refused.text()
    assert "world_size: 2 there, 3 now" in refused.text()
    assert "--allow-change world_size" in refused.text()
    accepted = train(folder, FSDP2, "--allow-change", "world_size", ranks=3)
    assert accepted.wait(300) == 0, accepted.text()
    assert "changed since the run was started: world_size" in accepted.text()
    assert len(list((folder / "checkpoint-6" / "sharded" / "model").iterdir())) == 3
    assert json.loads((folder / "metrics.json").read_text())["train"]["steps"] == 6


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_a_checkpoint(runs: Path, tmp_path: Path) -> None:
    command = train(tmp_path / "run", FSDP2)
    assert command.until((tmp_path / "run" / "checkpoint-2").exists, 200), command.text()
    command.send(signal.SIGTERM)
    assert command.wait(300) == 128 + signal.SIGTERM, command.text()
    assert "with everything saved" in command.text()
    assert train(tmp_path / "run", FSDP2).wait(300) == 0
    assert forked_process.weights(tmp_path / "run") == forked_process.weights(runs / "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["term", "loss"])
def test_a_step_that_is_not_finite_is_not_applied(tmp_path: Path, how: str) -> None:
    """All ranks make the same passes and skip the same steps, also where one alone has seen the fault."""
    term = f"terms.faulty={{term: {FAULTY}, at: [3], how: {how}, rank: 1}}"
    command = torchrun.train(tmp_path / "run", *RANK_SETTINGS, FSDP2, term, "--trust-remote-code", terms=("r3f",))
    assert command.wait(300) == 0, command.text()
    numbers = json.loads((tmp_path / "run" / "metrics.json").read_text())["train"]
    assert numbers["skipped"] == (how != "term")
    assert numbers["dropped"] == ({"faulty": 1} if how == "term" else {})
    assert "step 4: " in command.text()
    replayed = replay.replay(tmp_path / "run" / "crash" / "step-4", trust=True)  # whole weights, from shards
    assert replayed.notes[0] == f"weights of {tmp_path / 'run' / 'checkpoint-2'}"
    assert {part["part"] for part in replayed.parts} == {"base", "r3f", "faulty"}
    assert all(part["finite"] for part in replayed.parts)  # on the examples of the other rank


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["engine.name=deepspeed"],
            "engine.name='deepspeed': for a Trainer or a loop of your own alone (docs/support.md): use fsdp2",
        ),
        (["engine.cpu_offload=true"], "engine.cpu_offload=True: a setting of fsdp2: set engine.name=fsdp2"),
        ([FSDP2, "optimisation.ema_decay=0.9"], "weights in shards are not averaged: set it to null"),
        ([FSDP2, "optimisation.optim=adafactor"], "it averages rows and columns, which are cut: set it to adamw"),
        ([FSDP2, "optimisation.precision=fp16"], "its scale has not been tested on shards"),
        ([FSDP2, "optimisation.update={selective: {}}"], "it needs whole gradients: set it to null"),
        ([FSDP2, "model.name=x", "model.lora={}"], "adapters are not taken into weights in shards: set it to null"),
        ([FSDP2, "model.head=r4f"], "a normalised head is not saved from shards: set it to plain"),
        (["engine.name=zero"], "engine.name"),
    ],
)
def test_engines_that_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        run_config.resolve("quickstart", overrides=settings)
    assert said in str(error.value)
    assert len(error.value.lines) == 1


@pytest.mark.parametrize(
    ("settings", "term", "said"),
    [
        (["engine.param_dtype=bf16"], "smart", "below what bfloat16 resolves"),
        (["terms.r3f.layer=0", "terms.r3f.where=encoder"], "r3f", "passes cannot begin at a layer under FSDP2"),
        (["terms.anchor.divergence=l2"], "anchor", "under FSDP2 its gradient would miss the shares of other ranks"),
    ],
)
def test_what_a_pass_under_fsdp2_refuses_is_refused_before_anything_is_written(
    settings: list[str], term: str, said: str
) -> None:
    run = run_config.resolve("quickstart", overrides=[*forked_process.TINY, FSDP2, *settings], terms=[term])
    with pytest.raises(BadInput, match=said):
        training.prepare(run)


def test_fsdp2_needs_several_processes(tmp_path: Path) -> None:
    command = forked_process.train(tmp_path / "run", FSDP2)
    assert command.wait() == 2
    one_line(command, "engine.name=fsdp2: shards a model over several processes, and there is one: start them with")
    assert not (tmp_path / "run").exists()


def test_restarts_of_torchrun_need_a_store_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were started again have read the addresses of those that were gone, and given up."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launch.check_environment("fp32")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(BadInput, match=r"without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 .* or use seqreg launch"):
        launch.check_environment("fp32")


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--nnodes", "2"], {}, "--nnodes 2: needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "node0"], {}, "--rdzv-endpoint 'node0': expected HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "node0:99999"], {}, "expected HOST:PORT, such as node0:29500"),
        (["--nproc", "2"], {"RANK": "0"}, "RANK=0 is set: this is a process of torchrun already"),
    ],
)
def test_launches_that_are_refused(
    words: list[str], variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=said):
        cli.app(["launch", *words, "train", "quickstart", "--terms", "r3f"], standalone_mode=False)


def test_a_command_that_is_launched_is_not_read_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take --nproc behind it for an option of its own, and not know which."""
    seen, words = list[Any](), ["train", "quickstart", "--nproc", "2"]
    monkeypatch.setattr(torch.distributed.run, "run", seen.append)
    monkeypatch.setenv(launcher.UNSHARED_STORE, "1")
    assert launcher.launch(words, nproc=3) == 0
    (options,) = seen
    assert (options.module, options.training_script, options.nproc_per_node) == (True, "seqreg", "3")
    assert options.training_script_args == words


@pytest.mark.slow
def test_a_launched_command_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "seqreg", "launch", "--nproc", "2", "train", "quickstart", "sed=1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2
    assert "seqreg: command line: sed=1: unknown key; did you mean 'seed'?" in done.stderr
