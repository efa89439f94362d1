"""Models of other packages under kvjax: their modules and parameters, with kvjax's attention and cache.

Each file adapts a package to `kvjax.protocol.typing.Model`. No package is imported here: the user hands in its module.
"""
