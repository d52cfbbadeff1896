"""Text to batches: documents, their split, tokens on disk, and shuffled packed rows.

`load_corpus` maps the tokens of a `DataConfig`, made now or by `write_corpus` before;
`train_batches` and `heldout_batches` draw from them.
"""

from fp4jax.data.batches import Batches as Batches
from fp4jax.data.batches import heldout_batches as heldout_batches
from fp4jax.data.batches import row_order as row_order
from fp4jax.data.batches import train_batches as train_batches
from fp4jax.data.config import DataConfig as DataConfig
from fp4jax.data.corpus import Corpus as Corpus
from fp4jax.data.corpus import Documents as Documents
from fp4jax.data.corpus import Domain as Domain
from fp4jax.data.corpus import decided_by_source as decided_by_source
from fp4jax.data.corpus import is_tokenized as is_tokenized
from fp4jax.data.corpus import load_corpus as load_corpus
from fp4jax.data.corpus import write_corpus as write_corpus
from fp4jax.data.heldout import read_heldout as read_heldout
from fp4jax.data.packing import Batch as Batch
from fp4jax.data.tokenization import Progress as Progress
