"""One oracle per method: float64 NumPy in plain loops, written from the papers' definitions, never importing kvjax.

An oracle module is named like its method (lower case) and has

* ``KNOBS``: a small setting of the method, in kvjax's names; the laws and the comparison run at it,
* ``LENGTHS``: prompt lengths around the method's edges (window, page, block, budget),
* ``run(q, k, v, prompt, inv_freq, **knobs) -> plain.Trace`` for one row: un-rotated q [H, G, T, D], k and v
  [H, T, D] of all tokens, the first ``prompt`` of which are the prompt and the others decoded one by one.
"""
