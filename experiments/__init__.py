"""Measure and evaluate: one package per job, run by ``python -m experiments.<job>`` or ``kvjax <command>``.

Shared by all jobs:

* ``cli``: flags, settings, the table of commands. It knows no job.
* ``records``: JSON records with settings, versions, device and commit; tables, intervals and figures; timing.

Quality:

* ``tasks``: synthetic tasks, made of text and a scorer (RULER, InfiniteBench's generated tasks, code, long answers).
* ``benchmarks``: readers of the files of published benchmarks, their scorers, truncation, worker processes.
* ``answering``: a model, the loop that asks it, methods at their papers' budgets; download of named models (`kvjax fetch`).
* ``evaluation``: `kvjax eval` and `compare`: result folders, comparison with Full.
* ``heads``: scores, patterns and room of heads, budgets of layers, and layers that share lists, for methods that need them.
* ``lm_eval``: lm-evaluation-harness over a method's decode path.
* ``demo``, ``doctor``: `kvjax demo` and `kvjax doctor`.

Speed and memory:

* ``speed``: decode steps, prompts, host memory: time, bytes, floor. ``speed/kernels``: operation x
  implementation x shape.

``lab`` has the studies behind pages of the documentation that still run; docs/reproduce.md says where finished ones are.
Nothing outside imports it, and it is in no wheel:

* ``fidelity``: KL, top-1 agreement and perplexity beside Full, along texts through the decode path.
* ``insight``: attention mass and recall by layer, head and step.
* ``fits``: the table of what fits.
* ``site``, ``plot``: pages and tables of the documentation, figures of the lab's records.
"""
