"""SentenceKV: the method, its released reading, and the tokens that end a sentence."""

from kvjax.methods.sentencekv.method import RELEASED as RELEASED
from kvjax.methods.sentencekv.method import SentenceKV as SentenceKV
