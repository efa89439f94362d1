"""Place parameters and caches on the devices of a mesh, and run on several processes.

A mesh has some of the axes ``data`` (rows), ``model`` (KV heads, MLPs, vocabulary) and ``slots`` (slots of each row).
`sharding` reads from the shardings of the parameters how they are spread, and makes a `Plan`, which travels in the cache.
`kvjax.api.shard_map` then runs the program of one device on each device, inside one `jax.shard_map`, with the model's
description cut down by ``local``. Kernels see the arrays of one device, and XLA divides nothing.

Rules for code that runs there:

* Sum over the axis H with `pallas_kernels.axes.total`, where the sum is computed. On one device it does nothing.
* Give every leaf of a state the axis B first. A leaf has an axis of heads if its shape follows the number of heads, and an
  axis of slots if its shape follows the devices along ``slots``. So no static field of a state may depend on these numbers.
* Declare `slot_block` if a method can run on ``slots``. It then sees a `kvjax.cache.divided.PartCache`: slots are counted
  from the first slot of this device (``first``, ``here``), cursors and positions over the whole row. Choose by
  `best_slots`, add by `total`; attention joins the outputs. A method that evicts scores the slots of all devices (`whole`)
  at the prompt's end, and keeps a `LayerCache` on each device: its decode steps know nothing of ``slots``.
* End loops that contain a sum on all devices at once. Devices along ``data`` have other rows, but run as many passes.
* Take the same branch on all devices of a row if a sum follows it: sum the condition first, or compute it from the gathered
  logits, which have the same bits everywhere.
* Keep control flow free of process-local state: otherwise the processes deadlock. `processes` compares what users pass, and
  returns results whole in every process.
"""
