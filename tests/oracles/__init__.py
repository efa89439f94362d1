"""One oracle per method: float64 NumPy in plain loops, written from the papers' definitions, never importing kvjax.

An oracle module is named like its method (lower case) and has

* ``KNOBS``: a small setting of the method, in kvjax's names; the laws and the comparison run at it,
* ``LENGTHS``: prompt lengths around the method's edges (window, page, block, budget),
* ``run(q, k, v, prompt, inv_freq, **knobs) -> plain.Trace`` for one row: un-rotated q [H, G, T, D], k and v
  [H, T, D] of all tokens, the first ``prompt`` of which are the prompt and the others decoded one by one.
* where the maths leaves a choice open (the signs and order of eigenvectors), ``STATE``: arguments of ``run``, and the fields
  of the implementation's state that it is given there, checks to be a valid choice, and uses.

The oracle of CHESS is of the whole model: its ``run`` takes all layers and the logits, and ``test_chess.py`` drives it.
"""
