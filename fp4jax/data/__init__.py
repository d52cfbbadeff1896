"""Text to batches: documents, tokenizers, the split, and packed rows."""

from fp4jax.data.batches import Batches as Batches
from fp4jax.data.batches import heldout_batches as heldout_batches
from fp4jax.data.batches import train_batches as train_batches
from fp4jax.data.config import DataConfig as DataConfig
from fp4jax.data.corpus import Corpus as Corpus
from fp4jax.data.corpus import Documents as Documents
from fp4jax.data.corpus import Domain as Domain
from fp4jax.data.corpus import decided_by_source as decided_by_source
from fp4jax.data.corpus import load_corpus as load_corpus
from fp4jax.data.corpus import write_corpus as write_corpus
from fp4jax.data.packing import Batch as Batch
from fp4jax.data.tokenization import Progress as Progress
