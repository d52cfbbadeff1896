"""Trains dense and MoE models under 4-bit policies, and compares them with BF16.

python -m experiments.pretrain_gap --data tokens [--limit 420 --jobs 8]
"""

import sys

from experiments.many_runs import command
from experiments.pretrain_gap.study import STUDY

if __name__ == "__main__":
    sys.exit(command.main(STUDY))
