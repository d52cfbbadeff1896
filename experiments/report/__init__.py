"""Reports: of a finished comparison, and of runs as far as they have come."""

from experiments.report.comparison import markdown as markdown
from experiments.report.comparison import table as table
from experiments.report.comparison import write as write
from experiments.report.curves import smooth as smooth
from experiments.report.figures import plot as plot
from experiments.report.summary import Baseline as Baseline
from experiments.report.summary import Report as Report
from experiments.report.summary import Trial as Trial
from experiments.report.summary import summarize as summarize
