"""``kvjax fetch``: download a model, and nothing else; ``kvjax ls models``: the models that have a name."""
