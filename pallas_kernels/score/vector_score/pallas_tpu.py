"""Scores of vectors by the kernel for TPUs of `page_score`, without an upper bound."""

from pallas_kernels.score.page_score.pallas_tpu import Config, check_scores, scores


def vector_score(query, vector, limit, *, added, reduce, position, first, config: Config | None = None, interpret=False):
    """Multiply the queries with every vector in use; ``interpret`` as in ``pallas_call`` runs anywhere."""
    del position, first  # only for "each", which `check` refuses
    return scores(query, vector, None, limit, added, name="vector_score", reduce=reduce, config=config, interpret=interpret)


def check(query, vector, limit, *, added, reduce, position, first):
    """Raise ``NotImplementedError`` for dtypes and shapes that the kernel does not take."""
    check_scores(query, vector, reduce)
