"""What to read, how to tokenize it, and how to cut it into batches."""

from dataclasses import dataclass

from fp4jax.data.tokenizers import MIN_VOCAB_SIZE

TOKENIZERS = ("bpe", "bytes")
MAX_VOCAB_SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read, how to tokenize it, and how to cut it into batches.

    Attributes:
      source: "stdlib"; a text file, or a folder of `*.txt`; files of records, that is
        `*.jsonl`, `*.jsonl.gz`, `*.jsonl.zst`, `*.parquet`, `*.array_record`, or a
        folder of one such kind; "hf:OWNER/NAME[/CONFIG]", the train split of a Hugging
        Face dataset; a mixture, `*.json` (see `fp4jax.data.mixture`); or a folder that
        `experiments.tokenize` made, which also decides tokenizer, vocab_size, holdout
        and text_field (see `fp4jax.data.decided_by_source`).
      text_field: of a record, the one that holds its text.
      site_packages: with "stdlib", reads the installed packages' sources too.
      tokenizer: "bpe" (byte level, trained on the corpus), "bytes", or the path of a
        byte-level tokenizer.json.
      vocab_size: number of ids, <|endoftext|> included; what the model must embed.
      sequence_length: tokens a row.
      batch_size: rows a batch, over all hosts.
      holdout: part of the documents that is never trained on.
      seed: of the order in which rows are drawn.
      workers: processes that prepare batches; 0: a thread. Never changes a batch.

    Raises:
      ValueError: a value outside its range.
    """

    source: str = "stdlib"
    text_field: str = "text"
    site_packages: bool = False
    tokenizer: str = "bpe"
    vocab_size: int = 512
    sequence_length: int = 256
    batch_size: int = 8
    holdout: float = 0.02
    seed: int = 0
    workers: int = 0

    def __post_init__(self):
        for name, holds, allowed in (
            ("source", bool(self.source), "'stdlib', a folder or a file"),
            (
                "site_packages",
                self.source == "stdlib" or not self.site_packages,
                f'False unless source="stdlib", as source={self.source!r}',
            ),
            (
                "tokenizer",
                self.tokenizer in TOKENIZERS or self.tokenizer.endswith(".json"),
                f"one of {', '.join(TOKENIZERS)}, or the path of a tokenizer.json",
            ),
            (
                "vocab_size",
                MIN_VOCAB_SIZE <= self.vocab_size <= MAX_VOCAB_SIZE,
                f"at least {MIN_VOCAB_SIZE}, the 256 bytes and <|endoftext|>, and at "
                f"most {MAX_VOCAB_SIZE}",
            ),
            ("sequence_length", self.sequence_length >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("holdout", 0 < self.holdout < 1, "above 0 and below 1"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
            ("workers", self.workers >= 0, "at least 0"),
        ):
            if not holds:
                raise ValueError(
                    f"DataConfig: {name} must be {allowed}, "
                    f"got {name}={getattr(self, name)!r}."
                )
