"""PQCache: the method, and its codes by k-means."""

from kvjax.methods.pqcache.method import PQCache as PQCache
