"""Measure, evaluate and train: one package per job, run by ``python -m experiments.<job>`` or ``kvjax <command>``.

Shared by all jobs:

* ``cli``: flags, settings, the table of commands. It knows no job.
* ``records``: JSON records with settings, versions, device and commit; tables, intervals and figures; timing.

Quality:

* ``tasks``: synthetic tasks, made of text and a scorer (RULER, InfiniteBench's generated tasks, code, long answers).
* ``benchmarks``: readers of the files of published benchmarks, their scorers, truncation, worker processes.
* ``answering``: a model, the loop that asks it, methods at their papers' budgets; download of named models (`kvjax fetch`).
* ``evaluation``: `kvjax eval`, `sweep` and `compare`: result folders, comparison with Full, numbers that papers print.
  ``evaluation/peers``: kvpress's presses on the prompts of a result folder.
* ``fidelity``: KL, top-1 agreement and perplexity beside Full, along texts through the decode path.
* ``ablations``: the parts of the papers' methods, one at a time; recall over a long generation.
* ``insight``: attention mass and recall by layer, head and step; scores and patterns of heads.
* ``lm_eval``: lm-evaluation-harness over a method's decode path.
* ``demo``: `kvjax demo`.

Speed and memory:

* ``speed``: decode steps, prompts, one layer, host memory: time, bytes, floor. ``speed/kernels``: operation x
  implementation x shape. ``speed/peers``: the same steps in PyTorch.

Making:

* ``training``: how the shipped model and the adapter were made.
* ``site``: pages and tables of the documentation that come from docstrings and records.
* ``goldens``: numbers of other programs, which ``tests/goldens`` keeps.
"""
