"""Kill runs with SIGKILL at random instants, start them again, and compare the final weights.

    python -m tests.faults --kills 50
    python -m tests.faults --kills 20 --engine fsdp2

Every kill strikes a new run of a tiny BART with dropout and three terms (R3F, SMART, and Bregman's, which has a
memory), accumulation and evaluation. The same command is then run until the run is finished,
and the weights are compared, by hash, with those of a run that nobody disturbed. Two of five kills wait for a save
to begin, and strike inside it.

With --engine, two ranks train R3F and two terms that have a memory (Bregman, Anchor), one of them is killed, and
torchrun's agent starts both again. "zero2" is a loop of its own (tests/helpers/zero_run.py), whose checkpoints are
DeepSpeed's; the others are `seqreg train`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from seqreg.workbench.text.terminal import console
from tests.helpers import forked_process, torchrun, zero_run

TERMS = ("r3f", "smart", "bregman")
RANK_TERMS = ("r3f", "bregman", "anchor")
RANK_SETTINGS = (
    "optimisation.max_steps=6", "checkpoints.save_steps=2", "evaluation.eval_steps=4", "evaluation.test_sets=false",
    "evaluation.drift_examples=0", "optimisation.learning_rate=1e-2",
)  # fmt: skip
SETTINGS = (
    "optimisation.max_steps=8", "optimisation.gradient_accumulation_steps=2", "checkpoints.save_steps=2",
    "evaluation.eval_steps=4",
    "optimisation.learning_rate=1e-2",
)  # fmt: skip


@dataclass
class Tally:
    """What became of the runs that were killed."""

    kills: int = 0
    same: int = 0
    lost: int = 0
    inside: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {self.same} bit-identical finals, {self.lost} lost "
            f"({self.inside} kills left a save that was not completed)"
        )


@dataclass
class Runs:
    """How runs are started, and killed.

    Args:
        engine: of two ranks; "" for one process
        draw: which rank is killed
        restarted: runs that torchrun itself brought to their end after a kill
        ended: whether it did so with the last one
        torn: whether the last kill left a save that was not completed
    """

    engine: str
    draw: random.Random
    restarted: int = 0
    ended: bool = False
    torn: bool = False

    def start(self, output: Path) -> forked_process.Command:
        if not self.engine:
            return forked_process.train(output, *SETTINGS, terms=TERMS)
        if self.engine == "zero2":
            output.mkdir(exist_ok=True)
            log = output.with_suffix(".log")
            return torchrun.Agent(output, log=log, restarts=3, entry=zero_run.rank)
        settings = (*RANK_SETTINGS, f"engine.name={self.engine}")
        return torchrun.train(output, *settings, terms=RANK_TERMS, restarts=3)

    def saving(self, output: Path) -> bool:
        """Whether a save has begun that is not completed."""
        return zero_run.unfinished(output) if self.engine == "zero2" else any(output.glob(".tmp-checkpoint-*"))

    def strike(self, output: Path, instant: float, inside: bool, delay: float) -> bool:
        """Start a run and kill it, or one of its ranks; False if it was finished before that."""
        command = self.start(output)
        command.until(lambda: False, seconds=instant)
        if inside:
            command.until(lambda: self.saving(output))
            time.sleep(delay)
        if not isinstance(command, torchrun.Agent):
            killed = command.kill() == -9
            self.torn = self.saving(output)
            return killed
        command.until(lambda: len(command.ranks) == torchrun.RANKS)
        ranks = command.ranks
        if len(ranks) < torchrun.RANKS:
            return False
        os.kill(self.draw.choice(ranks), signal.SIGKILL)
        self.torn = self.saving(output)
        self.ended = command.wait(seconds=300) == 0
        self.restarted += self.ended
        return True

    def finish(self, output: Path, tries: int = 3) -> bool:
        """Run the same command until the run is finished."""
        return self.ended or any(self.start(output).wait(seconds=300) == 0 for _ in range(tries))


def run(kills: int, seed: int, folder: Path, engine: str = "") -> Tally:
    """Kill `kills` runs; what is lost is left in `folder`."""
    draw, tally = random.Random(seed), Tally()
    runs = Runs(engine, draw)
    runs.start(folder / "undisturbed").wait(seconds=300)
    start, again = time.monotonic(), folder / "undisturbed-again"  # the first one also started the server
    runs.start(again).wait(seconds=300)
    seconds, wanted = time.monotonic() - start, forked_process.weights(again)
    if wanted != forked_process.weights(folder / "undisturbed"):
        raise SystemExit("two undisturbed runs differ: nothing can be compared on this machine")
    for number in track(range(kills), "killing", console=console, disable=not console.is_terminal):
        output = folder / f"run-{number}"
        while not runs.strike(output, draw.uniform(0.02, 1) * seconds, draw.random() < 0.4, draw.uniform(0, 0.08)):
            shutil.rmtree(output)
        tally.kills += 1
        tally.inside += runs.torn
        if runs.finish(output) and forked_process.weights(output) == wanted:
            tally.same += 1
            shutil.rmtree(output)
        else:
            tally.lost += 1
            console.print(f"{output}: {(output.with_suffix('.log')).read_text()[-2000:]}")
    if engine:
        print(f"{runs.restarted} of {kills} were brought to their end by torchrun --max-restarts")
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--engine", choices=["ddp", "fsdp2", "zero2"], default="", help="two ranks, one of which is killed"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the instants; printed at the end")
    chosen = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"  # of semaphores that the killed leave behind
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    tally = run(chosen.kills, chosen.seed, folder, chosen.engine)
    print(f"{tally}; seed {chosen.seed}")
    if tally.lost:
        sys.exit(f"what is left of the lost ones is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
