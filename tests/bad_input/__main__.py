"""`python -m tests.bad_input` runs every row of the table and prints what happened; `--list` only prints the table."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.bad_input import ROWS


def main() -> int:
    """Print the table and the counts; 1 if a row does not behave."""
    out, failed, found = Console(highlight=False, markup=False, width=160), 0, {}
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    cases = [row for row in ROWS.values() if row.case is not None and "--list" not in sys.argv]
    for row in track(cases, "bad input", console=Console(stderr=True)):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                assert row.case is not None
                row.case(Path(folder))
                found[row.number] = f"ok {time.perf_counter() - begin:.1f} s"
            except Exception as error:
                failed += 1
                found[row.number] = f"FAILED {type(error).__name__}: {error}"[:300]
    table = Table("row", "input", "promise", "here", "case", title="bad input")
    for number in sorted(ROWS):
        row = ROWS[number]
        table.add_row(
            str(number), row.title, row.promise, row.does, found.get(number, row.test.rpartition("/")[2] or "-")
        )
    out.print(table)
    counts = Counter(row.does for row in ROWS.values())
    parts = [f"{name} {counts[name]}" for name in ("handled", "refused", "warned", "skipped", "cannot occur")]
    out.print(f"rows {len(ROWS)}: {', '.join(parts)}; cases run {len(found)}, failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
