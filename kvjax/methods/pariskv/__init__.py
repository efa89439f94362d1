"""ParisKV: the method, and its sign codes and votes."""

from kvjax.methods.pariskv.method import ParisKV as ParisKV
