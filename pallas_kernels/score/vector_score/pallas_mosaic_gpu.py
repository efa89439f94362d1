"""Scores of vectors by the Mosaic GPU kernel of `page_score`, without an upper bound."""

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels.score.page_score.pallas_mosaic_gpu import CHUNK, MOST_QUERIES, check_scores, scores


def vector_score(query, vector, limit, *, added, reduce, position, first):
    """Multiply the queries with every vector in use."""
    return scores(query, (vector,), limit, added=added, reduce=reduce, position=position, first=first)


TAKES = f"{arrays.HOPPER}, D a power of two from {CHUNK} to {32 * CHUNK}, G up to {2 * MOST_QUERIES}"


def check(query, vector, limit, *, added, reduce, position, first):
    """Raise ``NotImplementedError`` for GPUs, dtypes, head dims and groups that the kernel does not take."""
    check_scores(query, (vector,))
