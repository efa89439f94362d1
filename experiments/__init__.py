"""Measure, evaluate and train: one package per job, run by ``python -m experiments.<job>`` or ``kvjax <command>``.

Shared by all jobs:

* ``cli``: flags, settings, the table of commands. It knows no job.
* ``records``: JSON records with settings, versions, device and commit; tables, intervals and figures; timing.

Quality:

* ``tasks``: synthetic tasks, made of text and a scorer (RULER, InfiniteBench's generated tasks, code, long answers).
* ``benchmarks``: readers of the files of published benchmarks, their scorers, truncation, worker processes.
* ``answering``: a model, the loop that asks it, methods at their papers' budgets; download of named models (`kvjax fetch`).
* ``evaluation``: `kvjax eval` and `compare`: result folders, comparison with Full.
* ``heads``: scores and patterns of heads, and budgets of layers, which some methods need.
* ``lm_eval``: lm-evaluation-harness over a method's decode path.
* ``demo``: `kvjax demo`.

Speed and memory:

* ``speed``: decode steps, prompts, one layer, host memory: time, bytes, floor. ``speed/kernels``: operation x
  implementation x shape.

``lab`` has the studies behind pages of the documentation. Nothing outside imports it, and it is in no wheel:

* ``fidelity``: KL, top-1 agreement and perplexity beside Full, along texts through the decode path.
* ``exact``: drafts of `kvjax.Verified`: kept tokens, speed, equality with Full.
* ``ablations``: the parts of the papers' methods, one at a time; recall over a long generation. ``readings``: their readings.
* ``insight``: attention mass and recall by layer, head and step.
* ``peers``: the same steps in PyTorch, and kvpress's presses on the prompts of a result folder.
* ``places``, ``agreement``: scores by place in the answer; orders of methods under two models.
* ``training``: how the shipped model and the adapter were made.
* ``site``, ``plot``: pages and tables of the documentation, figures of the lab's records.
"""
