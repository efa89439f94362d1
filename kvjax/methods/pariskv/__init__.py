"""ParisKV: sign codes, votes and the method."""

from kvjax.methods.pariskv.method import ParisKV as ParisKV
