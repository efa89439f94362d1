"""EleutherAI's lm-evaluation-harness over a kvjax method. Nothing is imported here, because the harness is optional."""
