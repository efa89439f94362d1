"""The traced core: prefill, extend and decode of a model over the storage of a method, on one device; and `Sampler`."""

from kvjax.decoding.sampling import Sampler

__all__ = ["Sampler"]
