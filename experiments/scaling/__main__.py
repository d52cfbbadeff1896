"""Trains models of growing size, twenty tokens a parameter, and fits L(C).

    python -m experiments.scaling --data tokens [--limit 420 --jobs 8]

Trains what results.jsonl lacks, the most important first, then prints the tables that
the README shows. Each run is saved when it ends, so that a command that was stopped, or
that had no time for all, goes on when it is started again.
"""

import sys

from experiments.many_runs import command
from experiments.scaling.study import STUDY

if __name__ == "__main__":
    sys.exit(command.main(STUDY, description=__doc__))
