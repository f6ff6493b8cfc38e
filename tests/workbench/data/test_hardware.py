"""A CPU that advertises instructions which it cannot run: oneDNN is held to what works, and nothing is left out."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from seqreg.errors import BadInput
from seqreg.workbench.data import hardware, models

ROOT = Path(__file__).parents[3]
LINE = (
    "seqreg: warning: this CPU advertises instructions that it cannot run (products in bf16 die): "
    "ONEDNN_MAX_CPU_ISA={} is set\n"
)


def around(home: Path, **further: str) -> dict[str, str]:
    """The environment of a process on a machine with a broken CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_MAX_CPU_ISA")}
    path = os.pathsep.join([str(ROOT / "tests" / "helpers" / "broken_cpu"), str(ROOT)])
    return {**kept, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home / "cache"), **further}


def run(*words: str | Path, environment: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], env=environment, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("sound", range(len(hardware.LEVELS) + 1))
def test_the_highest_level_that_works_is_chosen(sound: int) -> None:
    levels = (hardware.ALL, *hardware.LEVELS)
    assert hardware.highest(lambda level: levels.index(level) >= sound) == levels[sound]


def test_a_processor_without_a_working_level_is_refused() -> None:
    with pytest.raises(BadInput, match="die on this CPU at every level"):
        hardware.highest(lambda level: False)


def test_the_chosen_level_really_multiplies() -> None:
    assert hardware.works(os.environ.get(hardware.VARIABLE, hardware.ALL))


