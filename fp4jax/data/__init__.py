"""Text to batches: documents, tokenizers, the split, and packed rows."""

from fp4jax.data.corpus import Corpus as Corpus
from fp4jax.data.corpus import DataConfig as DataConfig
from fp4jax.data.corpus import Documents as Documents
from fp4jax.data.corpus import load_corpus as load_corpus
from fp4jax.data.packing import Batch as Batch
from fp4jax.data.packing import heldout_batches as heldout_batches
from fp4jax.data.packing import train_batches as train_batches
