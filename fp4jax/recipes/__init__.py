"""Published recipes, each a function that returns a value."""

from fp4jax.recipes.bf16 import bf16 as bf16
from fp4jax.recipes.e2m1_ref import e2m1_ref as e2m1_ref
from fp4jax.recipes.four_over_six import four_over_six as four_over_six
from fp4jax.recipes.int2 import int2 as int2
from fp4jax.recipes.mxfp4 import mxfp4 as mxfp4
from fp4jax.recipes.mxfp4 import mxfp4_tseng as mxfp4_tseng
from fp4jax.recipes.mxfp8 import mxfp8 as mxfp8
from fp4jax.recipes.nvfp4 import nvfp4 as nvfp4
from fp4jax.recipes.quartet2 import quartet2 as quartet2
from fp4jax.recipes.recipe import Dgrad as Dgrad
from fp4jax.recipes.recipe import Fprop as Fprop
from fp4jax.recipes.recipe import Recipe as Recipe
from fp4jax.recipes.recipe import Wgrad as Wgrad
from fp4jax.recipes.serialize import from_json as from_json
from fp4jax.recipes.serialize import to_json as to_json
from fp4jax.recipes.ti2d import ti2d as ti2d
from fp4jax.recipes.ue5m3 import ue5m3 as ue5m3
from fp4jax.recipes.ufp4 import ufp4 as ufp4
