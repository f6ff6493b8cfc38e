"""Tests against real fairseq, in an environment of its own: bash tests/run.sh --fairseq."""
