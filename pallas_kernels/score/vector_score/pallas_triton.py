"""Scores of vectors by the Pallas Triton kernel of `page_score`, without an upper bound."""

from pallas_kernels.score.page_score.pallas_triton import Config, check_scores, scores


def vector_score(query, vector, limit, *, added, reduce, position, first, config: Config | None = None, interpret=False):
    """Multiply the queries with every vector in use; ``interpret=True`` runs anywhere, slowly."""
    options = {"added": added, "reduce": reduce, "position": position, "first": first, "config": config}
    return scores(query, vector, None, limit, name="vector_score", **options, interpret=interpret)


def check(query, vector, limit, *, added, reduce, position, first):
    """Raise ``NotImplementedError`` for dtypes and head dims that the kernel does not take."""
    check_scores(query, vector, None)
