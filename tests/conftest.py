"""What every test runs under, set before the first array exists."""

import gc
import os
import re

# LLVM takes a third of the time of a compilation. What decides numbers is XLA's own
# passes, which run as ever; `XLA_FLAGS= python -m pytest` runs everything as in use.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Flax and Optax promote dtypes implicitly, so only the floors below them can be strict.
STRICT_DTYPES = ("numerics", "ops")

# Breadth: checks repeated for recipes, sizes and transforms, of which a few of each are
# left among the quick tests. Each costs compilations of several seconds.
BREADTH = (
    r"experiments/test_evaluate.*questions_and",
    r"experiments/test_pretrain.*(share_the_compiled|finish_leaves)",
    r"experiments/test_(evaluate.*a_later_model|pretrain.*that_diverges)",
    r"experiments/test_resume.*(killed_while|records_that|finished_run)",
    r"experiments/scaling_gpus/.*(measured_on|losses_are_of|only_gpus)",
    r"experiments/(.*multiplies_equal|test_kernel_speed.*linear_layer)",
    r"experiments/test_(families.*policy_trains|plan.*equal_shares)",
    r"experiments/operands/.*(tensors_are|of_the_tensor|was_stopped|training_took)",
    r"experiments/many_runs/.*(of_the_trainer|tiny_study|what_is_missing)",
    r"experiments/test_(processes.*(onto_(eight|one)|killed_while)|named.*a_folder)",
    r"kernels/test_amax.*(rht64|drawn|float32|\(2, 3|triton|lanes|padded|P\('a',\))",
    r"kernels/test_exchange.*else\[(1|64)-",
    r"kernels/test_both.*(widths_may|of_each|ways\[(?!ufp4-spec1.*Auto))",
    r"kernels/test_partition.*(without_kernels|come_together|lanes_(of_lanes|have))",
    r"kernels/test_partition.*lie\[(?!uniform-rht-sr-in_axes0.*auto|nvfp4.*explicit)",
    r"kernels/test_partition.*part\[(?!uniform-rht-sr-1.*auto|nvfp4-sr-pad.*explicit)",
    r"kernels/test_quantize.*(every_kernel|every_size|padded.*\[(?!columns-ti2d)|values\[(?!uniform-rht-sr-nan))",
    r"kernels/test_quantize.*kernel_equals_the_reference\[nvfp4.*mosaic",
    r"kernels/test_quantize.*tokens_do\[(?!rows-ti2d-sr-mosaic)",
    r"kernels/test_quantize.*of_their_own\[(?!rows-nvfp4-square-mosaic)",
    r"kernels/test_partition.*(rows_are\[(?!uniform-rht-sr-1.*auto)|they_are\[auto)",
    r"kernels/test_(quantize.*(to_what|values|-sr-1).*triton|triton.*test_all_)",
    r"kernels/test_(planes.*\[(2|mxfp8)\]|partition.*they_lie\[nvfp4)",
    r"kernels/test_(planes.*several_blocks|instructions.*\[(?!E2M1\]|UNIFORM|E5M2))",
    r"kernels/test_fp8_partition.*part\[(?!0-shape0|1-shape4)",
    r"ops/test_encoded_mesh.*(False|whole|changes_no)",
    r"kernels/test_scaled_matmul.*(every_kernel|columns|lanes|f32-1-1|INT2|TO_2|-UE5M3_FN)",
    r"ops/test_packed\.py.*(mxfp4|ti2d|weight)",
    r"ops/test_(fp8.*(path\[(ufp4|mxfp4)|explicit_axes\[n)|kernels.*divide\[nvfp4|packed_weight.*equal_bit\w+\[nvf)",
    r"recipes/test_(ti2d_oracle.*transposition\[\(33|fields.*\[ufp4-wgrad)",
    r"linen/test_inject.*layer_raises_at_init\[plain",
    r"linen/test_inject.*(anew|inside_another|remat_ch|module_is_as|are_named|by_hand)",
    r"linen/test_state.*(no_jit|of_flax|scan_that_sh|pass_through|where_they_add)",
    r"linen/test_(inject.*subclasses|state.*exactly_at)",
    r"linen/test_state.*layers_hold_amaxes",
    r"models/test_dispatch.*\[dense",
    r"models/test_expert_parallel.*(every|no_mesh|are_not_sent)",
    r"models/test_moe.*(any_part|a_loop.relu2|shared|one_expert)",
    r"models/test_residuals.*bit_for_bit",
    r"models/test_ssd.*(whole|a part|less|short)",
    r"models/test_transformer.*(schedule_stacks|of_a_layer\[bf16)",
    r"models/test_transformer.*on_the_policy\[(?!bf16|nvfp4|ufp4)",
    r"models/test_transformer.*(scan_and_remat|equal_consec|later_one\[hybrid)",
    r"models/test_transformer.*(no_key|of_a_layer)\[(?!bf16|ufp4)",
    r"models/test_transformer.*its_neighbor\[hybrid",
    r"nnx/test_(inject.*result\[attention|weights.*key_each)",
    r"nnx/test_inject.*no_bit\[(?!nnx-remat-jax.jit)",
    r"nnx/test_grouped.*(capture|quantized_once.2)",
    r"nnx/test_weights.*(step_forgets|take_part|but_how_often)",
    r"numerics/test_groups.*of_their_own\[16",
    r"numerics/test_properties.*two_passes",
    r"numerics/test_qtensor.*producers",
    r"numerics/test_stats.*(survive_a|narrow|crest|no_nan)\w*\[(?!e2m1-f32)",
    r"numerics/test_stats.*(of_a_transpose|stochastic_b|of_a_gemm|falls|vmap|stale)",
    r"ops/test_both_cot.*(it_once|kind|lanes|interpreted|of_both\[nvf)",
    r"ops/test_dot_general.*(float16|(padding|rows|as_one|left\w+)\[(e2m1_ref|ufp4))",
    r"ops/test_dot_general.*products_of_operands\[(?!nvfp4-bf|ufp4-bf)",
    r"ops/test_dot_general.*(are\[nvfp4|everywhere\[e2m1|padding\[int2|rows\[int2)",
    r"ops/test_dot_general.*left\w+\[nvfp4",
    r"ops/test_einsum.*explicit_dot_general\[.*(ufp4|nvfp4)",
    r"ops/test_einsum.*(batch_labels|several_contr|summed_and|vmapped)",
    r"ops/test_held.*differentiates",
    r"ops/test_kernels.*(divide\[(?!nvfp4)|by_inter.*(u|nv)fp4|remat|groups|once|lowers)",
    r"ops/test_microbatch.*x_that_draws",
    r"ops/test_microbatch.*(eden-free|eden-contr|\[rotated)",
    r"ops/test_(gather.*device\[(mx|u)fp4|packed_weight.*it_again)",
    r"ops/test_packed_weight.*\[(quartet2|ue5m3|ti2d)",
    r"ops/test_ragged_dot.*of_their_own\[(?!ti2d)",
    r"ops/test_encoded.*(lhs|\[packed|wider|nan|zeros|not-s|w-of|part_of|vmap)",
    r"ops/test_grouped_matmul.*(kernels_of|hopper\[1)",
    r"ops/test_ragged_dot.*(in_the_whole|or_none|bfloat16|packed|every_group|amax_is)",
    r"ops/test_ragged_dot.*(vmap_are|scan_and|their_positions)",
    r"ops/test_residuals.*are_the_same\[(?!linear-(nvfp4|ti2d))",
    r"ops/test_residuals.*(bytes_saved_for_x\[-[023]\]|named|linear-nvfp4)",
    r"recipes/test_fields.*(\[(?!bf16|ufp4)|every_field)",
    r"recipes/test_quartet2_oracle.*(signs_and_scales|ties\[(heavy|steep))",
    r"recipes/test_ti2d_oracle.*(-(8|16|64)\]|transposition\[\((40|1),|operand\[w|one_s.*\[\(64)",
    r"test_colab.*tiny_parameter\[(write_your|first_light|train_in)",
    r"test_public_reports.*surfaces\[nvfp4",
    r"test_public_reports.*\[(e2m1_ref|four_over_six|mxfp4|quartet2|ti2d|ue5m3)",
    r"test_public_reports.*(no_block_divides|numpy_files)",
    r"test_public_reports.*(every_mesh|two_runs|recomputation|of_parameters|every_tr|eager)",
    r"test_explanation.*stacks_and_a_policy",
    r"test_(explanation.*program\[quartet2|taps.*(step_returns|layer_is_capt))",
    r"test_taps.*(\[1-dgrad_dy|bit_for_bit|as_they_were|\[quartet2|\[full|each_gemm|is_that_of)",
    r"train/test_accumulate.*(batch\[(bf16|ufp4)|of_the_part|\[quartet2|one_step)",
    r"train/test_accumulate.*(the_same_bits|in_the_loop)",
    r"train/test_accumulate.*(of_theirs|over_the_mesh)",
    r"train/test_checkpoint.*\[(empty|remove|error[12]|state)",
    r"train/test_experts.*(every_policy|in_use|without_room|remat|microbatches|over_a_mesh|diagnosis)",
    r"train/test_loop.*model_learns",
    r"train/test_partition.*(codes_only|depends_on_the_mesh|in_any_family)",
    r"train/test_step.*same_seed",
    r"train/test_(held.*refresh_steps|step.*different_noise)",
    r"train/test_held.*(resumes|one_condition\[2-1)",
    r"user_models/test_linen.*no_slot",
    r"user_models/.*(vit|ue5m3|fp4\[gpt2-ufp4|goes_on|remat|test_linen.*one_line)",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if any(re.search(pattern, item.nodeid) for pattern in BREADTH):
            item.add_marker(pytest.mark.breadth)


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


@pytest.fixture(autouse=True, scope="module")
def heap():
    """Garbage warns in the module that left it, and JAX's caches are not searched anew.

    Millions of objects stay in those: each full collection would take seconds.
    """
    yield
    gc.collect()
    gc.freeze()
