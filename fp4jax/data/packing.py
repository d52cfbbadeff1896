"""Packing: documents end to end, cut into rows of equal length.

Every target, that is each document's next tokens and its <|endoftext|>, falls into one
row of an epoch. Rows, not documents, are shuffled, so that one batch sees many
documents; packing a stream of whole documents would fill it from one or two.
"""

import numpy as np
from numpy.typing import NDArray

from fp4jax.data.corpus import Documents

Batch = dict[str, NDArray]


class Rows:
    """Random access to the rows of `documents`; those past the last are padding.

    Target j is token j + d + 1, where d is its document: no first token is a target.
    """

    def __init__(self, documents: Documents, sequence_length: int):
        self._tokens = documents.tokens
        self._ends = documents.ends - np.arange(1, len(documents) + 1)  # in targets
        self._starts = np.concatenate([[0], self._ends[:-1]])
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._sequence_length)

    def __getitem__(self, index: int | NDArray[np.integer]) -> Batch:
        """Returns one row, each value [t], or for an array of indices several, [b, t].

        Returns:
          inputs: int32.
          targets: int32, the token after each input.
          segment_ids: int32, 1 and up, one for each document in the row; 0 is padding.
          positions: int32, from 0 at the start of each segment.
          loss_mask: float32, 1 but for padding.
        """
        start = np.asarray(index)[..., None] * self._sequence_length  # [..., 1]
        target = start + np.arange(self._sequence_length)  # [..., t]
        mask = target < self._ends[-1]
        target = np.minimum(target, self._ends[-1] - 1)
        document = np.searchsorted(self._ends, target, side="right")
        row = {
            "inputs": self._tokens[target + document],
            "targets": self._tokens[target + document + 1],
            "segment_ids": document - document[..., :1] + 1,
            "positions": target - np.maximum(self._starts[document], start),
        }
        packed = {name: (value * mask).astype(np.int32) for name, value in row.items()}
        return packed | {"loss_mask": mask.astype(np.float32)}
