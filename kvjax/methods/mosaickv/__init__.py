"""MosaicKV: packed vectors, segments, bases and the method."""

from kvjax.methods.mosaickv.method import MosaicKV as MosaicKV
