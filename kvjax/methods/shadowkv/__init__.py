"""ShadowKV: the method, and its keys of low rank."""

from kvjax.methods.shadowkv.method import ShadowKV as ShadowKV
