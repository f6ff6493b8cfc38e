"""A stand-in for a CPU that dies of what it advertises: put this folder on PYTHONPATH.

A process that is started to try products in half precision dies with SIGILL, as if by oneDNN, unless
ONEDNN_MAX_CPU_ISA is one of the words of SOUND_LEVELS. Set XDG_CACHE_HOME to an empty folder too: what was found out
about the real CPU is remembered there.
"""

import os
import signal
import sys

if (
    "bfloat16" in " ".join(sys.orig_argv[2:3])
    and os.environ.get("ONEDNN_MAX_CPU_ISA")
    not in os.environ.get("SOUND_LEVELS", "AVX512_CORE_BF16 AVX512_CORE AVX2 SSE41").split()
):
    os.kill(os.getpid(), signal.SIGILL)
