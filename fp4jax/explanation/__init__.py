"""What each matrix product of a model really does, as a table and as JSON."""

from fp4jax.explanation.api import explain as explain
from fp4jax.explanation.matmul import Matmul as Matmul
from fp4jax.explanation.table import Explanation as Explanation
