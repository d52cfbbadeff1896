"""What every test runs under, set before the first array exists."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Flax and Optax promote dtypes implicitly, so only the floors below them can be strict.
STRICT_DTYPES = ("numerics", "ops")


@pytest.fixture(autouse=True, scope="module")
def dtype_promotion(request):
    strict = request.path.parent.name in STRICT_DTYPES
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Tokenizers cached by tests stay out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
