"""Trains models of growing size, twenty tokens a parameter, and fits L(C).

python -m experiments.scaling --data tokens [--limit 420 --jobs 8]
"""

import sys

from experiments.many_runs import command
from experiments.scaling.study import STUDY

if __name__ == "__main__":
    sys.exit(command.main(STUDY))
