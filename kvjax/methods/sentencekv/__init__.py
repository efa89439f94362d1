"""SentenceKV: the method, and the tokens that end a sentence."""

from kvjax.methods.sentencekv.method import SentenceKV as SentenceKV
