"""Trains the smallest model that tells recipes apart without one of their parts.

python -m experiments.ablation --data tokens [--limit 420 --jobs 12 --lanes 3]
"""

import sys

from experiments.ablation.study import STUDY
from experiments.many_runs import command

if __name__ == "__main__":
    sys.exit(command.main(STUDY))