def test_shells_are_told_the_remembered_level(tmp_path: Path) -> None:
    environment = around(tmp_path)
    words = (sys.executable, "-m", "seqreg.workbench.data.hardware")
    first = run(*words, environment=environment)
    assert (first.stdout, first.stderr) == ("AVX512_CORE_BF16\n", LINE.format("AVX512_CORE_BF16"))
    (kept,) = (tmp_path / "cache" / "seqreg").iterdir()
    assert kept.read_text() == "AVX512_CORE_BF16\n"
    again = run(*words, environment={**environment, "SOUND_LEVELS": ""})  # remembered: nothing is tried
    assert (again.stdout, again.stderr) == (first.stdout, first.stderr)
    kept.write_text("rm -rf\n")  # what cannot be right is tried again
    assert run(*words, environment={**environment, "SOUND_LEVELS": "AVX2"}).stdout == "AVX2\n"
    own = run(*words, environment={**environment, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"})
    assert (own.stdout, own.stderr, own.returncode) == ("", "", 0), "what a user has set is left alone"
    kept.unlink()
    none = run(*words, environment={**environment, "SOUND_LEVELS": ""})
    assert none.returncode == 1
    assert "at every level of ONEDNN_MAX_CPU_ISA" in none.stderr
    assert not kept.exists()


def test_scripts_and_what_they_start_inherit_it(tmp_path: Path) -> None:
    """With an environment that has everything installed, as far as the script can see."""
    tools = tmp_path / "checkout" / "tools"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "environment.sh", tools)
    for name in ("setup.cfg", "setup.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "checkout")
    fake = tmp_path / "environment" / "bin"
    fake.mkdir(parents=True)
    (fake / "python").write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then exit 0; fi\nexec "{sys.executable}" "$@"\n', encoding="utf-8"
    )
    (fake / "python").chmod(0o755)
    environment = around(tmp_path, VIRTUAL_ENV=str(fake.parent), PATH=f"{fake}{os.pathsep}{os.environ['PATH']}")
    script = 'set -euo pipefail; source tools/environment.sh ""; python -c "import os; print(os.getenv(\'{}\'))"'
    asked = script.format(hardware.VARIABLE)
    told = run("bash", "-c", asked, environment=environment, cwd=tools.parent)
    assert told.stdout == "AVX512_CORE_BF16\n", told.stderr
    assert told.stderr.endswith(LINE.format("AVX512_CORE_BF16"))
    own = run("bash", "-c", asked, environment={**environment, "ONEDNN_MAX_CPU_ISA": "AVX2"}, cwd=tools.parent)
    assert own.stdout == "AVX2\n", own.stderr


def test_bf16_on_the_command_line_is_checked_against_the_processor(tmp_path: Path) -> None:
    """`check` does all that `train` does before its first step, and a step; other precisions try nothing."""
    environment = around(tmp_path, HF_HUB_OFFLINE="1", COLUMNS="100")
    size = "{d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2, decoder_attention_heads: 2}"
    words = [sys.executable, "-m", "seqreg", "check", "quickstart", f"model.settings={size}", "data.limit.train=8"]
    plain = run(*words, environment=environment, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert "CPU" not in plain.stderr
    assert not (tmp_path / "cache").exists()
    half = run(*words, "optimisation.precision=bf16", environment=environment, cwd=tmp_path)
    assert half.returncode == 0, half.stderr
    assert half.stderr.count(LINE.format("AVX512_CORE_BF16")) == 1


@pytest.mark.parametrize(
    ("cpu", "used"),
    [
        ("vendor_id : AuthenticAMD\nflags : fma avx2 avx512f avx512_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : fma avx2", False),
        ("vendor_id : GenuineIntel\nflags : fma avx2 avx512f", False),  # MKL has AVX-512 there
        ("vendor_id : AuthenticAMD\nflags : fma avx2 avx512f amx_bf16 amx_tile", False),  # oneDNN would round to bf16
        ("", False),
    ],
)
def test_where_onednn_has_wider_instructions_than_mkl(cpu: str, used: bool) -> None:
    assert hardware.mkl_stays_at_avx2(cpu) == used


AMD = "vendor_id : AuthenticAMD\nflags : avx512f"


@pytest.fixture
def highest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch as it is when it starts, on a machine that says it is AMD's."""
    monkeypatch.setattr(hardware, "_cpu", lambda: AMD)
    monkeypatch.setattr(hardware, "_computes_float32", lambda: True)
    monkeypatch.delenv(hardware.VARIABLE, raising=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("highest")
def test_products_go_to_onednn_where_it_computes_float32() -> None:
    hardware.use_avx512()
    hardware.use_avx512()
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.usefixtures("highest")
def test_products_that_are_rounded_stay_with_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_computes_float32", lambda: False)
    hardware.use_avx512()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("highest")
@pytest.mark.parametrize("level", ["AVX2", "SSE41", "avx2", "AVX2_VNNI_2"])
def test_a_level_below_avx512_leaves_products_to_mkl(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv(hardware.VARIABLE, level)
    hardware.use_avx512()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("highest")
def test_what_a_user_has_set_in_torch_stays() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    hardware.use_avx512()
    assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    torch.set_float32_matmul_precision("highest")
    hardware.use_avx512()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("highest")
def test_beside_a_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # its precision would change too
    hardware.use_avx512()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_product_of_bf16_is_not_taken_for_one_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware._computes_float32()
    matmul = torch.Tensor.__matmul__
    rounded = lambda left, right: matmul(left.bfloat16(), right.bfloat16()).to(left.dtype)  # noqa: E731
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: matmul(a, b) if a.dtype == torch.double else rounded(a, b)
    )
    assert not hardware._computes_float32()


@pytest.mark.usefixtures("highest")
def test_a_model_that_is_loaded_settles_the_products(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    models.loaded(transformers.AutoModel, str(tmp_path), False, config, new_head=True)
    assert torch.get_float32_matmul_precision() == "medium"


PAGES = """
import resource, sys, torch
from seqreg.workbench.data import hardware
if sys.argv[1] == "gpu":
    torch.accelerator.is_available = lambda: True
hardware.keep_freed_memory()
faults = []
for _ in range(20):  # glibc reuses the place of an aligned array after some of its size
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
print(min(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.parametrize(
    ("device", "told", "kept"),
    [
        ("cpu", {}, True),
        ("cpu", {"MALLOC_MMAP_MAX_": "65536"}, False),
        ("cpu", {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}, False),
        ("gpu", {}, False),
    ],
)
def test_freed_memory_is_kept_unless_malloc_was_told_otherwise(device: str, told: dict[str, str], kept: bool) -> None:
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    faults = int(run(sys.executable, "-c", PAGES, device, environment=quiet | told).stdout)
    assert (faults < 100) == kept  # 64 MB are 16,384 pages of 4 kB, and 32 of 2 MB
