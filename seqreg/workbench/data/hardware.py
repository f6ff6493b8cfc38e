"""What the hardware can compute: half precision, float32 with AVX-512, instructions that crash; and how memory is kept.

    python -m seqreg.workbench.data.hardware    # prints the ONEDNN_MAX_CPU_ISA to set; nothing where none is needed

torch computes products in bf16 and fp16 with oneDNN, which asks the CPU what it has and uses the most of it. Where AMX
is advertised and not run, the process dies with SIGILL. So the product is tried in a process of its own, and oneDNN is
held to the highest level that works; everything is computed all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput, DiskError
from seqreg.workbench.text.atomic_files import write_text
from seqreg.workbench.text.terminal import first_process

VARIABLE = "ONEDNN_MAX_CPU_ISA"
LEVELS = ("AVX512_CORE_AMX", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2", "SSE41")
"""Of oneDNN, from the highest; `ALL` is what it does by itself."""
BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""oneDNN reads them in any case."""
ALL = "ALL"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`, by their numbers in malloc.h."""
PRODUCTS = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
for dtype in (torch.bfloat16, torch.float16):
    for size in (8, 64, 256):
        layer, ones = torch.nn.Linear(size, size, dtype=dtype), torch.ones(2, size, size, dtype=dtype)
        torch.bmm(layer(ones), ones).float().sum().backward()
"""
"""Of the sizes for which oneDNN has kernels of their own, with their gradients."""


def works(level: str) -> bool:
    """Whether products in half precision can be computed at a level, by trying it in another process.

    An error of Python's counts as alive: what torch cannot do is said where it is asked for.
    """
    environment = {**os.environ, VARIABLE: level}
    tried = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return 0 <= tried.returncode < 128  # above: a shell in between tells of a signal


def highest(works: Callable[[str], bool] = works) -> str:
    """The highest level that works: `ALL` on a sound machine."""
    for level in (ALL, *LEVELS):
        if works(level):
            return level
    raise BadInput(f"products in bf16 die on this CPU at every level of {VARIABLE}: set optimisation.precision=fp32")


def settle(*, aloud: bool = True) -> str:
    """Set ONEDNN_MAX_CPU_ISA, for this process and its children, where products in half precision die without it.

    Before oneDNN is first used: it reads the variable once. What a user has set stays as it is.

    Args:
        aloud: say so in one line
    """
    if given := os.environ.get(VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA"):  # its old name
        return given
    level = _remembered()
    if level != ALL:
        os.environ[VARIABLE] = level
        if aloud:
            what = "this CPU advertises instructions that it cannot run (products in bf16 die)"
            print(f"seqreg: warning: {what}: {VARIABLE}={level} is set", file=sys.stderr)
    return level


def _remembered() -> str:
    """The highest level, tried once for every start of the machine and version of torch."""
    path = _cache_file()
    if path is None:
        return highest()
    try:
        if (level := path.read_text(encoding="utf-8").strip()) in (ALL, *LEVELS):
            return level
    except (OSError, UnicodeDecodeError):
        pass  # not tried yet
    level = highest()
    with contextlib.suppress(DiskError):  # a home that cannot be written: it is tried again next time
        write_text(path, level + "\n")
    return level


def _cache_file() -> Path | None:
    """Where the level is remembered; None on a system that does not number its starts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "seqreg" / f"onednn-{boot}-torch-{metadata.version('torch')}"
    except (OSError, RuntimeError, metadata.PackageNotFoundError):
        return None


def check_precision(precision: str) -> None:
    """Refuse a precision ("fp32", "bf16" or "fp16") that this machine cannot compute in, by trying it."""
    if precision == "fp32":
        return
    import torch  # late: shells ask this module what to set, before every command

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    refusal = f"optimisation.precision={precision}: this machine's {device.type} cannot"
    if precision == "fp16" and device.type == "cpu":
        raise BadInput(f"{refusal}: set optimisation.precision=fp32 or bf16")
    if device.type == "cpu":
        settle(aloud=first_process())
    layer, dtype = torch.nn.Linear(8, 8, device=device), {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    try:
        with torch.autocast(device.type, dtype=dtype):
            output = torch.softmax(layer(torch.ones(2, 8, device=device)), -1).float().sum()
        torch.autograd.grad(output, layer.weight)
    except (RuntimeError, NotImplementedError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise BadInput(f"{refusal} ({reason}): set optimisation.precision=fp32") from None


def prepare_cpu() -> None:
    """What every command that computes with a model sets once: products with AVX-512, memory that is kept."""
    use_avx512()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what is allocated next.

    By default it returns large arrays to the system, which clears their pages anew in every step. What a user has told
    malloc in the environment stays as it is, and so does a process with a GPU.
    """
    import torch

    told = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if told or platform.libc_ver()[0] != "glibc" or torch.accelerator.is_available():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)  # large arrays too come from the heap
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # and its end is never returned


def use_avx512() -> None:
    """Let oneDNN compute float32 products on AMD's CPUs with AVX-512: MKL stays at AVX2 there, half as fast.

    torch hands float32 products to oneDNN only where it may round to bf16. Without AMX oneDNN has no kernel that does:
    it computes in float32, and a product is tried to see that. What a user has set in torch stays as it is;
    ONEDNN_MAX_CPU_ISA=AVX2 leaves the products to MKL.
    """
    import torch

    level = os.environ.get(VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA") or ALL
    if level.upper() in BELOW_AVX512 or not mkl_stays_at_avx2(_cpu()) or torch.accelerator.is_available():
        return
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    if settings.fp32_precision != "none":  # which it is until somebody sets it
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # of `settings` alone, and torch could no longer tell its precision
    if not _computes_float32():
        torch.set_float32_matmul_precision(before)


def mkl_stays_at_avx2(cpu: str) -> bool:
    """Whether oneDNN has wider instructions for float32 than MKL uses, and none for bf16 that it would take instead.

    Args:
        cpu: as /proc/cpuinfo describes it
    """
    words = set(cpu.split())
    return {"AuthenticAMD", "avx512f"} <= words and not any(word.startswith("amx") for word in words)


def _cpu() -> str:
    """Maker and flags of the first CPU; "" where the system does not tell."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return ""


def _computes_float32() -> bool:
    """Whether a product of float32 is as near to float64's as float32 is, and not as bf16 is (1,000 times as far)."""
    import torch

    values = torch.linspace(-100, 100, 128 * 512).sin()
    left, right = values.view(128, 512), values.view(512, 128)
    exact = left.double() @ right.double()
    return bool(((left @ right) - exact).abs().max() < 1e-5 * exact.abs().max())


def main() -> None:
    """For shells: the level to set on the standard output, if there is one."""
    given = os.environ.get(VARIABLE, "")
    try:
        settle()
    except BadInput as error:
        sys.exit(f"seqreg: {error}")
    if os.environ.get(VARIABLE, "") != given:
        print(os.environ[VARIABLE])


if __name__ == "__main__":
    main()
