"""Statistics of quantization: pure functions that run under `jax.jit` and `jax.vmap`.

By what they take: an array beside its rounded copy, `(x, x_dq)`; a quantized tensor,
with the array it was made of where that is needed, `(q)` or `(x, q)`; a quantizer that
meets one array twice, transposed or with other random bits; and an amax beside the one
that is held in its place. A statistic of values that are not finite is not finite
either; of zeros it is what each docstring says, never NaN.
"""

from fp4jax.numerics.stats.distribution import crest_factor as crest_factor
from fp4jax.numerics.stats.distribution import kurtosis as kurtosis
from fp4jax.numerics.stats.distribution import rotated as rotated
from fp4jax.numerics.stats.error import Cumulative as Cumulative
from fp4jax.numerics.stats.error import cosine as cosine
from fp4jax.numerics.stats.error import cumulative_shrinkage as cumulative_shrinkage
from fp4jax.numerics.stats.error import gemm_shrinkage as gemm_shrinkage
from fp4jax.numerics.stats.error import nmse as nmse
from fp4jax.numerics.stats.error import qsnr as qsnr
from fp4jax.numerics.stats.error import shrinkage as shrinkage
from fp4jax.numerics.stats.grid import bias as bias
from fp4jax.numerics.stats.grid import bin_error as bin_error
from fp4jax.numerics.stats.grid import geometric_bias as geometric_bias
from fp4jax.numerics.stats.grid import grid_use as grid_use
from fp4jax.numerics.stats.grid import nonfinite_rate as nonfinite_rate
from fp4jax.numerics.stats.grid import occupancy as occupancy
from fp4jax.numerics.stats.grid import saturation_rate as saturation_rate
from fp4jax.numerics.stats.grid import scale_saturation_rate as scale_saturation_rate
from fp4jax.numerics.stats.grid import scale_underflow_rate as scale_underflow_rate
from fp4jax.numerics.stats.grid import top_rate as top_rate
from fp4jax.numerics.stats.grid import zero_rate as zero_rate
from fp4jax.numerics.stats.held import scale_headroom as scale_headroom
from fp4jax.numerics.stats.held import stale_ratio as stale_ratio
from fp4jax.numerics.stats.views import StochasticBias as StochasticBias
from fp4jax.numerics.stats.views import TransposeMismatch as TransposeMismatch
from fp4jax.numerics.stats.views import stochastic_bias as stochastic_bias
from fp4jax.numerics.stats.views import transpose_mismatch as transpose_mismatch
