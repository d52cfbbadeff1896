"""Trains the smallest model that tells recipes apart without one of their parts.

    python -m experiments.ablation --data tokens [--limit 420 --jobs 12]

Trains what results.jsonl lacks, the most important first, then prints the tables that
the README shows. Each run is saved when it ends, so that a command that was stopped, or
that had no time for all, goes on when it is started again.
"""

import sys

from experiments.ablation.study import STUDY
from experiments.many_runs import command

if __name__ == "__main__":
    sys.exit(command.main(STUDY, description=__doc__))
