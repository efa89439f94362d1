"""Kernels that depend on JAX alone.

Each folder holds one operation, which has one public function of the folder's name:

* ``__init__.py``: the public function, its checks, and the table of its implementations (`dispatch.Operation`);
* ``reference.py``: plain JAX, the implementation "xla", which runs everywhere;
* ``pallas_triton.py``, ``jax_triton.py``, ``cudnn.py``: implementations for a GPU.

``_triton`` holds what the bodies of several kernels share, ``formats`` the layouts of data that several operations read.
"""

from __future__ import annotations
