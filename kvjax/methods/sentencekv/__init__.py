"""SentenceKV: which tokens end a sentence, and the method."""

from kvjax.methods.sentencekv.method import SentenceKV as SentenceKV
