"""Dense transformers of one style: RMSNorm, rotary positions, GQA and SwiGLU.

`dense_1p5b` has the size of the dense model in arXiv 2606.20381, whose shape is not
published, in the proportions of its family.
"""

from fp4jax.models.config import ModelConfig

DENSE = {
    "tiny": ModelConfig(
        vocab_size=512,
        num_layers=4,
        d_model=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        d_ff=384,
    ),
    "dense_10m": ModelConfig(
        vocab_size=8192,
        num_layers=8,
        d_model=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        d_ff=1024,
    ),
    "dense_35m": ModelConfig(
        vocab_size=8192,
        num_layers=10,
        d_model=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        d_ff=1536,
    ),
    "dense_125m": ModelConfig(
        vocab_size=32_768,
        num_layers=12,
        d_model=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        d_ff=2944,
    ),
    "dense_350m": ModelConfig(
        vocab_size=32_768,
        num_layers=28,
        d_model=1024,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        d_ff=2816,
    ),
    "dense_1p5b": ModelConfig(
        vocab_size=73_728,
        num_layers=28,
        d_model=2048,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        d_ff=6144,
    ),
}
