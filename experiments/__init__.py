"""Measure, evaluate and train: one package per job, run by ``python -m experiments.<job>`` or ``kvjax <command>``.

Shared by all jobs:

* ``cli``: flags, settings, the table of commands. It knows no job.
* ``records``: JSON records with settings, versions, device and commit; tables, intervals and figures; timing.

Quality:

* ``tasks``: synthetic tasks, made of text and a scorer (RULER, InfiniteBench's generated tasks, code, long answers).
* ``benchmarks``: readers of the files of published benchmarks, their scorers, truncation, worker processes.
* ``answering``: a model, the loop that asks it, methods at their papers' budgets; download of named models (`kvjax fetch`).
* ``evaluation``: `kvjax eval` and `compare`: result folders, comparison with Full, numbers that papers print.
* ``heads``: scores and patterns of heads, shares of layers.
* ``lm_eval``: lm-evaluation-harness over a method's decode path.
* ``demo``: `kvjax demo`.

Speed and memory:

* ``speed``: decode steps, prompts, host memory: time, bytes, floor. ``speed/kernels``: operation x implementation x shape.

* ``lab``: the workshop, which nothing else imports: studies for documents, peers, training, the site's tables, makers of
  goldens.
"""
