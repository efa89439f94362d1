"""Batches: the lengths that prompts are padded to, and the rows of a batch."""

from experiments.answering.mesh import equal_rows


def padded_length(tokens: int, smallest: int = 128) -> int:
    """Compute the length that a text is padded to: a multiple of ``smallest``, at most four lengths per doubling.

    Few lengths mean few compiled programs.
    """
    step = max(smallest, (1 << max(tokens - 1, 0).bit_length()) >> 3)
    return -(-tokens // step) * step


def most_rows(length: int, batch_tokens: int, groups: int = 1) -> int:
    """Compute the most rows that `batch_tokens` allow to generate together; a multiple of ``groups``, above 0."""
    return max(groups, batch_tokens // length // groups * groups)


def batch_rows(length: int, batch_tokens: int, samples: int, groups: int = 1) -> int:
    """Compute the rows that are generated together, so that batches of ``samples`` rows are as equal as possible.

    They are a multiple of ``groups`` (`LoadedModel.groups`), and at most ``batch_tokens`` tokens unless each group has one
    row.
    """
    batches = -(-samples // most_rows(length, batch_tokens, groups))
    return equal_rows(-(-samples // batches), groups)
